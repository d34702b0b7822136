import dataclasses
import json
import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from ml_collections import ConfigDict

from maxlp import report
from maxlp.monitoring.spikes import Policy, Spike
from maxlp.run import run_dir as workdir
from maxlp.runtime import files
from maxlp.runtime.checkpoint import StepInfo
from maxlp.runtime.writers import MetricWriter

CONFIG = {
    "model": {"name": "llama", "embed_dim": 128, "rope_scaling": None},
    "data": {"batch_size": 8, "seq_len": 256},
    "train": {"total_steps": 400},
}


def write_run(path, steps=400, losses=None):
    """A run as training leaves it: a record every 10 steps, an evaluation every 100, one resume."""
    workdir.save_config(path, ConfigDict(CONFIG))
    workdir.record_start(path, 0, num_params=1000)
    workdir.record_start(path, 200, num_params=1000)
    writer = MetricWriter(path, total_steps=400, console=False, tensorboard=False)
    for i, step in enumerate(range(10, steps + 1, 10)):
        loss = 1.5 + 4 * math.exp(-step / 50) if losses is None else losses[i]
        train = {"loss": loss, "grad_norm": 1 / step, "learning_rate": 1e-3}
        perf = {"tokens_per_sec": 1000.0 + step, "step_time": 0.25, "mfu": 0.5, "mfu_causal": 0.4}
        perf |= {"peak_tflops": 0.2, "peak_measured": 1.0}
        record = {f"train/{k}": v for k, v in train.items()} | {f"perf/{k}": v for k, v in perf.items()}
        writer.write(step, record | {"memory/host_peak_gib": 1.0 + step / 1000})
        if step % 100 == 0:
            bits = 2.0 + abs(step - 300) / 1000
            writer.write(step, {"eval/loss": bits * math.log(2), "eval/bits_per_byte": bits})
    writer.close()


def shown(path):
    """The report as {section: {label: text}}, lines that were wrapped joined again."""
    sections = {}
    for paragraph in report.report_text(report.load_run(path)).split("\n\n"):
        title, *lines = re.sub(r"\n {3,}", " ", paragraph).split("\n")
        parts = (line.strip().partition("  ") for line in lines)
        sections[title] = {label: text.strip() for label, _, text in parts}
    return sections


def test_a_finished_run(tmp_path):
    write_run(tmp_path)
    text = shown(tmp_path)
    assert text["Run"]["state"] == "finished, 400 steps"
    assert text["Run"]["started"].endswith("at step 0")
    assert text["Run"]["resumed"].endswith("at step 200")
    assert "8 × cpu, 1 process, host " in text["Run"]["device"]
    assert "jax 0." in text["Run"]["versions"]
    assert text["Config"]["model"] == "name=llama embed_dim=128"
    assert text["Loss"]["tokens seen"] == "819,200, 2,048 a step"
    tail = np.mean([1.5 + 4 * math.exp(-step / 50) for step in (370, 380, 390, 400)])
    assert text["Loss"]["train/loss"] == f"{tail:.4f}, mean of the last 4 records"
    assert text["Loss"]["eval/bits_per_byte"] == "2.1000 at step 400, best 2.0000 at step 300"
    assert text["Speed"]["perf/tokens_per_sec"] == "1,205 median, 5th to 95th percentile 1,030 to 1,380"
    assert text["Speed"]["MFU"].startswith("50.0% (full attention FLOPs), 40.0% (causal); peak 0.2 TFLOP/s")
    assert text["Speed"]["MFU"].endswith("as a matmul measured here")
    assert text["Speed"]["memory/host_peak_gib"] == "1.40 at most"
    assert "Spikes" not in text and "Checkpoints" not in text


def test_a_run_in_progress_with_a_cut_off_line_and_nothing_but_metrics(tmp_path):
    write_run(tmp_path, steps=120)
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 130, "train/lo')
    assert shown(tmp_path)["Run"]["state"].startswith("at step 120 of 400 (30.0%), last record 0:0")
    (tmp_path / "config.json").write_text('{"model": {"na')
    (tmp_path / "run.json").unlink()
    text = shown(tmp_path)
    assert text["Run"]["state"].startswith("at step 120, last record 0:0")
    assert set(text) == {"Run", "Loss", "Speed"}


def test_data_that_was_not_used_as_it_is(tmp_path):
    workdir.save_config(tmp_path, ConfigDict({"data": {"text_len": 77}}))
    recalls = {f"eval/recall_{k}": k / 10 for k in (1, 5, 10)}
    records = [
        {"step": 1, "data/skipped": 1},
        {"step": 2, "data/skipped": 5, "data/texts_cut": 0.03} | recalls,
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    text = shown(tmp_path)
    cut = "3.0% since the last start, longer than data.text_len=77"
    assert text["Data"] == {"skipped": "5 broken examples", "texts cut": cut}
    assert list(text["Loss"]) == list(recalls)  # 10 after 5


def test_losses_that_are_not_finite_are_told(tmp_path):
    losses = [2.0] * 3 + [math.nan] * 4 + [math.inf] + [2.0] * 32
    write_run(tmp_path, losses=losses)
    text = shown(tmp_path)
    assert text["Loss"]["not finite"] == "5 records, the first at step 40"
    assert text["Loss"]["train/loss"].startswith("2.0000, ")
    report.plot_curves(tmp_path)
    write_run(tmp_path, losses=[math.nan] * 40)
    assert shown(tmp_path)["Loss"]["train/loss"].startswith("nan, ")
    report.plot_curves(tmp_path)


def test_an_empty_directory(tmp_path):
    assert shown(tmp_path) == {"Run": {"directory": str(tmp_path), "state": "no metrics yet"}}
    assert report.plot_curves(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_start_from_nothing_after_a_start(tmp_path):
    workdir.record_start(tmp_path, 0, num_params=1000)
    workdir.record_start(tmp_path, 0, num_params=1000)
    assert set(shown(tmp_path)["Run"]) >= {"started", "started anew"}


def test_a_start_beside_another_is_told(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(workdir.logging, "warning", lambda text, *values: told.append(text % values))
    lock = f"fcntl.flock(os.open({str(tmp_path)!r}, os.O_RDONLY), fcntl.LOCK_EX)"
    hold = f"import fcntl, os; {lock}; print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "1\n"
        workdir.record_start(tmp_path, 0, num_params=1000)
        assert len(told) == 1 and f"another process trains in {tmp_path}" in told[0]
        other.kill()
    for _ in range(2):  # the second after a rollback in the same process
        workdir.record_start(tmp_path, 0, num_params=1000)
    assert len(told) == 1


def test_parameters_are_those_of_the_newest_start(tmp_path):
    run = report.load_run(tmp_path)
    assert run.num_params is None
    run = dataclasses.replace(run, info={"starts": [{"num_params": 1}, {"num_params": 8030261248}]})
    assert report.config_lines(run) == [("parameters", "8,030,261,248")]


def test_checkpoints_are_listed_with_their_state(tmp_path):
    run = dataclasses.replace(
        report.load_run(tmp_path),
        checkpoints=[
            StepInfo(100, tmp_path, "damaged", 0, time.time()),
            StepInfo(2000, tmp_path, "complete", 3 * 2**20, time.time()),
        ],
    )
    (bad, bad_text), (good, good_text) = report.checkpoint_lines(run)
    assert (bad, good) == ("step 100", "step 2,000")
    assert bad_text.startswith("damaged, 0.0 MiB") and good_text.startswith("complete, 3.0 MiB")


# --- Spikes -------------------------------------------------------------------------------------------


def noisy_descent(n=1000):
    rng = np.random.default_rng(0)
    steps = 10 * np.arange(1, n + 1)
    # Uniform noise cannot reach 3.2 of its own deviations (at most 1.73): what is found is planted.
    return steps, 2 + 3 * np.exp(-steps / 2000) + 0.05 * rng.uniform(-1, 1, n)


def test_a_run_without_spikes_has_none():
    assert report.find_spikes(*noisy_descent()) == []


def test_planted_spikes_are_found_once_each():
    steps, losses = noisy_descent()
    losses[[300, 301, 600]] += 0.5
    losses[450] = np.nan
    found = report.find_spikes(steps, losses)
    assert [s.step for s in found] == [steps[300], steps[600]]
    before = losses[300 - 64 : 300]
    assert found[0].loss == losses[300]
    assert found[0].mean == pytest.approx(before.mean())
    assert found[0].sigmas == pytest.approx((losses[300] - before.mean()) / before.std())
    assert len(report.find_spikes(steps, losses, Policy(merge_steps=0))) == 3
    assert report.find_spikes(steps, losses, Policy(threshold=100)) == []
    assert report.find_spikes(steps, losses, Policy(min_history=700, window=700)) == []


def test_spikes_in_the_report(tmp_path):
    losses = 2 + 0.01 * np.sin(np.arange(40))
    losses[[20, 30]] += 1.0
    write_run(tmp_path, losses=losses)
    assert list(shown(tmp_path)["Spikes"]) == ["step 210", "step 310"]
    assert report.spike_lines(report.load_run(tmp_path), at_most=1)[1] == ("", "and 1 more")


def test_spikes_that_a_run_wrote_down(tmp_path):
    write_run(tmp_path)
    (tmp_path / "spikes").mkdir()
    first = {"tensor": "layers/mlp/up_proj/kernel/3", "step": 206, "value": 4.2}
    record = Spike(210, 3.0, 2.0, 5.0)._asdict() | {"first": first}
    files.write_json(tmp_path / "spikes" / "210.json", record)
    rollback = {"spike": {"step": 210}, "to": 100, "batches": [100, 300]}
    files.write_json(tmp_path / "spikes" / "rollbacks.json", [rollback])
    assert shown(tmp_path)["Spikes"] == {
        "step 210": "loss 3.0000, 5.0 σ above the mean 2.0000 before it; "
        "first layers/mlp/up_proj/kernel/3, RMS_t 4.20 4 steps before",
        "rolled back": "from step 210 to step 100, without batches 101 to 300",
    }


def test_the_policy_of_the_run_says_what_a_spike_is(tmp_path):
    losses = 2 + 0.01 * np.sin(np.arange(40))
    losses[20] += 1.0
    write_run(tmp_path, losses=losses)
    config = json.loads((tmp_path / "config.json").read_text())
    files.write_json(
        tmp_path / "config.json", config | {"spikes": {"threshold": 1000.0, "statistics": True}}
    )
    assert "Spikes" not in shown(tmp_path)


# --- Picture ------------------------------------------------------------------------------------------


def pixels(path, color):
    picture = imread(path)[..., :3]
    return int((np.abs(picture - np.array(to_rgb(color))).max(-1) < 0.02).sum())


def test_the_picture_shows_curves_evaluations_and_spikes(tmp_path):
    losses = 2 + 0.01 * np.sin(np.arange(40))
    write_run(tmp_path, losses=losses)
    path = report.plot_curves(tmp_path)
    assert path == tmp_path / "loss.png"
    assert pixels(path, report.BLUE) > 1000 and pixels(path, report.ORANGE) > 100
    assert pixels(path, report.RED) == 0
    losses[20] += 1.0
    write_run(tmp_path, losses=losses)
    assert pixels(report.plot_curves(tmp_path), report.RED) > 10


def test_the_picture_of_a_first_record(tmp_path):
    write_run(tmp_path, steps=10)
    report.plot_curves(tmp_path)


def test_smoothing_passes_over_spikes_and_keeps_the_first_value():
    values = np.array([9.0, 5, 4, 3, 3, 30, 3, 3, np.nan, 3, 2])
    got = report.smooth(values, 2)
    assert got[0] == 9.0
    assert got[5] == 3.0
    np.testing.assert_array_equal(report.smooth(values, 0), values)
    assert np.isfinite(got).all()
    assert np.isnan(report.smooth(np.full(3, np.nan), 1)).all()


# --- Extension and command ----------------------------------------------------------------------------


def test_a_new_section_and_a_new_panel_are_a_function_each(tmp_path, monkeypatch):
    write_run(tmp_path)
    drawn = []
    monkeypatch.setitem(report.SECTIONS, "FP8 health", lambda run: [("saturated", f"{run.step}")])
    monkeypatch.setattr(report, "PANELS", (*report.PANELS, lambda axes, run: drawn.append(run.step)))
    assert shown(tmp_path)["FP8 health"] == {"saturated": "400"}
    report.plot_curves(tmp_path)
    assert drawn == [400]


def test_the_command(tmp_path, capsys):
    write_run(tmp_path)
    report.main(["report", str(tmp_path)])
    out = capsys.readouterr().out
    assert out.startswith("Run\n") and out.endswith(f"Curves in {tmp_path / 'loss.png'}\n")
    with pytest.raises(SystemExit, match=r"^error: .*missing is not a directory"):
        report.main(["report", str(tmp_path / "missing")])
    with pytest.raises(SystemExit, match="--spike=999 is beyond the run, whose last record is of step 400"):
        report.main(["report", str(tmp_path)], spike=999)


def test_no_file_of_the_run_is_changed(tmp_path):
    write_run(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    report.plot_curves(tmp_path)
    report.report_text(report.load_run(tmp_path))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name in before} == before
    assert json.loads(before["run.json"])["starts"][1]["step"] == 200
