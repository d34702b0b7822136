"""Ten steps of two matrices of each of three shapes equal those of tools/make_optimizer_goldens.py.

Rate, decay and clipping are part of the comparison: the chain is that of a run.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.optim.common import each_step, make_optimizer

GOLDENS = Path(__file__).parent / "goldens"
STACKS = ("wide", "tall", "square")
MAKE = dict(learning_rate=0.02, weight_decay=0.1, b1=0.8, b2=0.9, eps=1e-10)
SOAP = dict(precondition_frequency=3, max_precond_dim=5)
SPAM = dict(norm_decay=0.7, squared_norm_decay=0.9, largest_decay=0.95, reset_every=4)
# The reference counts the first step as 1 and has left its warm-up of 4 in the fourth.
ADAGC = dict(clip_norm=2.0, adagc=dict(ratio=1.05, decay=0.9, warmup_steps=3))
# Its factor is the root of `scale`.
APOLLO = dict(rank=2, scale=0.5, growth=float("inf"), update_proj_gap=4)


def as_params(stacks, dtype):
    """Of (layers, out, in): kernels are (layers, in, out)."""
    kernels = {k: {"kernel": jnp.asarray(x.swapaxes(-2, -1), dtype)} for k, x in stacks.items()}
    return {"layers": {"mlp": kernels}}


def assert_ten_steps_equal(golden, keys, dtype=np.float64, atol=2e-7):
    """Up to the rounding of the goldens, which are float32 numbers of up to 4: at most 1.2e-7."""
    inputs, golden = np.load(GOLDENS / "matrices.npz"), np.load(GOLDENS / f"{golden}.npz")
    with jax.enable_x64(dtype == np.float64):
        tx = make_optimizer(**MAKE | keys).tx
        params = as_params({k: inputs[f"{k}_0"] for k in STACKS}, dtype)
        grads = [as_params({k: inputs[f"{k}_grads"][t] for k in STACKS}, dtype) for t in range(10)]
        out = [jax.device_get(after["layers"]["mlp"]) for _, after, _ in each_step(tx, params, grads)]
    for k in STACKS:
        got = [step[k]["kernel"].swapaxes(-2, -1) for step in out]
        np.testing.assert_allclose(got, golden[k], atol=atol, rtol=0)
        assert np.abs(golden[k][-1] - inputs[f"{k}_0"]).max() > 1e5 * atol


@pytest.mark.parametrize(
    ("golden", "keys"),
    [
        ("muon", dict(name="muon", options=dict(beta=0.8))),
        ("normuon", dict(name="normuon", options=dict(beta=0.8))),
        ("adamp", dict(name="adamp", options=dict(delta=1.5))),
        ("schedule_free_adamw", dict(name="schedule_free_adamw", warmup_steps=3)),
        ("stable_spam", dict(name="stable_spam", options=SPAM)),
        ("adagc", dict(name="adamw", **ADAGC)),
    ],
)
def test_another_library_takes_the_same_steps(golden, keys):
    """In float64; the trajectories were rounded to float32 when they were saved."""
    assert_ten_steps_equal(golden, keys)


def test_another_library_takes_the_same_steps_of_soap():
    """Both sides of the square, the short sides of the others are rotated.

    Its state is float32, so ten steps are rounded by up to 1.2e-7 each.
    """
    keys = dict(name="soap", options=SOAP, weight_decay=0.0)
    assert_ten_steps_equal("soap", keys, dtype=np.float32, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("apollo", dict(options=APOLLO)),
        ("apollo_mini", dict(options=dict(update_proj_gap=4), b1=0.0, b2=0.0)),
    ],
)
def test_the_authors_package_takes_the_same_steps_of_apollo(name, keys, monkeypatch):
    """Through three projections, which are those of the golden."""
    draws = np.load(GOLDENS / "apollo_draws.npy")

    def normal(index, shape, dtype):
        return jnp.asarray(draws, dtype)[index, : shape[0], : shape[1]]

    monkeypatch.setattr(jax.random, "fold_in", lambda key, index: index)
    monkeypatch.setattr(jax.random, "normal", normal)
    assert_ten_steps_equal(name, keys | dict(name=name, weight_decay=0.0))
