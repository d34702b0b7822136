"""Finds keys that change nothing because a switch in their own section is off.

They are accepted, so that the switch alone can be changed on the command line, and a run lists them.
"""

import functools
import inspect
import operator
from typing import Any

from maxlp.run.settings import Settings

# A switch, its values under which the keys of its section that follow change nothing, and these keys.
SWITCHES: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    ("data.shuffle", (False,), ("shuffle_tokens",)),
    ("loss.method", ("plain", "sharded"), ("tile_size",)),
    ("metrics.wandb_project", ("", None), ("wandb_group", "wandb_tags")),
    ("optimizer.weight_decay", (0,), ("decay_embeddings",)),
    ("precision.loss_scale.per_tensor", (True,), ("growth_interval",)),
    ("profile.start", (0,), ("steps",)),
    ("spikes.guard", ("off",), ("guard_threshold", "max_actions")),
    ("spikes.guard", ("off", "skip"), ("rewind_steps", "skip_batches")),
)


def unused_keys(s: Settings) -> list[str]:
    """The keys without effect whose values are not the defaults, such as ``profile.steps (start=0)``."""
    found = []
    for path, off, keys in SWITCHES:
        name, _, switch = path.rpartition(".")
        if (given := operator.attrgetter(name)(s)) is None:
            continue
        function = given.func if isinstance(given, functools.partial) else type(given)
        parameters = inspect.signature(function).parameters
        values = {key: parameter.default for key, parameter in parameters.items()}
        values |= given.keywords if isinstance(given, functools.partial) else vars(given)
        if values.get(switch, ...) not in off:  # another family may not have it
            continue
        changed = (key for key in keys if values[key] != parameters[key].default)
        found += [f"{name}.{key} ({switch}={values[switch]})" for key in changed]
    if s.precision.loss_scale is None:
        return found
    # The steps that it skips count as actions too.
    return [text for text in found if not text.startswith("spikes.max_actions ")]
