"""Configs of the project, with changes."""

import importlib

from ml_collections import ConfigDict


def load(name: str, arg: str = "", family: str = "llama") -> ConfigDict:
    c = importlib.import_module(f"configs.{family}.{name}").get_config(arg)
    if c.data.source is None:
        c.data.source = c.data.tokenizer = "unread"
    return c


def changed(c: ConfigDict, values: dict) -> ConfigDict:
    with c.unlocked():
        c.update_from_flattened_dict(values)
    return c
