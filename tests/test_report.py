import pytest

from maxlp import report
from maxlp.runtime import cpu
from tests.monitoring.fixtures import write_run, write_spike


def test_the_command_prints_a_text_and_draws_the_curves(tmp_path, capsys):
    write_run(tmp_path)
    report.show(str(tmp_path))
    out = capsys.readouterr().out
    assert out.startswith("Run\n") and out.endswith(f"Curves in {tmp_path / 'loss.png'}\n")
    assert (tmp_path / "loss.png").exists()


def test_without_metrics_there_is_only_text(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"starts": []}')
    report.show(str(tmp_path))
    assert capsys.readouterr().out.endswith("no metrics yet\n")


def test_a_damaged_config_is_reported_once(tmp_path, caplog):
    write_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    report.show(str(tmp_path))
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'config.json'} is damaged (")


def test_a_workdir_that_cannot_be_written_to_has_a_report(tmp_path, capsys, monkeypatch):
    write_run(tmp_path)

    def fails(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)  # tests may run as root
    report.show(str(tmp_path))
    out = capsys.readouterr().out
    assert "train/loss" in out and out.endswith(
        f"No curves: [Errno 13] Permission denied: '{tmp_path}/loss.png'\n"
    )


def test_errors_are_one_line(tmp_path):
    write_run(tmp_path)
    with pytest.raises(ValueError, match=r"^.*missing is not a directory"):
        report.show(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="--spike=999 is beyond the run, whose last record is of step 400"):
        report.show(str(tmp_path), spike=999)
    with pytest.raises(ValueError, match="--spike=401 is beyond the run, whose last record is of step 400"):
        report.show(str(tmp_path), spike=401)  # within `log_every`, but the run ends at 400
    write_spike(tmp_path, 998)
    with pytest.raises(ValueError, match="--precision=fp4 is unknown"):  # of steps that were rolled back
        report.show(str(tmp_path), spike=998, precision="fp4")
    with pytest.raises(ValueError, match="--precision=float32 applies to a replay only; add --spike=STEP"):
        report.show(str(tmp_path), precision="float32")
    (tmp_path / "empty").mkdir()
    for config in ("{}", '{"model_type": "llama"}'):  # of Hugging Face
        (tmp_path / "empty" / "config.json").write_text(config)
        with pytest.raises(ValueError, match="empty holds no run; give the --workdir of one"):
            report.show(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="--precision=fp4 is unknown"):
        report.show(str(tmp_path), spike=400, precision="fp4")


def test_simulated_devices_of_a_replay_get_their_threads(tmp_path, monkeypatch):
    def configured(alone):
        raise ValueError(f"alone={alone}")

    monkeypatch.setattr(cpu, "configure_client", configured)
    write_run(tmp_path)
    with pytest.raises(ValueError, match="alone=True"):
        report.show(str(tmp_path), spike=400)
