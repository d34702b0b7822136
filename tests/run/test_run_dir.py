import subprocess
import sys

from ml_collections import ConfigDict

from maxlp.run import run_dir


def test_a_second_process_in_the_same_workdir_is_reported(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(run_dir.logging, "warning", lambda text, *values: warnings.append(text % values))
    lock = f"fcntl.flock(os.open({str(tmp_path)!r}, os.O_RDONLY), fcntl.LOCK_EX)"
    hold = f"import fcntl, os; {lock}; print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "1\n"
        run_dir.record_start(tmp_path, 0, num_params=1000)
        assert len(warnings) == 1 and f"another process trains in {tmp_path}" in warnings[0]
        other.kill()
    for _ in range(2):  # the second as after a rollback in the same process
        run_dir.record_start(tmp_path, 0, num_params=1000)
    assert len(warnings) == 1


def test_values_that_differ_from_those_of_the_last_start_are_told(tmp_path):
    first = {"model": {"dim": 4, "old": 1}, "train": {"steps": 10}, "rules": ((1, 2),)}
    second = {"model": {"dim": 8, "new": None, "more": 2}, "train": {"steps": 10}, "rules": ((1, 2),)}
    assert run_dir.save_config(tmp_path, ConfigDict(first)) == []
    assert run_dir.save_config(tmp_path, ConfigDict(first)) == []
    assert run_dir.save_config(tmp_path, ConfigDict(second)) == [
        "config.model.dim: 4 -> 8",
        "config.model.more: None -> 2",
        "config.model.old: 1 -> None",
    ]
    assert run_dir.load_config(tmp_path).model.dim == 8
