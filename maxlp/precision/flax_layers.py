"""Models made of Flax's own layers: their dtypes, and matmuls over several axes."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.precision.dot import QuantDot

_NARROW = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.Embed)
_WIDE = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.BatchNorm, nnx.InstanceNorm, nnx.MultiHeadAttention)


def mixed_precision(model: nnx.Module, dtype: Any = jnp.bfloat16) -> None:
    """Sets the dtypes in which the `flax.nnx` layers of a model compute, in place.

    Matmuls, convolutions and embeddings compute in ``dtype``; norms and attention scores (with their
    softmax) in float32. The parameters keep their dtype.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, _NARROW):
            module.dtype = jnp.dtype(dtype)
        elif isinstance(module, _WIDE):
            module.dtype = jnp.dtype("float32")


def kernel_shape(module: nnx.Einsum | nnx.LinearGeneral) -> tuple[tuple[int, ...], int, int]:
    """The shape of the stack that a kernel is in, and the input and output dims of its matmul."""
    if isinstance(module, nnx.Einsum):
        _, kernel, result = _labels(module.einsum_str or "")
        rank, summed = len(kernel), [i for i, label in enumerate(kernel) if label not in result]
    else:
        batch = len(module.batch_axis)
        rank = batch + len(module.axis) + len(module.out_features)
        summed = list(range(batch, batch + len(module.axis)))
    stack, shape = module.kernel.shape[:-rank], module.kernel.shape[-rank:]
    in_dim = math.prod(shape[i] for i in summed)
    return stack, in_dim, math.prod(shape) // in_dim


def set_dot(path: str, module: nnx.Einsum | nnx.LinearGeneral, dot: QuantDot) -> None:
    """Replaces the matmul of a layer.

    Raises:
      ValueError: batch axes, which a `QuantDot` does not have.
    """
    if isinstance(module, nnx.LinearGeneral):
        is_matmul, what = not module.batch_axis, f"batch_axis={dict(module.batch_axis)}"
    else:
        is_matmul, what = _is_matmul(module.einsum_str or ""), repr(module.einsum_str)
    if not is_matmul:
        raise ValueError(
            f"rules: {path} multiplies no input by one kernel ({what}); add a rule that gives it bf16"
        )
    if isinstance(module, nnx.LinearGeneral):
        module.dot_general_cls, module.dot_general = None, nnx.data(_General(dot))
    else:
        module.einsum_op = nnx.data(_Einsum(dot))


def _labels(einsum: str) -> tuple[str, str, str]:
    """The labels of input, kernel and result, without an ellipsis."""
    operands, result = einsum.replace(" ", "").replace("...", "").split("->")
    inputs, kernel = operands.split(",")
    return inputs, kernel, result


def _is_matmul(einsum: str) -> bool:
    """Whether each label is in two of input, kernel and result, with an ellipsis only in front."""
    labels = [set(part) for part in _labels(einsum)]
    in_two = all(sum(label in part for part in labels) == 2 for label in set().union(*labels))
    return in_two and re.fullmatch(r"(\.\.\.)?\w+,\w+->(\.\.\.)?\w+", einsum.replace(" ", "")) is not None


class _General(nnx.Module):
    """`QuantDot` for an input and a kernel that share several axes: it flattens them."""

    def __init__(self, dot: QuantDot):
        self.dot = nnx.data(dot)

    def __call__(
        self, x: jax.Array, kernel: jax.Array, dimension_numbers: Any, precision: Any = None, **options: Any
    ) -> jax.Array:
        (of_x, of_kernel), _ = dimension_numbers
        x_free = [i for i in range(x.ndim) if i not in of_x]
        kernel_free = [i for i in range(kernel.ndim) if i not in of_kernel]
        tokens = [x.shape[i] for i in x_free]
        features = [kernel.shape[i] for i in kernel_free]
        x = x.transpose(*x_free, *of_x).reshape(*tokens, -1)
        kernel = kernel.transpose(*of_kernel, *kernel_free).reshape(x.shape[-1], -1)
        y = self.dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision, **options)
        return y.reshape(*tokens, *features)


class _Einsum(nnx.Module):
    """`_General` in the place of `jnp.einsum`."""

    def __init__(self, dot: QuantDot):
        self.general = _General(dot)

    def __call__(self, einsum: str, x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
        inputs, of_kernel, result = _labels(einsum)
        summed = [label for label in of_kernel if label not in result]
        before = x.ndim - len(inputs)  # axes of an ellipsis
        of_x = [inputs.index(label) + before for label in summed]
        y = self.general(
            x, kernel, ((of_x, [of_kernel.index(label) for label in summed]), ((), ())), **options
        )
        kept = [label for label in inputs + of_kernel if label not in summed]
        return y.transpose(*range(before), *(before + kept.index(label) for label in result))
