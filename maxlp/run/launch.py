"""Checks at the launch of a run, before anything is allocated or compiled."""

from collections.abc import Mapping
from pathlib import Path

from maxlp.core.train_state import State
from maxlp.run import run_dir
from maxlp.run.config import errors_of
from maxlp.run.experiment import Experiment
from maxlp.runtime import checkpoint


def check_launch(run: Experiment, abstract: State, workdir: Path, changed: Mapping[str, str]) -> bool:
    """Raises now what would fail later in the launch: for an unusable workdir, weights or writers.

    Args:
      abstract: the training state as shapes, dtypes and shardings.
      changed: of `changes.check_config`.

    Returns:
      whether there is a checkpoint to resume.
    """
    s = run.settings
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
