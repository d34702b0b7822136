"""Runs whose workdir is a URL: killed, resumed, used by every command; the buckets are emulated."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maxlp.runtime import storage
from tests.run_outputs import checkpoint, losses, records
from tests.training_runs import ROOT, SMALL, environments, finish, shown, start

STEPS = 40  # so many that a run has not ended when a signal reaches it
WHOLE = (
    f"--config.train.total_steps={STEPS}",
    "--config.train.eval_every=4",
    "--config.optimizer.schedule=constant",
)


def copied(url: str, folder: Path) -> Path:
    """A run on disk with the files of one in a bucket."""
    for name in storage.find(url):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(storage.read(f"{url}/{name}"))
    return folder


def signalled(process: subprocess.Popen, step: int, number: int) -> None:
    """Sends a signal as soon as a run has printed a step."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(rf"step {step}\D", line):
            process.send_signal(number)
            break


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run on disk."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    finish(start(workdir, *WHOLE))
    return workdir


@pytest.mark.parametrize(
    "bucket",
    [pytest.param("s3", marks=pytest.mark.full), pytest.param("gs", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_killed_run_resumes_to_the_bit_and_every_command_takes_its_url(bucket, whole, tmp_path):
    url = f"{bucket}/run"
    process = start(url, *WHOLE)
    signalled(process, 8, signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    process = start(url, *WHOLE)
    signalled(process, 10, signal.SIGTERM)
    assert "the same command resumes the run" in finish(process, 75)
    out = finish(start(url, *WHOLE))
    assert f"{url}: resuming at step" in out and f"curves: {url}/loss.png" in out
    copy = copied(url, tmp_path / "copy")
    assert checkpoint(copy, STEPS) == checkpoint(whole, STEPS)
    assert records(copy) == records(whole)
    assert (copy / "loss.png").exists() and not (copy / "lock").exists()

    assert f"at step {STEPS}" in shown("evaluate", f"--workdir={url}")
    assert "─" in shown("generate", f"--workdir={url}", "--prompt=def", "--max_new_tokens=2")
    report = shown("report", url)
    assert f"finished, {STEPS} steps" in report and f"Curves in {url}/loss.png" in report
    output = shown("convert", "export", f"--workdir={url}", f"--output={bucket}/hf")
    assert f"{bucket}/hf holds config.json, model.safetensors" in output
    assert f"--from={bucket}/imported" in shown(
        "convert", "import", f"--input={bucket}/hf", f"--output={bucket}/imported"
    )
    from_imported = (f"--config.train.init_from={bucket}/imported", "--config.train.total_steps=3")
    finish(start(tmp_path / "tuned", *WHOLE, *from_imported))


def two_processes(url: str, *options: str, **kwargs) -> list[subprocess.Popen]:
    return [start(url, *options, "--config.mesh.dcn_data=2", **kwargs, **env) for env in environments(2)]


def kill_after(step: int, group: list[subprocess.Popen]) -> None:
    """Kills the second process, then the first, which waits for it (its launcher would end it)."""
    for line in group[0].stdout or ():
        if re.match(rf"step {step}\D", line):
            break
    for process in reversed(group):
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_of_two_processes_one_is_killed_and_one_alone_continues(bucket, whole, tmp_path):
    url = f"{bucket}/run"
    kill_after(8, two_processes(url, *WHOLE))
    assert "resuming at step" in finish(start(url, *WHOLE))
    got, want = losses(copied(url, tmp_path)), losses(whole)
    assert got.keys() == want.keys()
    # Sums over two processes round in another order.
    assert all(got[n] == pytest.approx(want[n], rel=1e-4) for n in want)


@pytest.mark.slow
def test_a_day_in_two_stores_from_another_folder(buckets, tmp_path):
    """Data in s3://, the run in gs://: prepared, trained by two processes, continued by one, evaluated."""
    s3, gs = buckets["s3"], buckets["gs"]
    env = dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")

    def command(*words: str) -> str:
        args = [sys.executable, "-m", *words]
        done = subprocess.run(args, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "texts").mkdir()
    for path in (ROOT / "maxlp").rglob("*.py"):
        shutil.copy(path, tmp_path / "texts" / f"{path.parent.name}_{path.stem}.txt")
    corpus = f"--output={s3}/corpus"
    command("maxlp.prepare", "text", "--source=text:texts/*.txt", corpus, "--shards=2")
    config = ["--config=llama/debug", *SMALL[1:], *WHOLE, "--config.data.shuffle_tokens=1024"]
    config += [f"--config.data.source=array_record:{s3}/corpus?validation=0.02"]
    url = f"{gs}/run"
    kill_after(5, two_processes(url, config=config, cwd=tmp_path, **env))
    out = finish(start(url, config=config, cwd=tmp_path, **env))
    assert f"{url}: resuming at step" in out
    assert sorted(losses(copied(url, tmp_path / "copy"))) == list(range(1, STEPS + 1))
    assert f"at step {STEPS}" in command("maxlp.evaluate", f"--workdir={url}")
    assert f"finished, {STEPS} steps" in command("maxlp.report", url)
    command("maxlp.convert", "export", f"--workdir={url}", f"--output={s3}/model")
    assert {"config.json", "model.safetensors"} <= storage.find(f"{s3}/model").keys()
