"""Checks that the checkpoints of a resumed run fit its config; an error names the keys that do not.

What a run keeps besides its weights, such as moments, amax histories and the errors of replicas, can
neither be dropped nor made up when a change of the config asks for it.
"""

import contextlib
import fnmatch
from collections.abc import Mapping
from pathlib import Path

from maxlp.core.train_state import CORE, State
from maxlp.run.changes import is_in
from maxlp.run.config import ConfigError
from maxlp.run.experiment import Experiment
from maxlp.runtime import checkpoint, tree_spec
from maxlp.runtime.files import read_json

# Entry of the training state -> the sections and keys that decide which arrays it has.
DECIDING = {
    "params": ("model", "optimizer.param_rounding", "train.lora"),
    "model_state": ("model", "precision", "train.local", "train.lora"),
    "opt_state": (
        *("model", "optimizer", "precision.exchange"),
        *("train.local", "train.lora", "train.release_gradients"),
    ),
}


def check(run: Experiment, abstract: State, workdir: Path, changed: Mapping[str, str]) -> None:
    """Compares the training state with the one in the newest checkpoint; reads no arrays.

    Args:
      abstract: the training state as shapes, dtypes and shardings.
      changed: of `changes.check_config`.

    Raises:
      ValueError: the state has other arrays than the checkpoint, or would misread them.
    """
    newest, saved = _newest_arrays(workdir / "checkpoints")
    if newest is None:
        return
    remedy = f"or start a new run from its weights, with --from={workdir} and another --workdir"
    before, now = num_replicas(saved), num_replicas(tree_spec.describe(abstract))
    if before and now and before != now:
        s = run.settings
        exchange, local = f"config.precision.exchange={s.precision.exchange}", s.train.local
        reason = exchange if local is None else f"config.train.local.steps={local.steps}"
        raise ConfigError(
            f"config.mesh.data={now}: the checkpoints of {workdir} hold the states of {before} replicas "
            f"({reason}); resume with config.mesh.data={before}, {remedy}"
        )
    try:
        checkpoint.fitting_record(newest, abstract, exact=True, required=CORE)
    except checkpoint.CheckpointError as error:
        mismatch = tree_spec.find_mismatch(saved, abstract, exact=True, required=CORE)
        part = mismatch.path.partition("/")[0] if mismatch else ""
        reasons = [line for key, line in changed.items() if is_in(DECIDING.get(part, ()), key)]
        if not reasons:
            raise
        raise ConfigError(
            f"the checkpoints of {workdir} do not fit the changed config ({'; '.join(reasons)}); undo the "
            f"change, {remedy}"
        ) from error
    if misread := _misread_histories(saved, run, changed):
        raise ConfigError(
            f"the amax histories in the checkpoints of {workdir} would be misread ({'; '.join(misread)}); "
            f"undo the change, {remedy}"
        )


def _newest_arrays(directory: Path) -> tuple[Path | None, Mapping[str, str]]:
    """The newest checkpoint and its arrays. Unreadable ones are left to `Checkpointer.restore_latest`."""
    for step in reversed(checkpoint.list_steps(directory)):
        if step.status == "complete":
            with contextlib.suppress(ValueError):
                return step.path, read_json(step.path / "checkpoint.json")["arrays"]
    return None, {}


def num_replicas(arrays: Mapping[str, str]) -> int:
    """The number of replicas whose own state is among these arrays (`tree_spec.describe`); 0 if none is."""
    for path, described in arrays.items():
        if path.startswith(("model_state/errors/", "opt_state/replicas/")):
            return tree_spec.shape_of(described)[0]
    return 0


def _misread_histories(saved: Mapping[str, str], run: Experiment, changed: Mapping[str, str]) -> list[str]:
    """The changes after which matmuls with delayed scales quantize other tensors than before."""
    found = []
    for key, matmuls in (
        ("precision.smooth_swiglu", run.family.gated_products),
        ("precision.options.fwd_hadamard", ("*",)),
    ):
        line = changed.get(key, "")
        if line.endswith(("None -> False", "False -> None")):  # an unset option is off in these recipes
            continue
        ends = [f"model_state/{name}/dot_general/input_amax_history" for name in matmuls]
        if line and any(fnmatch.fnmatch(path, end) for path in saved for end in ends):
            found.append(line)
    return found
