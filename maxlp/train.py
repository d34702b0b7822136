r"""Trains a model. The same command, run again, resumes where training stopped.

    python -m maxlp.train --config=llama/debug --workdir=/tmp/run

Any value of the config can be changed on the command line:

    python -m maxlp.train --config=llama/8b --workdir=/data/run \
        --config.data.source=array_record:/data/c4 \
        --config.optimizer.learning_rate=1e-4

--dry_run opens the data, checks the config and prints what would run: the
resolved values, and below them parameters, FLOPs, bytes per device and data.
SIGTERM and Ctrl-C save a checkpoint; the exit code is then 75 or 130. The same
command resumes the run.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

import maxlp
from maxlp.core.train_state import CORE, State
from maxlp.data import merge_states
from maxlp.families import Evaluate, Measure
from maxlp.monitoring import rollback
from maxlp.monitoring.recorder import Recorder
from maxlp.monitoring.watch import Watch
from maxlp.optim import eval_params
from maxlp.parallel.batches import one_pass
from maxlp.run import cli, run_dir
from maxlp.run.experiment import Experiment, describe, make_data, resolve
from maxlp.run.intact_batches import IntactBatches
from maxlp.run.launch import check_launch, repeats_the_last_launch
from maxlp.run.settings import Settings
from maxlp.run.tokenizer import prepare_tokenizer
from maxlp.runtime import cpu, distributed, files, hardware, preemption, verification
from maxlp.runtime.checkpoint import Checkpointer, ClockSetBackError
from maxlp.runtime.distributed import is_primary, print_primary
from maxlp.runtime.lock import WorkdirLock, open_lock
from maxlp.runtime.throughput import Throughput
from maxlp.runtime.writers import MetricWriter

CACHE_BYTES = 2**24  # more than the compiled programs of a run take


def define_flags() -> None:
    cli.define_flags(
        "Directory of the run: checkpoints, metrics, config. Resumed if it holds a checkpoint."
    )
    cli.define_from()
    flags.adopt_module_key_flags(cli)
    flags.DEFINE_bool("allow_change", False, "Let a resumed run have another model or other data.")
    flags.DEFINE_bool("dry_run", False, "Check the config, print what would run, and stop.")


def main() -> int:
    startup = Startup(maxlp.IMPORTED_AT)
    startup.mark("imports")
    preemption.exit_on_sigterm()
    distributed.initialize()
    workdir = files.local_path(flags.FLAGS.workdir, "--workdir")
    with preemption.exit_with_others(), open_lock(workdir) as lock:
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    code = train(cli.read_config(workdir), lock, stack, startup)
                if code is not None:
                    return code
            except rollback.RollbackRequested as request:
                print_primary(rollback.roll_back(workdir, request.spike, request.config))
            except ClockSetBackError as error:
                if jax.process_count() > 1:
                    raise
                print_primary(f"{error}, and is started now")
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
            preemption.exit_if_received()
            startup = Startup(time.monotonic())


def train(c: ConfigDict, lock: WorkdirLock, stack: contextlib.ExitStack, startup: "Startup") -> int | None:
    """Runs a config in the workdir of ``lock``; returns the exit code, or None if another phase follows."""
    # --- The config, resolved once: checked before anything is allocated or compiled.
    run = resolve(c)
    s, workdir, mesh = run.settings, lock.workdir, run.mesh
    changed = report_config(s, workdir, c)
    stack.enter_context(jax.set_mesh(mesh))  # the stack is closed however the run ends
    cpu.keep_freed_memory()

    # --- The training state as shapes and shardings, and the step that updates it.
    graphdef, abstract = run.abstract_state()
    print_primary(describe(run, abstract))
    train_step = run.jit_step(graphdef, abstract, resumes=check_launch(run, abstract, workdir, changed))
    if flags.FLAGS.dry_run:
        train_step.trace(abstract, run.abstract_batch())
        return dry_run(run, graphdef, workdir)
    startup.mark("config")

    # --- The data. Nothing in the workdir is touched until no other process can do so.
    lock.acquire()
    with run_dir.undone_on_failure(workdir):
        batches, validation, evaluate = open_data(run, graphdef, workdir)
    stack.callback(batches.close)
    startup.mark("data")

    # --- The step is compiled, except on GPUs while the state is restored or initialized.
    to_compile = (train_step, abstract, run.abstract_batch(), mesh, stack)
    compiled = None if seems_finished(s, workdir) else compile_in_background(*to_compile)
    checkpoints = stack.enter_context(open_checkpoints(s, workdir))
    state, start, meta = restore_or_init(run, abstract, checkpoints, batches, workdir, changed)
    rollback.skip_excluded_batches(workdir, start, batches)
    if (progress := run.progress(state, start)).finished:
        print_primary(f"{workdir} is at step {progress}: nothing is left to train")
        return 0
    batches.start_prefetch()
    run_dir.record_launch(workdir, c, start, s.num_params, run.family.units_per_step(s.data))
    stack.enter_context(run_dir.recording_errors(workdir))
    writer = stack.enter_context(contextlib.closing(open_writer(s, workdir, start, c)))
    startup.mark("state")
    train_step = (compiled or compile_in_background(*to_compile)).result()
    startup.mark("compilation")
    print_primary(f"{workdir}: resuming at step {start}" if start else f"{workdir}: a new run")

    # --- The loop.
    throughput = make_throughput(run)
    watch = Watch(s.spikes)
    recorder = Recorder(throughput, watch, writer, batches, workdir, s.train.log_every, meta)
    preempted = stack.enter_context(preemption.PreemptionGuard())
    profiler = stack.enter_context(contextlib.closing(s.profile(workdir=workdir)))
    measurements = make_measurements(run, graphdef)

    n, data_state, ends = start, batches.get_state(), False
    watch.note(start, data_state)
    intact = IntactBatches(batches)
    for n, (batch, data_state) in enumerate(throughput.waiting_for(intact.on_devices(mesh)), start + 1):
        watch.note(n, data_state)
        profiler.before(n - start)
        state, metrics = train_step(state, batch)
        profiler.after(n - start, metrics)
        first, last, stop = n == start + 1, progress.is_last(n, metrics), preempted.should_stop(n)
        ends = last or stop or n == s.precision.high_precision_from
        due = [measure for every, measure in measurements if is_due(n, every)]
        evaluates, saves = last or is_due(n, s.train.eval_every), ends or checkpoints.should_save(n)
        recorder.push(n, metrics, state["params"], wait=first or evaluates or bool(due) or saves, last=last)
        if first:
            startup.mark("step")
            print_primary(startup)
        with throughput.paused():
            if evaluates:
                writer.write(n, validate(evaluate, state, validation, mesh, s.train.eval_batches))
            if last and s.train.eval_batches:
                writer.write(n, validate(evaluate, state, validation, mesh, 0, "eval_full"))
            for measure in due:
                writer.write(n, measure(state, batch))
            if saves:
                save(checkpoints, n, state, data_state, recorder)
        if ends:
            break
    else:
        if n > start and not intact.error:  # the data has ended, and with it the run
            recorder.finish(state["params"])
            writer.write(n, validate(evaluate, state, validation, mesh, 0, "eval_full"))
        save(checkpoints, n, state, data_state, recorder)
    checkpoints.wait()
    writer.close()
    if not ends:
        raise data_ended(n, s.train.total_steps, intact.error)
    if not last:
        return stopped(workdir, n, preempted if stop else None)
    return finish(workdir)


# --- parts of the run -----------------------------------------------------------------------------------


def report_config(s: Settings, workdir: Path, c: ConfigDict) -> dict[str, str]:
    """Prints and returns what differs from the last launch; raises for a change that must not happen."""
    if flags.FLAGS.dry_run:
        values = json.loads(c.to_json_best_effort())  # lists, where YAML would write !!python/tuple
        print_primary(ConfigDict(values))  # before the summary, which then remains in sight in a terminal
    if jax.process_count() > 1:
        from maxlp.run import processes  # a single process needs none

        processes.check(c, flags.FLAGS.workdir)
    changed: dict[str, str] = {}
    if workdir.exists():
        from maxlp.run import changes  # new runs do not need it

        changed = changes.check_config(workdir, c, flags.FLAGS.allow_change)
        for line in (*changed.values(), *changes.check_environment(workdir)):
            print_primary(f"changed since the last launch: {line}")
    if s.train.init_from or s.data.tokenizer.startswith("hf:"):
        from maxlp.run import pretrained  # few runs need it

        pretrained.agree_on_commits(workdir, s.train.init_from, s.data.tokenizer)
        pretrained.report_differences(s, workdir)
    return changed


def dry_run(run: Experiment, graphdef: nnx.GraphDef, workdir: Path) -> int:
    """Opens the data as a real launch does, but in a scratch folder."""
    with run_dir.scratch(workdir) as folder:
        open_data(run, graphdef, folder)
    return 0


def open_data(run: Experiment, graphdef: nnx.GraphDef, workdir: Path) -> tuple[Any, Any, Evaluate]:
    """Training batches, validation data and the evaluation on it, with the run's own tokenizer."""
    s = run.settings
    run_dir.use_hub_commits(workdir, s.data)
    tokenizer = prepare_tokenizer(s, workdir)
    training, validation = (make_data(s, tokenizer, split, run.mesh) for split in ("train", "validation"))
    batches = iter(training)
    merge_states(distributed.gather_json(batches.get_state()))  # fails unless all processes have the same
    # Other data is refused before anything compiles. `batches` stays at the beginning for a rollback to it.
    state = run_dir.saved_data_state(workdir)
    if state and not flags.FLAGS.allow_change:
        iter(training).set_state(state)
    print_primary(
        f"data: {training.describe(s.train.total_steps)}\nvalidation data: {validation.describe()}"
    )
    evaluate = run.family.evaluator(graphdef, s.model, s.data, s.loss, validation)
    return batches, validation, evaluate


def seems_finished(s: Settings, workdir: Path) -> bool:
    """Whether the newest checkpoint, if it is intact, is of the last step (AdaScale may need fewer)."""
    return max(verification.list_numbered(workdir / "checkpoints"), default=0) >= s.train.total_steps


def compile_in_background(
    train_step: jax.stages.Wrapped, abstract: State, batch: Any, mesh: Mesh, stack: contextlib.ExitStack
) -> concurrent.futures.Future[jax.stages.Compiled]:
    """Starts compiling the step in a thread; if the program fails elsewhere, it does not wait for that.

    On a GPU this returns only when the step is compiled: XLA's autotuning runs kernels there. That takes
    memory, and other work on the device would distort the measured times.
    """
    if jax.config.jax_compilation_cache_dir is None:  # unless the user has set it
        keep_compiled_programs(files.cache_folder() / "xla")

    def compile_step() -> jax.stages.Compiled:
        with jax.set_mesh(mesh):  # the mesh in context is local to a thread
            return train_step.lower(abstract, batch).compile()

    background = concurrent.futures.ThreadPoolExecutor(1)
    stack.callback(background.shutdown, wait=False)
    compiled = background.submit(compile_step)
    if mesh.devices.flat[0].platform in ("gpu", "cuda"):
        concurrent.futures.wait([compiled])
    return compiled


def keep_compiled_programs(folder: Path) -> None:
    """Lets JAX keep what it compiles for later launches; without a folder to keep it in, says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # it may exist on a read-only file system
            file.write(bytes(CACHE_BYTES))  # JAX never replaces what a full disk has cut off
    except OSError as error:
        print_primary(
            f"the next launch will compile again: {folder} cannot be written to ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that you can write to"
        )
    else:
        jax.config.update("jax_compilation_cache_dir", str(folder))


def restore_or_init(
    run: Experiment,
    abstract: State,
    checkpoints: Checkpointer,
    batches: Any,
    workdir: Path,
    changed: dict[str, str],
) -> tuple[State, int, dict[str, Any]]:
    """The newest intact checkpoint, or a fresh state: state, number of finished steps, `Recorder.meta`."""
    if (restored := checkpoints.restore_latest(abstract, CORE)) is None:
        if not repeats_the_last_launch(workdir, changed):
            rollback.set_spikes_aside(workdir)
        return run.initial_state(abstract, workdir), 0, {}
    if run.settings.precision.high_precision_from:
        from maxlp.run import late_phase  # few runs have one

        late_phase.begin(run.settings, restored.step, workdir)
    batches.set_state(restored.data_state, flags.FLAGS.allow_change)
    return run.with_all_gates(restored.state), restored.step, restored.meta


def open_checkpoints(s: Settings, workdir: Path) -> Checkpointer:
    return s.checkpoint(
        directory=workdir / "checkpoints",
        on_complete=functools.partial(run_dir.record_checkpoint, workdir),
    )


def open_writer(s: Settings, workdir: Path, start: int, c: ConfigDict) -> MetricWriter:
    total = s.train.total_steps if s.optimizer.adascale is None else None
    return s.metrics(workdir=workdir, total_steps=total, resume_step=start, run_config=c.to_dict())


def make_throughput(run: Experiment) -> Throughput:
    s, family = run.settings, run.family
    return Throughput(
        unit=family.unit,
        units_per_step=family.units_per_step(s.data),
        flops_per_unit=s.flops_per_unit,
        peak_flops=hardware.published_flops(run.mesh.devices.flat[0].device_kind),
        num_devices=jax.device_count(),
        total_steps=s.train.total_steps,
    )


def make_measurements(run: Experiment, graphdef: nnx.GraphDef) -> list[tuple[int, Measure]]:
    """Measurements on the batch of a step, each with the number of steps between them."""
    if not run.settings.precision.measures:
        return []
    from maxlp.run import measurements  # few runs measure

    return measurements.make(run, graphdef)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def validate(
    evaluate: Evaluate, state: State, validation: Any, mesh: Mesh, limit: int, name: str = "eval"
) -> dict[str, float]:
    """Metrics on the first ``limit`` validation batches (0: all), under names such as ``eval/loss``."""
    params = eval_params(state["opt_state"], state["params"])  # schedule_free_adamw: an average
    model = {"params": params, "model_state": state["model_state"]}
    metrics = evaluate(model, lambda: one_pass(validation, mesh, limit or None))
    return {f"{name}/{key}": value for key, value in metrics.items()}


def save(checkpoints: Checkpointer, step: int, state: State, data_state: dict, recorder: Recorder) -> None:
    recorder.flush()  # the metrics of a last step after which the data ended
    checkpoints.save(step, state, merge_states(distributed.gather_json(data_state)), recorder.meta())


def data_ended(step: int, total_steps: int, error: str) -> ValueError:
    if error:
        return ValueError(
            f"{error}; step {step} is saved: repair the data, without changing the number of documents, "
            "and resume with --allow_change"
        )
    return ValueError(
        f"the data ended at step {step} of config.train.total_steps={total_steps}; that step is saved; "
        "raise config.data.num_epochs and add --allow_change, or lower config.train.total_steps"
    )


def stopped(workdir: Path, step: int, preempted: preemption.PreemptionGuard | None) -> int | None:
    """Reports a run that was stopped before its last step; returns as `train`."""
    print_primary(f"stopped and saved at step {step}; the same command resumes the run")
    if preempted is None:
        return None
    run_dir.record_end(workdir, preempted.signal_name)
    return preempted.exit_code


def finish(workdir: Path) -> int:
    """Prints the losses of a finished run and draws its curves."""
    if is_primary():
        from maxlp.monitoring import curves, sections
        from maxlp.monitoring.run_record import load_run

        run = load_run(workdir)
        print_primary(sections.section_text("done", sections.loss_lines(run)))
        more = f"python -m maxlp.report {shlex.quote(str(workdir))}"
        try:
            print_primary(f"curves: {curves.plot_curves(run)}; more: {more}")
        except OSError as error:  # such as without a place for Matplotlib's cache; the run is complete
            print_primary(f"no curves: {error}; more: {more}")
    return 0


class Startup:
    """How long the stages before the first step took."""

    def __init__(self, started_at: float):
        self.stages: list[tuple[str, float]] = []
        self.last = started_at

    def mark(self, stage: str) -> None:
        now = time.monotonic()
        self.stages.append((stage, now - self.last))
        self.last = now

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {s:.1f}" for name, s in self.stages)
        return f"first step after {sum(s for _, s in self.stages):.1f} s\n  {stages}"


if __name__ == "__main__":
    define_flags()
    cli.run(main)
