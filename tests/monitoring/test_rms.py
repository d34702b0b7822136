"""RMS_t as the optimizers of `make_tx` define it."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxlp import optim
from maxlp.monitoring import statistics
from tests.optim.common import random_tree, run

SHAPES = {
    "tok_embed": {"embedding": (16, 8)},
    "layers": {"attn": {"q_proj": {"kernel": (3, 8, 8)}}, "attn_norm": {"scale": (3, 8)}},
}
NAMES = {"tok_embed/embedding", "layers/attn/q_proj/kernel", "layers/attn_norm/scale"}
BASE = dict(
    learning_rate=1e-2,
    schedule="constant",
    warmup_steps=0,
    total_steps=100,
    final_lr_fraction=1.0,
    clip_norm=1.0,
    weight_decay=0.1,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
)


def gradients(steps):
    """Norms on both sides of the clip, and a burst in one layer at the end."""
    grads = [random_tree(SHAPES, i, scale=0.02 + 0.2 * (i % 2)) for i in range(steps)]
    grads[-1]["layers"]["attn"]["q_proj"]["kernel"] *= jnp.array([1.0, 1.0, 50.0])[:, None, None]
    return grads


def rms(grads, name, **changes):
    _, state = run(optim.make_tx(name, **BASE, **changes)[0], random_tree(SHAPES, 99), grads)
    return jax.device_get(statistics.optimizer_rms(grads[-1], state, b2=0.95, eps=1e-8, clip_norm=1.0))


def test_rms_of_adamw_is_that_which_stable_adamw_measures():
    grads = gradients(9)
    got = rms(grads, "adamw")
    want = rms(grads, "stable_adamw", options={"clip_threshold": math.inf})
    assert got.keys() == want.keys() == NAMES
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)


def test_what_has_no_rms_is_left_out():
    grads, galore, low_bit = gradients(2), dict(rank=2, targets=("q_proj",)), dict(min_size=64)
    assert rms(grads, "lion").keys() == set()
    assert rms(grads, "adamw", galore=galore).keys() == set()
    assert rms(grads, "stable_adamw", galore=galore).keys() == NAMES
    assert rms(grads, "adamw", low_bit=low_bit).keys() == {"layers/attn_norm/scale"}
    assert rms(grads, "stable_adamw", low_bit=low_bit).keys() == NAMES
