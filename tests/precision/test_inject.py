import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp import precision
from maxlp.families.llama.model import Llama
from maxlp.precision import RECIPES, QuantDot, inject, make_recipe
from tests.precision import tiny

QUANTIZED = [name for name in RECIPES if name != "bf16"]
PATHS = {f"layers/attn/{p}_proj" for p in "qkvo"} | {f"layers/mlp/{p}_proj" for p in ("gate", "up", "down")}


def abstract(**changes):
    sizes = tiny.SIZES | dict(scan_layers=True, remat="none", dtype="bfloat16") | changes
    return nnx.eval_shape(lambda: Llama(**sizes, rngs=nnx.Rngs(0)))


def table(recipe="fp8_current", model=None, **kwargs):
    return inject(model or abstract(), make_recipe(recipe), **kwargs)


def test_matmuls_of_blocks_get_the_recipe_and_all_else_stays():
    model = abstract()
    assert table(model=model) == {**dict.fromkeys(PATHS, "fp8_current"), "lm_head": "high precision"}
    assert model.layers.mlp.up_proj.dot_general.recipe == make_recipe("fp8_current")
    assert not isinstance(model.lm_head.dot_general, QuantDot)
    tied = table(model=abstract(tie_embeddings=True))
    assert set(tied) == PATHS


def test_bf16_changes_nothing():
    model = abstract()
    before = nnx.graphdef(model)
    assert set(table("bf16", model, first_blocks=1, last_blocks=1).values()) == {"high precision"}
    assert nnx.graphdef(model) == before


def test_the_first_matching_rule_decides():
    int8, bf16 = make_recipe("int8_switchback"), make_recipe("bf16")
    rules = (("*/down_proj", bf16), ("layers/mlp/*", int8), ("lm_head", int8))
    assert table(rules=rules) == {
        **dict.fromkeys(PATHS, "fp8_current"),
        "layers/mlp/up_proj": "int8_switchback",
        "layers/mlp/gate_proj": "int8_switchback",
        "layers/mlp/down_proj": "high precision",
        "lm_head": "int8_switchback",
    }
    # A small kernel stays in high precision, except where a rule says otherwise.
    assert table(min_dim=64)["layers/attn/k_proj"] == "high precision"
    assert table(min_dim=64)["layers/attn/q_proj"] == "fp8_current"
    assert table(min_dim=64, rules=(("*/k_proj", int8),))["layers/attn/k_proj"] == "int8_switchback"


def one_line(error):
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (
            dict(rules=(("layers/mpl/*", RECIPES["bf16"]),)),
            r"'layers/mpl/\*' matches no matmul; paths: layers/",
        ),
        (
            dict(first_blocks=1, last_blocks=1),
            "first_blocks=1 and precision.last_blocks=1 leave none of the 2",
        ),
        (dict(first_blocks=-1), "first_blocks=-1"),
    ],
)
def test_selections_that_cannot_work(kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        table(**kwargs)
    one_line(error)


def test_blocks_that_do_not_divide_a_kernel_are_named():
    with pytest.raises(
        ValueError, match=r"'mxfp8': layers/mlp/down_proj is 100 × 64, which blocks of 32"
    ) as error:
        table("mxfp8", abstract(mlp_dim=100))
    one_line(error)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("fp8", {}, "recipe 'fp8' is unknown; one of bf16, fp8_delayed"),
        ("fp8_delayed", dict(history=0), "'fp8_delayed': history=0: delayed scaling needs 1 step or more"),
        ("fp8_delayed", dict(granularity="row"), "granularity='row': delayed scales are per tensor"),
        ("fp8_current", dict(format="e5m3f"), "format 'e5m3f' is unknown"),
        (
            "fp8_current",
            dict(granularity="rows"),
            "granularity='rows': one of unscaled, tensor, row, block",
        ),
        ("fp8_current", dict(rounding="up"), "rounding='up': one of nearest, truncate"),
        ("fp8_current", dict(grad_format="int8"), "operands of dlhs must both be"),
        ("int8_switchback", dict(residuals="int8"), "residuals='int8' must be 'full' or 'quantized'"),
        ("int8_switchback", dict(histroy=3), "option 'histroy' is unknown; options: residuals, history"),
    ],
)
def test_bad_recipes_are_one_line_errors(name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_recipe(name, **options)
    one_line(error)


def test_options_replace_data():
    recipe = make_recipe(
        "simulate", format="e3m4", grad_format="e5m2", rounding="truncate", granularity="row"
    )
    assert [o.format for o in (*recipe.fwd, *recipe.dlhs, *recipe.drhs)] == [
        "e3m4", "e3m4", "e5m2", "e3m4", "e3m4", "e5m2"
    ]  # fmt: skip
    assert {
        (o.rounding, o.granularity) for pair in (recipe.fwd, recipe.dlhs, recipe.drhs) for o in pair
    } == {("truncate", "row")}


def five_losses(name, **how):
    make = tiny.make_model(name, **how)
    state, train = tiny.trainer(make, tx=optax.sgd(0.02))
    losses = []
    for _ in range(5):
        state, metrics = train(state, tiny.batch(0))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.fixture(scope="module")
def bf16_losses():
    return five_losses("bf16")


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("fp8_delayed", "int8_switchback") else pytest.param(name, marks=pytest.mark.slow)
        for name in QUANTIZED
    ],
)
def test_every_recipe_trains_a_llama(name, bf16_losses):
    """The loss of one batch falls as in bfloat16; with scan and with rematerialisation."""
    ours = five_losses(name, remat="dots", history=4)
    np.testing.assert_allclose(ours, bf16_losses, rtol=0.01)
    assert ours != bf16_losses and ours[-1] < ours[0] - 0.1


def test_a_stateful_recipe_works_outside_of_a_stack_and_in_generation():
    model = Llama(**tiny.SIZES, scan_layers=True, remat="none", dtype="bfloat16", rngs=nnx.Rngs(0))
    recipe = make_recipe("fp8_delayed", history=2)
    inject(model, recipe, rules=(("lm_head", recipe),))
    assert model.lm_head.dot_general.input_amax_history.shape == (2,)
    logits = model(jnp.zeros((1, 8), jnp.int32))
    assert float(jnp.max(model.lm_head.dot_general.input_amax_history[...])) > 0
    assert bool(jnp.all(jnp.isfinite(logits)))


def test_apply_takes_a_config_section():
    section = dict(
        recipe="fp8_delayed",
        options=dict(history=8),
        rules=(("lm_head", "bf16"),),
        first_blocks=1,
        last_blocks=0,
        min_dim=0,
        smooth_swiglu="balanced",
    )
    model = abstract()
    assert set(precision.apply(model, **section)) == PATHS | {"lm_head"}
    assert model.layers.unquantized_blocks == (1, 0)
    assert model.layers.mlp.up_proj.dot_general.kernel_amax_history.shape == (2, 8)
    down = model.layers.mlp.down_proj.dot_general
    assert down.recipe.smooth == "balanced" and down.recipe.delayed == ("output_grad",)
    with pytest.raises(ValueError, match="smooth_swiglu='channels': one of none, channel, balanced, token"):
        precision.apply(abstract(), **(section | dict(smooth_swiglu="channels")))
