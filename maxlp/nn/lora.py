"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): a few trained parameters beside frozen ones.

A matmul with kernel W computes ``x W + (alpha / rank) x A B``. B starts at zero, so that training starts
from the model as it is. W may have any precision recipe; the adapters are in float32, and compute in the
model's dtype.

Shape letters: K in · N out · R rank; a stack of layers has its axis in front.
"""

import fnmatch

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.nn.layers import Axes, Frozen, Linear, param, uniform
from maxlp.nn.stack import path_name


class Adapter(nnx.Module):
    """``x -> scale * x A B`` beside the kernel of a `Linear`; in a stack, one for each layer.

    Args:
      kernel: (…, K, N), with its logical axes.
      rank: R.
      scale: factor of the output.
      dtype: of its matmuls.
      key: of the random A.
    """

    def __init__(self, kernel: nnx.Param, rank: int, scale: float, dtype: jnp.dtype, key: jax.Array):
        *stack, in_dim, out_dim = kernel.shape
        *stack_axes, in_axis, out_axis = axes_of(kernel)
        # The initial A is that of the authors' code (uniform, variance 1 / 3K).
        a = (3 * in_dim) ** -0.5 * uniform(key, (*stack, in_dim, rank))
        self.a = param(a, (*stack_axes, in_axis, None))
        self.b = param(jnp.zeros((*stack, rank, out_dim), jnp.float32), (*stack_axes, None, out_axis))
        self.scale, self.dtype = scale, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x_R = x.astype(self.dtype) @ self.a[...].astype(self.dtype)
        return self.scale * (x_R @ self.b[...].astype(self.dtype))

    def product(self) -> jax.Array:
        """What the adapter adds to the kernel, float32 (…, K, N)."""
        return self.scale * jnp.matmul(self.a[...], self.b[...], precision="highest")


def axes_of(variable: nnx.Variable) -> Axes:
    """The logical axes of a parameter."""
    return variable.get_metadata("out_sharding")


def add_adapters(
    model: nnx.Module, rngs: nnx.Rngs, *, rank: int, scale: float, targets: tuple[str, ...] | None = None
) -> list[str]:
    """Freezes the parameters of a model and adds adapters, in place.

    Args:
      rank: R.
      scale: factor of the adapters' outputs, alpha / rank.
      targets: patterns of the matmuls that get an adapter; None takes all in blocks.

    Returns:
      the paths of the matmuls that have one.

    Raises:
      ValueError: a pattern that matches no matmul, or a rank that is not below both dims of a kernel.
    """
    linears = {path_name(path): m for path, m in nnx.iter_modules(model) if isinstance(m, Linear)}
    for pattern in targets or ():
        if not fnmatch.filter(linears, pattern):
            raise ValueError(
                f"lora.targets: pattern {pattern!r} matches no matmul; use one of {', '.join(linears)}"
            )
    chosen = [path for path, module in linears.items() if _is_target(path, module, targets)]
    adapters = {}
    for path in chosen:
        kernel = linears[path].kernel
        if rank >= min(kernel.shape[-2:]):
            raise ValueError(
                f"lora.rank={rank} must be below the dims {kernel.shape[-2:]} of {path}; "
                "lower it, or choose other matmuls with lora.targets"
            )
        adapters[path] = Adapter(kernel, rank, scale, linears[path].dtype, rngs.params())
    freeze(model)
    for path, adapter in adapters.items():
        linears[path].adapter = nnx.data(adapter)
    return chosen


def _is_target(path: str, module: Linear, targets: tuple[str, ...] | None) -> bool:
    if targets is None:
        return module.kernel.ndim > 2  # in a stack of blocks
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in targets)


def freeze(model: nnx.Module) -> None:
    """Makes every `nnx.Param` of a model a `Frozen`, in place."""
    for _, module in nnx.iter_modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param):
                setattr(module, name, Frozen(value[...], out_sharding=axes_of(value), eager_sharding=False))


def merged_params(model: nnx.Module) -> dict:
    """The parameters of the model without adapters that computes the same, up to rounding.

    Kernels that had an adapter are in float32. Without adapters they are the model's own parameters. This
    changes the kernels of ``model``, which is not to be used afterwards.
    """
    has_adapters = False
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and isinstance(adapter := module.adapter, Adapter):
            module.kernel[...] = module.kernel[...].astype(jnp.float32) + adapter.product()
            has_adapters = True
    return nnx.to_pure_dict(nnx.state(model, Frozen if has_adapters else nnx.Param))
