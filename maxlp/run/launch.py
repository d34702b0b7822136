"""Checks at the launch of a run: what would fail later, and whether it repeats an earlier launch."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from maxlp.core.train_state import State
from maxlp.run import run_dir
from maxlp.run.config import errors_of
from maxlp.run.experiment import Experiment
from maxlp.run.settings import OBSERVING
from maxlp.runtime import checkpoint


def check_launch(run: Experiment, abstract: State, workdir: Path, changed: Mapping[str, str]) -> bool:
    """Raises now what would fail later in the launch: for JAX's settings, workdir, weights or writers.

    Args:
      abstract: the training state as shapes, dtypes and shardings.
      changed: of `changes.check_config`.

    Returns:
      whether there is a checkpoint to resume.

    Raises:
      ValueError: JAX_DISABLE_JIT is set, or what is named above cannot be used.
    """
    s = run.settings
    if jax.config.jax_disable_jit:
        raise ValueError("JAX_DISABLE_JIT is set; unset it: a training step is compiled before it runs")
    run_dir.check_workdir(workdir)
    run_dir.check_checkpoints(workdir)
    resumes = any(i.status == "complete" for i in checkpoint.list_steps(workdir / "checkpoints"))
    if resumes:
        from maxlp.run import compatibility  # new runs do not need it

        compatibility.check(run, abstract, workdir, changed)
    elif s.train.init_from:
        from maxlp.run import pretrained  # few runs need it

        pretrained.check(s, run.mesh)
    with errors_of("metrics"):
        if project := s.metrics.keywords.get("wandb_project"):
            from maxlp.runtime.wandb_writer import check_installed

            check_installed(project)
    return resumes


def repeats_the_last_launch(workdir: Path, changed: Iterable[str]) -> bool:
    """Whether a launch without a checkpoint repeats an earlier one; otherwise it begins another run.

    A run that was killed before its first checkpoint, or rolled back to its beginning, has the same config,
    except for sections that do not affect training.
    """
    return (workdir / "run.json").exists() and all(key.partition(".")[0] in OBSERVING for key in changed)
