"""How quantization treats each tensor of each layer: what saturates, what vanishes, which scales are old.

`measure` is a training pass over a model whose `QuantDot`s count as they go (`Probe`); its gradients are
not used, so that XLA leaves the matmuls of the kernels' gradients out. Run it every some hundred steps.

Of each input, kernel and output gradient, as the first of its matmuls quantizes it:

* ``amax``: the largest magnitude.
* ``scale``: the one in use; the largest, if rows or blocks have their own.
* ``age``: steps since the amax that a delayed scale comes from; 0 for a current scale.
* ``saturated``: share of the elements beyond the largest number. More than a few in a million means that
  the history is too short, or that the tensor grows: a channel aligns, the learning rate is too high.
* ``underflow``: share of the nonzero elements that become zero. A few per cent are usual (for E5M2 less);
  much more means that outliers set the scale.

And of each SwiGLU, from its kernels alone: ``corr``, the correlation of a channel's gate and up weights,
and ``norm``, the product of their norms. A channel in which both are large makes the gated product
quadratic and breaks delayed scaling (Fishman et al. 2024, arXiv:2409.12517, section 4); see
`smooth_swiglu`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp.numerics import formats
from maxlp.precision import delayed
from maxlp.precision.dot import QuantDot, quantize
from maxlp.precision.recipes import Recipe

STATISTICS = ("amax", "scale", "age", "saturated", "underflow")
TENSORS = ("input", "kernel", "output_grad")
TOP_CHANNELS = 4

Numbers = dict[str, dict[str, jax.Array]]  # path → "input/amax" → (…layers)


# --- counting -----------------------------------------------------------------------------------------


class Health(nnx.Variable):
    """float32 (…, `STATISTICS`); the forward pass writes it."""


class Probe(QuantDot):
    """A `QuantDot` that also writes down the statistics of its three tensors.

    Args:
      dot: the one whose place it takes, and whose histories it uses.
      stack: the leading axes of a stacked kernel.
    """

    def __init__(self, dot: QuantDot, stack: tuple[int, ...]):
        self.recipe = dot.recipe
        for name in dot.recipe.delayed:
            setattr(self, f"{name}_amax_history", getattr(dot, f"{name}_amax_history"))
        zeros = jnp.zeros((*stack, len(STATISTICS)), jnp.float32)
        self.input_health, self.kernel_health = Health(zeros), Health(zeros)
        self.output_grad_health = delayed.OverwriteWithGradient(zeros)

    def _product(self, x: jax.Array, kernel: jax.Array, dtype: Any, out_sharding: Any) -> jax.Array:
        histories = {name: getattr(self, f"{name}_amax_history")[...] for name in self.recipe.delayed}
        for name, value in (("input", x), ("kernel", kernel)):
            stats = statistics(self.recipe, name, jax.lax.stop_gradient(value), histories.get(name))
            getattr(self, f"{name}_health")[...] = stats
        y = super()._product(x, kernel, dtype, out_sharding)
        return _watched(self.recipe, y, histories.get("output_grad"), self.output_grad_health[...])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(recipe: Recipe, y: jax.Array, history: jax.Array | None, stats: jax.Array) -> jax.Array:
    """``y``; the "gradient" of ``stats`` are those of the gradient of ``y``."""
    return y


def _watched_fwd(recipe, y, history, stats):
    return y, history


def _watched_bwd(recipe, history, g):
    nothing = None if history is None else jnp.zeros_like(history)
    return g, nothing, statistics(recipe, "output_grad", g, history)


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
    amax, age, seen = formats.amax(x), jnp.zeros(()), None
    if operand.delayed:
        assert history is not None
        seen = delayed.seen(history, amax, recipe.cold_start)
        age = jnp.where(jnp.max(history) > 0, jnp.argmax(history) + 1.0, 0.0)
    q = quantize(recipe, operand, x, _contracted(recipe, tensor, x), seen)
    ones = formats.Quantized(jnp.ones_like(x, jnp.float32), q.scale)
    magnitude, scales = jnp.abs(x.astype(jnp.float32)), formats.dequantize(ones, jnp.float32)
    nonzero = magnitude > 0
    # A scale is rounded: the amax that it was made for may lie beyond the top by as much.
    saturated = magnitude > scales * (formats.get(operand.format).max * (1 + 2.0**-16))
    vanished = nonzero & (q.values.astype(jnp.float32) == 0)
    count = lambda x: jnp.sum(x, dtype=jnp.float32)  # noqa: E731
    underflow = count(vanished) / jnp.maximum(count(nonzero), 1)
    return jnp.stack([amax, jnp.max(q.scale), age, count(saturated) / x.size, underflow])


def _contracted(recipe: Recipe, tensor: str, x: jax.Array) -> tuple[int, ...]:
    """The axes that the first matmul with this tensor sums over."""
    last, tokens = (x.ndim - 1,), tuple(range(x.ndim - 1))
    if tensor == "kernel":
        return (0,) if recipe.fwd else (1,)
    return last if (recipe.fwd if tensor == "input" else recipe.dlhs) else tokens


# --- the pass -----------------------------------------------------------------------------------------


def measure(
    state: Mapping[str, Any], batch: Any, *, graphdef: nnx.GraphDef, gradients: Callable[..., Any]
) -> Numbers:
    """The statistics of every quantized layer on one batch; to be run under jit, its result replicated.

    Args:
      state: a training state; nothing of it changes.
      gradients: (graphdef, state, batch) to (…, new model_state, …), as in training. What several
        microbatches found is combined by maximum.

    Returns:
      ``{"layers/mlp/up_proj": {"input/amax": float32 (L,), …}, …, "layers/mlp": {"swiglu/corr_1": …}}``.
      What is not quantized (blocks at either end) has a scale of 0.
    """
    probed, model_state = _with_probes(graphdef, state)
    _, model_state, _ = gradients(probed, {**state, "model_state": model_state}, batch)
    found: Numbers = {}
    for path, stats in nnx.traversals.flatten_mapping(model_state).items():
        if path[-1].endswith("_health"):
            where = found.setdefault("/".join(map(str, path[:-2])), {})
            for i, name in enumerate(STATISTICS):
                where[f"{path[-1].removesuffix('_health')}/{name}"] = stats[..., i]
    for path, module in nnx.iter_modules(nnx.merge(graphdef, state["params"], state["model_state"])):
        if hasattr(module, "gate_proj") and hasattr(module, "up_proj"):
            aligned = alignment(module.gate_proj.kernel[...], module.up_proj.kernel[...])
            found["/".join(map(str, path))] = {f"swiglu/{name}": x for name, x in aligned.items()}
    return found


def _with_probes(graphdef: nnx.GraphDef, state: Mapping[str, Any]) -> tuple[nnx.GraphDef, dict]:
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(dot := getattr(module, "dot_general", None), QuantDot):
            module.dot_general = nnx.data(Probe(dot, module.kernel.shape[:-2]))
    graphdef, _, model_state = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(model_state)


def alignment(
    gate_kernel: jax.Array, up_kernel: jax.Array, top: int = TOP_CHANNELS
) -> dict[str, jax.Array]:
    """How far the channels of a SwiGLU point the same way, from its kernels (…, D, F).

    Returns:
      float32 (…) each: ``corr_1`` to ``corr_top``, the correlations over D of the most correlated channels
      (with their sign), ``channel_1`` … which these are, ``norm_1`` … the largest products of a channel's
      two norms, and ``norm_median``.
    """
    gate, up = gate_kernel.astype(jnp.float32), up_kernel.astype(jnp.float32)
    norms = jnp.linalg.norm(gate, axis=-2) * jnp.linalg.norm(up, axis=-2)
    gate, up = (w - jnp.mean(w, axis=-2, keepdims=True) for w in (gate, up))
    lengths = jnp.linalg.norm(gate, axis=-2) * jnp.linalg.norm(up, axis=-2)
    corr = jnp.sum(gate * up, axis=-2) / jnp.maximum(lengths, jnp.finfo(jnp.float32).tiny)
    top = min(top, corr.shape[-1])
    _, channels = jax.lax.top_k(jnp.abs(corr), top)
    corr = jnp.take_along_axis(corr, channels, axis=-1)
    largest, _ = jax.lax.top_k(norms, top)
    each = {"corr": corr, "channel": channels.astype(jnp.float32), "norm": largest}
    numbered = {f"{name}_{i + 1}": x[..., i] for name, x in each.items() for i in range(top)}
    return numbered | {"norm_median": jnp.median(norms, axis=-1)}


# --- for people ---------------------------------------------------------------------------------------


def flatten(numbers: Numbers) -> dict[str, float]:
    """``health/<path>/<layer>/<tensor>/<statistic>`` to a float; no layer where there is no stack."""
    flat = {}
    for path, statistics in numbers.items():
        for name, values in statistics.items():
            for index, value in np.ndenumerate(np.asarray(values)):
                flat["/".join(["health", path, *map(str, index), name])] = float(value)
    plain = {key.removesuffix("/scale") for key, v in flat.items() if key.endswith("/scale") and v == 0}
    return {key: value for key, value in flat.items() if key.rpartition("/")[0] not in plain}


def summary(flat: Mapping[str, float]) -> dict[str, float]:
    """The worst layer of each statistic that has one: ``health/input/saturated`` and so on."""
    worst: dict[str, float] = {}
    for key, value in flat.items():
        _, tensor, name = key.rsplit("/", 2)
        if name in ("age", "saturated", "underflow", "corr_1", "norm_1"):
            name, value = name.removesuffix("_1"), abs(value)
            worst[f"health/{tensor}/{name}"] = max(value, worst.get(f"health/{tensor}/{name}", value))
    return worst


def lines(flat: Mapping[str, float]) -> list[tuple[str, str]]:
    """One line for each tensor of each stack of layers: its ranges, and where it is worst."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for key, value in flat.items():
        path, tensor, name = key.removeprefix("health/").rsplit("/", 2)
        path, _, layer = path.rpartition("/") if path.rpartition("/")[2].isdigit() else (path, "", "")
        found.setdefault((path, tensor), {}).setdefault(name, {})[layer] = value
    table = []
    for (path, tensor), names in sorted(found.items()):
        if tensor == "swiglu":
            layer = max(names["corr_1"], key=lambda i: abs(names["corr_1"][i]))
            longest = max(names["norm_1"], key=lambda i: names["norm_1"][i] / names["norm_median"][i])
            text = (
                f"corr {names['corr_1'][layer]:+.2f} in channel {names['channel_1'][layer]:.0f}"
                f"{_layer(layer)}, norm "
                f"{names['norm_1'][longest] / names['norm_median'][longest]:.1f} × median{_layer(longest)}"
            )
        else:
            amax, scale = names["amax"].values(), names["scale"].values()
            text = (
                f"amax {min(amax):.2g} to {max(amax):.2g}, scale {min(scale):.2g} to {max(scale):.2g}, "
                f"age up to {max(names['age'].values()):.0f}, {_worst(names, 'saturated')}, "
                f"{_worst(names, 'underflow')}"
            )
        table.append((f"{path} {tensor}", text))
    return table


def record_lines(record: Mapping[str, float]) -> list[tuple[str, str]]:
    """`lines` of a record of metrics, which holds the `summary` too."""
    return lines({k: v for k, v in record.items() if k.startswith("health/") and k.count("/") > 2})


def _worst(names: Mapping[str, Mapping[str, float]], name: str) -> str:
    layer = max(names[name], key=lambda i: names[name][i])
    return f"{name} {names[name][layer]:.2%}{_layer(layer) if names[name][layer] else ''}"


def _layer(layer: str) -> str:
    return f" (layer {layer})" if layer else ""
