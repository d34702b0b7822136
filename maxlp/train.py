r"""Trains a model; started again with the same command, it goes on where it was.

    python -m maxlp.train --config=configs/llama/debug.py --workdir=/tmp/run

Any value of the config can be changed on the command line:

    python -m maxlp.train --config=configs/llama/8b.py --workdir=/data/run \
        --config.data.source=array_record:/data/c4 --config.optimizer.learning_rate=1e-4

--dry_run checks the config and prints what would run: the resolved values, parameters, FLOPs, bytes per
device. SIGTERM saves a checkpoint and exits with code 75 (start me again); Ctrl-C too, with code 130.
"""

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import ConfigDict

import maxlp
from maxlp import report
from maxlp.core import train_step as step
from maxlp.data import merge_states
from maxlp.monitoring import guards as spike_guard
from maxlp.monitoring.statistics import flat
from maxlp.monitoring.watch import Watch
from maxlp.parallel import sharding
from maxlp.run import build, config
from maxlp.run import run_dir as files
from maxlp.runtime import distributed, hardware, preemption
from maxlp.runtime.checkpoint import load_params
from maxlp.runtime.throughput import DelayedFetch, Throughput


def define_flags() -> None:
    config.define_flags(
        "Directory of the run: checkpoints, metrics, config. Resumed if it holds a checkpoint."
    )
    flags.adopt_module_key_flags(config)
    flags.DEFINE_bool("dry_run", False, "Check the config, print what would run, and stop.")


def main() -> int:
    startup = Startup(maxlp.IMPORTED_AT)
    startup.mark("imports")
    distributed.initialize()
    c, workdir = flags.FLAGS.config, Path(flags.FLAGS.workdir)
    while True:
        try:
            with contextlib.ExitStack() as stack:
                return train(c, workdir, stack, startup)
        except spike_guard.RolledBack as event:
            distributed.print_primary(spike_guard.roll_back(workdir, event.spike, build.spike_policy(c)))
            startup = Startup(time.time())


def train(c: ConfigDict, workdir: Path, stack: contextlib.ExitStack, startup: "Startup") -> int:
    """Runs a config to its end in ``workdir``; returns the exit code of the process.

    What has to be closed, however the run ends, is put on the ``stack``.
    """
    # --- The choices, checked before anything is allocated or compiled.
    mesh = build.mesh(c)
    build.check(c, mesh)
    loop, task, make_model = build.loop(c), build.task(c), build.model(c)
    (tx, _), judges = build.tx(c), build.judges(c)
    peak = hardware.peak_flops()
    stack.enter_context(jax.set_mesh(mesh))

    # --- The state as shapes and shardings.
    graphdef, abstract = step.abstract_state(make_model, tx, mesh, judges)
    distributed.print_primary(build.describe(c, mesh, abstract))
    if flags.FLAGS.dry_run:
        distributed.print_primary(c)
        return 0
    startup.mark("config and mesh")

    # --- The data.
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizer = build.tokenizer(c, workdir)
    heldout, batches = build.heldout(c, tokenizer), iter(build.train_data(c, tokenizer))
    stack.callback(batches.close)
    evaluate = task.evaluator(c, graphdef, heldout)
    startup.mark("tokenizer and data")

    # --- The step, compiled in the background while the state is made.
    use_compilation_cache()
    train_step = build.train_step(c, graphdef, abstract, mesh)
    background = concurrent.futures.ThreadPoolExecutor(1)
    stack.callback(background.shutdown, wait=False)  # what fails in the meantime does not wait for it
    compiled = background.submit(compile_under, mesh, train_step, abstract, task.abstract_batch(c, mesh))

    # --- The state: restored, or born in its shards.
    checkpoints = stack.enter_context(build.checkpointer(c, workdir / "checkpoints"))
    start, watch = 0, Watch(build.spike_policy(c))
    if (restored := checkpoints.restore_latest(abstract)) is not None:
        start, state = restored.step, restored.state
        batches.set_state(restored.data_state)
        watch.set_state(restored.meta.get("watch", watch.get_state()))  # older checkpoints have none
    else:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        init = functools.partial(step.init_state, make_model, tx, loop.seed, judges)
        state = jax.jit(init, out_shardings=shardings)()
        if loop.init_from:
            state["params"] = load_params(loop.init_from, abstract["params"])
    spike_guard.pass_over(workdir, start, batches)
    if start >= loop.total_steps:
        distributed.print_primary(
            f"{workdir} is at step {start} of {loop.total_steps}: nothing is left to train"
        )
        return 0
    batches.start_prefetch()
    if distributed.is_primary():
        for change in files.save_config(workdir, c):
            distributed.print_primary(f"changed since the last start: {change}")
        files.record_start(workdir, start, build.num_params(abstract["params"]))
    writer = stack.enter_context(
        contextlib.closing(build.metric_writer(c, workdir, loop.total_steps, start))
    )
    startup.mark("state")
    train_step = compiled.result()
    startup.mark("rest of compilation")
    distributed.print_primary(f"{workdir}: resuming at step {start}" if start else f"{workdir}: a new run")

    # --- The loop. The metrics of a step are read when the next one is already queued.
    guard = stack.enter_context(preemption.PreemptionGuard())
    fetch = DelayedFetch()
    throughput = Throughput(
        unit=task.UNIT,
        units_per_step=task.units(c),
        flops_per_unit=task.flops(c, build.num_params(abstract["params"])),
        peak=peak,
        num_devices=jax.device_count(),
        total_steps=loop.total_steps,
    )
    health_every, measure_health = build.health_every(c), build.health(c, graphdef)
    profiler = stack.enter_context(contextlib.closing(build.profiler(c, workdir)))

    n, data_state = start, batches.get_state()
    watch.note(start, data_state)
    ahead = throughput.waiting_for(sharding.device_batches(batches, mesh))
    for n, (batch, data_state) in enumerate(ahead, start + 1):
        watch.note(n, data_state)
        profiler.before(n - start)
        state, out = train_step(state, batch)
        profiler.after(n - start, out)
        first, last, stop = n == start + 1, n == loop.total_steps, guard.should_stop(n)
        evaluates = last or (loop.eval_every > 0 and n % loop.eval_every == 0)
        measures = health_every > 0 and n % health_every == 0
        saves = last or stop or checkpoints.should_save(n)
        for done, values in fetch.push(n, out, wait=first or evaluates or measures or saves):
            throughput.tick(done)
            if spike := watch.observe(done, values):  # before it is saved
                watch.act(workdir, spike, values)
            if done % loop.log_every == 0 or done == loop.total_steps:
                values = {f"train/{name}": value for name, value in flat(values).items()}
                running = throughput.report() | hardware.memory_metrics() | batches.metrics()
                writer.write(done, values | running)
        if first:
            startup.mark("first step")
            distributed.print_primary(startup)
        with throughput.paused():
            if evaluates:
                limit = 0 if last else loop.eval_batches
                held = functools.partial(heldout_batches, heldout, mesh, limit)
                writer.write(
                    n, {f"eval/{name}": v for name, v in evaluate(build.evaluated(state), held).items()}
                )
            if measures:
                writer.write(n, measure_health(state, batch))
            if saves:
                checkpoints.save(n, state, merge_states(distributed.gather_json(data_state)), watch.meta())
        if stop and not last:
            checkpoints.wait()
            distributed.print_primary(f"stopped and saved at step {n}; the same command goes on from here")
            return guard.exit_code
        if last:
            break
    else:
        checkpoints.save(n, state, merge_states(distributed.gather_json(data_state)), watch.meta())
        raise ValueError(
            f"the data ended at step {n} of config.train.total_steps={loop.total_steps} and is saved "
            "there; raise config.data.num_epochs or lower total_steps"
        )

    checkpoints.wait()
    if distributed.is_primary():
        report.plot_curves(workdir)
        distributed.print_primary(f"done: {workdir}/loss.png; python -m maxlp.report {workdir} tells more")
    return 0


def heldout_batches(heldout, mesh: Mesh, limit: int) -> Iterator[dict]:
    return (batch for batch, _ in sharding.device_batches(iter(heldout), mesh, limit))


def compile_under(mesh: Mesh, function: jax.stages.Wrapped, *shapes) -> jax.stages.Compiled:
    with jax.set_mesh(mesh):  # the mesh of a context is a thread's own
        return function.lower(*shapes).compile()


def use_compilation_cache() -> None:
    """Keeps compiled steps between starts, unless JAX_COMPILATION_CACHE_DIR says where or the user no."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "maxlp" / "xla"))


class Startup:
    """Where the seconds before the first step went."""

    def __init__(self, began: float):
        self.stages: list[tuple[str, float]] = []
        self.last = began

    def mark(self, stage: str) -> None:
        now = time.time()
        self.stages.append((stage, now - self.last))
        self.last = now

    def __str__(self) -> str:
        total = sum(seconds for _, seconds in self.stages)
        return f"first step after {total:.1f} s: " + ", ".join(f"{name} {s:.1f}" for name, s in self.stages)


if __name__ == "__main__":
    define_flags()
    config.run(main)
