"""Metrics in Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlp.runtime import files
from maxlp.runtime.writers import metrics_of


def check_installed(project: str) -> None:
    """Raises a ValueError if W&B is not installed."""
    try:
        import wandb  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"wandb_project={project!r} needs wandb: pip install wandb, or set it to ''"
        ) from None


class WandbWriter:
    """A W&B run that continues when training resumes: its id is saved in the workdir.

    Args:
      labels: ``group`` and ``tags``; None leaves them to the environment, as it does all other settings
        (WANDB_MODE=offline).
    """

    def __init__(
        self, project: str, workdir: Path, run_config: Mapping[str, Any] | None, **labels: Any
    ) -> None:
        check_installed(project)
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = workdir / "wandb_id"
        run_id = id_file.read_text(encoding="utf-8") if id_file.exists() else None
        self._run = wandb.init(
            project=project,
            name=workdir.resolve().name,
            dir=str(workdir),
            id=run_id,
            resume="allow",
            config=dict(run_config or {}),
            allow_val_change=True,  # of the config, when the run resumes
            **labels,
        )
        files.write_text(id_file, self._run.id)

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(metrics_of(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()
