"""Schedule-free AdamW is evaluated at the average, of which a checkpoint's reader needs a part alone."""

import jax
import numpy as np
import optax
import pytest

from maxlp import optim
from maxlp.optim.pure_bf16 import PureBf16State
from maxlp.parallel import sharding
from maxlp.runtime.checkpoint import Checkpointer, restore
from tests.optim.common import assert_trees_equal, random_tree, run

MAKE = dict(learning_rate=0.02, schedule="constant", warmup_steps=0, total_steps=9, final_lr_fraction=1.0)
MAKE |= dict(clip_norm=0.0, weight_decay=0.1, b1=0.9, b2=0.95, eps=1e-8)
SHAPES = {"layers": {"kernel": (2, 8, 4)}, "norm": {"scale": (8,)}}


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_part_that_evaluation_needs_is_restored_alone(tmp_path, wrapped):
    grads = [random_tree(SHAPES, i) for i in range(5)]
    params, opt_state = run(optim.make_tx("schedule_free_adamw", **MAKE)[0], random_tree(SHAPES, 9), grads)
    want = optax.contrib.schedule_free_eval_params(opt_state, params)
    state = PureBf16State(opt_state.z["norm"]["scale"], opt_state, None) if wrapped else opt_state
    with Checkpointer(tmp_path, every_steps=1) as checkpoints:
        checkpoints.save(5, {"params": params, "opt_state": state}, {})
    place = sharding.replicated(sharding.make_mesh(fsdp=1, data=1, devices=jax.devices()[:1]))
    wanted = {"params": params, "opt_state": optim.eval_part(state)}
    assert len(jax.tree.leaves(wanted["opt_state"])) == 3
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), wanted)
    part = restore(tmp_path, abstract).state
    assert_trees_equal(
        optim.eval_params(part["opt_state"], part["params"]), optim.eval_params(state, params)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        optim.eval_params(state, params),
        want,
    )
    assert not np.array_equal(want["norm"]["scale"], params["norm"]["scale"])


def test_others_need_nothing():
    params = random_tree(SHAPES, 9)
    state = optim.make_tx("adamw", **MAKE)[0].init(params)
    assert optim.eval_part(state) == {} and optim.eval_params({}, params) is params
