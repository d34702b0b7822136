"""QuantDot on meshes with explicit axes, where the sharding is part of every array's type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.numerics import formats
from maxlp.numerics.quantized import quantize
from maxlp.planning import hlo
from maxlp.precision import RECIPES, integers, make_recipe
from tests.precision.fixtures import Layer

LAYOUTS = {  # the partitions of input and kernel
    "fsdp": (P("fsdp", None, None), P("fsdp", "tensor")),
    "tensor": (P("fsdp", None, "tensor"), P("tensor", "fsdp")),  # sums over split dims: needs out_sharding
}


def arrays():
    """Small integers: all sums are exact in any order."""
    rng = np.random.default_rng(0)
    shapes = dict(x=(8, 32, 128), kernel=(128, 128), g=(8, 32, 128))
    return {k: rng.integers(-4, 5, s).astype(np.float32).astype(jnp.bfloat16) for k, s in shapes.items()}


@functools.cache
def layer(name):
    made = Layer(make_recipe(name, **(dict(history=3) if name == "fp8_delayed" else {})))
    state = jax.device_get(made.state)

    def run(state, x, kernel, g, out_sharding):
        y, dx, dkernel, (forward, backward) = made.step(state, x, kernel, g, out_sharding)
        return dict(y=y, dx=dx, dkernel=dkernel, state={**forward, **backward})

    return functools.partial(jax.jit(run, static_argnames="out_sharding"), state)


def on_mesh(name, kind, layout):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind, kind))
    out = P("fsdp", None, "tensor" if layout == "fsdp" else None)
    places = dict(zip(("x", "kernel"), LAYOUTS[layout], strict=True), g=out)
    with jax.set_mesh(mesh):
        placed = {k: jax.device_put(v, NamedSharding(mesh, places[k])) for k, v in arrays().items()}
        found = layer(name)(**placed, out_sharding=out if kind == AxisType.Explicit else None)
    return jax.device_get(found), jax.tree.map(lambda a: a.sharding.spec, found)


# Results that are sums of dequantized values, and so are rounded: to bfloat16, by up to 2^-9 of them.
DEQUANTIZED = {
    **dict.fromkeys(("int8_switchback_m", "wta_crs"), ("dkernel",)),
    **dict.fromkeys(("fp8_blocks", "quest"), ("y", "dx", "dkernel")),
}
FAST = ("fp8_delayed", "fp8_rowwise", "int8_switchback_m", "mxfp8")  # one for each granularity


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_explicit_axes_equal_automatic_ones_and_one_device(name, layout):
    explicit, specs = on_mesh(name, AxisType.Explicit, layout)
    others = [jax.device_get(layer(name)(**arrays(), out_sharding=None))]
    if layout == "tensor":
        others.append(on_mesh(name, AxisType.Auto, layout)[0])
    for other in others:
        for key in DEQUANTIZED.get(name, ()):
            ours, theirs = explicit[key].astype(np.float32), other.pop(key).astype(np.float32)
            np.testing.assert_allclose(ours, theirs, atol=2.0**-6 * np.abs(ours).max())
        jax.tree.map(np.testing.assert_array_equal, {k: explicit[k] for k in other}, other)
    x, kernel = LAYOUTS[layout]
    assert (specs["dx"], specs["dkernel"]) == (x, kernel), "gradients are sharded like input and kernel"
    assert np.any(explicit["y"]) and np.any(explicit["dx"]) and np.any(explicit["dkernel"])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_integers_in_parts_equal_whole_ones(kind, layout, monkeypatch):
    whole = jax.device_get(layer("int8_all")(**arrays(), out_sharding=None))
    monkeypatch.setattr(integers, "INT32_MAX", 32 * 127**2)
    monkeypatch.setitem(globals(), "layer", layer.__wrapped__)  # traced again
    found, specs = on_mesh("int8_all", kind, layout)
    for key in ("y", "dx", "dkernel"):
        np.testing.assert_array_equal(found[key], whole[key])
    if kind == AxisType.Explicit:
        assert (specs["dx"], specs["dkernel"]) == LAYOUTS[layout]


@pytest.mark.parametrize(("length", "gathered"), [(128, False), (64, True)])
def test_only_blocks_that_lie_on_two_devices_are_gathered(length, gathered):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((2, length), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp")))
    to = formats.get("float8_e4m3fn")
    with jax.set_mesh(mesh):
        run = jax.jit(lambda x: quantize(x, to, "block", (1,), block_size=32).codes)
        found = hlo.collectives(run.lower(x).compile().as_text(), dict(mesh.shape))
    assert bool(found) == gathered
