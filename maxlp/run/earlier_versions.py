"""Configs that earlier versions wrote, in today's keys and words."""

from typing import Any

from maxlp.run.config import RENAMED


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """A config of an earlier version in today's keys and words."""
    for old, new in RENAMED.items():
        section, key = old.split(".")
        if key in config.get(section, {}):
            config[section][new.split(".")[1]] = config[section].pop(key)
    data = config.get("data", {})
    if config["model"].get("name") == "llama":
        config["model"].setdefault("qk_norm", False)
    if config["model"].get("name") == "clip":
        data.setdefault("lowercase", False)
    low_bit = config.get("optimizer", {}).get("low_bit")
    if low_bit is not None and "mu" not in low_bit:
        low_bit |= {"mu": "float8_e4m3fn", "nu": "float8_e5m2"}  # what an empty section meant
    data.pop("name", None)  # the family determines the kind of data
    for key in ("source", "validation_source"):
        if data.get(key):
            data[key] = data[key].replace("heldout", "validation")
    return config
