"""A model and its gradients under `scalify`."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from maxlp.nn.layers import LayerNorm, RMSNorm
from maxlp.precision.inject import HIGH_PRECISION, matmuls
from maxlp.precision.replace import keep_plain
from maxlp.precision.scalify.interpreter import scalify
from maxlp.precision.scalify.markers import dynamic_rescale_l2_grad, fp8_dot_general
from maxlp.precision.scalify.scaled import scale, unscale


def mark(
    model: nnx.Module, fp8: bool = False, first_blocks: int = 0, last_blocks: int = 0
) -> dict[str, str]:
    """Marks a model for `scalify`: rescaling at the norms and, with ``fp8``, FP8 matmuls.

    Args:
      fp8: the matmuls in blocks multiply FP8; others, and those of the first and last blocks, float16.

    Returns:
      path → name of what a matmul computes in, for printing.

    Raises:
      ValueError: no block is left.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, (RMSNorm, LayerNorm)):
            module.mark_input = dynamic_rescale_l2_grad
    table = {}
    for path, module in matmuls(model):
        in_fp8 = fp8 and module.kernel.ndim > 2
        if in_fp8:
            module.dot_general = fp8_dot_general
        table[path] = "scalify_fp8" if in_fp8 else HIGH_PRECISION
    if fp8:
        in_fp8 = {path: frozenset() for path, name in table.items() if name != HIGH_PRECISION}
        keep_plain(model, first_blocks, last_blocks, in_fp8)
    return table


def scaled_gradients(gradients: Callable) -> Callable:
    """A `core.gradients.Gradients` computed under `scalify`, from and to float32 arrays.

    Every parameter gets its scale from its own values, once a step.
    """

    def scaled(graphdef: nnx.GraphDef, state: dict, batch: dict, loss_scale: None) -> Any:
        assert loss_scale is None, "scales of tensors replace that of the loss"

        def of_params(params: dict, rest: dict, batch: dict) -> Any:
            return gradients(graphdef, rest | {"params": params}, batch, None)

        rest = {key: state[key] for key in ("model_state", "step")}
        return unscale(scalify(of_params)(jax.tree.map(scale, state["params"]), rest, batch))

    return scaled
