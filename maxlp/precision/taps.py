"""Taps: every tensor between the layers of a model, recorded and replaced, forward and backward.

    y = tap(x, given)        forward:  y = given[0]         where that is not NaN, else x
                             backward: dx = given[1]        where that is not NaN, else dy
                             the "gradient" of given is (x, dy)

With ``given`` all NaN the program computes what the model does, and records. With the values that another
program has recorded, each layer computes from these alone, so that a difference between the programs
appears only in the layer where it arises. ``given`` is overwritten with its gradient
(`delayed.OverwriteWithGradient`), so that taps work in every program that computes gradients: scanned or
unrolled, with remat, on any mesh without pipeline stages.

A tap is at the input and at the output of each module in `TAPPED`; layers of the same input
(`layers.apply_to_same_input`) share the first one's tap there.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlp.nn.layers import Embed, LayerNorm, LayerScale, Linear, RMSNorm
from maxlp.nn.stack import count_layers, find_stacks, path_name
from maxlp.precision.delayed import OverwriteWithGradient

TAPPED = (Linear, Embed, RMSNorm, LayerNorm, LayerScale)
UNTAPPED = ("lm_head",)  # a loss in chunks applies it to pieces of the sequence; its input has a tap
ENDS = {"input": "tap_input", "output": "tap_output"}  # → names of the variables

Path = tuple[Any, ...]  # of a tap's variable in model_state


class Tap(NamedTuple):
    """What a tap's variable holds: (layers, 2, …) of the tensor's dtype.

    Attributes:
      layers: None outside of stacks.
    """

    layers: int | None
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(eq=False)  # with a hash, as a static part of a module
class _Found:
    """Shape and dtype of each tapped tensor, by module and end, in the order of the program."""

    tensors: dict[tuple[Path, str], tuple[tuple[int, ...], Any]] = dataclasses.field(default_factory=dict)


def with_taps(
    graphdef: nnx.GraphDef, state: Mapping[str, Any], trace: Callable[[nnx.GraphDef, Any], Any]
) -> tuple[nnx.GraphDef, dict[Path, Tap]]:
    """The structure of a model with taps, and the taps in the order of the forward pass.

    Args:
      state: with ``params`` and ``model_state``, which may be abstract.
      trace: (structure, state) to any result; it runs the model, and is traced here for the shapes.
    """
    found = _Found()

    def record(module: Any, layers: list[int]) -> None:
        module.tap_found = nnx.static(found)

    def add(module: Any, layers: list[int]) -> None:
        for end in ENDS:
            if (module.tap_path, end) in found.tensors:
                shape, dtype = found.tensors[module.tap_path, end]
                setattr(module, ENDS[end], OverwriteWithGradient(np.zeros((*layers, 2, *shape), dtype)))

    recording, _ = _tapped_model(graphdef, state, record)
    jax.eval_shape(functools.partial(trace, recording), state)
    graphdef, model_state = _tapped_model(graphdef, state, add)
    flat, taps = nnx.traversals.flatten_mapping(model_state), {}
    for (module, end), (shape, dtype) in found.tensors.items():
        path = *module, ENDS[end]
        stacked = flat[path].ndim > len(shape) + 1
        taps[path] = Tap(len(flat[path]) if stacked else None, flat[path].shape, dtype)
    return graphdef, taps


def stacks(model: nnx.Module) -> dict[str, int]:
    """The path of each stack, with a slash at its end, and its number of layers."""
    return {f"{name}/": count_layers(blocks) for name, blocks in find_stacks(model).items()}


def mark(module: Path, end: str) -> str:
    """The name that a tapped tensor has in a jaxpr; that of its gradient ends in " gradient"."""
    return f"tap: {path_name(module)} {end}"


def _tapped_model(
    graphdef: nnx.GraphDef, state: Mapping[str, Any], prepare: Callable[[Any, list[int]], None]
) -> tuple[nnx.GraphDef, Any]:
    """The model with the tapped class of each module in `TAPPED`, and its model state.

    Args:
      prepare: called with each of these modules and the layers of the stack that it is in, [] outside.
    """
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    in_stacks = stacks(model)
    for parts, module in list(nnx.iter_modules(model)):
        path = path_name(parts)
        if type(module) not in TAPPED or path in UNTAPPED:
            continue
        module.__class__ = _tapped(type(module))
        module.tap_path = parts
        prepare(module, [size for stack, size in in_stacks.items() if path.startswith(stack)])
    graphdef, _, model_state = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(model_state)


@functools.cache
def _tapped(cls: type[nnx.Module]) -> type[nnx.Module]:
    def call(self, x: jax.Array, *args, **kwargs) -> jax.Array:
        shared = {} if kwargs.get("shared") is None else kwargs["shared"]
        if "tapped" not in shared:
            shared["tapped"] = _at(self, "input", x)
        return _at(self, "output", cls.__call__(self, shared["tapped"], *args, **kwargs))

    return type(f"Tapped{cls.__name__}", (cls,), {"__call__": call})


def _at(module: Any, end: str, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if isinstance(given := getattr(module, ENDS[end], None), nnx.Variable):
        name = mark(module.tap_path, end)
        return _tap(name, checkpoint_name(x, name), given[...])
    module.tap_found.tensors[module.tap_path, end] = x.shape, x.dtype
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(name: str, x: jax.Array, given: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(given[0]), x, given[0])


def _tap_fwd(name, x, given):
    return _tap(name, x, given), (x, given[1])


def _tap_bwd(name, saved, g):
    x, given_g = saved
    g = checkpoint_name(g, f"{name} gradient")
    return jnp.where(jnp.isnan(given_g), g, given_g), jnp.stack([x, g])


_tap.defvjp(_tap_fwd, _tap_bwd)
