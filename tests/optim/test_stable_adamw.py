from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim.divided_decay import divide_decay
from maxlp.optim.stable_adamw import last_rms, scale_by_stable_adam, step_divisor
from tests.optim.common import each_step, make_optimizer

GOLDEN = Path(__file__).parent / "goldens" / "stable_adamw.npz"
LR, DECAY, B1, B2, EPS = 1e-2, 0.1, 0.9, 0.99, 1e-6
SHAPES = {"kernel": (6, 4), "scale": (5,)}
MAKE = dict(name="stable_adamw", learning_rate=LR, weight_decay=DECAY, b1=B1, b2=B2, eps=EPS)


def gradients(steps, burst=30.0, dtype=np.float64):
    """Noise around a mean, with gradients `burst` times as large in steps 12 to 14."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        size = burst if 12 <= step < 15 else 1.0
        yield {k: (size * (0.5 + rng.normal(size=s))).astype(dtype) for k, s in SHAPES.items()}


def initial(dtype=np.float64):
    rng = np.random.default_rng(1)
    return {k: rng.normal(size=s).astype(dtype) for k, s in SHAPES.items()}


def algorithm_2(theta, grads, *, decay, decay_with_clip=True, threshold=1.0, decay_rate=None):
    """The paper's algorithm for one tensor in float64, with debiased betas instead of debiased moments.

    Returns the parameters after each step and RMS_t of each step.
    """
    v, u = np.zeros_like(theta), np.zeros_like(theta)
    thetas, rms_of_step = [], []
    for t, g in enumerate(grads, 1):
        beta1 = B1 * (1 - B1 ** (t - 1)) / (1 - B1**t)
        beta2 = B2 * (1 - B2 ** (t - 1)) / (1 - B2**t) if decay_rate is None else 1 - t**-decay_rate
        v = beta1 * v + (1 - beta1) * g
        u = beta2 * u + (1 - beta2) * g**2
        rms = np.sqrt(np.mean(g**2 / np.maximum(u, EPS**2)))
        lr = LR / max(1.0, rms / threshold)
        theta = theta - (lr if decay_with_clip else LR) * decay * theta - lr * v / (np.sqrt(u) + EPS)
        thetas.append(theta)
        rms_of_step.append(rms)
    return thetas, rms_of_step


def trajectory(tx, params, grads_of_step):
    """Parameters and RMS_t after each step."""
    found = list(each_step(tx, params, grads_of_step))
    return [params for _, params, _ in found], [optax.tree.get(state, "rms") for *_, state in found]


# Forty steps round parameters of up to 4, and RMS somewhat more often.
@pytest.mark.parametrize(
    ("dtype", "atol", "decay_with_clip", "threshold", "decay_rate"),
    [
        (np.float64, 1e-12, True, 1.0, None),
        (np.float64, 1e-12, False, 0.5, None),
        (np.float64, 1e-12, True, 0.5, 0.8),
        (np.float32, 2e-6, True, 0.5, None),
        (np.float32, 2e-6, False, 1.0, 0.5),
    ],
)
def test_forty_steps_with_a_burst_equal_algorithm_2(dtype, atol, decay_with_clip, threshold, decay_rate):
    with jax.enable_x64(dtype == np.float64):
        options = {"clip_threshold": threshold} | ({} if decay_rate is None else {"decay_rate": decay_rate})
        tx = make_optimizer(**MAKE, decay_with_clip=decay_with_clip, options=options).tx
        out, rms = trajectory(tx, jax.tree.map(jnp.asarray, initial(dtype)), gradients(40, dtype=dtype))
        out, rms = jax.device_get((out, rms))
    clipped = 0
    for key, decay in {"kernel": DECAY, "scale": 0.0}.items():
        expected, expected_rms = algorithm_2(
            initial()[key],
            [g[key] for g in gradients(40)],
            decay=decay,
            decay_with_clip=decay_with_clip,
            threshold=threshold,
            decay_rate=decay_rate,
        )
        np.testing.assert_allclose([p[key] for p in out], expected, atol=atol)
        np.testing.assert_allclose([r[key] for r in rms], expected_rms, rtol=4 * atol)
        assert out[0][key].dtype == dtype
        clipped += np.sum(np.array(expected_rms) > threshold)
        assert max(expected_rms) > (3 if decay_rate is None else 1.5), "the burst is visible"
    assert 5 < clipped < 80, "some steps are clipped and some are not"


def test_optimi_takes_the_same_forty_steps():
    golden = np.load(GOLDEN)
    for name, rtol in (("float64", 1e-12), ("float32", 5e-6)):  # both libraries round each step
        with jax.enable_x64(name == "float64"):
            tx = make_optimizer(**MAKE | {"weight_decay": 0.0}).tx
            decayed = make_optimizer(**MAKE).tx
            dtype = np.dtype(name)
            params = {k: jnp.asarray(golden[f"{k}_0"], dtype) for k in SHAPES}
            grads = [{k: golden[f"{k}_grads"][i].astype(dtype) for k in SHAPES} for i in range(40)]
            plain = jax.device_get(trajectory(tx, params, grads)[0])
            with_decay = jax.device_get(trajectory(decayed, params, grads)[0])
        got = {"kernel": [p["kernel"] for p in with_decay], "scale": [p["scale"] for p in plain]}
        for key in SHAPES:
            np.testing.assert_allclose(got[key], golden[f"{key}_{name}"], rtol=rtol, atol=rtol)


def test_without_clipping_it_is_adamw_to_the_bit():
    grads = list(gradients(20, dtype=np.float32))
    params = jax.tree.map(jnp.asarray, initial(np.float32))
    stable = scale_by_stable_adam(B1, B2, EPS, clip_threshold=float("inf"))
    out, rms = trajectory(stable, params, grads)
    want = [after for _, after, _ in each_step(optax.scale_by_adam(B1, B2, EPS), params, grads)]
    jax.tree.map(np.testing.assert_array_equal, out, want)
    assert max(float(r["kernel"]) for r in rms) > 3, "RMS_t is measured anyway"


def test_the_first_step_after_a_burst_is_short_and_that_of_clip_by_block_rms_is_not():
    """Quiet gradients, then one 30 times as large."""
    params = {"kernel": jnp.zeros((8, 8))}
    rng = np.random.default_rng(3)
    grads = [{"kernel": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)} for _ in range(30)]
    grads.append({"kernel": 30 * jnp.ones((8, 8))})

    def last_step(tx):
        out, _ = trajectory(optax.chain(tx, optax.identity()), params, grads)
        return float(jnp.sqrt(jnp.mean((out[-1]["kernel"] - out[-2]["kernel"]) ** 2)))

    adam = optax.scale_by_adam(0.9, 0.999)
    plain = last_step(optax.chain(adam, with_rms()))
    block = last_step(optax.chain(adam, optax.clip_by_block_rms(1.0), with_rms()))
    stable = last_step(scale_by_stable_adam(0.9, 0.999))
    assert stable < 0.3 * min(plain, block)


def with_rms():
    """The identity, with a state that `trajectory` can read."""
    return optax.GradientTransformation(lambda p: {"rms": 0}, lambda u, s, p=None: (u, s))


def test_each_layer_of_a_stack_has_its_own_rms_and_steps_like_a_single_tensor():
    rng = np.random.default_rng(5)
    rescale, decay = scale_by_stable_adam(B1, B2, EPS), optax.add_decayed_weights(DECAY)
    tx = divide_decay(
        rescale, decay, lambda state: jax.tree.map(lambda rms: step_divisor(rms, 1.0), last_rms(state))
    )
    stacked = {"layers": {"attn": {"kernel": jnp.asarray(rng.normal(size=(3, 4, 6)), jnp.float32)}}}
    # Only layer 1 has a burst: one RMS for all layers would slow down the others.
    burst = np.ones((20, 3, 1, 1))
    burst[15, 1] = 30.0
    grads = jnp.asarray(burst * rng.normal(size=(20, 3, 4, 6)), jnp.float32)
    out, rms = trajectory(tx, stacked, [{"layers": {"attn": {"kernel": g}}} for g in grads])
    burst_rms = rms[15]["layers"]["attn"]["kernel"]
    assert burst_rms.shape == (3,) and burst_rms[1] > 3 and max(burst_rms[0], burst_rms[2]) < 2
    for i in range(3):
        single = {"kernel": stacked["layers"]["attn"]["kernel"][i]}
        want, want_rms = trajectory(tx, single, [{"kernel": g[i]} for g in grads])
        # Means over a part of a stack may be added in another order.
        np.testing.assert_allclose(
            out[-1]["layers"]["attn"]["kernel"][i], want[-1]["kernel"], rtol=1e-6, atol=1e-7
        )
        np.testing.assert_allclose(
            [r["layers"]["attn"]["kernel"][i] for r in rms], [r["kernel"] for r in want_rms], rtol=1e-5
        )


def test_moments_and_rms_of_bfloat16_parameters_are_float32():
    params = {"kernel": jnp.ones((4, 4), jnp.bfloat16)}
    tx = scale_by_stable_adam()
    updates, state = tx.update(params, tx.init(params))
    assert updates["kernel"].dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves((state.mu, state.nu, state.rms))} == {jnp.dtype(jnp.float32)}
    assert jax.tree.map(lambda x: x.dtype, tx.init(params)) == jax.tree.map(lambda x: x.dtype, state)
    # Squares and quotients too: the state is that of the same gradients in float32.
    grads = {"kernel": jnp.asarray(np.random.default_rng(6).normal(size=(4, 4)), jnp.bfloat16)}
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    states = [tx.update(g, tx.update(g, tx.init(g))[1])[1] for g in (grads, wide)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_the_growing_beta2_is_no_1_after_a_million_steps():
    tx = scale_by_stable_adam(decay_rate=0.8)
    grads = {"kernel": jnp.full((2, 2), 3.0)}
    state = tx.init(grads)._replace(count=jnp.int32(999_999))
    _, state = tx.update(grads, state)
    # In float32, 1 - t^-0.8 is a multiple of 2^-24, 0.4 % of t^-0.8 here; a power is exact to 1e-6.
    np.testing.assert_allclose(state.nu["kernel"], 9 * 1e6**-0.8, rtol=1e-5)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"clip_threshold=0 must be above 0"):
        scale_by_stable_adam(clip_threshold=0)
    with pytest.raises(ValueError, match=r"decay_rate=1.5 must be above 0 and at most 1"):
        scale_by_stable_adam(decay_rate=1.5)


def test_gradients_of_real_size_are_clipped():
    """Gradients of a large model are about 1e-5: far below √eps, and above eps."""
    small = [jax.tree.map(lambda g: np.float32(1e-5) * g, g) for g in gradients(40, dtype=np.float32)]
    tx = make_optimizer(**MAKE).tx
    out, rms = jax.device_get(trajectory(tx, jax.tree.map(jnp.asarray, initial(np.float32)), small))
    expected, expected_rms = algorithm_2(
        initial()["kernel"], [g["kernel"].astype(np.float64) for g in small], decay=DECAY
    )
    assert max(expected_rms) > 3, "the burst is as visible as that of larger gradients"
    # As of larger gradients, above.
    np.testing.assert_allclose([r["kernel"] for r in rms], expected_rms, rtol=8e-6)
    # 40 steps of float32: each adds a rounding error of at most 2^-24 of parameters up to 4.
    np.testing.assert_allclose([p["kernel"] for p in out], expected, atol=1e-5)
