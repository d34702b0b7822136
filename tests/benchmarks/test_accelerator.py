"""The campaign of measurements: what it repeats, the failures it survives, reports of partial results."""

import json
import math
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.accelerator import __main__ as campaign
from benchmarks.accelerator import report
from benchmarks.accelerator.__main__ import Piece
from benchmarks.accelerator.results import (
    DONE,
    FAILED,
    INTERRUPTED,
    LEFT_OUT,
    RUNNING,
    OutOfTime,
    Result,
    load,
    path,
)
from maxlp.parallel import sharding
from maxlp.planning import search, topologies
from maxlp.run.settings import read
from tests.training_runs import ROOT, wait_until

CPU = {"platform": "cpu", "kind": "cpu", "count": 1, "memory": None, "tiny": True}
H200 = {"platform": "gpu", "kind": "NVIDIA H200", "count": 1, "memory": 1e11, "tiny": False}


def of_device(device: dict, **pieces: list[dict]) -> report.Results:
    return {name: {"status": DONE, "device": device, "rows": rows} for name, rows in pieces.items()}


def outcome(results: report.Results, target: str) -> list[str]:
    """The cells of a target in the report, without its name."""
    lines = [line.split(" | ") for line in report.targets(results).splitlines()]
    return next([cell.strip("| ") for cell in cells[1:]] for cells in lines if target in cells[0])


def steps(rate: float, **values: object) -> list[dict]:
    return [{"per_second": rate, "flags": "", "mfu": [0.6, 0.5], "peak": None, **values}]


def test_targets_are_judged_on_their_device_alone():
    rows = {"8b_fp8": steps(11_000.0), "8b_bf16": steps(10_000.0)}
    measured = of_device(H200, **rows)
    assert outcome(measured, "8B FP8, tokens/s: TorchTitan") == ["at least 10,938", "11,000", "met"]
    assert outcome(measured, "8B FP8, tokens/s: stretch")[2] == "**missed**"
    assert outcome(measured, "8B FP8 ÷ bfloat16") == ["at least 1.35", "1.10", "**missed**"]
    assert outcome(measured, "8B bfloat16, MFU") == ["at least 55.0%", "60.0%", "met"]
    assert outcome(measured, "1.5B FP8") == ["at least 73,000", "", "not measured"]
    for device in (CPU, H200 | {"kind": "NVIDIA H100 80GB HBM3"}, H200 | {"tiny": True}):
        assert outcome(of_device(device, **rows), "TorchTitan")[2] == "is for one H200"


def test_correctness_is_judged_on_every_device():
    equal = {"run": "llama", "equal": True, "first_loss": 2.0, "last_loss": 1.0}
    assert outcome(of_device(CPU, smoke=[equal, equal]), "resumed runs")[1:] == ["0", "met"]
    assert (
        outcome(of_device(CPU, smoke=[equal, equal | {"equal": False}]), "resumed runs")[2] == "**missed**"
    )
    wrong = {"what": "recipe", "kernel": "fp8", "case": "", "error": 0.5}
    assert outcome(of_device(CPU, kernels=[wrong]), "error against the CPU")[2] == "**missed**"


def test_what_fails_on_a_device_is_wrong_and_says_why():
    refused = {
        "what": "recipe",
        "kernel": "fp8",
        "case": "",
        "error": math.inf,
        "refused": "JaxRuntimeError: no",
    }
    for rows in ([refused], [refused | {"error": 1e-3}, {**refused, "error": math.nan}]):
        assert outcome(of_device(CPU, kernels=rows), "error against the CPU")[1:] == ["inf", "**missed**"]
    quantizers = [{"recipe": "fp8", "share": 0.9}, {"recipe": "mxfp8", "error": "no"}]
    quantized = outcome(of_device(H200, quantizers=quantizers), "slowest quantizer")
    assert quantized[1:] == ["0%", "**missed**"]
    failed = {"run": "llama", "equal": False, "error": "no GPU"}
    told = report.render(of_device(CPU, kernels=[refused], smoke=[failed]))
    assert "| recipe | fp8 |  | JaxRuntimeError: no |" in told and "| llama | **failed** | no GPU |" in told
    assert outcome(of_device(CPU, smoke=[failed]), "resumed runs")[1:] == ["1", "**missed**"]


def test_predictions_are_compared_with_what_was_measured():
    predicted = {"peak": 90e9, "seconds": 0.9}
    row = steps(1.0, run="8b_bf16", predicted=predicted, median_seconds=1.0)[0] | {"peak": 100e9}
    results = of_device(H200, **{"8b_bf16": [row], "predict": [{"run": "8b_bf16"}]})
    assert outcome(results, "planner: memory")[1:] == ["10%", "**missed**"]
    assert outcome(results, "planner: time")[1:] == ["10%", "met"]
    assert "| 8b_bf16 | 83.8 | 93.1 | -10% | 0.9 | 1 | -10% |" in report.render(results)


def test_a_report_of_a_part_names_what_is_missing_and_why():
    assert report.render({}) == "nothing is measured yet"
    failed = {"status": FAILED, "device": CPU, "rows": [], "error": "ValueError: no"}
    measured = of_device(CPU, **{"8b_fp8": steps(7.0)})
    measured["8b_fp8"]["commit"] = 40 * "a"
    told = report.render(measured | {"torch_8b_fp8": failed})
    assert "commit aaaaaaaaaaaa, unknown." in told.splitlines()[0]
    assert "### Llama 8B, and PyTorch" in told and "### Quantizers" not in told
    assert "| torch_8b_fp8 | failed | ValueError: no |" in told
    assert "| smoke | not run |  |" in told and "| 8b_fp8 | not run" not in told


def test_results_of_another_device_are_not_mixed_in():
    of_h100 = of_device(H200 | {"kind": "NVIDIA H100 80GB HBM3"}, **{"8b_bf16": steps(5_000.0)})
    of_h200 = of_device(H200, **{"8b_fp8": steps(11_000.0)})
    of_h100["8b_bf16"]["start"], of_h200["8b_fp8"]["start"] = "2026-11-01", "2026-11-02"
    for results in (of_h100 | of_h200, of_h200 | of_h100):
        told = report.render(results)
        assert "2026-11-02, NVIDIA H200" in told and "| 8B FP8 ÷ bfloat16 | at least 1.35 |  | not" in told
        assert "| 8b_bf16 | left out | of another device, NVIDIA H100 80GB HBM3 |" in told
        assert "5,000" not in told


def test_a_report_names_the_pieces_with_other_xla_flags():
    results = of_device(H200, **{"8b_fp8": steps(11_000.0), "8b_bf16": steps(10_000.0)})
    assert "XLA_FLAGS" not in report.render(results)
    results["8b_fp8"]["xla_flags"] = "--xla_gpu_enable_triton_gemm=false"
    assert "With XLA_FLAGS=`--xla_gpu_enable_triton_gemm=false`: 8b_fp8." in report.render(results)


def test_the_clocks_of_a_piece_are_those_while_the_gpu_was_busy():
    results = of_device(H200, **{"8b_fp8": steps(11_000.0), "8b_bf16": steps(10_000.0)})
    assert "Clocks" not in report.render(results)
    compiling, running = [345.0, 2619.0, 75.0, 30.0], [1980.0, 3201.0, 650.0, 60.0]
    results["8b_fp8"]["clocks"] = [compiling, compiling, running, running, [1755.0, 3201.0, 700.0, 71.0]]
    assert "| 8b_fp8 | 1,980 | 1,755 to 1,980 | 700 | 71 |" in report.render(results)


def test_the_worst_of_a_part_is_no_target_that_is_met():
    for target, piece, row in [
        ("resumed runs", "smoke", {"equal": True}),
        ("error against", "kernels", {"error": 1e-3}),
        ("slowest quantizer", "quantizers", {"recipe": "mxfp8", "share": 0.9}),
    ]:
        results = of_device(H200, **{piece: [row]})
        assert outcome(results, target)[2] == "met"
        for status in (RUNNING, INTERRUPTED, FAILED):
            results[piece]["status"] = status
            assert outcome(results, target)[2] == "met so far"


def test_recipes_are_compared_with_bfloat16_alone():
    row = {"what": "layer", "layer": "down", "flops": 1e12, "share": 0.5, "matmuls": ""}
    fp8, refused = row | {"recipe": "fp8", "ms": 2.0}, row | {"recipe": "bf16", "error": "out of memory"}
    assert "| fp8 | 1 (50%) |  |  |" in report.matmuls(of_device(H200, matmuls=[refused, fp8]))
    bf16 = row | {"recipe": "bf16", "ms": 3.0}
    assert "| fp8 | 1 (50%) | 1.50 |  |" in report.matmuls(of_device(H200, matmuls=[bf16, fp8]))


def test_the_memory_of_a_run_that_failed_is_not_that_of_the_next():
    from benchmarks.accelerator.training_runs import peak_bytes

    device = types.SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 7})
    assert [peak_bytes(device, before) for before in (None, 5, 7)] == [7, 7, None]
    assert peak_bytes(types.SimpleNamespace(memory_stats=lambda: None)) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_end_of_the_campaign_ends_its_piece(tmp_path, number):
    """Also by a lost connection; otherwise the piece would keep the device."""
    code = "; ".join(
        (
            "import signal, sys; from benchmarks.accelerator import __main__ as campaign",
            # Under nohup this process would inherit from the tests that SIGHUP is ignored.
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)",
            'campaign.PIECES = [campaign.Piece("hangs", "pieces:hangs", 1, 8, "hangs")]',
            f'campaign.PACKAGE = "tests.benchmarks"; campaign.find_device = lambda tiny: {CPU}',
            f'sys.argv[1:] = ["--out={tmp_path}"]; campaign.main()',
        )
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    while not (path(tmp_path, "hangs").exists() and load(path(tmp_path, "hangs"))["rows"]):
        assert process.poll() is None
        time.sleep(0.05)
    pieces = children(process.pid)
    process.send_signal(number)
    assert process.wait(30) == -number and pieces
    wait_until(lambda: not any(is_running(piece) for piece in pieces))


def is_running(pid: str) -> bool:
    """False also for a process that has ended without being waited for."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "zombie" not in status.read_text(encoding="utf-8")


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()


def test_an_interrupted_piece_goes_on_after_its_last_row(tmp_path, monkeypatch):
    (tmp_path / "device.json").write_text(json.dumps(H200))
    calls = []

    def attempt(limit: int, commit: str = "1234567890abcdef") -> Result:
        """Measures rows until there are this many, and leaves the file as an interruption would."""
        monkeypatch.setattr("benchmarks.accelerator.results.git_revision", lambda: commit)
        out = Result("piece", tmp_path, 60)
        for n in range(limit):
            out.measure(lambda n=n: calls.append(n) or {"value": 1 / (n - 1)}, shape=[n, 1], n=n)
        return out

    attempt(2)
    Result("piece", tmp_path, 60)  # stopped before it came to its first row
    out = attempt(3)
    assert calls == [0, 1, 2] and out.rows[1]["error"] == "ZeroDivisionError: division by zero"
    assert load(path(tmp_path, "piece"))["rows"] == out.rows and [row["n"] for row in out.rows] == [0, 1, 2]
    attempt(1, "of other code")
    assert calls.pop() == 0
    attempt(1)
    monkeypatch.setenv("XLA_FLAGS", "--other")
    attempt(1)
    assert [calls.pop(), calls.pop()] == [0, 0]
    for _ in range(2):
        attempt(1, "1234567890abcdef-dirty")
    assert calls == [0, 1, 2, 0, 0]
    attempt(1).write(DONE)
    attempt(1)  # --again
    assert calls == [0, 1, 2, 0, 0, 0, 0]


def test_variants_for_which_no_time_is_left_are_for_another_call(tmp_path, monkeypatch):
    from benchmarks.accelerator import learning

    (tmp_path / "device.json").write_text(json.dumps(H200 | {"tiny": True}))
    clock = [0.0]

    def train(changes: dict, data: None) -> dict[str, float]:
        clock[0] += 25
        return {"validation_loss": 3.0}

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learning, "Data", lambda *_: None)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    out = Result("fidelity_60m", tmp_path, 60)
    with pytest.raises(OutOfTime):
        learning.fidelity(out)
    assert [row["variant"] for row in out.rows] == ["bf16"]


def test_a_piece_without_a_measurement_has_failed(tmp_path):
    (tmp_path / "device.json").write_text(json.dumps(H200))
    command = [sys.executable, "-m", "benchmarks.accelerator.piece", "piece"]
    command += ["tests.benchmarks.pieces:every_row_fails", str(tmp_path), "60"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 1
    failed = load(path(tmp_path, "piece"))
    assert failed["status"] == FAILED and len(failed["rows"]) == 2
    assert failed["error"] == "every row failed: ZeroDivisionError: division by zero"


def test_every_piece_has_a_section():
    for piece in campaign.PIECES:
        assert report.section(piece.name, {piece.name: {"rows": []}}) == ""


def test_a_table_that_cannot_be_made_ends_nothing():
    assert campaign.table_of("smoke", {"rows": [{}]}).startswith("no table: KeyError(")


def test_results_of_another_device_or_an_interruption_do_not_count():
    done = {"status": DONE, "device": H200}
    assert campaign.is_finished(done, H200) and campaign.is_finished(done | {"status": FAILED}, H200)
    for status in (RUNNING, INTERRUPTED):
        assert not campaign.is_finished(done | {"status": status}, H200)
    assert not campaign.is_finished(done, CPU) and not campaign.is_finished(done, H200 | {"tiny": True})
    assert not campaign.is_finished({}, H200)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out=x", "--only=smoke,nope"], "--only=nope is unknown; the pieces: kernels, "),
        (["--out=x", "--minutes=0"], "--minutes=0 is not positive"),
        (["--out=x", "--minutes=nan"], "--minutes=nan is not positive"),
        ([f"--out={__file__}"], "test_accelerator.py is a file; give a folder"),
    ],
)
def test_mistakes_in_arguments_are_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accelerator", *arguments])
    with pytest.raises(SystemExit, match="2"):
        campaign.parse_args()
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


@pytest.mark.full
def test_every_run_of_full_size_fits_an_h200():
    from benchmarks.accelerator import training_runs

    for name in training_runs.RUNS:
        s = read(training_runs.make_config(training_runs.RUNS[name], tiny=False))
        first = search.find(s, training_runs.topology(H200 | {"memory": None}))
        assert first.layouts or first.numerics, name
    trained = {piece.name for piece in campaign.PIECES if piece.function == "training_runs:train"}
    assert trained == training_runs.RUNS.keys()


@pytest.mark.full
def test_bad_pieces_leave_the_others(tmp_path, monkeypatch, capsys):
    names = ("good", "fails", "left_out", "runs_out", "hangs", "dies")
    limit = dict(hangs=0.25)  # minutes; those that end also do on a busy machine
    pieces = [Piece(name, f"pieces:{name}", 0.1, limit.get(name, 5), name) for name in names]
    monkeypatch.setattr(campaign, "PIECES", pieces)
    monkeypatch.setattr(campaign, "PACKAGE", "tests.benchmarks")
    monkeypatch.setattr(campaign, "find_device", lambda tiny: CPU)
    monkeypatch.setattr(report, "section", lambda *_: "")
    monkeypatch.setattr(sys, "argv", ["accelerator", f"--out={tmp_path}"])

    def statuses() -> dict[str, str]:
        return {name: load(path(tmp_path, name))["status"] for name in names}

    assert campaign.main() == 1
    assert statuses() == dict(
        good=DONE, fails=FAILED, left_out=LEFT_OUT, runs_out=INTERRUPTED, hangs=FAILED, dies=FAILED
    )
    failed = load(path(tmp_path, "fails"))
    assert failed["error"] == "ValueError: two\nlines" and failed["rows"] == [{"run": "half"}]
    assert failed["log"][-2:] == ["ValueError: two", "lines"]
    hung = load(path(tmp_path, "hangs"))
    assert hung["error"] == "stopped after 15 s" and hung["rows"] == [{"run": "half"}]
    assert load(path(tmp_path, "dies"))["error"] == "exit code -6"
    good = load(path(tmp_path, "good"))
    assert good["versions"]["jax"] and good["device"] == CPU and good["command"] and "clocks" in good
    told = capsys.readouterr().out
    assert "failed: fails, hangs, dies" in told and "for lack of time: runs_out\n" in told

    before = {name: path(tmp_path, name).stat().st_mtime_ns for name in names}
    interrupted = json.loads(path(tmp_path, "good").read_text()) | {"status": RUNNING}
    path(tmp_path, "good").write_text(json.dumps(interrupted))
    assert campaign.main() == 1  # those that failed stay, and only what was interrupted is repeated
    after = {name: path(tmp_path, name).stat().st_mtime_ns for name in names}
    repeated = {name for name in names if before[name] != after[name]}
    assert repeated == {"good", "runs_out"} and statuses()["good"] == DONE


@pytest.mark.full
def test_a_piece_that_the_end_of_the_minutes_stops_is_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "PIECES", [Piece("hangs", "pieces:hangs", 0.01, 8, "hangs")])
    monkeypatch.setattr(campaign, "PACKAGE", "tests.benchmarks")
    monkeypatch.setattr(campaign, "find_device", lambda tiny: H200)
    monkeypatch.setattr(report, "section", lambda *_: "")
    monkeypatch.setattr(sys, "argv", ["accelerator", f"--out={tmp_path}", "--minutes=0.2"])
    for _ in range(2):
        assert campaign.main() == 0
        result = load(path(tmp_path, "hangs"))
        assert result["status"] == INTERRUPTED and result["rows"] == [{"run": "half"}]
        told = capsys.readouterr().out
        assert "interrupted after 12 s: no time was left" in told
        assert told.rstrip().endswith("left for another call, for lack of time: hangs")
    assert "| hangs | interrupted | no time was left |" in report.render({"hangs": result})


def test_other_settings_are_searched_only_for_a_run_that_does_not_fit(tmp_path, monkeypatch):
    from benchmarks.accelerator import training_runs

    memories, measured = [], []

    def find(s, topology):
        memories.append(topology.chip.memory)
        remat = {"model.remat": "dots" if len(set(memories)) == 1 else "block"}
        best = search.Candidate(remat, (), remat, 0.9 * topology.chip.memory, 1.0, 1.0, 1.0)
        return search.Found([best], [], None, 1)

    def measure(s):
        measured.append(s.model.remat)
        return {"refused": "too large"} if s.model.remat == "dots" else {"per_second": 1.0}

    (tmp_path / "device.json").write_text(json.dumps(H200))
    monkeypatch.setattr(search, "find", find)
    monkeypatch.setattr(training_runs, "measure", measure)
    monkeypatch.setattr(training_runs, "RUNS", {"8b_bf16": training_runs.RUNS["8b_bf16"]})
    training_runs.predict(Result("predict", tmp_path, 60))
    assert len(memories) == 1
    out = Result("8b_bf16", tmp_path, 60)
    training_runs.train(out)
    assert measured == ["dots", "block"] and [row.get("per_second") for row in out.rows] == [None, 1.0]
    assert out.rows[0]["predicted"]["peak"] == 0.9e11 and memories[-1] == 0.85 * 0.9e11


@pytest.mark.parametrize("error", [1e-3, 0.5, math.inf, math.nan])
def test_a_llama_has_the_attention_of_cudnn_where_ours_fails(error, tmp_path):
    from benchmarks.accelerator import training_runs

    (tmp_path / "device.json").write_text(json.dumps(H200))
    row = {"what": "attention", "kernel": "flash", "case": "causal", "error": error}
    path(tmp_path, "kernels").write_text(json.dumps({"device": H200, "rows": [row | {"error": 0}, row]}))
    found = {
        name: read(training_runs.config_for_device(Result(name, tmp_path, 60))).model.attention
        for name in ("8b_fp8", "clip_b16")
    }
    assert found == {"8b_fp8": "auto" if error == 1e-3 else "cudnn", "clip_b16": "auto"}


def test_a_gpu_that_jax_does_not_find_is_no_cpu_run(monkeypatch):
    found = subprocess.CompletedProcess([], 0, json.dumps({"platform": "cpu"}))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: found)
    monkeypatch.setattr(campaign.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(SystemExit, match="JAX finds no GPU"):
        campaign.find_device(tiny=False)
    assert campaign.find_device(tiny=True)["tiny"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert campaign.find_device(tiny=False)["tiny"]


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_users_share_of_memory_is_the_only_one(name, monkeypatch):
    """With both names JAX refuses to start on a GPU."""
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert campaign.environment(shares=False)["XLA_CLIENT_MEM_FRACTION"] == "0.95"
    monkeypatch.setenv(name, "0.5")
    found = campaign.environment(shares=False)
    assert [(key, found[key]) for key in found if key.endswith("MEM_FRACTION")] == [(name, "0.5")]


def test_kernels_and_runs_that_fail_leave_the_others(tmp_path, monkeypatch):
    from benchmarks.accelerator import checks

    def refuses(*_):
        raise NotImplementedError("not on\nthis device")

    def resumed(family, folder, tiny):
        return {"equal": True} if family == "clip" else refuses()

    (tmp_path / "device.json").write_text(json.dumps(CPU))
    monkeypatch.setattr(checks, "resumed", resumed)
    monkeypatch.setenv("XLA_FLAGS", "")  # is changed for the runs
    out = Result("kernels", tmp_path, 60)
    checks.compare(out, [np.ones(1)], refuses, what="recipe", kernel="fp8", case="")
    checks.compare(out, [np.ones(1)], lambda: [np.ones(1)], what="recipe", kernel="bf16", case="")
    assert [row["error"] for row in out.rows] == [math.inf, 0.0]
    assert out.rows[0]["refused"] == "NotImplementedError: not on this device"
    out = Result("smoke", tmp_path, 60)
    with pytest.raises(AssertionError, match="resumed runs: not on this device"):
        checks.smoke(out)
    assert [(row["run"], row["equal"]) for row in out.rows] == [("llama", False), ("clip", True)]


@pytest.mark.parametrize(
    ("name", "function", "first"),
    [
        ("quantizers", "quantizers", "copy_bandwidth"),
        ("attention", "time_attention", "matmul_rate"),
        ("matmuls", "matmuls", "matmul_rate"),
    ],
)
def test_a_piece_whose_reference_fails_says_why(name, function, first, tmp_path, monkeypatch):
    from benchmarks.accelerator import tables

    (tmp_path / "device.json").write_text(json.dumps(CPU))
    monkeypatch.setattr(tables, first, lambda tiny: 1 / 0)
    out = Result(name, tmp_path, 60)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        getattr(tables, function)(out)
    assert "refused" in report.render({name: load(path(tmp_path, name))})


def test_the_measured_block_is_that_of_the_model():
    """It quantizes the shared input of the gate and up projections once."""
    from benchmarks.accelerator import tables

    function, args, _ = tables.swiglu(tables.in_training("fp8_delayed"), 32, 16, 48)
    text = str(jax.make_jaxpr(function)(*args))
    assert len(re.findall(r":f8_e4m3fn\[1,32,16\] = convert_element_type", text)) == 1


@pytest.mark.parametrize(("make", "sizes"), [("layer", (32, 16, 8)), ("swiglu", (32, 16, 48))])
def test_the_measured_layers_keep_the_amaxes_of_delayed_scales(make, sizes):
    from benchmarks.accelerator import tables

    function, args, _ = getattr(tables, make)(tables.in_training("fp8_delayed"), *sizes)
    _, state = jax.jit(function)(*args)
    histories = {path[-1]: value for path, value in nnx.to_flat_state(state) if "grad" not in path[-1]}
    assert set(histories) == {"input_amax_history", "kernel_amax_history"}
    assert all(jnp.max(history[...]) > 0 for history in histories.values())


@pytest.mark.aot("jax_cuda13_plugin")
def test_matmuls_of_the_resumed_runs_are_cublas():
    """With deterministic operations, XLA 0.11 finds no Triton kernel for a matmul, and fails to compile."""
    from benchmarks.accelerator import checks

    mesh = sharding.make_mesh(devices=topologies.devices(topologies.parse("h100:1x1")))
    x = jax.ShapeDtypeStruct((2048, 192), jnp.float32, sharding=sharding.replicated(mesh))
    lowered = jax.jit(lambda x: jax.nn.relu(x.T @ x)).trace(x).lower(lowering_platforms=("cuda",))
    flags = dict(flag.removeprefix("--").split("=") for flag in checks.DETERMINISTIC.split())
    text = lowered.compile({name: value == "true" for name, value in flags.items()}).as_text()
    assert text is not None and "__cublas$lt$matmul" in text and "triton" not in text


def test_a_piece_for_which_no_time_is_left_does_not_begin(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "PIECES", [Piece("long", "pieces:good", 5, 8, "long")])
    for device, minutes in (H200, 4), (CPU, 1e-9):
        monkeypatch.setattr(campaign, "find_device", lambda tiny, device=device: device)
        monkeypatch.setattr(sys, "argv", ["accelerator", f"--out={tmp_path}", f"--minutes={minutes}"])
        assert campaign.main() == 0 and not path(tmp_path, "long").exists()
        assert "left for another call, for lack of time: long" in capsys.readouterr().out


def test_a_damaged_result_is_reported_before_any_piece_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["accelerator", f"--out={tmp_path}"])
    monkeypatch.setattr(campaign, "find_device", lambda tiny: pytest.fail("the call went on"))
    path(tmp_path, campaign.PIECES[-1].name).write_text("{")
    with pytest.raises(ValueError, match=r"fidelity_130m\.json is damaged .*; delete it"):
        campaign.main()


ALL = [piece.name for piece in campaign.PIECES]
ONE_OF_EACH = [
    *("smoke", "kernels", "predict", "8b_fp8", "torch_8b_bf16", "quantizers", "attention", "matmuls"),
    *("1b_bf16", "clip_h14_fp8", "contrastive", "fidelity_60m"),
]


def test_ci_runs_a_piece_of_each_function():
    functions = {piece.name: piece.function for piece in campaign.PIECES}
    assert {functions[name] for name in ONE_OF_EACH} == set(functions.values())


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ONE_OF_EACH, id="one of each", marks=pytest.mark.full),
        pytest.param(ALL, id="all", marks=pytest.mark.slow),
    ],
)
def test_the_campaign_runs_at_tiny_sizes(names, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    flags = [f"--out={tmp_path}", f"--only={','.join(names)}"]
    command = [sys.executable, "-m", "benchmarks.accelerator", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    results = {name: load(path(tmp_path, name)) for name in names}
    assert {name for name, one in results.items() if one["status"] != DONE} <= {
        "torch_8b_bf16",
        "torch_8b_fp8",
    }
    told = report.render(results)
    assert all(f"### {title}" in told for title in report.SECTIONS)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.count("already") == len(names)
