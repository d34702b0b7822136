"""Recipes and the ``precision`` section of a config: what replaces what, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlp.numerics import formats
from maxlp.precision import (
    RECIPES,
    DynamicLossScale,
    PrecisionConfig,
    RecipeOptions,
    blocks,
    make_recipe,
    recipes,
)
from maxlp.precision.dot import quantize
from tests.precision.fixtures import Layer, documented_recipes, table_rows

SECTION = dict(
    recipe="fp8_delayed",
    options=RecipeOptions(history=8),
    rules=(("lm_head", "bf16"),),
    first_blocks=1,
    last_blocks=0,
    min_dim=0,
    smooth_swiglu="balanced",
)


def assert_one_line(error):
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("fp8", {}, "recipe='fp8' is unknown; one of bf16, fp8_delayed"),
        ("fp8_delayed", dict(history=0), "history=0 must be at least 1"),
        ("fp8_delayed", dict(margin=float("inf")), "margin=inf must be a finite number"),
        ("fp8_delayed", dict(granularity="row"), "granularity='row' does not work with delayed scales"),
        ("fp8_current", dict(format="e5m3f"), "format='e5m3f' is unknown"),
        ("fp8_current", dict(format="float16"), "format='float16' is unknown"),
        ("fp8_current", dict(grad_format="e9m9"), "grad_format='e9m9' is unknown"),
        (
            "fp8_current",
            dict(granularity="rows"),
            "granularity='rows' is unknown; one of unscaled, ten",
        ),
        (
            "fp8_current",
            dict(rounding="up"),
            "rounding='up' is unknown; one of nearest, truncate, stochastic",
        ),
        (
            "fp8_current",
            dict(grad_format="int8"),
            r"operands of dlhs, int8 .* and float8_e4m3fn .* must both",
        ),
        (
            "fp8_current",
            dict(granularity="block", grad_format="e5m2"),
            r"operands of dlhs, e5m2 .* must both",
        ),
        ("int8_switchback", dict(residuals="int8"), "residuals='int8' is unknown; one of full, quantized"),
        ("bf16", dict(residuals="quantized"), "residuals='quantized' needs a quantized fwd"),
        ("mxfp8", dict(granularity="tile"), "granularity='tile' is for kernels; use options.kernel_gran"),
        ("mxfp8", dict(kernel_granularity="tensor"), "both in blocks or neither"),
        (
            "int8_all",
            dict(clipping="gaussian"),
            "clipping='gaussian' is for .* midrise4, not for int8 .*; use 'max'",
        ),
        (
            "fp8_current",
            dict(trust_mask=True),
            "trust_mask=True needs integer formats without blocks; use F",
        ),
        ("nvfp4", dict(block_scales="e8m0"), "block_scales='e8m0' is unknown; one of up, floor, float32"),
        (
            "simulate",
            dict(format="e7m3"),
            r"products of e7m3 .* and e7m3 .* overflow float32 in fwd; use options.granularity='unscaled'",
        ),
        (
            "simulate",
            dict(format="midrise3", granularity="block"),
            "blocks in drhs are filled up with zeros, which midrise3 does not have; use options.gr",
        ),
    ],
)
def test_bad_recipes_are_one_line_errors(name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_recipe(name, **options)
    assert_one_line(error)


@pytest.mark.parametrize(
    "name, granularity", [("e6m9", "tensor"), ("e7m8", "unscaled"), ("e8m7", "unscaled"), ("e8m7", "block")]
)
def test_formats_of_many_exponent_bits_have_finite_products(name, granularity):
    """Scales of tensors or rows would make codes of 2^64 and more, which are refused above."""
    layer = Layer(make_recipe("simulate", format=name, granularity=granularity))
    x, w, g = (jnp.ones(shape) for shape in ((1, 32, 64), (64, 32), (1, 32, 32)))
    y, dx, dw, _ = jax.jit(layer.step)(layer.state, x, w, g)
    for product, terms in ((y, 64), (dx, 32), (dw, 32)):
        np.testing.assert_allclose(product, terms, rtol=2.0**-6)


def test_options_replace_data():
    recipe = make_recipe(
        "simulate", format="e3m4", grad_format="e5m2", rounding="truncate", granularity="row", history=3
    )
    assert [o.format for o in (*recipe.fwd, *recipe.dlhs, *recipe.drhs)] == [
        "e3m4", "e3m4", "e5m2", "e3m4", "e3m4", "e5m2"
    ]  # fmt: skip
    assert {
        (o.rounding, o.granularity) for pair in (recipe.fwd, recipe.dlhs, recipe.drhs) for o in pair
    } == {("truncate", "row")}
    assert recipe.history == 3
    # One format is that of all operands; a format of gradients alone leaves the others.
    assert {o.format for pair in make_recipe("simulate", format="e3m4").gemms.values() for o in pair} == {
        "e3m4"
    }
    grads = make_recipe("fp8_delayed", grad_format="float8_e4m3fn")
    assert grads.dlhs == grads.fwd and grads.residuals == "quantized" and grads.history == 1024
    # None keeps what a recipe has, and False does not.
    assert make_recipe("fp8_current", power_of_two=None, cold_start=None) == make_recipe("fp8_current")
    assert not make_recipe("fp8_current", power_of_two=False).fwd[0].power_of_two


INTERVALS = [f.name for f in dataclasses.fields(PrecisionConfig) if f.name.endswith("_every")]


@pytest.mark.parametrize("key", INTERVALS)
def test_each_interval_makes_a_run_measure(key):
    assert PrecisionConfig(**SECTION, **{key: 10}).measures
    assert not PrecisionConfig(**SECTION).measures


def test_a_section_is_hashable_and_compares_by_value():
    config = PrecisionConfig(**SECTION, loss_scale=DynamicLossScale(), health_every=10)
    assert hash(config) == hash(dataclasses.replace(config)) and config == dataclasses.replace(config)
    assert (PrecisionConfig(**SECTION).loss_scale, PrecisionConfig(**SECTION).health_every) == (None, 0)
    with pytest.raises(TypeError, match="missing"):
        PrecisionConfig(recipe="bf16")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(recipe="fp4"), "recipe='fp4' is unknown; one of bf16"),
        (
            dict(rules=(("lm_head", "fp4"),)),
            r"rules\[0\]\[1\]='fp4' is unknown; one of bf16",
        ),
        (dict(rules=("lm_head",)), r"rules\[0\]='lm_head' is of type str, expected \(str, str\)"),
        (dict(first_blocks=-1), "first_blocks=-1 must be at least 0"),
        (dict(last_blocks=-1), "last_blocks=-1 must be at least 0"),
        (dict(min_dim=-1), "min_dim=-1 must be at least 0"),
        (dict(health_every=-1), "health_every=-1 must be at least 0"),
        (dict(smooth_swiglu="channels"), "smooth_swiglu='channels' is unknown; one of none, channel"),
    ],
)
def test_bad_sections_are_one_line_errors_that_start_with_the_key(change, message):
    with pytest.raises(ValueError, match=message) as error:
        PrecisionConfig(**(SECTION | change))
    assert_one_line(error)
    assert str(error.value).startswith(next(iter(change)))


def test_delayed_scaling_is_that_of_transformer_engine_by_default():
    recipe = make_recipe("fp8_delayed")
    assert (recipe.history, recipe.margin, recipe.cold_start) == (1024, 0.0, True)


def bits_reduced(x, exponent_bits, mantissa_bits):
    """bfloat16 numbers with fewer bits, by shifts of their integer significands: float64."""
    codes = np.asarray(x).view(np.uint16).astype(np.int64)
    sign, exponent, fraction = 1 - 2 * (codes >> 15), (codes >> 7) & 0xFF, codes & 0x7F
    significand = np.where(exponent > 0, fraction | 0x80, fraction)
    unit = np.maximum(exponent, 1) - 127 - 7  # the significand counts 2**unit
    low, high = 2 - 2 ** (exponent_bits - 1), 2 ** (exponent_bits - 1) - 1
    finest = np.maximum(unit + 7, low) - mantissa_bits  # what remains counts 2**finest
    shift = np.clip(finest - unit, 0, 62)
    reduced = np.ldexp(((significand >> shift) << shift).astype(np.float64), unit)
    largest = np.ldexp(float(2 ** (mantissa_bits + 1) - 1), high - mantissa_bits)
    reduced = np.where(unit + 7 > high, largest, reduced)  # exponents are clipped
    return np.where(exponent == 255, np.nan, sign * reduced)  # NaN and infinity have this exponent


REDUCED = [(8, m) for m in range(1, 8)] + [(e, 7) for e in range(2, 8)] + [(5, 2), (4, 3)]


@pytest.mark.parametrize("e, m", REDUCED, ids=lambda n: str(n))
def test_bit_reduction_of_every_bfloat16(e, m):
    """Mantissa bits are masked and exponents clipped, without a scale (docs/numerics_lab.md)."""
    recipe = make_recipe("simulate", format=f"e{e}m{m}", granularity="unscaled", rounding="truncate")
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    x32 = x.astype(np.float32)
    x = x[~((np.abs(x32) > 0) & (np.abs(x32) < np.finfo(np.float32).tiny))]  # subnormals may be flushed
    for operands in recipe.operands.values():
        for operand in operands:
            q = quantize(recipe, operand, jnp.asarray(x), (0,), None)
            ours = np.asarray(q.codes).astype(np.float64)
            np.testing.assert_array_equal(ours, bits_reduced(x, e, m))
            assert q.scale == 1


# --- the table of the documentation -----------------------------------------------------------------------


def test_both_tables_of_the_documentation_name_every_recipe():
    first = table_rows("| `precision.recipe` | fwd (input · kernel) |")
    for rows in (first, documented_recipes()):
        assert list(rows) == list(RECIPES), "docs/low_precision.md#recipes has two rows for each"


@pytest.mark.parametrize("name", documented_recipes())
def test_the_table_of_the_documentation_agrees_with_the_recipe(name):
    bits, rounding, state, hardware, *_ = documented_recipes()[name]
    recipe = RECIPES[name]
    operands = [operand for pair in recipe.gemms.values() for operand in pair]
    assert state == ("amax histories" if recipe.delayed else "none")
    if name == "simulate":
        return
    assert {formats.get(o.format).bits for o in operands} <= {int(bits.split(",")[0])}
    for gemm in recipes.GEMMS:
        assert (gemm in recipe.gemms) == (gemm not in bits) or not recipe.gemms
    assert ("stochastic" in rounding) == any(o.rounding == "stochastic" for o in operands)
    rates = {blocks.rate(pair) for pair in recipe.gemms.values()}
    chips = {"int8": "v5e", "float8": "H100", "mxfp8": "B200", "nvfp4": "B200", "bfloat16": "none"}
    assert all(chips[rate] in hardware for rate in rates)
    assert ("B200" in hardware) == bool(rates & {"float8", "mxfp8", "nvfp4"})
