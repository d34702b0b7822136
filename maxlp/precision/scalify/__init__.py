"""Scale propagation (Balança et al. 2024, arXiv:2407.17353): 16-bit programs without a loss scale.

An array is a pair of data and a scale, ``data * 2**exponent`` (`Scaled`), and `scalify` runs a program on
such pairs. The data stays near 1, where float16 and FP8 are precise; the magnitudes are in the int32
exponents, so that they neither underflow nor overflow::

    @jax.jit
    @scalify
    def update(params, batch):
        grads = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = jax.tree.map(scale, params)  # float16 data
    params = update(params, batch)
"""

from maxlp.precision.scalify.interpreter import scalify
from maxlp.precision.scalify.markers import dynamic_rescale_l2_grad, fp8_dot_general
from maxlp.precision.scalify.scaled import Scaled, scale, unscale
from maxlp.precision.scalify.training import mark, scaled_gradients

__all__ = [
    "Scaled",
    "dynamic_rescale_l2_grad",
    "fp8_dot_general",
    "mark",
    "scale",
    "scaled_gradients",
    "scalify",
    "unscale",
]
