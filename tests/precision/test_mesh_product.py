"""Products of quantized arrays on a mesh, on CPUs computed as on GPUs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.numerics.formats import Quantized
from maxlp.numerics.quantized import dequantize
from maxlp.precision import make_recipe
from maxlp.precision.mesh_product import Product
from tests.fixtures import exchanged_bytes, make_mesh
from tests.precision.fixtures import Layer

SIZES = {"b": 4, "s": 64, "k": 128, "n": 256, "j": 96}
BLOCK = 32
FORWARD, INPUT_GRADIENT, KERNEL_GRADIENT = "bsk,kn->bsn", "bsn,kn->bsk", "bsk,bsn->kn"


def operands(equation: str, scales: str = "blocks") -> tuple[Product, list[Quantized]]:
    """Small integers, so that sums are exact in any order, and powers of two as scales."""
    rng, quantized, contracted = np.random.default_rng(0), [], []
    inputs, result = equation.split("->")
    for axes in inputs.split(","):
        shape = [SIZES[axis] for axis in axes]
        contracted.append(tuple(i for i, axis in enumerate(axes) if axis not in result))
        num = {
            "blocks": [n // BLOCK if i == contracted[-1][-1] else n for i, n in enumerate(shape)],
            "tiles": [n // BLOCK if n > BLOCK else n for n in shape],
            "rows": [1 if i in contracted[-1] else n for i, n in enumerate(shape)],
            "tensor": [1] * len(shape),
        }
        codes = rng.integers(-3, 4, shape).astype(jnp.float8_e4m3fn)
        scale = 2.0 ** rng.integers(-2, 3, num[scales])
        quantized.append(Quantized(jnp.asarray(codes), jnp.asarray(scale, jnp.float32)))

    def multiply(a, b, scale):
        return scale * jnp.einsum(equation, dequantize(a, jnp.float32), dequantize(b, jnp.float32))

    return Product(multiply, tuple(contracted), in_blocks=scales in ("blocks", "tiles")), quantized


@pytest.mark.parametrize(
    ("equation", "splits", "result", "collectives"),
    [
        pytest.param(FORWARD, (P("fsdp"), P(None, "tensor")), P("fsdp", None, "tensor"), {}, id="columns"),
        pytest.param(
            FORWARD,
            (P("fsdp", None, "tensor"), P("tensor")),
            P("fsdp", "tensor"),
            {"reduce-scatter": 1 / 4},
            id="rows",
        ),
        pytest.param(
            FORWARD,
            (P("fsdp", None, "tensor"), P("tensor")),
            P("fsdp"),
            {"all-reduce": 1 / 2},
            id="whole sums",
        ),
        pytest.param(
            INPUT_GRADIENT,
            (P("fsdp", None, "tensor"), P(None, "tensor")),
            P("fsdp", "tensor"),
            {"reduce-scatter": 1 / 4},
            id="input gradient",
        ),
        pytest.param(
            KERNEL_GRADIENT,
            (P("fsdp"), P("fsdp", None, "tensor")),
            P("fsdp", "tensor"),
            {"reduce-scatter": 1 / 4},
            id="kernel gradient",
        ),
        pytest.param(
            KERNEL_GRADIENT,
            (P("fsdp", "tensor"), P("fsdp", "tensor")),
            P(("fsdp", "tensor")),
            {"reduce-scatter": 1 / 4},
            id="two axes of tokens",
        ),
    ],
)
@pytest.mark.parametrize("scales", ["blocks", "rows", "tensor"])
def test_each_device_multiplies_its_part(equation, splits, result, collectives, scales):
    """And sends only parts of the result, in its dtype."""
    program = check(equation, splits, result, scales)
    num_bytes = 4 * math.prod(SIZES[axis] for axis in equation.split("->")[1])
    sent = {(kind, "f32"): share * num_bytes for kind, share in collectives.items()}
    assert exchanged_bytes(program) == sent


@pytest.mark.parametrize(
    ("equation", "splits", "result"),
    [
        pytest.param("bsj,jn->bsn", (P(None, None, "fsdp"), P("fsdp")), P(), id="a split of blocks"),
        pytest.param("bsk,kj->bsj", (P(), P(None, "fsdp")), P(None, None, "fsdp"), id="a split of tiles"),
        pytest.param(FORWARD, (P(None, None, "tensor"), P("fsdp")), P("fsdp"), id="operands that disagree"),
        pytest.param(
            FORWARD,
            (P(None, "tensor", "fsdp"), P("fsdp")),
            P(None, ("fsdp", "tensor")),
            id="sums for the first of two axes",
        ),
        pytest.param(FORWARD, (P("fsdp"), P(None, "tensor")), P(), id="a result that is not split"),
        pytest.param(FORWARD, (P("tensor"), P(None, "tensor")), P(), id="one axis for both"),
    ],
)
@pytest.mark.parametrize("scales", ["blocks", "tiles", "rows"])
def test_any_split_gives_the_same_product(equation, splits, result, scales):
    check(equation, splits, result, scales)


def check(equation, splits, result, scales) -> str:
    product, arrays = operands(equation, scales)
    dequantized = (np.float64(dequantize(q, jnp.float32)) for q in arrays)
    multiply, arrays = product.partitioned, (*arrays, jnp.float32(0.5))
    actual, program = on_a_mesh(multiply, arrays, (*splits, P()), result)
    np.testing.assert_array_equal(actual, 0.5 * np.einsum(equation, *dequantized))
    return program


def test_a_mapped_axis_is_split_too():
    """As stages are, and the rows of devices by `Scatter`; one kernel serves all here."""
    product, (x, kernel) = operands(FORWARD)
    twice = jax.tree.map(lambda a: a + a, x)
    stages = jax.tree.map(lambda *both: jnp.stack(both), x, twice)
    multiply = product.partitioned
    expected = [jax.jit(multiply)(q, kernel, jnp.float32(i)) for i, q in enumerate((x, twice))]
    splits = P("fsdp", None, None, "tensor"), P("tensor"), P("fsdp")
    mapped = jax.vmap(multiply, (0, None, 0))
    actual, program = on_a_mesh(
        mapped, (stages, kernel, jnp.arange(2.0)), splits, P("fsdp", None, "tensor")
    )
    np.testing.assert_array_equal(actual, expected)
    assert exchanged_bytes(program) == {("reduce-scatter", "f32"): actual.nbytes // 4}


def test_two_mapped_axes_are_split_too():
    product, (x, kernel) = operands(FORWARD)
    stages = jax.tree.map(lambda a: jnp.stack([a, a + a]), x)
    mapped = jax.vmap(jax.vmap(product.partitioned, (0, None, None)), (None, None, 0))
    splits = P(None, "fsdp", None, "tensor"), P("tensor"), P()
    scales = jnp.array([1.0, 2.0, 4.0])
    actual, _ = on_a_mesh(mapped, (stages, kernel, scales), splits, P(None, None, "fsdp", "tensor"))
    one = np.einsum(FORWARD, *(np.float64(dequantize(q, jnp.float32)) for q in (x, kernel)))
    # Codes and scales of the second stage are twice those of the first.
    np.testing.assert_array_equal(actual, [[scale * one, 4 * scale * one] for scale in scales])


@pytest.mark.parametrize(
    ("platform", "axis_type", "expected"),
    [
        ("cuda", AxisType.Auto, 1),
        ("cpu", AxisType.Auto, 0),
        ("tpu", AxisType.Auto, 0),
        ("cuda", AxisType.Explicit, 0),
    ],
)
def test_only_gpus_with_automatic_axes_partition_it(platform, axis_type, expected):
    product, (x, kernel) = operands(FORWARD)
    with jax.set_mesh(jax.make_mesh((2,), ("fsdp",), axis_types=(axis_type,))):
        traced = jax.jit(lambda *operands: product(*operands)).trace(x, kernel, jnp.float32(0.5))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@CustomSPMDPartitioning") == expected


def on_a_mesh(multiply, arrays, splits, result):
    """The product of operands with these shardings, and the compiled program."""
    mesh = make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(lambda x, split=split: place(mesh, x, split), array)
            for array, split in zip(arrays, splits, strict=True)
        ]
        out = None if result is None else NamedSharding(mesh, result)
        program = jax.jit(multiply, out_shardings=out).lower(*placed).compile()
        return jax.device_get(program(*placed)), program.as_text()


def place(mesh, x, split):
    """Split like this, but for shared scales and the 3 of three blocks."""
    axes = (*split, *[None] * (x.ndim - len(split)))
    axes = [None if n in (1, 3) else axis for n, axis in zip(x.shape, axes, strict=True)]
    return jax.device_put(x, NamedSharding(mesh, P(*axes)))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("fp8_delayed", {}),  # a scale for each tensor, a power of two
        ("fp8_current", {}),
        ("int8_switchback", {}),  # scales of rows
        ("fp8_blocks", {}),
        ("nvfp4", dict(grad_rounding="nearest")),
    ],
)
def test_a_layer_is_that_of_one_device(recipe, options, monkeypatch):
    """Output and both gradients, as far as no sum of 128 to 512 terms in float32 is in another order."""
    monkeypatch.setattr(Product, "__call__", lambda self, a, b, scale=None: self.partitioned(a, b, scale))
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=shape).astype(np.float32) for shape in ((4, 128, 256), (256, 512), (4, 128, 512))
    ]
    layer = Layer(make_recipe(recipe, **options))

    def step(x, kernel, g):
        return layer.step(layer.state, x, kernel, g)[:3]

    expected = jax.jit(step)(*arrays)
    columns = P("fsdp"), P("fsdp", "tensor"), P("fsdp", None, "tensor")
    rows = P("fsdp", None, "tensor"), P("tensor", "fsdp"), P("fsdp", "tensor")
    for splits in (columns, rows):
        actual, _ = on_a_mesh(step, arrays, splits, None)
        for ours, theirs in zip(actual, expected, strict=True):
            atol = 512 * 2.0**-24 * np.abs(theirs).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=str(splits))
