"""A toy training run with spikes on request, and the files that a finished run leaves."""

import contextlib
import functools
import io
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from maxlp.core import train_step as step
from maxlp.monitoring import rollback, statistics
from maxlp.monitoring.skip_guard import SkipGuard
from maxlp.monitoring.spikes import Spike, SpikeConfig
from maxlp.monitoring.watch import Watch
from maxlp.run import run_dir
from maxlp.runtime.checkpoint import Checkpointer
from maxlp.runtime.files import write_json
from maxlp.runtime.writers import MetricWriter


def gates_of(config):
    return {"guard": SkipGuard(config)} if config.guard == "skip" else {}


def noisy(steps=300, seed=0):
    """Losses whose noise is uniform: at most 1.73 of its standard deviations, so that nothing spikes."""
    return 2 + 0.05 * np.random.default_rng(seed).uniform(-1, 1, steps)


def trees_equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def write_records(workdir, records):
    """The `metrics.jsonl` of a run with these records."""
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_spike(workdir, step, **values):
    """The record of a spike, with these values."""
    record = Spike(step, 3.0, 2.0, 5.0)._asdict() | {"policy": vars(SpikeConfig()), "checkpoint": None}
    record |= {"data_state": {"step": step - 1}, "first": None, "steps": []} | values
    (workdir / "spikes").mkdir(exist_ok=True)
    write_json(workdir / "spikes" / f"{step}.json", record)


def write_rollback(workdir, spike, to, batches):
    (workdir / "spikes").mkdir(exist_ok=True)
    entry = {"spike": {"step": spike}, "to": to, "batches": batches}
    path = workdir / "spikes" / "rollbacks.json"
    write_json(path, [*(json.loads(path.read_text()) if path.exists() else []), entry])


# --- A toy run ----------------------------------------------------------------------------------------

B2, TX = 0.95, optax.adam(0.01, b2=0.95)
TOTAL_STEPS = 20
# Settings of `SpikeConfig` for a run so short.
TOY = dict(window=8, min_history=4, merge_steps=2, rewind_steps=3, skip_batches=2, lead=2)


class Batches:
    """Examples of a linear map; `bad` adds a number to the targets of a batch, counted from 1."""

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


def init(config):
    rng = np.random.default_rng(0)
    shapes = {"layers": (2, 8, 8), "head": (8, 1)}
    params = {k: {"kernel": jnp.asarray(0.3 * rng.normal(size=s), jnp.float32)} for k, s in shapes.items()}
    state = {"params": params, "model_state": {}, "opt_state": TX.init(params), "step": jnp.int32(0)}
    return state | {name: gate.init() for name, gate in gates_of(config).items()}


def gradients(graphdef, state, batch, loss_scale):
    def loss(params):
        h = batch["x"]
        for i in range(2):
            h = h + jnp.tanh(h @ params["layers"]["kernel"][i])
        return jnp.mean((h @ params["head"]["kernel"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return grads, {}, {"loss": value}


def adam_rms(grads, opt_state):
    """RMS_t by its definition, for each layer of the stack."""
    nu_hat = optax.tree.bias_correction(opt_state[0].nu, B2, opt_state[0].count)
    ratio = jax.tree.map(lambda g, v: jnp.square(g) / jnp.maximum(v, 1e-16), grads, nu_hat)
    return {
        "layers/kernel": jnp.sqrt(jnp.mean(ratio["layers"]["kernel"], axis=(1, 2))),
        "head/kernel": jnp.sqrt(jnp.mean(ratio["head"]["kernel"])),
    }


def train_step(config):
    return _compiled_step(config if config.guard == "skip" else SpikeConfig())


@functools.cache
def _compiled_step(config):
    function = functools.partial(
        step.train_step,
        None,
        gradients=gradients,
        tx=TX,
        gates=gates_of(config),
        statistics=functools.partial(statistics.tensor_statistics, rms=adam_rms),
    )
    return jax.jit(function)


def train(workdir: Path, config, bad=(), total=TOTAL_STEPS, stop_at=0):
    """One start of a run as in `maxlp.train`: resumes, saves every fourth step, stops at a spike.

    Returns the batches that were drawn and the last state, or None if it was killed after step `stop_at`.
    """
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = init(config)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)
    batches, watch, start = Batches(bad), Watch(config), 0
    with Checkpointer(workdir / "checkpoints", every_steps=4, keep_last=3) as checkpoints:
        if restored := checkpoints.restore_latest(abstract):
            start, state = restored.step, restored.state
            batches.set_state(restored.data_state)
            watch.set_meta(restored.meta)
        rollback.skip_excluded_batches(workdir, start, batches)
        watch.note(start, batches.get_state())
        for n in range(start + 1, total + 1):
            state, metrics = train_step(config)(state, next(batches))
            watch.note(n, batches.get_state())
            values = jax.device_get(metrics)
            if spike := watch.observe(n, values):
                watch.act(workdir, spike, values)
            if n == stop_at:
                return batches.drawn, None
            if n % 4 == 0:
                meta = json.loads(json.dumps(watch.meta()))
                checkpoints.save(n, state, batches.get_state(), meta)
                checkpoints.wait()
    return batches.drawn, jax.device_get(state)


def train_to_the_end(workdir: Path, config, bad=(), total=TOTAL_STEPS):
    """Starts again after every rollback; returns the batches of each complete start, and the last state."""
    drawn = []
    while True:
        try:
            seen, state = train(workdir, config, bad, total)
            return [*drawn, seen], state
        except rollback.RollbackRequested as event:
            drawn.append(None)
            rollback.roll_back(workdir, event.spike, config)


# --- The files of a run -------------------------------------------------------------------------------

CONFIG = {
    "model": {"name": "llama", "embed_dim": 128, "rope_scaling": None},
    "data": {"batch_size": 8, "seq_len": 256},
    "train": {"total_steps": 400, "log_every": 10, "eval_batches": 10},
}


def write_run(path, steps=400, losses=None):
    """A run as training leaves it: a record every 10 steps, an evaluation every 100, one resume."""
    run_dir.record_launch(path, ConfigDict(CONFIG), 0, num_params=1000, units_per_step=2048)
    run_dir.record_launch(path, ConfigDict(CONFIG), 200, num_params=1000, units_per_step=2048)
    with contextlib.redirect_stdout(io.StringIO()):
        writer = MetricWriter(path, total_steps=400, resume_step=0, tensorboard=False)
    for i, n in enumerate(range(10, steps + 1, 10)):
        loss = 1.5 + 4 * math.exp(-n / 50) if losses is None else losses[i]
        train = {"loss": loss, "grad_norm": 1 / n, "learning_rate": 1e-3}
        perf = {"tokens_per_sec": 1000.0 + n, "step_time": 0.25, "mfu": 0.5, "mfu_causal": 0.4}
        perf |= {"peak_tflops": 197.0}
        record = {f"train/{k}": v for k, v in train.items()} | {f"perf/{k}": v for k, v in perf.items()}
        writer.write(n, record | {"memory/host_peak_gib": 1.0 + n / 1000})
        if n % 100 == 0:
            bits = 2.0 + abs(n - 300) / 1000
            writer.write(n, {"eval/loss": bits * math.log(2), "eval/bits_per_byte": bits})
    if steps == 400:
        writer.write(400, {"eval_full/loss": 2.0, "eval_full/bits_per_byte": 2.0 / math.log(2)})
    writer.close()
