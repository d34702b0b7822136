"""Spikes are seen, written down, skipped and gone back on; where nothing happens, nothing changes."""

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.core import gradients as gradients_lib
from maxlp.core import train_step as step
from maxlp.families.llama import task as language
from maxlp.families.llama.model import Llama
from maxlp.monitoring import guards as guard
from maxlp.monitoring import replay, statistics
from maxlp.monitoring.guards import SkipGuard
from maxlp.monitoring.spikes import Detector, Policy, Spike, find_rms_spikes, find_spikes, foretold
from maxlp.monitoring.watch import Watch, first_to_cross, read_record, recorded_spikes
from maxlp.parallel import sharding
from maxlp.runtime.checkpoint import Checkpointer, list_steps
from maxlp.runtime.metrics import read_jsonl
from tests.optim.common import make_optimizer, random_tree, run

LLAMA = dict(
    vocab_size=256,
    embed_dim=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=128,
    max_seq_len=32,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=0.02,
    dtype="float32",
    param_dtype="float32",
    attention="xla",
    scan_layers=True,
    remat="none",
)

# --- What is a spike ----------------------------------------------------------------------------------


def noisy(steps=300, seed=0):
    return 2 + 0.05 * np.random.default_rng(seed).uniform(-1, 1, steps)


def test_a_resumed_detector_sees_what_one_that_never_stopped_sees():
    losses = noisy()
    losses[[100, 105, 200]] += 1.0
    losses[150] = math.nan
    whole, cut, seen = Detector(Policy()), Detector(Policy()), []
    for i, loss in enumerate(losses):
        seen.append((whole.observe(i, loss), cut.observe(i, loss)))
        state = json.loads(json.dumps(cut.get_state()))
        cut = Detector(Policy())
        cut.set_state(state)
    assert all(a == b or (a.step == b.step == 150 and b.sigmas == math.inf) for a, b in seen if a or b)
    assert [(a.step, a.begins) for a, _ in seen if a] == [
        (100, True),
        (105, False),
        (150, True),
        (200, True),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(guard="stop"), "guard='stop' is unknown, choose one of: off, skip, rollback"),
        (dict(window=8), "window=8 must be at least 16"),
        (dict(threshold=0.0), r"threshold=0.0 must be positive"),
        (dict(lead=0), "lead=0 must be at least 1"),
    ],
)
def test_a_policy_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        Policy(**changes)


def test_foretold_counts_hits_and_those_by_chance():
    # RMS spikes at 10 and 50: steps 11..18 and 51..58 follow them, 16 of 100.
    assert foretold([18, 19, 51, 50], [10, 50], 100) == (4, 2, 4 * 0.16)
    assert foretold([18], [], 100) == (1, 0, 0.0)
    rms = np.ones(100)
    rms[[20, 21, 25, 60]] = 2.0
    assert find_rms_spikes(np.arange(100), rms) == [20, 60]


# --- Statistics of tensors ----------------------------------------------------------------------------

SHAPES = {
    "tok_embed": {"embedding": (16, 8)},
    "layers": {"attn": {"q_proj": {"kernel": (3, 8, 8)}}, "attn_norm": {"scale": (3, 8)}},
}
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
HOW = dict(b2=0.95, eps=1e-8, clip_norm=1.0)


def gradients(steps):
    """Norms on both sides of the clip, and a burst in one layer at the end."""
    grads = [random_tree(SHAPES, i, scale=0.02 + 0.2 * (i % 2)) for i in range(steps)]
    grads[-1]["layers"]["attn"]["q_proj"]["kernel"] *= jnp.array([1.0, 1.0, 50.0])[:, None, None]
    return grads


def test_rms_of_adamw_is_that_which_stable_adamw_measures():
    grads, params = gradients(9), random_tree(SHAPES, 99)
    _, plain = run(make_optimizer(name="adamw", **BASE).tx, params, grads)
    unclipped = make_optimizer(name="stable_adamw", **BASE, options={"clip_threshold": math.inf}).tx
    _, measured = run(unclipped, params, grads)
    got = jax.device_get(statistics.tensor_statistics(grads[-1], plain, **HOW)["rms"])
    want = jax.device_get(statistics.tensor_statistics(grads[-1], measured, **HOW)["rms"])
    assert (
        got.keys()
        == want.keys()
        == {
            "tok_embed/embedding",
            "layers/attn/q_proj/kernel",
            "layers/attn_norm/scale",
        }
    )
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)
    numbers = statistics.numbers(got)
    assert statistics.largest(numbers)[0][0] == "layers/attn/q_proj/kernel/2"
    assert statistics.flat({"loss": np.float32(2), "rms": got}) == {
        "loss": 2.0,
        **{f"rms/{name}": value for name, value in numbers.items()},
        "rms/max": numbers["layers/attn/q_proj/kernel/2"],
    }


def test_what_has_no_rms_is_left_out():
    grads, params = gradients(2), random_tree(SHAPES, 99)

    def rms(name, **changes):
        _, state = run(make_optimizer(name=name, **BASE, **changes).tx, params, grads)
        return set(statistics.tensor_statistics(grads[-1], state, **HOW).get("rms", {}))

    galore = dict(rank=2, targets=("q_proj",))
    assert rms("lion") == set()
    assert rms("adamw", galore=galore) == set()
    assert len(rms("stable_adamw", galore=galore)) == 3
    low_bit = dict(mu="float8_e4m3fn", nu="float8_e5m2", min_size=64)
    assert rms("adamw", low_bit=low_bit) == {"layers/attn_norm/scale"}
    assert len(rms("stable_adamw", low_bit=low_bit)) == 3


def test_norms_of_tensors_add_up_to_the_global_norm():
    grads = gradients(1)[0]
    norms = statistics.numbers(jax.device_get(statistics.tensor_norms(grads)))
    assert len(norms) == 7
    assert math.hypot(*norms.values()) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6)


# --- A toy run ----------------------------------------------------------------------------------------

TX = make_optimizer(name="stable_adamw", **BASE | {"clip_norm": 0.0}).tx
POLICY = dict(window=8, min_history=4, threshold=3.2, rewind_steps=3, skip_batches=2, lead=2)


class Batches:
    """Examples of a linear map; the batches in `bad` have targets far away, or NaN."""

    def __init__(self, bad=()):
        self.bad, self.at, self.drawn = dict(bad), 0, []

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        self.drawn.append(self.at)
        rng = np.random.default_rng(self.at)
        x = rng.normal(size=(16, 8)).astype(np.float32)
        return {"x": x, "y": x.sum(1, keepdims=True) + np.float32(self.bad.get(self.at, 0.0))}

    def get_state(self):
        return {"step": self.at, "streams": {}, "settings": {}}

    def set_state(self, state):
        self.at = state["step"]


def init(policy):
    params = random_tree({"layers": {"kernel": (2, 8, 8)}, "head": {"kernel": (8, 1)}}, 0, 0.3)
    state = {"params": params, "model_state": {}, "opt_state": TX.init(params), "step": jnp.int32(0)}
    return state | {name: judge.init() for name, judge in guard.judges(policy).items()}


def toy_gradients(graphdef, state, batch):
    def loss(params):
        h = batch["x"]
        for i in range(2):
            h = h + jnp.tanh(h @ params["layers"]["kernel"][i])
        return jnp.mean((h @ params["head"]["kernel"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return grads, {}, {"loss": value}


@functools.cache
def train_step(policy):
    function = functools.partial(
        step.train_step,
        graphdef=None,
        gradients=toy_gradients,
        tx=TX,
        schedule=lambda n: 0.01,
        judges=guard.judges(policy),
        statistics=functools.partial(statistics.tensor_statistics, **HOW),
    )
    return jax.jit(function)


def train(policy, steps, bad=()):
    """A loop without a host's part; returns the state and the metrics of each step."""
    state, batches, out = init(policy), Batches(bad), []
    for _ in range(steps):
        state, metrics = train_step(policy)(state, next(batches))
        out.append(jax.device_get(metrics))
    return jax.device_get(state), out


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# --- The guard that skips -----------------------------------------------------------------------------


def llama_losses_and_state(policy, tx):
    """Eight steps of a small Llama in the real step."""
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    make = lambda rngs: Llama(**LLAMA, rngs=rngs)  # noqa: E731
    judges, rng, losses = guard.judges(policy), np.random.default_rng(0), []
    with jax.set_mesh(mesh):
        graphdef, abstract = step.abstract_state(make, tx, mesh, judges)
        state = jax.jit(functools.partial(step.init_state, make, tx, 0, judges))()
        function = step.jit_train_step(
            abstract,
            mesh,
            graphdef=graphdef,
            gradients=gradients_lib.of_sums(language.next_token_loss, language.num_targets),
            tx=tx,
            schedule=lambda n: 0.01,
            judges=judges,
        )
        for _ in range(8):
            tokens = rng.integers(0, 256, (2, 33)).astype(np.int32)
            ones = np.ones((2, 32), np.int32)
            batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ones)
            batch |= dict(positions=np.cumsum(ones, 1) - 1, loss_mask=ones > 0)
            state, metrics = function(state, batch)
            losses.append(float(metrics["loss"]))
            assert not metrics.get("skipped", 0)
    return losses, jax.device_get({key: state[key] for key in ("params", "opt_state")})


def test_a_guard_that_does_not_act_changes_no_bit():
    tx = make_optimizer(name="stable_adamw", **BASE).tx
    losses, state = llama_losses_and_state(Policy(), tx)
    guarded_losses, guarded = llama_losses_and_state(Policy(guard="skip"), tx)
    assert losses == guarded_losses
    assert equal(state, guarded)


@pytest.mark.parametrize("bad", [math.nan, 1e4])
def test_a_bad_batch_is_as_if_it_had_not_been(bad):
    policy = Policy(**POLICY, guard="skip")
    guarded, metrics = train(policy, 31, {20: bad})
    assert [i + 1 for i, m in enumerate(metrics) if m["skipped"]] == [20] and guarded["step"] == 31
    without, batches = init(policy), Batches()
    for _ in range(31):
        batch = next(batches)
        if batches.at != 20:
            without, _ = train_step(policy)(without, batch)
    assert equal(jax.device_get(without["params"]), guarded["params"])
    assert equal(jax.device_get(without["opt_state"]), guarded["opt_state"])


def test_the_guard_on_the_device_and_the_detector_on_the_host_have_one_definition():
    losses = noisy(200, seed=1).astype(np.float32)
    losses[[50, 51, 120]] += 0.4
    losses[80] = np.inf
    policy = Policy(guard_threshold=3.2, guard="skip")
    judged = jax.jit(lambda s, loss: SkipGuard(policy).judge(s, {"loss": loss, "grad_norm": 1.0}))
    acted, state, host = 0, SkipGuard(policy).init(), Detector(policy)
    for i, loss in enumerate(losses):
        ok, state, _ = judged(state, loss)
        assert bool(ok) == (host.observe(i, float(loss)) is None), i
        acted += not ok
    assert acted >= 4


def test_a_level_that_stays_is_accepted():
    policy = Policy(guard="skip", window=16)
    judged = jax.jit(lambda s, loss: SkipGuard(policy).judge(s, {"loss": loss, "grad_norm": 1.0}))
    state, oks = SkipGuard(policy).init(), []
    for loss in [*noisy(40), *(noisy(40) + 3)]:
        ok, state, _ = judged(state, loss)
        oks.append(bool(ok))
    assert all(oks[:40]) and not oks[40] and all(oks[50:])


def test_too_many_skips_in_a_row_stop_the_run():
    watch = Watch(Policy(guard="skip", max_actions=3))
    for n in (1, 2):
        watch.observe(n, {"loss": math.nan, "skipped": 1.0})
    watch.observe(3, {"loss": 1.0, "skipped": 0.0})
    for n in (4, 5):
        watch.observe(n, {"loss": math.nan, "skipped": 1.0})
    with pytest.raises(FloatingPointError, match=r"^step 6: 3 updates in a row were skipped"):
        watch.observe(6, {"loss": math.nan, "skipped": 1.0})


# --- The guard that goes back -------------------------------------------------------------------------


def life(workdir: Path, policy: Policy, bad=(), total=40, die_at=0):
    """One start of a run as `maxlp.train` makes it: resumes, saves every fourth step, stops at a spike."""
    place = sharding.replicated(sharding.make_mesh(fsdp=1, data=1, devices=jax.devices()[:1]))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), init(policy))
    batches, watch, start, state = Batches(bad), Watch(policy), 0, init(policy)
    with Checkpointer(workdir / "checkpoints", every_steps=4, keep_last=3) as checkpoints:
        if restored := checkpoints.restore_latest(abstract):
            start, state = restored.step, restored.state
            batches.set_state(restored.data_state)
            watch.set_state(restored.meta["watch"])
        guard.pass_over(workdir, start, batches)
        watch.note(start, batches.get_state())
        for n in range(start + 1, total + 1):
            state, metrics = train_step(policy)(state, next(batches))
            watch.note(n, batches.get_state())
            if spike := watch.observe(n, jax.device_get(metrics)):
                if spike.begins:
                    watch.save(workdir, spike)
                if watch.acts_on(spike):
                    raise guard.RolledBack(spike)
            if n == die_at:
                return batches.drawn, None
            if n % 4 == 0:
                meta = json.loads(json.dumps({"watch": watch.get_state()}))
                checkpoints.save(n, state, batches.get_state(), meta)
                checkpoints.wait()
    return batches.drawn, jax.device_get(state)


def train_on(workdir: Path, policy: Policy, bad=()):
    """Lives until the end; returns what each drew, and the last state."""
    drawn = []
    while True:
        try:
            seen, state = life(workdir, policy, bad)
            return [*drawn, seen], state
        except guard.RolledBack as event:
            drawn.append(None)
            guard.roll_back(workdir, event.spike, policy)


def test_the_run_goes_back_and_past_the_batches_around_the_spike(tmp_path):
    policy = Policy(**POLICY, guard="rollback")
    (first, drawn), state = train_on(tmp_path, policy, {30: math.nan})
    assert first is None
    # The spike is at 30, checkpoints were at 20, 24, 28: the newest that is 3 older is 24. It is of
    # 24 batches; 25 and 26 would be two, but 30 has to be among those left out.
    assert guard.read_rollbacks(tmp_path)[0] | {"spike": 0} == {"spike": 0, "to": 24, "batches": [24, 30]}
    assert drawn == list(range(25, 47)) and math.isfinite(state["params"]["head"]["kernel"].sum())
    infos = {info.path.name: info.status for info in list_steps(tmp_path / "checkpoints")}
    assert infos["28.rolled_back"] == "rolled_back" and "28" not in infos
    record = read_record(tmp_path, 30)
    assert record["checkpoint"] == "spikes/checkpoints/24" and record["data_state"]["step"] == 29
    # By hand: 24 steps, and 16 more from batch 31 on.
    want, batches = init(policy), Batches()
    for _ in range(40):
        if batches.at == 24:
            batches.at = 30
        want, _ = train_step(policy)(want, next(batches))
    assert equal(jax.device_get(want), state)


def test_a_kill_between_rollback_and_the_next_checkpoint_changes_nothing(tmp_path):
    policy, bad = Policy(**POLICY, guard="rollback"), {30: math.nan, 39: 1e4}
    _, want = train_on(tmp_path / "whole", policy, bad)
    with pytest.raises(guard.RolledBack) as event:
        life(tmp_path / "cut", policy, bad)
    guard.roll_back(tmp_path / "cut", event.value.spike, policy)
    life(tmp_path / "cut", policy, bad, die_at=26)
    _, got = train_on(tmp_path / "cut", policy, bad)
    assert equal(want, got)
    rollbacks = guard.read_rollbacks(tmp_path / "cut")
    assert rollbacks == guard.read_rollbacks(tmp_path / "whole")
    # Batch 39 came at step 33: back to 28, which had seen 34.
    assert [(r["to"], r["batches"]) for r in rollbacks] == [(24, [24, 30]), (28, [34, 39])]


def test_a_spike_before_the_first_checkpoint_goes_back_to_the_beginning(tmp_path):
    (_, drawn), _ = train_on(tmp_path, Policy(**POLICY, guard="rollback"), {2: math.nan})
    assert drawn[:3] == [1, 2, 3] and len(drawn) == 42


def test_rollbacks_come_to_an_end(tmp_path):
    policy = Policy(**POLICY, guard="rollback", max_actions=2)
    with pytest.raises(FloatingPointError, match=r"after 2 rollbacks: lower optimizer\.learning_rate"):
        train_on(tmp_path, policy, {n: math.nan for n in range(20, 200)})


def test_without_a_spike_rollback_is_off(tmp_path):
    _, off = life(tmp_path / "off", Policy(**POLICY))
    (drawn,), on = train_on(tmp_path / "on", Policy(**POLICY, guard="rollback"))
    assert equal(off, on) and drawn == list(range(1, 41))


# --- What is written down -----------------------------------------------------------------------------


def test_a_spike_is_written_down_and_its_checkpoint_outlives_the_run(tmp_path):
    _, state = life(tmp_path, Policy(**POLICY | {"threshold": 8.0}), {30: 30.0})
    assert state["step"] == 40, "off only watches"
    (record,) = recorded_spikes(tmp_path)
    assert record["step"] == 30 and record["sigmas"] > 3.2 and record["policy"]["lead"] == 2
    assert [s["step"] for s in record["steps"]] == [28, 29, 30]
    assert set(record["steps"][0]["rms"]) == {"layers/kernel/0", "layers/kernel/1", "head/kernel"}
    assert (
        record["steps"][-1]["grad_norms"]["head/kernel"]
        > 3 * record["steps"][0]["grad_norms"]["head/kernel"]
    )
    assert record["first"]["step"] == 30 and record["first"]["value"] > 1.8
    shutil.rmtree(tmp_path / "checkpoints")
    kept = tmp_path / record["checkpoint"]
    assert kept.name == "24" and (kept / "manifest.txt").exists()


def test_the_first_to_cross_is_the_earliest_and_of_those_the_largest():
    steps = [
        {"step": 1, "rms": {"a": 1.0, "b": 1.5}},
        {"step": 2, "rms": {"a": 1.9, "b": 2.5, "c": 1.0}},
        {"step": 3, "rms": {"a": 9.0, "b": 1.0, "c": math.nan}},
    ]
    assert first_to_cross(steps, Policy()) == {"tensor": "b", "step": 2, "value": 2.5}
    assert first_to_cross(steps[2:], Policy())["tensor"] == "c"
    assert first_to_cross(steps[:1], Policy()) is None


def test_find_spikes_uses_the_policy():
    losses = noisy()
    losses[200] += 0.5
    assert [s.step for s in find_spikes(np.arange(300), losses)] == [200]
    assert find_spikes(np.arange(300), losses, Policy(threshold=100.0)) == []
    assert isinstance(find_spikes(np.arange(300), losses)[0], Spike)


# --- Replay -------------------------------------------------------------------------------------------


def test_the_first_gradient_to_stand_out():
    rng = np.random.default_rng(0)
    norms = {name: 1 + 0.1 * rng.uniform(-1, 1, 40) for name in "abc"}
    norms["b"][10] = 5.0  # long before
    norms["a"][36], norms["c"][36], norms["b"][38] = 3.0, 2.0, 9.0
    steps = [{"step": i, "grad_norms": {k: v[i] for k, v in norms.items()}} for i in range(40)]
    first = replay.first_to_stand_out(steps, Policy())
    assert (first["tensor"], first["step"]) == ("a", 36) and first["value"] > 10
    assert replay.first_to_stand_out(steps[:20], Policy(lead=2)) is None
    lines = list(replay.verdict_lines(replay.Verdict({}, None, first), 39, Policy()))
    assert lines[0] == "first by RMS_t: none was above 1.8 in the 8 steps before"
    assert lines[1].startswith("first by gradient norm: a at step 36, 3 before (")


@pytest.mark.slow
def test_a_replay_repeats_the_run_and_answers_in_another_precision(tmp_path):
    def command(name, *options, code=0):
        full = [sys.executable, "-m", f"maxlp.{name}", *options]
        env = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
        root = Path(__file__).parent.parent
        done = subprocess.run(full, cwd=root, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    sizes = dict(embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=64)
    options = {f"model.{key}": value for key, value in sizes.items()} | {
        "model.vocab_size": 512,
        "model.dtype": "bfloat16",
        "data.source": "stdlib?heldout=0.002",
        "data.tokenizer": "bytes",
        "data.seq_len": 32,
        "data.shuffle_tokens": 4096,
        "optimizer.name": "stable_adamw",
        "optimizer.warmup_steps": 2,
        "train.total_steps": 14,
        "train.log_every": 1,
        "train.eval_every": 0,
        "checkpoint.every_steps": 5,
    }
    values = [f"--config.{key}={value}" for key, value in options.items()]
    command("train", "--config=configs/llama/debug.py", f"--workdir={tmp_path}", *values)
    logged = {
        r["step"]: r["train/loss"] for r in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in r
    }

    def replayed(*options):
        lines = command("report", str(tmp_path), *options).splitlines()
        assert lines[0].startswith("from step 10 to 13") and "RMS_t " in lines[1]
        assert lines[4].startswith("first by RMS_t: ") and lines[5].startswith("first by gradient norm: ")
        return [float(line.split()[3]) for line in lines[1:4]]

    assert replayed("--spike=13") == [round(logged[n], 4) for n in (11, 12, 13)]
    exact = replayed("--spike=13", "--precision=float32")
    assert exact != replayed("--spike=13") and exact == pytest.approx(
        [logged[n] for n in (11, 12, 13)], 0.01
    )
    assert "no checkpoint before step 9, its oldest is of 10" in command(
        "report", str(tmp_path), "--spike=9", code=1
    )


def test_a_precision_that_cannot_be(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match="precision='fp4' is unknown, choose one of: recipe, bf16, float32"
    ):
        replay.replay(tmp_path, 13, "fp4")
