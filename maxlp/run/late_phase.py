"""The last steps of a run, whose matmuls compute in the model's dtype (`precision.high_precision_from`).

A run in 4 bits recovers part of its gap when it ends in 16 (NVIDIA 2025, arXiv:2509.25149). It is saved at
that step and goes on in the same process, with ``recipe="bf16"`` in its config. `config.json` says so from
then on: commands that evaluate or convert a run compute in the precision of its current phase.
"""

from pathlib import Path
from typing import Any

from maxlp.run.config import ConfigError
from maxlp.run.settings import Settings
from maxlp.runtime import checkpoint


def config_now(values: dict[str, Any], workdir: Path | None) -> dict[str, Any]:
    """The values of a config, as those with which a run goes on from its newest checkpoint.

    Raises:
      ConfigError: a run without low precision.
    """
    p, infos = values["precision"], checkpoint.list_steps(workdir / "checkpoints") if workdir else []
    first = p["high_precision_from"]
    if max((i.step for i in infos if i.status == "complete"), default=0) >= first:
        options = dict.fromkeys(p["options"])
        p |= dict(recipe="bf16", options=options, rules=(), smooth_swiglu="none", health_every=0)
    elif p["recipe"] == "bf16" and not p["rules"]:
        raise ConfigError(
            f"config.precision.high_precision_from={first} changes nothing with recipe=bf16; set it to 0, "
            "or choose another recipe"
        )
    return values


def check(s: Settings, step: int) -> None:
    """Raises a ConfigError if a restored checkpoint is not the one that `config_now` saw.

    It saw one that was damaged and is now set aside, or an older one than a copy of the run elsewhere has.
    """
    first = s.precision.high_precision_from
    if s.is_quantized != (step < first):
        raise ConfigError(
            f"the newest intact checkpoint is that of step {step}, on the other side of config.precision."
            f"high_precision_from={first}; start the same command again, which goes on from there"
        )


def refusal(s: Settings) -> str | None:
    """The message for a late phase that the run cannot have."""
    first, p = s.precision.high_precision_from, s.precision
    key = f"precision.high_precision_from={first}"
    if first >= s.train.total_steps:
        return f"{key} is not below train.total_steps={s.train.total_steps}; use an earlier step, or 0"
    if any(s.recipe(path).delayed for path in s.matmuls):
        return f"{key} does not go with the histories of {p.recipe}; use a recipe without delayed scales"
    return None
