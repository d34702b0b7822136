"""The campaign of kills and damage says whether everything holds."""

import pytest

from benchmarks import reliability


@pytest.mark.parametrize("holds", [True, False])
def test_the_exit_code_says_whether_all_cases_hold(holds, tmp_path, monkeypatch, capsys):
    def case(campaign, workdir, rng):
        assert holds, "the records differ"
        return "equal"

    monkeypatch.setattr(reliability, "CASES", {"kill": (case, 2, 1), "other": (lambda *_: "equal", 1, 1)})
    monkeypatch.setattr(reliability, "prepare", reliability.Campaign)
    monkeypatch.setattr("sys.argv", ["reliability", f"--work={tmp_path}"])
    assert reliability.main() == (0 if holds else 1)
    told = capsys.readouterr().out
    assert f"| kill | 2 | {2 * holds} of 2 |" in told and "| other | 1 | 1 of 1 |" in told
    assert told.count("does not hold: AssertionError: the records differ") == 2 * (not holds)
