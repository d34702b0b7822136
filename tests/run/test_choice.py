"""The matmuls that `lab choose` keeps in high precision, against brute force, and its lines in a config."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp import lab, precision
from maxlp.parallel.batches import global_batch
from maxlp.run import attribution, choice
from maxlp.run.choice import Costs
from maxlp.run.settings import read
from tests.fixtures import Trainer, batch, precision_config
from tests.run.fixtures import load

PATHS = ("layers/attn/q_proj", "layers/mlp/down_proj", "layers/mlp/up_proj")


def random_costs(seed, num_layers=4):
    rng = np.random.default_rng(seed)
    effects = rng.lognormal(sigma=2, size=(num_layers, len(PATHS)))
    return Costs(PATHS, effects, 64 * rng.integers(1, 6, len(PATHS)))


def brute_force(c, budget):
    """The least effect that any set of matmuls can leave within the budget."""
    sets = (np.arange(2**c.effects.size)[:, None] >> np.arange(c.effects.size)) & 1
    sizes = np.tile(c.sizes, len(c.effects))
    fits = sets @ sizes <= budget * sizes.sum() * (1 + 1e-9)
    return np.sqrt(((1 - sets[fits]) @ c.effects.ravel()).min())


@pytest.mark.parametrize("seed", range(5))
def test_no_other_choice_leaves_less(seed):
    c = random_costs(seed)
    for budget in (0.01, 0.2, 0.4, 0.8):
        chosen = choice.choose(c, budget)
        assert c.flops_share(chosen) <= budget + 1e-9
        np.testing.assert_allclose(c.remaining_error(chosen), brute_force(c, budget), rtol=1e-12)  # float64


@pytest.mark.parametrize("num_layers", [3, 7])
def test_the_share_of_any_set_is_enough_for_that_set(num_layers):
    """`table` compares at the share of the first and last block, which is a rounded quotient."""
    rng = np.random.default_rng(0)
    for seed in range(50):
        c = random_costs(seed, num_layers)
        kept = rng.random(c.effects.shape) < 0.5
        only_kept = dataclasses.replace(c, effects=np.where(kept, c.effects, 0))
        chosen = choice.choose(only_kept, c.flops_share(kept))
        np.testing.assert_array_equal(chosen, kept)


def test_the_table_compares_the_choice_with_the_first_and_last_block(monkeypatch):
    c = random_costs(0, num_layers=5)

    class Evaluate:
        off = np.zeros(c.effects.shape, bool)

        def __call__(self, high):
            return {"loss": 2.0, "error": c.remaining_error(high)}, None

    monkeypatch.setattr(choice, "costs", lambda *_: c)
    monkeypatch.setattr(choice, "switched", lambda _, c, high: high)
    _, *rows, config = choice.table(Evaluate(), None, 0.2)
    numbers = [row[24:].replace("%", "").split()[:3] for row in rows]
    shares, expected, errors = np.array(numbers, float).T
    assert [row[:24].strip() for row in rows] == [
        "everything low",
        "chosen, at most 20.0%",
        "first and last block",
        "chosen, at most 40.0%",
    ]
    np.testing.assert_array_equal(expected, errors)
    assert shares[0] == 0 and shares[1] <= 20 and shares[2] == 40 and shares[3] <= 40
    assert errors[0] > errors[1] > errors[3] and errors[3] < errors[2]
    assert config == choice.config(choice.rules(c, choice.choose(c, 0.2)))


def test_sizes_without_a_common_factor_stay_within_the_budget():
    """They are rounded up by at most a 10,000th of the budget each."""
    sizes = np.array([2_500_999, 2_500_998, 2_500_997])
    c = Costs(PATHS, random_costs(0).effects, sizes)
    for budget in (1e7 / (4 * sizes.sum()), 0.2, 0.5):  # the first is 3,994 less than four matmuls
        chosen = choice.choose(c, budget)
        assert c.flops_share(chosen) <= budget
        worse = brute_force(c, budget * (1 - c.effects.size / choice.MAX_UNITS))
        assert brute_force(c, budget) <= c.remaining_error(chosen) * (1 + 1e-12) <= worse * (1 + 2e-12)


def test_equal_effects_take_the_fewest_flops():
    sizes = np.array([3, 1, 2])
    assert not choice.choose(Costs(PATHS, np.zeros((1, 3)), sizes), 0.9).any()
    [chosen] = choice.choose(Costs(PATHS, np.ones((1, 3)), sizes), 0.5)
    assert chosen.tolist() == [False, True, True]
    [chosen] = choice.choose(Costs(PATHS, np.array([[1.0, 1.0, 0.0]]), sizes), 0.5)
    assert chosen.tolist() == [False, True, False]
    [chosen] = choice.choose(Costs(PATHS, np.array([[9.0, 1.0, 1.0]]), sizes), 0.5)
    assert chosen.tolist() == [True, False, False], "one that takes the whole budget"


def test_shares_of_flops():
    c = random_costs(1)
    nothing = c.end_blocks(0, 0)
    assert c.flops_share(nothing) == 0 and c.remaining_error(nothing) == pytest.approx(
        np.sqrt(c.effects.sum())
    )
    assert c.flops_share(c.end_blocks(1, 1)) == pytest.approx(1 / 2)
    both = c.end_blocks(1, 1) | (np.array(PATHS) == PATHS[0])
    assert c.flops_share(both) == pytest.approx(1 / 2 + c.sizes[0] / c.sizes.sum() / 2)


def kept(*names):
    """Which matmuls are named, as bool (2 layers, paths of the model)."""
    everything = [[f"layers/{i}/{name}" for name in NAMES] for i in range(2)]
    return np.isin(everything, names)


NAMES = tuple(
    f"{kind}_proj" for kind in ("attn/k", "attn/o", "attn/q", "attn/v", "mlp/down", "mlp/gate", "mlp/up")
)


@pytest.mark.parametrize(
    "high, expected",
    [
        (kept(), []),
        (kept("layers/1/mlp/up_proj"), ["layers/1/mlp/up_proj"]),
        (kept("layers/0/mlp/up_proj", "layers/1/mlp/up_proj"), ["layers/mlp/up_proj"]),
        (kept(*(f"layers/0/{name}" for name in NAMES)), ["layers/0/*"]),
        (
            kept("layers/1/mlp/up_proj", *(f"layers/0/{name}" for name in NAMES)),
            ["layers/mlp/up_proj", "layers/0/*"],
        ),
    ],
)
def test_the_printed_lines_are_a_config(high, expected):
    paths = tuple(f"layers/{name}" for name in NAMES)
    patterns = choice.rules(Costs(paths, np.ones((2, len(paths))), np.ones(len(paths), int)), high)
    assert patterns == expected
    config = load("debug")
    config.precision.recipe = "fp8_current"
    exec(choice.config(patterns), {"c": config})
    s = read(config)
    model = nnx.eval_shape(lambda: s.family.make_model(s.model, rngs=nnx.Rngs(0)))
    recipes = precision.apply(model, s.precision, gated_products=())
    for i, name in itertools.product(range(2), NAMES):
        plain = any(name in part.plain for part in model.layers.parts if part.start <= i < part.stop)
        low = recipes[f"layers/{name}"].startswith("fp8_current") and not plain
        assert low != high[i, NAMES.index(name)], (i, name)


@pytest.mark.parametrize(
    "family, budget, message",
    [
        ("llama", 1.5, "--budget=1.5 is not a share of the FLOPs; choose one between 0 and 1"),
        (
            "clip",
            0.1,
            "choose needs a model with one stack of blocks, clip has 2; use attribute",
        ),
    ],
)
def test_what_is_refused(tmp_path, family, budget, message):
    s = read(load("debug", family=family))
    with pytest.raises(ValueError) as error:
        lab.attribute(s, None, None, "fp8_current", tmp_path / "out", 5, budget)
    assert str(error.value) == message and not (tmp_path / "out").exists()


@pytest.mark.full
def test_what_is_measured_is_what_the_config_trains():
    """The loss with a choice's switches off is that of a step under its rules."""
    trainer = Trainer(recipe=precision_config("fp8_current"))
    state = trainer.init()
    with jax.set_mesh(trainer.mesh):
        data = global_batch(batch(0), trainer.mesh)
        evaluate = attribution.SwitchEvaluator(trainer.graphdef, trainer.gradients, state, data)
        effect = attribution.Effect(0.0, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        effects = dict.fromkeys(evaluate.sites, effect)
        costs = choice.costs(evaluate, attribution.Attribution(1, 0.0, 0.0, 0.0, 1.0, effects))
        chosen = costs.end_blocks(1, 0).copy()
        chosen[1, costs.paths.index("layers/mlp/down_proj")] = True
        chosen[0, costs.paths.index("layers/attn/q_proj")] = False
        chosen_loss = evaluate(choice.switched(evaluate, costs, chosen))[0]["loss"]
        everything_low = evaluate(choice.switched(evaluate, costs, costs.end_blocks(0, 0)))[0]["loss"]
    # Six operands of each matmul of one of two layers are low, as many matmuls as there are in a layer.
    assert costs.remaining_error(chosen) == pytest.approx(0.1 * np.sqrt(6 * len(costs.paths)))
    assert costs.flops_share(costs.end_blocks(1, 0)) == pytest.approx(0.5)

    rules = tuple((pattern, choice.HIGH) for pattern in choice.rules(costs, chosen))
    low = Trainer(recipe=precision_config("fp8_current", rules=rules))
    [metrics] = low.run(low.init(), [batch(0)])[1]
    # Both programs round the same operands; their float32 sums may differ in order.
    assert metrics["loss"] == pytest.approx(chosen_loss, rel=1e-6)
    assert abs(everything_low - chosen_loss) > 1e-5 * chosen_loss
