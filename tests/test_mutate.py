"""The list of faults matches the code, and the tool reports which faults tests notice."""

from collections import Counter

import pytest

from tools import mutate
from tools.faults import FAULTS, Fault


def test_every_fault_can_be_tried():
    """Its text occurs once, what replaces it is Python, and its tests exist."""
    problems = {mutate.title(fault): mutate.problem(fault) for fault in FAULTS}
    wrong = {title: problem for title, problem in problems.items() if problem}
    assert not wrong, "adapt these entries of tools/faults.py to the code as it is now"
    assert max(Counter((fault.file, fault.old, fault.new) for fault in FAULTS).values()) == 1


def test_every_package_and_command_has_faults():
    """There are few faults that no test can notice, and these have a reason."""
    paths = (mutate.ROOT / "maxlp").iterdir()
    parts = {p.name for p in paths if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__.py"}
    assert {fault.file.split("/")[0] for fault in FAULTS} == parts
    assert len(FAULTS) >= 120
    assert sum(bool(fault.why) for fault in FAULTS) <= (1 - mutate.REQUIRED) * len(FAULTS)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (Fault("core/nowhere.py", "a", "b", ()), "there is no maxlp/core/nowhere.py"),
        (Fault("core/gates.py", "no such text", "b", ()), "its text occurs 0 times in maxlp/core/gates.py"),
        (Fault("core/gates.py", "import", "b", ()), "times in maxlp/core/gates.py"),
        (Fault("core/gates.py", "accepted &= ok", "accepted &= ok", ()), "it changes nothing"),
        (Fault("core/gates.py", "accepted &= ok", "accepted &=", ()), "it is not Python"),
        (
            Fault("core/gates.py", "accepted &= ok", "pass", ("core/test_x.py",)),
            "there is no test core/test_x.py",
        ),
        (
            Fault("core/gates.py", "accepted &= ok", "pass", ("core/test_gates.py::test_x",)),
            "there is no test",
        ),
    ],
)
def test_entries_that_cannot_be_tried_are_named(fault, problem):
    assert problem in mutate.problem(fault)


@pytest.mark.full
def test_a_fault_is_noticed_or_not(monkeypatch, capsys):
    """Tried with the tests of schedules, which depend on no other code."""
    file, tests = "optim/schedules.py", ("optim/test_schedules.py::test_constant_stays",)
    noticed = Fault(
        file, "return optax.constant_schedule(peak)", "return optax.constant_schedule(0.0)", tests
    )
    missed = Fault(file, "alpha=final / peak", "alpha=final", tests)
    monkeypatch.setattr(mutate, "FAULTS", [noticed, missed])
    before = (mutate.ROOT / "maxlp" / file).read_bytes()
    assert mutate.main(["--jobs=2"]) == 1, "half of them is too little"
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(" optim")[0].strip() for line in lines[:2]} == {"noticed", "NOT NOTICED"}
    assert lines[2] == "1 of 2 faults noticed (50.0%)"
    assert mutate.main(["--only=constant_schedule(0.0)"]) == 0
    monkeypatch.setattr(mutate, "FAULTS", [noticed._replace(old="moved")])
    assert mutate.main([]) == 2 and "broken entry" in capsys.readouterr().out
    assert (mutate.ROOT / "maxlp" / file).read_bytes() == before
