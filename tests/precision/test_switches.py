"""Recipes with switches: all off and all on are the two programs between which they switch."""

import jax
import numpy as np
import pytest

from maxlp.parallel.batches import global_batch
from maxlp.precision import make_recipe, switches
from maxlp.run.attribution import Evaluate
from tests.fixtures import Trainer, batch, precision_config

# The scales of these recipes are powers of two: no rounding depends on how XLA fuses the program around a
# matmul. (So in float32; in bfloat16 XLA may keep more precision, in one program and not in the other.)
EXACT = ["fp8_delayed", "fp8_rowwise_with_gw_hp", "mxfp8"]


def evaluation(recipe, **options):
    """An `Evaluate` of a small Llama under a recipe, and the trainer."""
    trainer = Trainer(recipe=precision_config(recipe, **options))
    state, data = trainer.init(), global_batch(batch(0), trainer.mesh)
    with jax.set_mesh(trainer.mesh):
        made = Evaluate(trainer.graphdef, trainer.gradients, state, data, lambda state: None)
    return made, trainer


def gradients_of(trainer, state):
    """Loss and gradients of the training program itself."""

    @jax.jit
    def gradients(state):
        grads, _, metrics = trainer.gradients(trainer.graphdef, state, batch(0), None)
        return metrics["loss"], grads

    with jax.set_mesh(trainer.mesh):
        return jax.device_get(gradients(state))


def switched(evaluate, value):
    on = {path: np.full_like(off, value) for path, off in evaluate.off.items()}
    numbers, grads, _ = evaluate.compiled(evaluate.state, evaluate.batch, on, evaluate.reference)
    return jax.device_get((numbers["loss"], grads))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.full
@pytest.mark.parametrize("recipe", EXACT)
def test_all_off_is_high_precision_and_all_on_is_the_recipe_to_the_bit(recipe):
    evaluate, trainer = evaluation(recipe)
    plain = Trainer()
    low = gradients_of(trainer, trainer.init())
    high = gradients_of(plain, plain.init(trainer.init()["params"]))
    assert_equal(switched(evaluate, False), high)
    assert_equal(switched(evaluate, True), low)
    assert low[0] != high[0], "the recipe changes the loss"


def test_the_operands_of_a_recipe():
    def kinds(name, **options):
        return set(switches.switchable(make_recipe(name, **options)))

    every = {(gemm, tensor) for gemm, pair in switches.GEMMS.items() for tensor in pair}
    assert kinds("fp8_current") == every
    assert kinds("int8_switchback") == every - {("drhs", "input"), ("drhs", "output_grad")}
    # The kernel's gradient is in high precision, but made from the input as int8 has saved it.
    assert kinds("int8_switchback_m") == every - {("drhs", "output_grad")}
