"""Configs that earlier versions wrote, in today's keys and words.

A key that they did not have gets its default value, with which everything is as before there was the key.
"""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from maxlp import families, schema
from maxlp.optim.config import OPTIMIZERS
from maxlp.run import settings
from maxlp.run.config import RENAMED


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """A config of an earlier version in today's keys and words."""
    for old, new in RENAMED.items():
        section, key = old.split(".")
        if key in config.get(section, {}):
            config[section][new.split(".")[1]] = config[section].pop(key)
    data = config.get("data", {})
    optimizer = config.get("optimizer", {})
    name = optimizer.get("name")
    if name in OPTIMIZERS and pkgutil.resolve_name(OPTIMIZERS[name]).last_rms is None:
        optimizer.pop("decay_with_clip", None)  # it had no effect, and `clip/low_precision` set it for all
    low_bit = optimizer.get("low_bit")
    if low_bit is not None and "mu" not in low_bit:
        low_bit |= {"mu": "float8_e4m3fn", "nu": "float8_e5m2"}  # what an empty section meant
    # Keys that had no effect, which are refused today.
    recipes, profile = config.get("precision", {}), config.get("profile", {})
    keeps_all = (recipes.get("options") or {}).get("keep") is None  # no matmul samples tokens
    if recipes.get("recipe") == "bf16" and "min_dim" in recipes and keeps_all:
        recipes["min_dim"] = 0
        if all(name == "bf16" for _, name in recipes.get("rules") or ()):
            recipes["rules"] = ()
    if (profile.get("start") or 0) > (config.get("train", {}).get("total_steps") or 0):
        profile.pop("start")
    data.pop("name", None)  # the family determines the kind of data
    for key in ("source", "validation_source"):
        if data.get(key):
            data[key] = data[key].replace("heldout", "validation")
    if (family := config["model"].get("name")) not in families.FAMILIES:
        return config
    known = settings.sections(families.get(family))
    return {name: _with_defaults(known[name], v) if name in known else v for name, v in config.items()}


def _with_defaults(function: Callable, values: Any) -> Any:
    """A section with defaults in place of what is missing or unset, see `config.bind`."""
    if not isinstance(values, Mapping):
        return values
    values, hints = dict(values), schema.annotations(function)
    for name, parameter in inspect.signature(function).parameters.items():
        hint, default = hints[name], parameter.default
        if section := schema.section(hint):  # an optional one is off, or has its own values
            if name in values and type(None) not in schema.options(hint):
                values[name] = _with_defaults(section, values[name])
        elif not isinstance(default, str | int | float | tuple):
            continue
        elif name not in values or (values[name] is None and not schema.fits(None, hint)):
            values[name] = default
    return values
