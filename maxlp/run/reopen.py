"""A run in the state before one of its steps, from a checkpoint or from its seed. Nothing is written."""

import contextlib
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from maxlp.core.gradients import Batch
from maxlp.core.local_steps import LocalState
from maxlp.core.train_state import State
from maxlp.monitoring import rollback
from maxlp.monitoring.run_record import load_run
from maxlp.monitoring.spike_records import checkpoint_before, read_record
from maxlp.parallel.batches import device_batches
from maxlp.run import late_phase
from maxlp.run.config import ConfigError
from maxlp.run.experiment import Experiment, make_data, resolve_settings
from maxlp.run.settings import Settings
from maxlp.run.tokenizer import prepare_tokenizer, saved_tokenizer
from maxlp.runtime import checkpoint
from maxlp.runtime.messages import counted


class OpenRun(NamedTuple):
    """A run in the state after ``start`` steps; the next of ``batches`` is that of step ``start`` + 1."""

    run: Experiment
    graphdef: nnx.GraphDef
    abstract: State
    state: State
    start: int
    batches: Any


class _RepeatedBatches:
    """The batches that a run has drawn, from a position on, without those that rollbacks left out.

    Args:
      batches: at the position after the step ``start``.
      last: the step to repeat. If a spike was recorded there, later rollbacks do not count.
    """

    def __init__(self, batches: Any, workdir: Path, start: int, last: int | None):
        self.batches, self.workdir, self.step = batches, workdir, start
        record = None if last is None else read_record(workdir, last)
        self.before = record["data_state"]["step"] if record else sys.maxsize

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rollback.skip_excluded_batches(self.workdir, self.step, self.batches, self.before)
        self.step += 1
        return next(self.batches)

    def get_state(self) -> dict[str, Any]:
        return self.batches.get_state()


@contextlib.contextmanager
def open_run(
    s: Settings, workdir: Path, step: int | None, lead: int = 0, *, same_precision: bool
) -> Iterator[OpenRun]:
    """The run of a workdir before a step, with the mesh set.

    Args:
      s: the run's settings, perhaps with another precision.
      step: None starts from the newest checkpoint.
      lead: see `find_checkpoint`.
      same_precision: whether matmuls have the recipe of the run.

    Raises:
      ValueError: no run in the workdir, devices that its mesh does not fit, no checkpoint from before the
        step that fits the precision, or one from before the late phase, whose steps were taken in another
        precision.
    """
    # Nothing is saved, so that which checkpoints are kept does not matter.
    s = dataclasses.replace(s, checkpoint=functools.partial(s.checkpoint.func))
    _check_devices(s, workdir)
    run = resolve_settings(s)
    tokenizer = saved_tokenizer(s.data.tokenizer, workdir)
    batches = iter(make_data(s, tokenizer, "train", run.mesh))
    with jax.set_mesh(run.mesh), contextlib.closing(batches):
        graphdef, abstract = run.abstract_state()
        root = find_checkpoint(workdir, sys.maxsize if step is None else step, lead)
        if root is None:
            state, start = run.initial_state(abstract, workdir), 0
        else:
            state, start = restore_state(root, abstract, batches, same_precision)
        if start < (last := late_phase.last_early_step(workdir, s)):
            raise ValueError(
                f"the recipe changed after step {last} (config.precision.high_precision_from="
                f"{s.precision.high_precision_from}), and the checkpoint to start from is of step {start}; "
                f"use step {last} or an earlier one (report also takes --precision=bf16 or float32)"
            )
        batches = _RepeatedBatches(batches, workdir, start, step)
        yield OpenRun(run, graphdef, abstract, state, start, batches)


@contextlib.contextmanager
def open_or_create_run(
    s: Settings, workdir: Path | None, step: int | None, *, same_precision: bool = True
) -> Iterator[OpenRun]:
    """As `open_run`, for `batch_of` the same step; without a workdir a new run, in a temporary folder.

    Raises:
      ValueError: as `open_run`, or the run has not come as far as the step.
    """
    with contextlib.ExitStack() as stack:
        if workdir is None:
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            prepare_tokenizer(s, workdir)
        elif step is not None:
            _check_step(workdir, step)
        yield stack.enter_context(open_run(s, workdir, step, same_precision=same_precision))


def _check_devices(s: Settings, workdir: Path) -> None:
    """Raises a ValueError unless the mesh fits the devices here; that of a run cannot be changed."""
    launches = load_run(workdir).launches
    try:
        s.machine_of(jax.devices())
    except ConfigError as error:
        if not launches or not (needed := launches[-1].get("num_devices")):
            raise
        simulated = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        raise ValueError(
            f"{workdir} ran on {counted(needed, 'device')}, and its steps are repeated on the same mesh, "
            f"which does not fit the {jax.device_count()} here; start on {needed}, which a CPU simulates "
            f"with {simulated}"
        ) from error


def _check_step(workdir: Path, step: int) -> None:
    run = load_run(workdir)
    last = max([run.step, *(saved.step for saved in run.checkpoints if saved.status == "complete")])
    if step > last + 1 and not read_record(workdir, step):
        taken = counted(last, "step")
        raise ValueError(f"--step={step} has no batch in {workdir}, which has taken {taken}")


def batch_of(at: OpenRun, step: int | None) -> tuple[State, Batch, int]:
    """The state before a step, the step's batch and its number; trains up to there if need be.

    Args:
      step: None takes the next one.

    Raises:
      ValueError: the data ends before it.
    """
    step = at.start + 1 if step is None else step
    stream = device_batches(at.batches, at.run.mesh, step - at.start)
    state, train_step = at.state, None
    for n, (batch, _) in enumerate(stream, at.start + 1):
        if n == step:
            return state, batch, step
        train_step = train_step or at.run.jit_step(at.graphdef, at.abstract)
        state, _ = train_step(state, batch)
    raise ValueError(f"--step={step} has no batch: the data ends before it; give an earlier step")


# --- the checkpoint ---------------------------------------------------------------------------------------


def find_checkpoint(workdir: Path, spike_step: int, lead: int) -> Path | None:
    """The checkpoint that the spike's record names if it exists, or else that of `checkpoint_before`.

    Args:
      spike_step: any step; a recorded spike has its own checkpoint.
      lead: how many steps before the spike should be repeated, if a checkpoint allows it.

    Returns:
      None if the run has no checkpoint, or had none at its spike: the replay starts from the beginning.

    Raises:
      ValueError: all checkpoints are from the step of the spike or later.
    """
    record = read_record(workdir, spike_step)
    if record and record["checkpoint"] is None:
        return None
    if record and (workdir / record["checkpoint"]).is_dir():
        return workdir / record["checkpoint"]
    infos, rollbacks = checkpoint.list_steps(workdir / "checkpoints"), rollback.read_rollbacks(workdir)
    for number in range(len(rollbacks) + 1):
        kept = checkpoint.list_steps(rollback.kept_checkpoints(workdir, number))
        infos += [info for info in kept if all(info.step <= later["to"] for later in rollbacks[number:])]
    if chosen := checkpoint_before(infos, spike_step, lead):
        return chosen.path
    oldest = min((info.step for info in infos if info.status == "complete"), default=None)
    if oldest is not None:
        raise ValueError(
            f"{workdir} has no checkpoint from before step {spike_step}; its oldest is from step {oldest}"
        )
    return None


def restore_state(root: Path, abstract: State, batches: Any, same_precision: bool) -> tuple[State, int]:
    """The state of a checkpoint, and its step; moves the data iterator to the position saved there.

    Raises:
      ValueError: the precision is not that of the run, and the model keeps state besides its parameters.
    """
    wanted = dict(abstract)
    if not same_precision:
        # The state of the run's recipe (amax histories) is useless to another recipe.
        model_state = wanted.pop("model_state")
        if jax.tree.leaves(model_state):
            raise ValueError(
                "another precision than the run's is impossible for a model that keeps state besides its "
                "parameters (a history of scales, frozen weights); use the recipe of the run"
            )
    local = abstract["opt_state"]
    without_errors = isinstance(local, LocalState) and not jax.tree.leaves(local.errors)
    if without_errors:  # an empty part would not fit that of a run whose replicas keep errors
        wanted["opt_state"] = {"outer": local.outer, "replicas": local.replicas}
    restored = checkpoint.restore(root, wanted)
    batches.set_state(restored.data_state)
    state = {"model_state": abstract["model_state"]} | restored.state
    if without_errors:
        state["opt_state"] = local._replace(**state["opt_state"])
    return state, restored.step
