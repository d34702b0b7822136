"""Error messages for overrides of keys that the config does not have."""

import difflib
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from maxlp import schema
from maxlp.optim.config import OPTIMIZERS, options_of, unknown_option
from maxlp.run.config import RENAMED


def explain(argv: list[str]) -> str | None:
    """The message for the first --config.SECTION.KEY that the config does not have."""
    c = flags.FLAGS["config"].parser.config if "config" in flags.FLAGS else None
    if c is None:
        return None
    for word in argv:
        name = word.partition("=")[0].lstrip("-")
        section, dot, key = name.partition(".")
        if dot and section in c and ("=" in word or word.startswith("-")):
            close = [key] if key in c[section] else difflib.get_close_matches(key, c[section], 1)
            return (
                f"{name} is unknown; did you mean --config.{section}.{close[0] if close else 'KEY'}=VALUE?"
            )
        if section != "config" or not dot:
            continue
        if new := RENAMED.get(name.removeprefix("config.")):
            return f"{name} is now config.{new}"
        here: Any = c
        for part in name.split(".")[1:]:
            if not isinstance(here, ConfigDict):
                return f"--{name} is unknown; {part!r} is below a value, not a section"
            if part not in here:
                if name.startswith("config.optimizer.options."):
                    return f"--{name} {_unknown_option(part, c.optimizer.name, argv)}"
                return f"--{name} {schema.unknown_key(part, here)}"
            here = here.get(part)
    return None


def _unknown_option(key: str, optimizer: str, argv: list[str]) -> str:
    """The phrase for an unknown key of `optimizer.options`; ``argv`` may override the optimizer's name."""
    flag = "config.optimizer.name="
    given = [word.partition("=")[2] for word in argv if word.lstrip("-").startswith(flag)]
    name = [optimizer, *given][-1]
    if name not in OPTIMIZERS:
        return f"is unknown, as is optimizer.name={name!r}"
    if key in options_of(name):
        return f"is not in this config; set it in the config file, as c.optimizer.options.{key} = VALUE"
    return unknown_option(key, name)
