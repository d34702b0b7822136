"""Local steps with an outer update, against synchronous steps and against a loop over replicas.

Shape letters: B rows · S tokens of a row · D, F features · R replicas.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp.core import local_steps, train_step
from maxlp.core.gradients import token_gradients
from maxlp.core.train_state import State
from maxlp.families.llama.task import NextTokenConfig, loss_gradients
from maxlp.nn.layers import param
from maxlp.parallel import exchange
from maxlp.planning import hlo
from maxlp.runtime.checkpoint import Checkpointer
from tests import fixtures
from tests.fixtures import Trainer, make_llama, make_mesh, precision_config

B, S, D, F = 16, 4, 64, 64
# Clipping and momentum show whose gradient and whose state an update uses.
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.2, momentum=0.9))
ROUNDING = 1e-6  # of sums in float32 in another order, in numbers below 1


class TwoMatrices(nnx.Module):
    """tanh(x · up) · down."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = param(0.1 * rngs.params.normal((D, F)), ("embed", "mlp"))
        self.down = param(0.1 * rngs.params.normal((F, D)), ("mlp", "embed"))

    def __call__(self, x_BSD):
        return jnp.tanh(x_BSD @ self.up[...]) @ self.down[...]


def squares(model, batch):
    error_BS = jnp.sum(jnp.square(model(batch["x"]) - batch["y"]), axis=-1)
    sums = {"loss": error_BS, "correct": error_BS < D}
    return {key: jnp.sum(jnp.where(batch["mask"], value, 0.0)) for key, value in sums.items()}


def count(batch):
    return jnp.sum(batch["mask"], dtype=jnp.float32)


GRADIENTS = token_gradients(squares, count)


def batches(steps: int, alike: bool = False) -> list[dict]:
    """Rows with different numbers of tokens, or all with the same one."""
    rng = np.random.default_rng(0)

    def one() -> dict:
        x_BSD, y_BSD = (rng.standard_normal((B, S, D)).astype(np.float32) for _ in range(2))
        counts_B = np.full(B, S) if alike else rng.integers(1, S + 1, B)
        return {"x": x_BSD, "y": y_BSD, "mask": np.arange(S) < counts_B[:, None]}

    return [one() for _ in range(steps)]


def plain(mesh=None, tx=CLIPPED) -> Trainer:
    return Trainer(mesh, make_model=TwoMatrices, gradients=GRADIENTS, tx=tx)


def local(
    mesh,
    tx=CLIPPED,
    *,
    steps=2,
    rate=0.7,
    momentum=0.9,
    format_name="none",
    model=TwoMatrices,
    gradients=GRADIENTS,
) -> Trainer:
    """A `Trainer` of replicas that train alone for ``steps`` steps at a time."""
    inner = functools.partial(train_step.train_step, gradients=gradients, tx=tx)
    outer, step = local_steps.combine(
        tx,
        inner,
        replicas=mesh.shape["data"],
        format_name=format_name,
        steps=steps,
        outer_rate=rate,
        outer_momentum=momentum,
    )
    trainer = Trainer(mesh, make_model=model, gradients=gradients, tx=outer)
    trainer.step = train_step.jit_step(step, trainer.graphdef, trainer.abstract, mesh)
    return trainer


def outer_params(state: State) -> dict:
    return jax.device_get(state["params"])


def own_params(state: State) -> dict:
    """The parameters of each replica, (R, …)."""
    return jax.device_get(state["opt_state"].replicas.state["params"])


def assert_close(got, want, atol=ROUNDING):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), got, want)


def test_rounds_of_one_step_with_plain_descent_are_synchronous():
    """If all replicas have the same number of tokens; otherwise a mean of means is not the mean."""
    data, sgd = batches(2, alike=True), optax.sgd(0.1)
    one, replicas = plain(tx=sgd), local(make_mesh(data=4), sgd, steps=1, rate=1.0, momentum=0.0)
    params = jax.device_get(one.init()["params"])
    want, before = one.run(one.init(params), data)
    got, after = replicas.run(replicas.init(params), data)
    assert_close(outer_params(got), outer_params(want))
    assert np.abs(outer_params(want)["up"] - params["up"]).max() > 100 * ROUNDING
    for a, b in zip(before, after, strict=True):
        for name in ("loss", "accuracy", "tokens"):
            np.testing.assert_allclose(b[name], a[name], rtol=1e-5, err_msg=name)  # sums in another order


def loop(params: dict, data: list[dict], replicas: int, steps: int, rate: float, momentum: float):
    """A run of the replicas without a mesh.

    Returns:
      the outer parameters after each step, those of the replicas at the end, and the loss and the accuracy
      of each step.
    """
    trainer, rows = plain(), B // replicas
    gradient = jax.jit(functools.partial(GRADIENTS, trainer.graphdef))
    own, states = [params] * replicas, [CLIPPED.init(params)] * replicas
    trace, outer, means = jax.tree.map(np.zeros_like, params), [], []
    for n, batch in enumerate(data, start=1):
        sums = np.zeros(3)
        for r in range(replicas):
            mine = {key: value[r * rows : (r + 1) * rows] for key, value in batch.items()}
            grads, _, metrics = gradient({"params": own[r], "model_state": {}, "step": n}, mine, None)
            updates, states[r] = CLIPPED.update(grads, states[r], own[r])
            own[r] = optax.apply_updates(own[r], updates)
            sums += mine["mask"].sum() * np.array([metrics["loss"], metrics["accuracy"], 1.0])
        means.append(sums[:2] / max(sums[2], 1))
        if n % steps == 0:
            away = jax.tree.map(lambda p, *a: p - np.mean(a, axis=0), params, *own)
            trace = jax.tree.map(lambda m, g: momentum * m + g, trace, away)
            params = jax.tree.map(lambda p, g, m: p - rate * (g + momentum * m), params, away, trace)
            own = [params] * replicas
        outer.append(params)
    return outer, jax.tree.map(lambda *a: np.stack(a), *own), means


@pytest.mark.parametrize(
    "sizes",
    [dict(data=2, fsdp=2, tensor=2), pytest.param(dict(data=4, fsdp=2), marks=pytest.mark.full)],
    ids=str,
)
def test_steps_are_those_of_a_loop_over_the_replicas(sizes):
    data, trainer = batches(5), local(make_mesh(**sizes))
    data[1]["mask"][: B // sizes["data"]] = False  # a replica without tokens
    data[3]["mask"][:] = False  # none at all
    state = trainer.init()
    params = outer_params(state)
    outer, own, means = loop(params, data, sizes["data"], steps=2, rate=0.7, momentum=0.9)
    for want, (loss, accuracy), one in zip(outer, means, data, strict=True):
        state, [metrics] = trainer.run(state, [one])
        assert_close(outer_params(state), want)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)  # means in float32
        np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-5)
        assert metrics["tokens"] == one["mask"].sum()
    assert_close(own_params(state), own)
    assert np.abs(outer[1]["up"] - params["up"]).max() > 100 * ROUNDING
    assert np.abs(own["up"][0] - own["up"][1]).max() > 100 * ROUNDING, "replicas have rows of their own"


@functools.cache
def in_8_bits() -> Trainer:
    return local(make_mesh(data=8), format_name="float8_e4m3fn")


def test_what_8_bits_lose_of_an_outer_gradient_is_kept():
    """Plain descent by the mean: θ moves by the outer gradients that were sent."""
    mesh, data, how = make_mesh(data=8), batches(2), dict(rate=1.0, momentum=0.0)
    exact, rounded = local(mesh, **how), local(mesh, format_name="float8_e4m3fn", **how)
    params = jax.device_get(exact.init()["params"])
    want, got = (t.run(t.init(params), data)[0] for t in (exact, rounded))
    lost, begun = jax.device_get(got["opt_state"].errors.state), own_params(got)
    want, got = outer_params(want), outer_params(got)
    assert_close(jax.tree.map(lambda p, e: p - e.sum(axis=0), got, lost), want)
    moved, off = np.abs(want["up"] - params["up"]).max(), np.abs(got["up"] - want["up"]).max()
    # E4M3 rounds to 3 bits twice; a replica's share may be larger than the mean, as shares cancel.
    assert 100 * ROUNDING < off < moved / 4
    jax.tree.map(lambda own, p: np.testing.assert_array_equal(own, np.stack([p] * 8)), begun, got)


def test_a_run_resumes_in_a_round_to_the_bit(tmp_path):
    trainer, data = in_8_bits(), batches(6)
    state, _ = trainer.run(trainer.init(), data[:3])
    with Checkpointer(tmp_path, every_steps=1) as checkpoints:
        checkpoints.save(3, state, {})
        checkpoints.wait()
        restored = checkpoints.restore_latest(trainer.abstract).state
    straight, again = (jax.device_get(trainer.run(s, data[3:])[0]) for s in (state, restored))
    jax.tree.map(np.testing.assert_array_equal, again, straight)


def sent(trainer: Trainer, one: dict, in_update: bool) -> dict[tuple[str, str], int]:
    """Bytes that collectives over ``data`` yield in outer updates, or elsewhere; by kind and dtype."""
    program, entry = hlo.computations(trainer.compile(one).as_text())
    found = collections.Counter()

    def visit(name: str, inside: bool) -> None:
        for i in program.get(name, []):
            kind = i.opcode.removesuffix("-start")
            if kind in hlo.KINDS and "data" in hlo.device_groups(i, dict(trainer.mesh.shape))[0]:
                for one in re.findall(r"[a-z]\w*\[[\d,]*\]", i.type) if inside == in_update else ():
                    found[kind, one.partition("[")[0]] += int(hlo.num_bytes(one))
            for computation in hlo.called(i):
                visit(computation, inside or (i.opcode == "while" and "outer_update" in i.rest))

    visit(entry, False)
    return dict(found)


def test_replicas_send_nothing_but_sums_of_metrics_and_outer_gradients():
    """These in 8 bits are a quarter of those in float32, with a scale for each block."""
    exact, rounded, [one] = local(make_mesh(data=8), steps=3), in_8_bits(), batches(1)
    values = sum(p.size for p in jax.tree.leaves(exact.abstract["params"]))
    assert values % (8 * exchange.BLOCK) == 0, "nothing is padded"
    assert sent(exact, one, in_update=True) == {("all-reduce", "f32"): 4 * values}
    scales = 4 * values // exchange.BLOCK
    assert sent(rounded, one, in_update=True) == {
        (kind, dtype): size
        for kind in ("all-to-all", "all-gather")
        for dtype, size in {"s8": values, "f32": scales}.items()
    }
    for trainer in (exact, rounded):
        [((kind, dtype), size)] = sent(trainer, one, in_update=False).items()
        assert (kind, dtype) == ("all-reduce", "f32") and size < 100


@pytest.mark.full
def test_a_llama_in_fp8_trains_alike_on_more_devices():
    """With Adam, whose updates depend little on the size of gradients; chunks, microbatches, all axes."""
    how = dict(
        tx=optax.adamw(1e-3),
        format_name="float8_e4m3fn",
        model=make_llama(precision_config("fp8_current")),
        gradients=loss_gradients(NextTokenConfig(num_chunks=2), microbatches=2, alone=True),
    )
    few, many = local(make_mesh(data=2), **how), local(make_mesh(data=2, fsdp=2, tensor=2), **how)
    params, data = jax.device_get(few.init()["params"]), fixtures.batches(4)
    runs = [t.run(t.init(params), data)[1] for t in (few, many)]
    for a, b in zip(*runs, strict=True):
        # Another order of sums rounds some numbers to their FP8 neighbours.
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-3)
    [((kind, dtype), size)] = sent(many, data[0], in_update=False).items()
    assert (kind, dtype) == ("all-reduce", "f32") and size < 100
