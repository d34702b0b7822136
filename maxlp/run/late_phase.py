"""The last steps of a run, whose matmuls compute in the model's dtype (`precision.high_precision_from`).

A run in 4 bits closes part of its gap to bfloat16 when its last steps are in 16 bits (NVIDIA 2025,
arXiv:2509.25149). The run is saved after the last low-precision step and continues in the same process,
with ``recipe="bf16"`` in its config and from then on in `config.json`: commands that evaluate or convert a
run compute in the precision of its current phase.
`early_precision.json` keeps the precision of the steps before it, for commands that replay them.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from maxlp.run import earlier_versions, run_dir
from maxlp.run.config import ConfigError
from maxlp.run.settings import Settings, read
from maxlp.runtime import checkpoint
from maxlp.runtime.distributed import is_primary
from maxlp.runtime.files import read_json, write_json

EARLY = "early_precision.json"
# With these values in the section precision, and options unset, all matmuls compute in the model's dtype.
WITHOUT_RECIPE: dict[str, Any] = dict(recipe="bf16", rules=(), min_dim=0, smooth_swiglu="none")


def config_now(values: dict[str, Any], workdir: Path | None) -> dict[str, Any]:
    """The values of a config, changed to those with which a run continues from its newest checkpoint.

    Raises:
      ConfigError: a wrong value, or a run without low precision.
    """
    s = read(ConfigDict(values))
    p = values["precision"]
    infos = checkpoint.list_steps(workdir / "checkpoints") if workdir else []
    first = p["high_precision_from"]
    if max((i.step for i in infos if i.status == "complete"), default=0) >= first:
        p |= WITHOUT_RECIPE | dict(options=dict.fromkeys(p["options"]), health_every=0)
    elif not s.is_quantized:
        raise ConfigError(
            f"config.precision.high_precision_from={first} changes nothing: all matmuls compute in "
            f"{s.model.dtype} from the start; set it to 0, or choose another recipe"
        )
    return values


def begin(s: Settings, step: int, workdir: Path) -> None:
    """Keeps the precision of the steps up to this one, if it is the last one before the late phase.

    `config.json` is then still that of the last launch.

    Args:
      step: of the restored checkpoint.

    Raises:
      ConfigError: the checkpoint is not the one that `config_now` saw. It saw one that was damaged and is
        now set aside, or an older one than a copy of the run elsewhere has.
    """
    first = s.precision.high_precision_from
    if s.is_quantized != (step < first):
        raise ConfigError(
            f"the newest intact checkpoint is that of step {step}, on the other side of config.precision."
            f"high_precision_from={first}; start the same command again, which continues from there"
        )
    if step < first or not is_primary() or not (workdir / "config.json").exists():
        return
    early = run_dir.load_config(workdir)
    if read(early).is_quantized:
        write_json(workdir / EARLY, {"last_step": step, "precision": early.precision.to_dict()})


def config_at(workdir: Path, step: int | None) -> ConfigDict:
    """The config with which a run took a step; if that is None, the one with which it continues.

    Raises:
      ConfigError: imported weights, or a step from before the late phase whose precision nothing has kept.
    """
    c = run_dir.load_config(workdir)
    if run_dir.is_imported(c):
        raise ConfigError(
            f"{workdir} holds imported weights and names no data; give a run that started from them "
            f"(train --from={workdir})"
        )
    last = last_early_step(workdir, read(c))
    if step is None or step > last:
        return c
    early = read_json(workdir / EARLY, {})
    if "precision" not in early:
        raise ConfigError(
            f"the recipe of step {step} is unknown: after step {last} config.precision."
            f"high_precision_from={last} changed it, and there is no {workdir / EARLY}; use a later step "
            "(report also takes --precision=bf16 or float32)"
        )
    return ConfigDict(earlier_versions.upgraded(c.to_dict() | {"precision": early["precision"]}))


def last_early_step(workdir: Path, s: Settings) -> int:
    """The last step that a run took in another precision than these settings'; 0 if there is none."""
    first = s.precision.high_precision_from
    if not first or s.is_quantized:
        return 0
    return read_json(workdir / EARLY, {"last_step": first}, fields={"last_step": int})["last_step"]


def refusal(s: Settings) -> str | None:
    """The message for a late phase that the run cannot have."""
    first, p = s.precision.high_precision_from, s.precision
    key = f"precision.high_precision_from={first}"
    if first >= s.train.total_steps:
        return f"{key} is not below train.total_steps={s.train.total_steps}; use an earlier step, or 0"
    if any(s.recipe(path).delayed for path in s.matmuls):
        return f"{key} cannot be combined with {p.recipe}'s histories; use a recipe without delayed scales"
    return None
