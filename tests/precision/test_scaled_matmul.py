"""The product in blocks on a mesh; `jax.nn.scaled_matmul`, which only GPUs have, is emulated."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.numerics.formats import Quantized
from maxlp.numerics.quantized import dequantize
from maxlp.precision.scaled_matmul import Product, scaled_matmul
from tests.fixtures import exchanged_bytes, make_mesh

SIZES = {"b": 4, "s": 64, "k": 128, "n": 256, "j": 96}
BLOCK = 32
FORWARD, INPUT_GRADIENT, KERNEL_GRADIENT = "bsk,kn->bsn", "bsn,kn->bsk", "bsk,bsn->kn"


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    def multiply(a, b, a_scale, b_scale, preferred_element_type):
        a, b = (
            codes.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), BLOCK, axis=2)
            for codes, scale in ((a, a_scale), (b, b_scale))
        )
        return jnp.einsum("brk,bck->brc", a, b, preferred_element_type=preferred_element_type)

    monkeypatch.setattr(jax.nn, "scaled_matmul", multiply)


def operands(equation: str, tile: bool = False) -> tuple[Product, list[Quantized]]:
    """Small integers, so that sums are exact in any order, and powers of two as scales."""
    rng, quantized, contracted = np.random.default_rng(0), [], []
    inputs, result = equation.split("->")
    for axes in inputs.split(","):
        contracted.append(tuple(i for i, axis in enumerate(axes) if axis not in result))
        shape = [SIZES[axis] for axis in axes]
        in_blocks = range(len(axes)) if tile else contracted[-1][-1:]
        scales = [n // BLOCK if i in in_blocks and n > BLOCK else n for i, n in enumerate(shape)]
        codes = rng.integers(-3, 4, shape).astype(jnp.float8_e4m3fn)
        scale = 2.0 ** rng.integers(-2, 3, scales)
        quantized.append(Quantized(jnp.asarray(codes), jnp.asarray(scale, jnp.float32)))
    product = Product(tuple(contracted), (jnp.float8_e4m3fn,) * 2, jnp.float8_e8m0fnu, jnp.float32)
    return product, quantized


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
def test_each_device_multiplies_its_part(equation, splits, result, collectives):
    """And sends no more than shares of the result, in its dtype."""
    program = check(equation, splits, result)
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
@pytest.mark.parametrize("tile", [False, True], ids=["blocks", "tiles"])
def test_any_split_gives_the_same_product(equation, splits, result, tile):
    check(equation, splits, result, tile)


def check(equation, splits, result, tile=False) -> str:
    product, arrays = operands(equation, tile)
    dequantized = (np.float64(dequantize(q, jnp.float32)) for q in arrays)
    multiply, arrays = functools.partial(scaled_matmul, product), (*arrays, jnp.float32(0.5))
    actual, program = on_a_mesh(multiply, arrays, (*splits, P()), result)
    np.testing.assert_array_equal(actual, 0.5 * np.einsum(equation, *dequantized))
    return program


def test_a_mapped_axis_is_split_too():
    """As stages are, and the rows of devices by `Scatter`; one kernel serves all here."""
    product, (x, kernel) = operands(FORWARD)
    twice = jax.tree.map(lambda a: a + a, x)
    stages = jax.tree.map(lambda *both: jnp.stack(both), x, twice)
    multiply = functools.partial(scaled_matmul, product)
    expected = [jax.jit(multiply)(q, kernel, jnp.float32(i)) for i, q in enumerate((x, twice))]
    splits = P("fsdp", None, None, "tensor"), P("tensor"), P("fsdp")
    mapped = jax.vmap(multiply, (0, None, 0))
    actual, program = on_a_mesh(
        mapped, (stages, kernel, jnp.arange(2.0)), splits, P("fsdp", None, "tensor")
    )
    np.testing.assert_array_equal(actual, expected)
    assert exchanged_bytes(program) == {("reduce-scatter", "f32"): actual.nbytes // 4}


def on_a_mesh(multiply, arrays, splits, result):
    """The product of operands that are split so, and the compiled program."""
    mesh = make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(lambda x, split=split: place(mesh, x, split), array)
            for array, split in zip(arrays, splits, strict=True)
        ]
        program = jax.jit(multiply, out_shardings=NamedSharding(mesh, result)).lower(*placed).compile()
        return jax.device_get(program(*placed)), program.as_text()


def place(mesh, x, split):
    """Split like this, but for 3 scales on 2 devices."""
    return jax.device_put(x, NamedSharding(mesh, P() if 3 in x.shape else split))
