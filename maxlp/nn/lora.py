"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): a few trained parameters beside frozen ones.

A matmul with kernel W computes ``x W + (alpha / rank) x A B``. B starts at zero, so that training starts
from the model as it is. W may have any precision recipe; the adapters are in float32, and compute in the
model's dtype.

Shape letters: K in · N out · R rank; a stack of layers has its axis in front.
"""

import dataclasses
import fnmatch

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp import schema
from maxlp.nn.layers import Axes, Frozen, Linear, param, uniform
from maxlp.schema import Count, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The config's ``train.lora`` section.

    Attributes:
      rank: R.
      alpha: the adapters' outputs are multiplied by ``alpha / rank``; None takes ``2 * rank``.
      targets: patterns of the matmuls that get an adapter, as in ``*/q_proj``; None takes all in blocks.

    Raises:
      ValueError: a rank or alpha that is not positive.
    """

    rank: Count
    alpha: Positive | None = None
    targets: tuple[str, ...] | None = None

    def __post_init__(self):
        schema.check(self)

    @property
    def scale(self) -> float:
        return 2.0 if self.alpha is None else self.alpha / self.rank


class Adapter(nnx.Module):
    """``x -> scale * x A B`` beside the kernel of a `Linear`; in a stack, one for each layer.

    Args:
      kernel: (…, K, N), with its logical axes.
    """

    def __init__(self, kernel: nnx.Param, config: LoraConfig, dtype: jnp.dtype, key: jax.Array):
        *stack, in_dim, out_dim = kernel.shape
        *stack_axes, in_axis, out_axis = axes_of(kernel)
        # The initial A is that of the authors' code (uniform, variance 1 / 3K).
        a = (3 * in_dim) ** -0.5 * uniform(key, (*stack, in_dim, config.rank))
        self.a = param(a, (*stack_axes, in_axis, None))
        self.b = param(
            jnp.zeros((*stack, config.rank, out_dim), jnp.float32), (*stack_axes, None, out_axis)
        )
        self.scale, self.dtype = config.scale, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x_R = x.astype(self.dtype) @ self.a[...].astype(self.dtype)
        return self.scale * (x_R @ self.b[...].astype(self.dtype))

    def product(self) -> jax.Array:
        """What the adapter adds to the kernel, float32 (…, K, N)."""
        return self.scale * jnp.matmul(self.a[...], self.b[...], precision="highest")


def axes_of(variable: nnx.Variable) -> Axes:
    """The logical axes of a parameter."""
    return variable.get_metadata("out_sharding")


def add_adapters(model: nnx.Module, config: LoraConfig, rngs: nnx.Rngs) -> list[str]:
    """Freezes the parameters of a model and adds adapters, in place.

    Returns:
      the paths of the matmuls that have one.

    Raises:
      ValueError: a pattern that matches no matmul, or a rank that is not smaller than a kernel's dims.
    """
    linears = {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model) if isinstance(m, Linear)}
    for pattern in config.targets or ():
        if not fnmatch.filter(linears, pattern):
            raise ValueError(
                f"lora.targets: pattern {pattern!r} matches no matmul; use one of {', '.join(linears)}"
            )
    chosen = [path for path, module in linears.items() if _is_target(path, module, config)]
    adapters = {}
    for path in chosen:
        kernel = linears[path].kernel
        if config.rank >= min(kernel.shape[-2:]):
            raise ValueError(
                f"lora.rank={config.rank} must be below the dims {kernel.shape[-2:]} of {path}; "
                "lower it, or choose other matmuls with lora.targets"
            )
        adapters[path] = Adapter(kernel, config, linears[path].dtype, rngs.params())
    freeze(model)
    for path, adapter in adapters.items():
        linears[path].adapter = nnx.data(adapter)
    return chosen


def _is_target(path: str, module: Linear, config: LoraConfig) -> bool:
    if config.targets is None:
        return module.kernel.ndim > 2  # in a stack of blocks
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in config.targets)


def freeze(model: nnx.Module) -> None:
    """Makes every `nnx.Param` of a model a `Frozen`, in place."""
    for _, module in nnx.iter_modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param):
                setattr(module, name, Frozen(value[...], out_sharding=axes_of(value), eager_sharding=False))


def merged_params(model: nnx.Module) -> dict:
    """The parameters of the model without adapters that computes the same, up to rounding.

    Kernels that had an adapter are in float32.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and isinstance(adapter := module.adapter, Adapter):
            module.kernel[...] = module.kernel[...].astype(jnp.float32) + adapter.product()
    return nnx.to_pure_dict(nnx.state(model, Frozen))
