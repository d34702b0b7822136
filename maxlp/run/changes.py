"""What a resumed run may change.

A resumed run keeps its model and its data. If the config has changed, keys that decide what the model
computes or what it learns from are refused unless the user allows the change; changes of all others, such
as the mesh, memory, kernels, precision and hyperparameters, are only reported. The contents of files are
compared with the last checkpoint's record by the data pipelines (`data.common.check_settings`) and by
`run.tokenizer`.
"""

import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from maxlp import families
from maxlp.optim import OPTIMIZERS
from maxlp.run import run_dir
from maxlp.run.config import ConfigError
from maxlp.runtime.distributed import print_primary

# Sections and keys that decide what the model computes or what it learns from …
FIXED = ("model", "data", "loss", "train.seed", "train.lora")
# … except these and `Family.free_keys`, which decide where, how fast or how exactly it is computed, or
# what is measured.
FREE = (
    *("model.dtype", "model.param_dtype", "model.attention", "model.scan_layers", "model.remat"),
    "data.num_workers",
)
# Keys that decide how saved numbers are decoded. Some formats share a dtype, and some block sizes give the
# same number of scales, so a checkpoint written with one would load silently as the other.
FORMATS = ("optimizer.low_bit.mu", "optimizer.low_bit.nu", "optimizer.low_bit.block_size")


def check_config(workdir: Path, c: ConfigDict, allow: bool = False) -> dict[str, str]:
    """Compares a config with that of the run's last launch.

    Args:
      allow: whether a resumed run may have another model or other data.

    Returns:
      changed key -> a line with both values.

    Raises:
      ConfigError: a run that has a checkpoint would have another model or other data, or misread it.
    """
    if not (path := workdir / "config.json").exists():
        if run_dir.saved_data_state(workdir) is not None:
            print_primary(f"{path} is missing: what this launch changes in the run's config is not known")
        return {}
    from maxlp.run import earlier_versions  # new runs do not need it

    old, new = run_dir.load_config(workdir).to_dict(), json.loads(c.to_json_best_effort())
    changes = differences(old, earlier_versions.upgraded(new))
    if not changes or run_dir.saved_data_state(workdir) is None:
        return changes
    if "model.name" in changes and not allow:
        raise ConfigError(
            f"{workdir} holds a run of another family ({changes['model.name']}); use a new workdir"
        )
    formats = FORMATS
    if pkgutil.resolve_name(OPTIMIZERS[new["optimizer"]["name"]]).averages:
        formats += ("optimizer.b1",)  # which mixes the average into the parameters
    if unreadable := [change for key, change in changes.items() if is_in(formats, key)]:
        raise ConfigError(
            f"the checkpoints of {workdir} would be misread ({'; '.join(unreadable)}); undo the change, or "
            "use a new workdir"
        )
    refused = [change for key, change in changes.items() if is_fixed(key, old, new)]
    if refused and not allow:
        raise ConfigError(
            f"{workdir} was trained with another model or other data ({'; '.join(refused)}); undo the "
            "change, use a new workdir, or add --allow_change"
        )
    return changes


def check_environment(workdir: Path) -> list[str]:
    """A line with both values for each version of a package and each variable of JAX and XLA that changed.

    Other versions round differently, and variables such as JAX_DEFAULT_PRNG_IMPL also change the numbers.
    """
    launches = run_dir.read_record(workdir)["starts"]
    lines = []
    for field, now in (("versions", run_dir.versions()), ("environment", run_dir.environment())):
        old = launches[-1].get(field) if launches else None
        if old is not None:  # earlier versions recorded no environment
            names = sorted(name for name in old.keys() | now.keys() if old.get(name) != now.get(name))
            lines += [f"{name}: {old.get(name, 'unset')} -> {now.get(name, 'unset')}" for name in names]
    return lines


def is_fixed(key: str, *configs: Mapping[str, Any]) -> bool:
    """Whether a key of these configs decides what the model computes or what it learns from."""
    free = (*FREE, *(name for family in families_of(*configs) for name in family.free_keys))
    return is_in(FIXED, key) and not is_in(free, key)


def families_of(*configs: Mapping[str, Any]) -> list[families.Family]:
    """The families that these configs name, without those that are unknown."""
    names = [flat(config).get("model.name") for config in configs]
    return [families.get(name) for name in families.FAMILIES if name in names]


def is_in(names: tuple[str, ...], key: str) -> bool:
    """Whether a key is one of these or below one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Each key of two configs whose values differ -> a line with both."""
    old, new = flat(old), flat(new)
    keys = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    return {k: f"config.{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in keys}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a config by their keys, joined by dots; as in JSON, which has no tuples."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found
