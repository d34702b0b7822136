"""Generated bad inputs of all commands are refused in one line; `tests.fuzz.run` states the rule."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from maxlp.run.config import load_file
from tests.commands import COMMANDS
from tests.fuzz.cases import GROUPS, make_case
from tests.fuzz.keys import KEYS

ROOT = Path(__file__).parent.parent.parent
SEED = 1


def refused(*options: str) -> None:
    """Runs cases in a process of their own, because one with a JAX backend must not fork."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    command = [sys.executable, "-m", "tests.fuzz.run", f"--seed={SEED}", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-5000:]}"


@pytest.mark.full
def test_a_sample_of_bad_inputs_is_refused_in_one_line():
    refused("--cases=42")


@pytest.mark.slow
def test_bad_inputs_are_refused_in_one_line():
    refused("--cases=1260")


def test_a_case_is_made_from_its_number_alone():
    cases = [make_case(SEED, number) for number in range(20 * len(GROUPS))]
    again = [make_case(SEED, number) for number in reversed(range(20 * len(GROUPS)))][::-1]
    assert [(c.what, c.command, c.names) for c in cases] == [(c.what, c.command, c.names) for c in again]
    assert {case.command.module for case in cases} == set(COMMANDS)
    assert Counter(case.what for case in cases).most_common(1)[0][1] <= 8, "few cases are drawn again"


@pytest.mark.parametrize("family", list(KEYS))
def test_every_key_has_wrong_values(family):
    config = load_file(f"{family}/debug")

    def leaves(tree, prefix=""):
        for key, value in tree.items():
            is_section = hasattr(value, "items") and len(value)
            yield from leaves(value, f"{prefix}{key}.") if is_section else [prefix + key]

    assert set(leaves(config)) == set(KEYS[family]), "tests/fuzz/keys.py has wrong values for every key"
