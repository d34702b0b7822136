import pytest

from maxlp import report
from tests.monitoring.fixtures import write_run


def test_the_command_prints_a_text_and_draws_the_curves(tmp_path, capsys):
    write_run(tmp_path)
    report.main(["report", str(tmp_path)])
    out = capsys.readouterr().out
    assert out.startswith("Run\n") and out.endswith(f"Curves in {tmp_path / 'loss.png'}\n")
    assert (tmp_path / "loss.png").exists()


def test_without_metrics_there_is_only_text(tmp_path, capsys):
    report.main(["report", str(tmp_path)])
    assert capsys.readouterr().out.endswith("no metrics yet\n")


def test_errors_are_one_line(tmp_path):
    write_run(tmp_path)
    with pytest.raises(SystemExit, match=r"^error: .*missing is not a directory"):
        report.main(["report", str(tmp_path / "missing")])
    with pytest.raises(SystemExit, match="--spike=999 is beyond the run, whose last record is of step 400"):
        report.main(["report", str(tmp_path)], spike=999)
    with pytest.raises(SystemExit, match="error: --precision=fp4 is unknown"):
        report.main(["report", str(tmp_path)], spike=400, precision="fp4")
