"""Every value of a config is checked where it enters: a mutation gives one line with the key and the value.

All is in this process, and nothing is traced or compiled: a hundred cases cost seconds.
"""

import copy
import functools
import math
import re
from typing import Any

import pytest
from ml_collections import ConfigDict

from maxlp.run.config import ConfigError
from maxlp.run.settings import make_optimizer, read
from tests.run.fixtures import load

FAMILIES = ("llama", "clip")


@functools.cache
def base(family: str) -> dict[str, Any]:
    """The debug config of a family."""
    return load("debug", family=family).to_dict()


def with_value(family: str, key: str, value: Any) -> ConfigDict:
    """The debug config with a value that no ConfigDict has checked, as from a JSON file."""
    return with_values(family, {key: value})


def with_values(family: str, values: dict[str, Any]) -> ConfigDict:
    c = copy.deepcopy(base(family))
    for key, value in values.items():
        *path, name = key.split(".")
        functools.reduce(lambda d, part: d[part], path, c)[name] = value
    return ConfigDict(c)


def message(c: ConfigDict) -> str | None:
    """The message with which a config is refused; None if it is accepted."""
    try:
        make_optimizer(read(c))
    except ConfigError as error:
        return str(error)
    return None


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        found |= leaves(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return found


# --- every key ------------------------------------------------------------------------------------------

TEXTS = ("data.source", "data.validation_source", "data.tokenizer", "data.classes", "train.init_from")
# Keys whose value may be what no other key's may be.
MAY_BE_NEGATIVE = re.compile(r"mesh\.(?!dcn_data).*|model\.logit_(scale|bias)|precision\.options\.margin")
MAY_BE_HUGE = re.compile(r"data\.(shuffle_tokens|max_pixels)")
# Two keys of a nested section that only work together: the message may name the other one.
INCOMPLETE = re.compile(r"model\.rope_scaling\..*|optimizer\.low_bit\.(mu|nu)|model\.text\.eos_id")


def refused(family: str, key: str, value: Any) -> str:
    """Asserts that the value is refused in one line that begins with its key; returns the line."""
    got = message(with_value(family, key, value))
    assert got is not None, f"config.{key}={value!r} is accepted"
    assert "\n" not in got
    if not INCOMPLETE.fullmatch(key):
        assert got.startswith(f"config.{key}"), got
        assert repr(value) in got or value is None, got
    return got


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_takes_a_number_that_is_not_finite_or_not_of_64_bits(family):
    keys = [key for key in leaves(base(family)) if key != "model.name"]
    assert len(keys) > 100
    for key in keys:
        for value in (math.nan, math.inf, -math.inf, 2**63, -(2**63) - 1):
            refused(family, key, value)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_takes_a_value_of_another_type(family):
    for key, default in leaves(base(family)).items():
        for value in ({"x": 1}, ("x", 1.5), "x", True, 1.5):
            if isinstance(value, type(default)) or (default is None and key not in TEXTS):
                continue
            if key == "optimizer.options" and isinstance(value, dict):
                continue
            if isinstance(value, str) and key in (*TEXTS, "metrics.wandb_project"):
                continue
            refused(family, key, value)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_some_keys_take_a_negative_number(family):
    for key, default in leaves(base(family)).items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            if MAY_BE_NEGATIVE.fullmatch(key):
                assert message(with_value(family, key, type(default)(-1))) is None, key
            else:
                refused(family, key, type(default)(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_fit_into_32_bits(family):
    for key, default in leaves(base(family)).items():
        if type(default) is int and not MAY_BE_HUGE.fullmatch(key):
            refused(family, key, 2**32)


@pytest.mark.parametrize("family", FAMILIES)
def test_none_means_unset_or_is_refused(family):
    """A key of a config is unset by None, and takes its default; a key without one must be set."""
    for key in leaves(base(family)):
        got = message(with_value(family, key, None))
        assert got is None or INCOMPLETE.fullmatch(key) or got.startswith(f"config.{key} is not set"), got
    for key in ("model.norm_eps", "data.seq_len" if family == "llama" else "data.text_len", "train.seed"):
        assert refused(family, key, None) == f"config.{key} is not set; give --config.{key}=VALUE"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_section_and_required_key_is_named(family):
    for section in base(family):
        c = with_values(family, {})
        with c.unlocked():
            del c[section]
        assert message(c).startswith(f"config.{section} is missing; sections: ")
        c[section] = 3
        assert message(c) == f"config.{section}=3 is not a section; write its keys and values"
    for key in ("model.norm_eps", "optimizer.learning_rate", "train.total_steps", "data.batch_size"):
        c = with_values(family, {})
        section, name = key.split(".")
        with c.unlocked():
            del c[section][name]
        assert message(c) == f"config.{key} is missing; add it to the config file"
