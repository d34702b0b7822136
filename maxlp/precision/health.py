"""How quantization treats each tensor of each layer: saturation, underflow and the age of scales.

`measure` is a forward and backward pass over a model whose `QuantDot`s are replaced by `Probe`s, which
record statistics. Its gradients are not used, so XLA leaves out the ``drhs`` matmuls. Run it every few
hundred steps. A head that computes its logits in chunks is not measured.

For each input, kernel and output gradient, in the format of the first matmul that uses it:

* ``amax``: the largest magnitude.
* ``scale``: the one in use; the largest, if rows or blocks have their own. Those of zeros alone, which are
  1, do not count.
* ``age``: steps since the amax that a delayed scale comes from; 0 for a current scale.
* ``saturated``: the fraction of elements that saturate. More than a few in a million means that the history
  is too short, or that the tensor grows: a channel aligns, the learning rate is too high.
* ``underflow``: the fraction of nonzero elements that become zero. A few per cent are usual (for E5M2
  fewer); much more means that outliers set the scale. If ``amax`` is also far below ``scale`` times the
  format's largest number, the tensor has shrunk in ``age`` steps and the history is too long.

And for each SwiGLU, from its kernels alone: ``corr``, the correlation of a channel's gate and up
weights, and ``norm``, the product of their norms. A channel in which both are large makes the gated
product quadratic and breaks delayed scaling (Fishman et al. 2024, arXiv:2409.12517, section 4); see
`smooth_swiglu`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp.nn.stack import path_name
from maxlp.numerics import formats
from maxlp.numerics.quantized import dequantize
from maxlp.numerics.scales import amax
from maxlp.precision import delayed
from maxlp.precision.dot import QuantDot, Static, quantize
from maxlp.precision.inject import Matmul, matmuls
from maxlp.precision.recipes import Operand, Recipe
from maxlp.precision.replace import replace_quant_dots

STATISTICS = ("amax", "scale", "age", "saturated", "underflow")
TENSORS = ("input", "kernel", "output_grad")
TOP_CHANNELS = 4

Measurement = dict[str, dict[str, jax.Array]]  # path → "input/amax" → (…layers)
LossScaleOf = Callable[[Any], jax.Array | None]


# --- statistics ---------------------------------------------------------------------------------------


class Health(nnx.Variable):
    """float32 (…, `STATISTICS`), written by the forward pass."""


class Probe(QuantDot):
    """A `QuantDot` that also records the statistics of its three tensors.

    Args:
      dot: the one it replaces; it uses the same histories.
      stack: the leading axes of a stacked kernel.
    """

    def __init__(self, dot: QuantDot, stack: tuple[int, ...]):
        self.share_histories(dot)
        zeros = jnp.zeros((*stack, len(STATISTICS)), jnp.float32)
        self.input_health, self.kernel_health = Health(zeros), Health(zeros)
        self.output_grad_health = delayed.OverwriteWithGradient(zeros)

    @property
    def health(self) -> dict[str, nnx.Variable]:
        """The statistics of each tensor."""
        return {tensor: getattr(self, f"{tensor}_health") for tensor in TENSORS}

    def _product_of_rotated(
        self, x: jax.Array, kernel: jax.Array, static: Static, shared: dict
    ) -> jax.Array:
        histories = {tensor: history[...] for tensor, history in self.histories.items()}
        for tensor, value in (("input", x), ("kernel", kernel)):
            stats = statistics(self.recipe, tensor, jax.lax.stop_gradient(value), histories.get(tensor))
            self.health[tensor][...] = stats
        y = super()._product_of_rotated(x, kernel, static, shared)
        return _watched(self.recipe, y, histories.get("output_grad"), self.output_grad_health[...])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(recipe: Recipe, y: jax.Array, history: jax.Array | None, stats: jax.Array) -> jax.Array:
    """Returns ``y``; ``stats`` get the statistics of its gradient, see `delayed.OverwriteWithGradient`."""
    return y


def _watched_fwd(recipe, y, history, stats):
    return y, history


def _watched_bwd(recipe, history, g):
    no_gradient = None if history is None else jnp.zeros_like(history)
    return g, no_gradient, statistics(recipe, "output_grad", g, history)


_watched.defvjp(_watched_fwd, _watched_bwd)


def statistics(recipe: Recipe, tensor: str, x: jax.Array, history: jax.Array | None) -> jax.Array:
    """float32 (`STATISTICS`) of one tensor in a layer with this recipe; zeros if it is not quantized.

    Args:
      tensor: one of `TENSORS`.
      history: its amax history (H,) before this step, if it has one.
    """
    if not recipe.operands[tensor]:
        return jnp.zeros(len(STATISTICS))
    operand = recipe.operands[tensor][0]
    current, age, delayed_amax = amax(x), jnp.zeros(()), None
    if operand.delayed:
        assert history is not None
        delayed_amax = delayed.delayed_amax(history, current, recipe.cold_start)
        age = jnp.where(jnp.max(history) > 0, jnp.argmax(history) + 1.0, 0.0)
    q = quantize(recipe, operand, x, _contracted(recipe, tensor, x), delayed_amax)
    scales = dequantize(q._replace(codes=jnp.ones_like(x, jnp.float32)), jnp.float32)
    largest = jnp.max(jnp.where(x == 0, jnp.finfo(jnp.float32).tiny, scales))
    return jnp.stack([current, largest, age, *shares(operand, x, q.codes, scales)])


def shares(operand: Operand, x: jax.Array, values: jax.Array, scales: jax.Array) -> list[jax.Array]:
    """The fractions of a tensor's elements that saturate and that underflow, see above: float32 scalars.

    Args:
      values: the codes to which ``x`` was quantized.
      scales: the scale of each element, in the shape of ``x``.
    """
    magnitude = jnp.abs(x.astype(jnp.float32))
    nonzero = magnitude > 0
    # A scale is rounded, so that its own amax may exceed the largest number by a rounding error.
    saturated = magnitude > scales * (formats.get(operand.format).max * (1 + 2.0**-16))
    vanished = nonzero & (values.astype(jnp.float32) == 0)
    return [_count(saturated) / x.size, _count(vanished) / jnp.maximum(_count(nonzero), 1)]


def _count(x: jax.Array) -> jax.Array:
    return jnp.sum(x, dtype=jnp.float32)


def _contracted(recipe: Recipe, tensor: str, x: jax.Array) -> tuple[int, ...]:
    """The axes that the first matmul with this tensor sums over."""
    if tensor == "kernel":
        return (0,) if recipe.fwd else (1,)
    sums_over_last = recipe.fwd if tensor == "input" else recipe.dlhs  # drhs sums over the tokens
    return (x.ndim - 1,) if sums_over_last else tuple(range(x.ndim - 1))


# --- the pass -----------------------------------------------------------------------------------------


@runtime_checkable
class SwiGLU(Protocol):
    """A module that multiplies ``silu(gate_proj(x))`` by ``up_proj(x)``."""

    gate_proj: Matmul
    up_proj: Matmul


def measure(
    state: Mapping[str, Any],
    batch: Any,
    *,
    graphdef: nnx.GraphDef,
    gradients: Callable[..., Any],
    loss_scale: LossScaleOf | None = None,
) -> Measurement:
    """The statistics of every quantized layer on one batch.

    Call it in a jitted function with replicated results, as `run.measurements` does.

    Args:
      state: a training state; it does not change.
      gradients: see `core.gradients`. The statistics of several microbatches are combined by
        maximum.
      loss_scale: the factor of the loss in float16 training, from the state.

    Returns:
      ``{"layers/mlp/up_proj": {"input/amax": float32 (L,), …}, …, "layers/mlp": {"swiglu/corr_1":
      …}}``. Tensors that are not quantized (in blocks at either end) have a scale of 0.
    """
    probed, model_state = replace_quant_dots(graphdef, state, Probe)
    probed_state = {**state, "model_state": model_state}
    scale = None if loss_scale is None else loss_scale(state)
    _, model_state, _ = gradients(probed, probed_state, batch, scale)
    model = nnx.merge(probed, state["params"], model_state)
    found: Measurement = {}
    for path, module in matmuls(model):
        if isinstance(dot := module.dot_general, Probe):
            found[path] = {
                f"{tensor}/{name}": stats[..., i]
                for tensor, stats in dot.health.items()
                for i, name in enumerate(STATISTICS)
            }
    for path, module in nnx.iter_modules(model):
        if isinstance(module, SwiGLU):
            aligned = alignment(module.gate_proj.kernel[...], module.up_proj.kernel[...])
            found[path_name(path)] = {f"swiglu/{name}": x for name, x in aligned.items()}
    return found


def alignment(gate_kernel: jax.Array, up_kernel: jax.Array) -> dict[str, jax.Array]:
    """How far the channels of a SwiGLU point the same way, from its kernels (…, D, F).

    Returns:
      float32 (…) each: ``corr_1`` to ``corr_4``, the correlations over D of the most correlated
      channels (signed), ``channel_1`` … the indices of these, ``norm_1`` … the largest products of
      a channel's two norms, and ``norm_median``.
    """
    gate, up = gate_kernel.astype(jnp.float32), up_kernel.astype(jnp.float32)
    norms = jnp.linalg.norm(gate, axis=-2) * jnp.linalg.norm(up, axis=-2)
    gate, up = (w - jnp.mean(w, axis=-2, keepdims=True) for w in (gate, up))
    lengths = jnp.linalg.norm(gate, axis=-2) * jnp.linalg.norm(up, axis=-2)
    corr = jnp.sum(gate * up, axis=-2) / jnp.maximum(lengths, jnp.finfo(jnp.float32).tiny)
    top = min(TOP_CHANNELS, corr.shape[-1])
    _, channels = jax.lax.top_k(jnp.abs(corr), top)
    corr = jnp.take_along_axis(corr, channels, axis=-1)
    largest, _ = jax.lax.top_k(norms, top)
    each = {"corr": corr, "channel": channels.astype(jnp.float32), "norm": largest}
    numbered = {f"{name}_{i + 1}": x[..., i] for name, x in each.items() for i in range(top)}
    return numbered | {"norm_median": jnp.median(norms, axis=-1)}


# --- reports ------------------------------------------------------------------------------------------


def metrics(found: Measurement) -> dict[str, float]:
    """`summary` and `flatten` of what `measure` returns."""
    flat = flatten(found)
    return summary(flat) | flat


def flatten(found: Measurement) -> dict[str, float]:
    """``health/<path>/<layer>/<tensor>/<statistic>`` to a float; without a layer for unstacked modules.

    Tensors that are not quantized are left out.
    """
    flat = {}
    for path, stats in found.items():
        for name, values in stats.items():
            tensor, _, _ = name.partition("/")
            scales = stats.get(f"{tensor}/scale")
            for index, value in np.ndenumerate(np.asarray(values)):
                if scales is None or np.asarray(scales)[index] != 0:
                    flat["/".join(["health", path, *map(str, index), name])] = float(value)
    return flat


def summary(flat: Mapping[str, float]) -> dict[str, float]:
    """The largest value over all layers, for statistics with a worst layer: ``health/input/saturated`` …"""
    worst: dict[str, float] = {}
    for key, value in flat.items():
        _, tensor, name = key.rsplit("/", 2)
        if name in ("age", "saturated", "underflow", "corr_1", "norm_1"):
            name, value = name.removesuffix("_1"), abs(value)
            worst[f"health/{tensor}/{name}"] = max(value, worst.get(f"health/{tensor}/{name}", value))
    return worst


def lines(flat: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, text) of each tensor of each stack of layers: ranges over the layers, and the worst layer."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for key, value in flat.items():
        path, tensor, name = key.removeprefix("health/").rsplit("/", 2)
        parent, _, last = path.rpartition("/")
        path, layer = (parent, last) if last.isdigit() else (path, "")
        found.setdefault((path, tensor), {}).setdefault(name, {})[layer] = value
    return [
        (f"{path} {tensor}", _swiglu_line(stats) if tensor == "swiglu" else _tensor_line(stats))
        for (path, tensor), stats in sorted(found.items())
    ]


def record_lines(record: Mapping[str, float]) -> list[tuple[str, str]]:
    """`lines` of a record of metrics, which also holds the `summary`."""
    return lines({k: v for k, v in record.items() if k.startswith("health/") and k.count("/") > 2})


# Statistic → layer → value.
_OfLayers = Mapping[str, Mapping[str, float]]


def _swiglu_line(stats: _OfLayers) -> str:
    layer = max(stats["corr_1"], key=lambda i: abs(stats["corr_1"][i]))
    medians = stats["norm_median"]  # 0 if most channels are zeros
    relative = {i: norm / medians[i] if medians[i] else math.inf for i, norm in stats["norm_1"].items()}
    longest = max(relative, key=lambda i: relative[i])
    return (
        f"corr {stats['corr_1'][layer]:+.2f} in channel {stats['channel_1'][layer]:.0f}{_layer(layer)}, "
        f"norm {relative[longest]:.1f} × median{_layer(longest)}"
    )


def _tensor_line(stats: _OfLayers) -> str:
    parts = [f"{name} {_range(stats[name])}" for name in ("amax", "scale")]
    if age := max(stats["age"].values()):  # 0 for current scales
        parts.append(f"age up to {age:.0f}")
    return ", ".join([*parts, *(_worst(stats, name) for name in ("saturated", "underflow"))])


def _range(of_layers: Mapping[str, float]) -> str:
    """The least and the largest value, or the one to which both are rounded."""
    ends = (f"{end(of_layers.values()):.2g}" for end in (min, max))
    return " to ".join(dict.fromkeys(ends))


def _worst(stats: _OfLayers, name: str) -> str:
    layer = max(stats[name], key=lambda i: stats[name][i])
    share = stats[name][layer]
    where = _layer(layer) if share else ""
    return f"{name} {percent(share)}{where}"


def percent(share: float) -> str:
    """A share with two decimals, or with an exponent where these would hide it: `12.34%`, `3.1e-04%`."""
    return f"{share:.2%}" if share == 0 or share >= 5e-5 else f"{100 * share:.1e}%"


def _layer(layer: str) -> str:
    return f" (layer {layer})" if layer else ""
