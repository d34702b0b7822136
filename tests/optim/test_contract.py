"""The contract of every optimizer and wrapper.

It converges; jit equals eager; the state's shapes are known before it exists; sharded equals one device;
a restored state continues bit for bit; stacked layers equal single ones; accumulated gradients equal their
mean.
"""

import contextlib
import functools
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp import optim
from maxlp.optim.partition import map_moments
from maxlp.optim.tree_utils import find_states
from maxlp.parallel import sharding
from tests.optim.common import (
    assert_trees_close,
    assert_trees_equal,
    jitted_step,
    make_optimizer,
    random_tree,
    run,
    run_on_mesh,
    saved_and_restored,
)

BASE = dict(schedule="cosine", warmup_steps=1, clip_norm=50.0, weight_decay=0.01)
GALORE = dict(rank=2, update_proj_gap=3, scale=1.0)
FP8 = dict(mu="float8_e4m3fn", nu="float8_e5m2", min_size=32)
DYNAMIC8 = dict(mu="dynamic8", nu="dynamic8", block_size=4, min_size=32)
COMPANDED8 = dict(mu="companded8", nu="companded8", block_size=4, min_size=32)
ADAFACTOR = dict(options=dict(min_dim_size_to_factor=4, momentum=0.9))
OPTIMIZERS = {name: {} for name in optim.OPTIMIZERS} | {
    "adafactor": ADAFACTOR,
    "stable_spam": dict(options=dict(reset_every=3)),
    "lion": dict(b2=0.98),
    "soap": dict(options=dict(precondition_frequency=2, one_sided=True)),  # see test_soap.py
    "apollo": dict(options=dict(rank=2, update_proj_gap=3)),
    "apollo_mini": dict(options=dict(update_proj_gap=3)),
    "schedule_free_adamw": dict(schedule="constant"),
    "galore": dict(
        name="stable_adamw", galore=GALORE | dict(basis="randomized", moments="reproject", side="long")
    ),
    "galore_adafactor": ADAFACTOR | dict(name="adafactor", galore=GALORE),
    "low_bit": dict(name="adamw", low_bit=FP8),
    "adagc": dict(name="stable_adamw", adagc=dict(warmup_steps=2)),
    "growing_b2": dict(name="stable_adamw", options=dict(decay_rate=0.5)),
    "companded": dict(name="adamw", low_bit=COMPANDED8),
    "flash": dict(name="adamw", param_rounding="residual", low_bit=COMPANDED8),  # bfloat16 parameters
    "muon_8bit": dict(name="muon", low_bit=DYNAMIC8),
    "q_galore": dict(
        name="adamw", galore=GALORE | dict(projector="int4", lazy_threshold=0.4), low_bit=DYNAMIC8
    ),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)


def quick_for(*quick):
    """Every optimizer, with these in the quick tier and the others in the full one."""
    names = [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in OPTIMIZERS]
    return pytest.mark.parametrize("name", names)


# One kernel and one vector: enough where the arithmetic of single tensors matters.
SMALL = {"layers": {"attn_norm": {"scale": (2, 8)}, "attn": {"k_proj": {"kernel": (2, 8, 4)}}}}
# Together these have every kind of sharding.
LARGE = {
    "tok_embed": {"embedding": (16, 8)},
    "layers": {"attn_norm": {"scale": (2, 8)}, "mlp": {"up_proj": {"kernel": (2, 8, 16)}}},
}
LARGE_AXES = {
    "tok_embed": {"embedding": ("vocab", "embed")},
    "layers": {
        "attn_norm": {"scale": ("layers", "norm")},
        "mlp": {"up_proj": {"kernel": ("layers", "embed", "mlp")}},
    },
}


@functools.cache
def make(name, learning_rate=0.02):
    return make_optimizer(**BASE | dict(name=name, learning_rate=learning_rate) | OPTIMIZERS[name]).tx


def start(name, shapes=SMALL):
    rounded = "param_rounding" in OPTIMIZERS[name]
    return optax.tree.cast(random_tree(shapes, 100), "bfloat16" if rounded else "float32")


def gradients(steps, shapes=SMALL):
    return [random_tree(shapes, i) for i in range(steps)]


def tolerance(name):
    """Sums in another order may round a code to its other neighbour, and so a parameter in bfloat16.

    Of four steps of 0.02, a code changes 5 %, and where Adam divides by small numbers, rounding 0.04 %.
    """
    rtol = 2.0**-7 if "param_rounding" in OPTIMIZERS[name] else 1e-7
    return dict(atol=4e-3 if "low_bit" in OPTIMIZERS[name] else 3e-5, rtol=rtol)


@functools.cache
def four_steps(name):
    """Parameters and state on one device, compiled. GaLore refreshes in the fourth step."""
    return run(make(name), start(name), gradients(4))


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_its_kind_describes_its_state(name):
    """RMS_t is read from the second moment, and a run whose state has an average is evaluated at it."""
    kind, params = pkgutil.resolve_name(optim.OPTIMIZERS[name]), start(name)
    state = jax.eval_shape(make(name).init, params)
    assert bool(find_states(state, optax.contrib.ScheduleFreeState)) == kind.averages
    if kind.second_moment is not None:
        [(_, adam)] = find_states(state, kind.second_moment)
        shapes = {p.shape for p in jax.tree.leaves(params)}
        assert {nu.shape for nu in jax.tree.leaves(adam.nu)} <= shapes


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_low_bit_is_refused_for_a_moment_that_its_state_does_not_have(name):
    found = set()
    map_moments(lambda moment, path, x: found.add(moment), jax.eval_shape(make(name).init, start(name)))
    for moment, other in (("mu", "nu"), ("nu", "mu")):
        low_bit, options = {moment: "int8", other: "float32"}, OPTIMIZERS[name]
        refused = pytest.raises(ValueError, match=r"^low_bit\.")
        with contextlib.nullcontext() if moment in found else refused:
            make_optimizer(**BASE | dict(name=name, low_bit=low_bit) | options)


@every
def test_converges_on_least_squares(name):
    """Every kernel is a linear map to be found from 64 examples; the loss falls to a fiftieth."""
    target, tx = random_tree(SMALL, 7), make(name, learning_rate=0.4)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(64, 8)), jnp.float32)

    def one_loss(p, t):
        rows = p.shape[-2]
        return jnp.mean(jnp.square(x[:, :rows] @ (p - t) if rows > 2 else p - t))

    def loss(params):
        return sum(jax.tree.leaves(jax.tree.map(one_loss, params, target)))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def losses(params):
        (trained, state), _ = jax.lax.scan(step, (params, tx.init(params)), length=100)
        return loss(params), loss(optim.eval_params(state, trained))

    first, last = losses(start(name))
    assert last < 0.02 * first


@quick_for("adamw", "adafactor", "low_bit")
def test_jit_equals_eager(name):
    params, tx = start(name), make(name)
    state = tx.init(params)
    for g in gradients(2):
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    want, want_state = run(tx, start(name), gradients(2))
    # Compiled, XLA fuses operations: float32 rounds differently, and a code of 4 or 8 bits may do so too.
    assert_trees_close(
        params, want, atol=5e-3 if name == "q_galore" else 2e-5, rtol=tolerance(name)["rtol"]
    )
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, want_state)


@every
def test_shapes_are_known_in_advance_and_never_change(name):
    """Nothing is of a weak type, for which the second step would be compiled again."""
    tx = make(name)

    def spec(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    abstract = jax.eval_shape(tx.init, start(name))
    updates, after = jax.eval_shape(tx.update, gradients(1)[0], abstract, start(name))
    assert spec(abstract) == spec(four_steps(name)[1]) == spec(after)
    assert spec(updates) == spec(gradients(1)[0])
    assert not any(x.weak_type for x in jax.tree.leaves((abstract, after)))


@quick_for("adamw", "adafactor", "galore", "low_bit", "flash")  # each kind of state
def test_sharded_equals_one_device(name):
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    tx, params, grads = make(name), start(name, LARGE), gradients(4, LARGE)
    want, _ = run(tx, params, grads)
    params, state, _ = run_on_mesh(tx, mesh, LARGE_AXES, params, grads)
    assert_trees_close(jax.device_get(params), jax.device_get(want), **tolerance(name))
    whole = [
        p for p, x in jax.tree.leaves_with_path(state) if x.size >= 64 and x.sharding.is_fully_replicated
    ]
    assert not whole, "every large part of the state is sharded"


def takes_mu_dtype(name):
    return "mu_dtype" in inspect.signature(pkgutil.resolve_name(optim.OPTIMIZERS[name]).scale_by).parameters


@pytest.mark.parametrize("name", [*filter(takes_mu_dtype, optim.OPTIMIZERS)])
def test_all_first_moments_have_the_dtype_that_is_asked_for(name):
    """Those of parameters that an optimizer leaves to Adam are among them."""
    tx = make_optimizer(**BASE | dict(name=name, mu_dtype="bfloat16") | OPTIMIZERS[name]).tx
    before = jax.eval_shape(tx.init, start(name, LARGE))
    _, after = jax.eval_shape(tx.update, gradients(1, LARGE)[0], before, start(name, LARGE))
    for state in (before, after):
        # Adafactor's first moment is an `optax.ema`.
        moments = [x for field in ("mu", "ema") for _, x in optax.tree.get_all_with_path(state, field)]
        assert {x.dtype for x in jax.tree.leaves(moments)} == {jnp.dtype("bfloat16")}


@every
def test_gradients_of_zeros_only_let_parameters_decay(name):
    """As behind a layer scale of 0, where no division has a divisor."""
    params = before = start(name)
    state, zeros = make(name).init(params), optax.tree.zeros_like(gradients(1)[0])
    for _ in range(2):
        params, state = jitted_step(make(name))(zeros, state, params)
    # Rates of 0.02 and a decay of 0.01, and in bfloat16 two roundings.
    assert_trees_close(params, before, rtol=2.0**-7 if "param_rounding" in OPTIMIZERS[name] else 5e-4)


@every
def test_restored_state_continues_to_the_bit(name, tmp_path):
    tx = make(name)
    params, state = run(tx, start(name), gradients(3))
    saved = {"params": params, "opt_state": state}
    restored = saved_and_restored(tmp_path, saved)
    assert_trees_equal(restored, saved)
    again = jitted_step(tx)(gradients(4)[3], restored["opt_state"], restored["params"])
    assert_trees_equal(again, four_steps(name))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "low_bit"])  # rounds at random
def test_stacked_layers_equal_single_ones(name):
    """Only global clipping sees all layers at once; it does not act here."""

    def layer(tree):
        return {"layer": jax.tree.map(lambda x: x[1], tree["layers"])}

    got, _ = run(make(name), layer(start(name)), [layer(g) for g in gradients(4)])
    assert_trees_close(got, layer(four_steps(name)[0]), **tolerance(name))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "flash"])  # optax sums in bfloat16
def test_accumulated_gradients_take_the_step_of_their_mean(name):
    tx = make(name)
    parts = gradients(4)
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *parts[i : i + 2]) for i in (0, 2)]
    want, _ = run(tx, start(name), means)
    got, _ = run(optax.MultiSteps(tx, 2), start(name), parts)
    assert_trees_close(got, want, **tolerance(name))
