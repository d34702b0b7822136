"""Dynamic loss scaling: the path of the scale, skipped steps, and gradients without its factor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.core import gradients, train_step
from maxlp.precision import DynamicLossScale


def expected_path(initial, interval, lowest, highest, finite):
    """The scales used in each step, in plain Python."""
    scale, good, used = initial, 0, []
    for ok in finite:
        used.append(scale)
        if not ok:
            scale, good = max(scale / 2, lowest), 0
            continue
        good += 1
        if good == interval:
            scale, good = min(scale * 2, highest), 0
    return used, scale


@pytest.mark.parametrize("lowest, highest", [(1.0, 2.0**24), (4.0, 16.0)])
def test_the_scale_follows_an_independent_model(lowest, highest):
    finite = np.random.default_rng(0).random(400) < 0.8
    finite[:3] = True  # just enough to grow
    finite[3:15] = False  # down to the floor
    finite[100:160] = True  # and up to the ceiling
    ours = DynamicLossScale(8.0, 3, lowest, highest)

    def accept(state, ok):
        accepted, state, metrics = ours.accept(state, {"grad_norm": jnp.where(ok, 1.0, jnp.nan)})
        return state, (accepted, metrics["loss_scale"])

    last, (accepted, used) = jax.jit(lambda s: jax.lax.scan(accept, s, jnp.asarray(finite)))(ours.init())
    np.testing.assert_array_equal(accepted, finite)
    expected, expected_last = expected_path(8.0, 3, lowest, highest, finite)
    np.testing.assert_array_equal(used, expected)
    assert last["scale"] == expected_last
    # The ceiling of the first case is too far away to be reached.
    assert lowest in used and (highest in used or highest == 2.0**24)


# --- a training step in float16 -----------------------------------------------------------------------


def trainer(loss_scale, size=1e-7):
    """Fits w to x·w* in float16; the gradients are around ``size``, below what float16 holds."""
    tx = optax.adam(0.02)
    w = jnp.asarray(np.random.default_rng(1).normal(size=(16,)), jnp.float32)

    def loss_fn(params, batch):
        h = batch["x"].astype(jnp.float16) * params["w"].astype(jnp.float16)[None]
        return size * jnp.sum(jnp.square(h.astype(jnp.float32) - batch["y"]))

    def gradients_of(graphdef, state, batch, scale):
        grads = jax.grad(lambda p: gradients.scaled(loss_fn(p, batch), scale))(state["params"])
        metrics = {"loss": loss_fn(state["params"], batch) / size}
        return gradients.unscaled(grads, scale), {"seen": state["model_state"]["seen"] + 1}, metrics

    step = functools.partial(
        train_step.train_step,
        None,
        gradients=gradients_of,
        tx=tx,
        gates={"loss_scale": loss_scale},
        statistics=lambda grads, opt_state, updates, params: {"grads": grads},
    )
    state = dict(
        params={"w": jnp.zeros(16)},
        model_state={"seen": jnp.zeros(())},
        opt_state=tx.init({"w": jnp.zeros(16)}),
        step=jnp.int32(0),
        loss_scale=loss_scale.init(),
    )

    def batch(seed):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=(8, 16)), jnp.float32)
        return {"x": x, "y": x * w[None]}

    return jax.jit(step), state, batch


def test_a_step_with_an_overflow_changes_nothing_but_the_scale():
    step, state, batch = trainer(DynamicLossScale(2.0**15, 100))
    state, metrics = step(state, batch(0))
    assert metrics["skipped"] == 0 and np.all(state["params"]["w"] != 0)
    for bad in (np.inf, np.nan):
        after, metrics = step(state, {**batch(1), "y": batch(1)["y"].at[3, 3].set(bad)})
        assert metrics["skipped"] == 1 and metrics["loss_scale"] == state["loss_scale"]["scale"]
        assert after["step"] == state["step"] + 1
        assert after["loss_scale"] == {"scale": state["loss_scale"]["scale"] / 2, "good_steps": 0}
        for part in ("params", "model_state", "opt_state"):
            jax.tree.map(np.testing.assert_array_equal, after[part], state[part])
        state = after
    assert state["model_state"]["seen"] == 1 and state["opt_state"][0].count == 1


def test_gradients_depend_neither_on_the_scale_nor_on_its_growth():
    """Powers of two round nothing: with a scale that doubles in each step, all steps are the same."""
    fixed, growing = DynamicLossScale(2.0**20, 1000), DynamicLossScale(2.0**12, 1)
    runs = []
    for loss_scale in (fixed, growing):
        step, state, batch = trainer(loss_scale, size=1e-4)
        grads = []
        for i in range(8):
            state, metrics = step(state, batch(i))
            grads.append(metrics["grads"]["w"])
        runs.append((state["params"]["w"], grads, float(metrics["loss_scale"])))
    assert [scale for *_, scale in runs] == [2.0**20, 2.0**19]
    np.testing.assert_array_equal(np.stack(runs[0][1]), np.stack(runs[1][1]))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])


def test_small_gradients_vanish_without_and_train_with_a_scale():
    moved, losses = [], []
    for initial, most in ((1.0, 1.0), (2.0**15, 2.0**24)):
        step, state, batch = trainer(DynamicLossScale(initial, 20, maximum=most), size=1e-9)
        for i in range(200):
            state, metrics = step(state, batch(i))
        moved.append(bool(np.any(state["params"]["w"])))
        losses.append(float(metrics["loss"]))
    assert moved == [False, True] and losses[1] < 0.01 * losses[0]


def test_a_scale_per_tensor_is_fixed_and_counts_every_step():
    loss_scale = DynamicLossScale(2.0**16, 1, per_tensor=True)
    state = loss_scale.init()
    for norm in (1.0, np.inf, np.nan):
        accepted, state, metrics = loss_scale.accept(state, {"grad_norm": jnp.float32(norm)})
        assert accepted and metrics == {"loss_scale": 65536.0} and state == loss_scale.init()
    resumed = DynamicLossScale(2.0**12, 1, per_tensor=True)
    _, state, metrics = resumed.accept(state, {"grad_norm": jnp.float32(1.0)})
    assert metrics == {"loss_scale": 65536.0} and state == resumed.init(), "the config's from the next step"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(initial=1000), "initial=1000 must be a power of two"),
        (dict(initial=2.0**25), "initial=33554432.0 must lie between minimum=1.0 and maximum=16777216.0"),
        (dict(growth_interval=0), "growth_interval=0 must be at least 1"),
        (dict(minimum=float("inf")), "minimum=inf must be a finite number"),
    ],
)
def test_bad_settings_are_one_line_errors(options, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        DynamicLossScale(**options)
    assert "\n" not in str(error.value)
