"""RMS_t as `Optimizer.rms` measures it, for optimizers with and without a second moment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.optim.common import each_step, make_optimizer, random_tree

SHAPES = {
    "tok_embed": {"embedding": (16, 8)},
    "layers": {"attn": {"q_proj": {"kernel": (3, 8, 8)}}, "attn_norm": {"scale": (3, 8)}},
}
EVERY = {"tok_embed/embedding", "layers/attn/q_proj/kernel", "layers/attn_norm/scale"}
ROUNDING = 1e-6  # of means of up to 192 squares in float32, in two programs
CLIPPED = dict(clip_norm=1.0, weight_decay=0.1)


def gradients(steps, size=1.0):
    """Norms on both sides of the clip, and a burst in one layer at the end."""
    grads = [random_tree(SHAPES, i, scale=size * (0.02 + 0.2 * (i % 2))) for i in range(steps)]
    grads[-1]["layers"]["attn"]["q_proj"]["kernel"] *= jnp.array([1.0, 1.0, 50.0])[:, None, None]
    return grads


def measured(size=1.0, **changes):
    """RMS_t of the last of nine steps."""
    optimizer = make_optimizer(**CLIPPED | changes)
    grads = gradients(9, size)
    *_, (_, _, state) = each_step(optimizer.tx, random_tree(SHAPES, 99), grads)
    return jax.device_get(optimizer.rms(grads[-1], state))


def measured_names(**changes):
    optimizer, params = make_optimizer(**changes), random_tree(SHAPES, 99)
    return set(jax.eval_shape(optimizer.rms, params, jax.eval_shape(optimizer.tx.init, params)))


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_rms_of_adamw_is_what_stable_adamw_measures(clip_norm):
    got = measured(clip_norm=clip_norm)
    want = measured(clip_norm=clip_norm, name="stable_adamw", options={"clip_threshold": float("inf")})
    assert got.keys() == want.keys() == EVERY
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=ROUNDING)
    assert got["layers/attn/q_proj/kernel"].argmax() == 2, "the layer with the burst"


def test_optimizers_with_another_state_of_the_second_moment():
    """AdamP's is Adam's for the same gradients; so is that inside schedule-free averaging."""
    want = measured()
    for name in ("adamp", "schedule_free_adamw"):
        got = measured(name=name)
        assert got.keys() == EVERY
        for tensor in want:
            np.testing.assert_allclose(got[tensor], want[tensor], rtol=ROUNDING)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (dict(name="lion"), set()),
        (dict(name="adafactor"), set()),
        (dict(name="muon"), EVERY - {"layers/attn/q_proj/kernel"}),
        (dict(name="adamw", galore=dict(rank=2)), set()),
        (dict(name="stable_adamw", galore=dict(rank=2)), EVERY),
        (
            dict(name="adamw", low_bit=dict(mu="dynamic8", nu="dynamic8", min_size=64)),
            {"layers/attn_norm/scale"},
        ),
        (dict(name="stable_adamw", low_bit=dict(mu="dynamic8", nu="dynamic8", min_size=64)), EVERY),
    ],
)
def test_parameters_without_a_plain_second_moment_are_left_out(changes, names):
    assert measured_names(**changes) == names


@pytest.mark.parametrize("name", ["adamw", "stable_adamw"])
def test_rms_is_finite_with_an_eps_whose_square_underflows(name):
    """Rows of tokens that no text has have no gradient: both moments are 0."""
    optimizer, params = make_optimizer(name=name, eps=1e-20, **CLIPPED), random_tree(SHAPES, 99)
    grads = jax.tree.map(jnp.ones_like, params)
    grads["tok_embed"]["embedding"] = grads["tok_embed"]["embedding"].at[:4].set(0.0)
    [(updates, _, state)] = each_step(optimizer.tx, params, [grads])
    rms = optimizer.rms(grads, state)["tok_embed/embedding"]
    np.testing.assert_allclose(rms, 0.75**0.5, rtol=ROUNDING)
    assert all(jnp.isfinite(u).all() for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["adamw", "stable_adamw"])
def test_rms_does_not_depend_on_the_size_of_the_gradients(name):
    """Those of a large model are about 1e-5; eps² is far below their squares, eps is not."""
    got, want = (measured(size, name=name, clip_norm=0.0) for size in (1e-5, 1.0))
    for tensor in want:
        np.testing.assert_allclose(got[tensor], want[tensor], rtol=ROUNDING)
