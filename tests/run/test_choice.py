"""What `lab choose` keeps in high precision, against brute force, and its lines in a config."""

import itertools

import jax
import numpy as np
import pytest

from maxlp import lab
from maxlp.parallel.batches import global_batch
from maxlp.run import attribution, choice
from maxlp.run.choice import Choice, Costs
from maxlp.run.settings import read
from tests.fixtures import Trainer, batch, precision_config
from tests.run.fixtures import load

PATHS = ("layers/attn/q_proj", "layers/mlp/down_proj", "layers/mlp/up_proj")


def random_costs(seed, num_layers=5):
    rng = np.random.default_rng(seed)
    flops = rng.uniform(1, 4, len(PATHS))
    effects = rng.lognormal(sigma=2, size=(num_layers, len(PATHS)))
    return Costs(PATHS, effects, flops / flops.sum() / num_layers)


def brute_force(c, budget):
    """The least effect that blocks at the ends and whole matmuls can leave within the budget."""
    num_layers, best = len(c.effects), np.inf
    for first, last in itertools.product(range(num_layers), repeat=2):
        for keep in itertools.product((False, True), repeat=len(PATHS)):
            low = [
                (layer, p)
                for layer, p in itertools.product(range(first, num_layers - last), range(len(PATHS)))
                if not keep[p]
            ]
            if first + last < num_layers and 1 - sum(c.flops[p] for _, p in low) <= budget + 1e-9:
                best = min(best, sum(c.effects[where] for where in low))
    return np.sqrt(best)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_choice_leaves_less(seed):
    c = random_costs(seed)
    for budget in (0.01, 0.2, 0.4, 0.8):
        chosen = choice.choose(c, budget)
        assert c.share(chosen) <= budget + 1e-9
        np.testing.assert_allclose(c.left(chosen), brute_force(c, budget), rtol=1e-12)


def test_equal_effects_take_the_fewest_flops():
    c = random_costs(0)
    assert choice.choose(Costs(PATHS, 0 * c.effects, c.flops), 0.9) == Choice()


def test_shares_of_flops():
    c = random_costs(1)
    assert c.share(Choice()) == 0 and c.left(Choice()) == pytest.approx(np.sqrt(c.effects.sum()))
    assert c.share(Choice(1, 1)) == pytest.approx(2 / 5)
    both = 2 / 5 + 3 * c.flops[0]
    assert c.share(Choice(1, 1, PATHS[:1])) == pytest.approx(both)


@pytest.mark.parametrize("paths", [(), ("layers/mlp/down_proj",), PATHS])
def test_the_printed_lines_are_a_config(paths):
    config = load("debug")
    config.precision.recipe = "fp8_current"
    exec(str(Choice(1, 0, paths)), {"c": config})
    s = read(config)
    assert (s.precision.first_blocks, s.precision.last_blocks) == (1, 0)
    assert {p for p, recipe in s.matmuls.items() if recipe == "high precision"} == {"lm_head", *paths}


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
    """The loss with a choice's switches off is that of a step under its first_blocks and rules."""
    chosen = Choice(1, 0, ("layers/mlp/down_proj",))
    trainer = Trainer(recipe=precision_config("fp8_current"))
    state = trainer.init()
    with jax.set_mesh(trainer.mesh):
        data = global_batch(batch(0), trainer.mesh)
        evaluate = attribution.Evaluate(
            trainer.graphdef, trainer.gradients, state, data, lambda state: None
        )
        effect = attribution.Effect(0.0, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        effects = dict.fromkeys(evaluate.sites, effect)
        costs = choice.costs(evaluate, attribution.Attribution(1, 0.0, 0.0, 0.0, 1.0, effects))
        chosen_loss = evaluate(choice.switched(evaluate, costs, chosen))[0]["loss"]
        everything_low = evaluate(choice.switched(evaluate, costs, Choice()))[0]["loss"]
    # Six operands of each matmul of one of two layers are low, but for the down projection's.
    assert costs.left(chosen) == pytest.approx(0.1 * np.sqrt(6 * (len(costs.paths) - 1)))
    assert costs.share(Choice(1, 0)) == pytest.approx(0.5)

    rules = tuple((path, choice.HIGH) for path in chosen.paths)
    low = Trainer(recipe=precision_config("fp8_current", rules=rules, first_blocks=chosen.first))
    [metrics] = low.run(low.init(), [batch(0)])[1]
    # Both programs round the same operands; their float32 sums may differ in order.
    assert metrics["loss"] == pytest.approx(chosen_loss, rel=1e-6)
    assert abs(everything_low - chosen_loss) > 1e-5 * chosen_loss
