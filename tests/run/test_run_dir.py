import subprocess
import sys

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
