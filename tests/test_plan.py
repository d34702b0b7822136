"""The command: what it prints and writes, its errors, and real compilers where they are installed."""

import dataclasses
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import safetensors.numpy

from maxlp import plan
from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.families.llama.presets import llama
from maxlp.planning import search, topologies
from maxlp.planning.cost_model import Work
from maxlp.planning.hlo import Collective
from maxlp.run.config import ConfigError
from maxlp.run.settings import read
from tests.commands import run_command
from tests.pretrained import write_llama
from tests.run.fixtures import changed, load

ROOT = Path(__file__).parent.parent


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "maxlp.plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=480)


@pytest.mark.full
def test_command_without_a_compiler(tmp_path):
    """405B on 1024 chips: the printed plan, and the files."""
    done = run(
        "--config=configs/llama/405b.py",
        "--topology=v5p:8x8x16",
        "--estimate_only",
        f"--json={tmp_path / 'plan.json'}",
        f"--plot={tmp_path / 'plan.png'}",
        "--config.data.source=text:/my data/*.txt",
        "--config.optimizer.decay_fraction=None",
    )
    assert done.returncode == 0, done.stderr
    assert "1,024 × TPU v5, mesh fsdp 128 × tensor 8" in done.stdout
    assert "405,853,388,800 parameters" in done.stdout and "\nfits: " in done.stdout
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["estimate"]["seconds"] < 1  # arithmetic; the shapes of the state come before
    norms = (2 * 126 + 1) * 16384  # which each device has as a whole
    parameters = 4 * ((405853388800 - norms) / 1024 + norms)
    assert values["estimate"]["memory"]["parameters"] == pytest.approx(parameters)
    again = ["--config=configs/llama/405b.py", "--topology=v5p:8x8x16"]
    again += ["--config.data.source=text:/my data/*.txt", "--config.optimizer.decay_fraction=None"]
    assert shlex.split(values["command"]) == ["python", "-m", "maxlp.plan", *again]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_plan_from_weights_has_their_sizes(tmp_path):
    weights = write_llama(tmp_path)
    changes = ["--config.data.seq_len=128"]
    done = run(
        f"--from={weights}",
        "--topology=h100:1x1",
        "--estimate_only",
        f"--json={tmp_path}/plan.json",
        *changes,
    )
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "plan.json").read_text())
    saved = safetensors.numpy.load_file(weights / "model.safetensors")
    assert values["parameters"] == sum(tensor.size for tensor in saved.values())
    again = ["--config=llama/finetune", f"--from={weights}", "--topology=h100:1x1", *changes]
    assert shlex.split(values["command"]) == ["python", "-m", "maxlp.plan", *again]


def test_errors_are_one_line():
    for args, message in (
        (["--config=llama/8b", "--topology=v9:4x4"], "'v9' is unknown; one of v4, v5e"),
        (["--config=llama/8b"], "--topology is missing; see --list_topologies\n"),
        (["--topology=v5e:4x4"], "--config is missing; presets: clip/b16, "),
    ):
        done = run_command("plan", *args, "--estimate_only")
        assert done.returncode == 2 and message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "path", "compiles", "message"),
    [
        ("json", "/nowhere/plan.json", False, "--json=/nowhere/plan.json: the folder does not exist"),
        ("json", ".", True, "--json=. is a folder"),
        ("plot", "plan.gif", False, "--plot=plan.gif must end in one of .png, .svg, .pdf"),
        ("plot", "", True, "--plot= is a folder; give the name of a file"),
        ("hlo", "step.txt", False, "--hlo=step.txt needs a compiled program"),
    ],
)
def test_files_that_cannot_be_written_are_refused_at_the_start(name, path, compiles, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan.check_files({"json": None, "hlo": None, "plot": None, name: path}, compiles=compiles)


def settings(c, **changes):
    with c.unlocked():
        c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return read(plan.with_placeholder_data(c))


def test_placeholders_replace_only_what_is_unset():
    c = llama()
    c.data.tokenizer = "bytes"
    copy = plan.with_placeholder_data(c)
    assert (copy.data.source, copy.data.tokenizer) == ("unread", "bytes") and c.data.source is None


def test_a_config_that_training_refuses_has_no_plan():
    c = importlib.import_module("configs.llama.8b").get_config()
    s = settings(c, data__seq_len=16384, model__max_seq_len=8192)
    refused = r"^config.data.seq_len=16384 is above model.max_seq_len=8192.*; set config.data.seq_len=8192"
    with pytest.raises(ConfigError, match=refused):
        plan.make_plan(s, topologies.parse("v5p:2x2x4"), compiles=False)


@pytest.mark.full
def test_a_clip_that_does_not_fit_is_split(capsys):
    """b32 with the activations of 4,096 images a device does not fit on v5e; split, it does."""
    s = settings(clip(**CLIP_SIZES["b32"]), model__remat="none", data__batch_size=32768)
    topology = topologies.parse("v5e:2x4")
    values = plan.make_plan(s, topology, compiles=False)
    assert values["estimate"]["memory"]["batch"] == 4096 * (224 * 224 * 3 + 77 * 4)
    assert values["estimate"]["peak"] == sum(values["estimate"]["memory"].values())
    assert not values["fits"] and "images/s" in plan.report(values)
    found = plan.search_settings(s, topology, compiles=False)
    assert found is not None and found["layouts"] and "fastest of" in capsys.readouterr().out
    assert plan.make_plan(search.changed(s, found["layouts"][0]["changes"]), topology, compiles=False)[
        "fits"
    ]


def test_a_plan_warns_of_a_rank_that_is_cut():
    """The keys of a Llama 3 8B have 1,024 columns."""
    c = importlib.import_module("configs.llama.8b").get_config("galore=1536")
    s = read(plan.with_placeholder_data(c))
    values = plan.make_plan(s, topologies.parse("h100:1x8"), compiles=False)
    assert "warning: optimizer.galore.rank=1536 is cut to the short side of 2 of 7" in plan.report(values)


@pytest.mark.parametrize(
    ("choices", "changes", "left_out"),
    [
        ("optimizer=soap", {}, ["eigh", "qr"]),
        ("galore=8", {}, ["svd"]),
        ("galore=8", {"optimizer.galore.basis": "randomized"}, ["eigh", "qr"]),
        ("optimizer=muon", {}, []),
        ("optimizer=adamw", {}, []),
    ],
)
def test_a_plan_names_the_decompositions_that_its_time_leaves_out(choices, changes, left_out):
    name, _, value = choices.partition("optimizer=")
    s = read(changed(load("debug", name), changes | ({"optimizer.name": value} if value else {})))
    values = plan.make_plan(s, topologies.parse("h100:1x1"), compiles=False)
    assert values["not_timed"] == left_out
    line = f"  without the optimizer's decompositions ({', '.join(left_out)})\n"
    assert (line in plan.report(values)) == bool(left_out)


@pytest.mark.parametrize("family", ["llama", "clip"])
def test_a_plan_warns_of_a_format_that_the_chip_lacks(family):
    c = importlib.import_module(f"configs.{family}.debug").get_config("precision=mxfp8")
    for chip, lacks in (("h100", True), ("b200", False)):
        values = plan.make_plan(read(c), topologies.parse(f"{chip}:1x1"), compiles=False)
        assert ("does not multiply the formats of mxfp8 (fwd" in plan.report(values)) == lacks
        flops = values["estimate"]["work"]["flops"]
        rates = topologies.CHIPS[chip].peak("bfloat16"), topologies.CHIPS[chip].peak("mxfp8")
        seconds = flops["bfloat16"] / rates[0] + flops["mxfp8"] / rates[1]
        assert values["estimate"]["time"]["compute"] == pytest.approx(seconds)
        assert (rates[0] == rates[1]) == lacks


def candidate(seconds: float, changes: dict, *numerics: str) -> search.Candidate:
    layout = {
        "mesh": {"fsdp": 8},
        "kernel": "xla",
        "model.remat": "block",
        "train.release_gradients": False,
        "train.microbatches": 4,
    }
    return search.Candidate(changes, numerics, layout, 2.0**30, seconds, seconds, 1e6 / seconds)


def test_a_candidate_that_does_not_compile_is_reported_and_skipped(capsys, monkeypatch):
    def refuse(*_):
        raise ValueError("the compiler rejects it")

    monkeypatch.setattr(plan.compiled, "compile_step", refuse)
    monkeypatch.setattr(plan.topologies, "devices", lambda _: jax.devices())
    found = search.Found([candidate(1.0, {"model.remat": "block"})], [], None, 7)
    monkeypatch.setattr(plan.search, "find", lambda *_: found)
    s = settings(clip(**CLIP_SIZES["b32"]))
    assert plan.search_settings(s, topologies.parse("v5e:2x4"), compiles=True) == dataclasses.asdict(found)
    message = "does not compile: --config.model.remat=block: the compiler rejects it"
    assert message in capsys.readouterr().out


def test_results_of_a_search_fit_80_columns_and_name_what_changes_the_numerics():
    topology, key = topologies.parse("h100:1x8"), "optimizer.galore"
    layouts = [candidate(1.0, {"train.microbatches": 4, "model.remat": "block"}), candidate(2.0, {})]
    numerics = [
        candidate(0.5, {key: {"rank": 8, "side": "long"}}, "galore=8", "batch_size=2", "clip_norm=0")
    ]
    fits = plan.found_report(search.Found(layouts, numerics, None, 9), topology, "tokens")
    only = plan.found_report(search.Found([], numerics, None, 9), topology, "tokens")
    nothing = plan.found_report(search.Found([], [], numerics[0], 9), topology, "tokens")
    assert all(len(line) <= 80 for text in (fits, only, nothing) for line in text.splitlines())
    assert "faster only with other numerics" in fits and "fits only with other numerics" in " ".join(
        only.split()
    )
    assert "--config.train.microbatches=4 --config.model.remat=block" in fits
    assert "galore=8 + batch_size=2 + clip_norm=0" in only and "--config.optimizer.galore.rank=8" in only
    assert "nothing fits" in nothing and "GiB too much" in nothing and "--config" not in nothing
    as_is = plan.found_report(search.Found(layouts[1:], [], None, 9), topology, "tokens")
    assert "The first is the config as it is." in as_is


@pytest.mark.full
def test_a_config_whose_mesh_does_not_exist_is_searched_nevertheless(tmp_path):
    """70B has a tensor axis of 8; on 4 chips the search finds another mesh, and the message is printed."""
    path = tmp_path / "plan.json"
    done = run("--config=configs/llama/70b.py", "--topology=h200:1x4", "--estimate_only", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert "mesh.tensor=8: the number of devices, 4, is not a multiple of 8" in done.stdout
    assert "fits only with other numerics" in " ".join(done.stdout.split())
    values = json.loads(path.read_text())
    assert "mesh.tensor=8" in values["refused"] and values["search"]["numerics"]


def test_a_config_that_cannot_run_anywhere_is_an_error():
    options = ["--topology=h100:1x1", "--estimate_only", "--config.data.seq_len=262144"]
    done = run_command("plan", "--config=configs/llama/debug.py", *options)
    assert done.returncode == 2 and "config.data.seq_len=262144 is above" in done.stderr
    assert done.stderr.count("\n") == 1


def test_listing_names_every_chip():
    assert all(name in topologies.listing() for name in topologies.CHIPS)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        pytest.param("v5e:2x2", "tpu_custom_call", marks=pytest.mark.aot("libtpu")),
        pytest.param("h100:1x4", "__gpu$xla.gpu.triton", marks=pytest.mark.aot("jax_cuda13_plugin")),
    ],
)
def test_compiled_for_machines_that_are_not_available(name, kernel, tmp_path):
    """The step of `maxlp.train`, by the real compilers: kernels, memory of the state, collectives."""
    done = run(
        "--config=configs/llama/debug.py",
        f"--topology={name}",
        "--config.model.dtype=bfloat16",
        f"--json={tmp_path / 'plan.json'}",
        f"--plot={tmp_path / 'plan.png'}",
    )
    assert done.returncode == 0, done.stderr
    assert "\nfits: " in done.stdout
    values = json.loads((tmp_path / "plan.json").read_text())
    compiled = values["compiled"]
    assert any(target.startswith(kernel) for target in compiled["kernels"])
    held = sum(values["estimate"]["memory"][part] for part in ("parameters", "optimizer", "batch"))
    assert held == pytest.approx(compiled["memory"]["arguments"], rel=0.1)  # TPU pads small arrays
    assert {axis for row in compiled["collectives"] for axis in row["axes"]} == {"fsdp"}
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_step_that_does_not_compile_is_one_line(monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: shape\n  overflow")

    monkeypatch.setattr(plan.compiled, "compile_step", fail)
    monkeypatch.setattr(plan.topologies, "devices", lambda _: jax.devices())
    s, topology = read(load("debug")), topologies.parse("h100:1x8")
    with pytest.raises(
        ValueError, match=r"cannot compile this step for h100:1x8: INTERNAL: shape overflow;"
    ):
        plan.compile_for(s, topology.machine(s), topology)


def timed(topology, work: Work, *collectives: Collective, full: float = 1.0) -> dict:
    """What a plan of 8 devices and 8 tokens a step says about time; ``full``: FLOPs per token."""
    values: dict = dict(mesh={"fsdp": 8}, devices=8, units_per_step=8, unit="tokens", not_timed=[])
    values["flops_per_unit"] = {"full": full, "causal": full}
    values["chip"] = dataclasses.asdict(topology.chip) | {"peak_bfloat16": topology.chip.peak()}
    return values | {"compiled": plan.timing(values, work, collectives, topology, 1)}


def test_the_expected_mfu_counts_exposed_collectives():
    """A GPU computes for half a second, then waits for a tenth."""
    h100 = topologies.parse("h100:1x8")
    gather = Collective("all-gather", ("fsdp",), 8, int(h100.chip.links * 0.1 * 8 / 7), 1, overlapped=False)
    values = timed(
        h100, Work({"bfloat16": 0.5 * h100.chip.peak()}, 0.0), gather, full=0.3 * h100.chip.peak()
    )
    assert values["compiled"]["time"]["expected"] == pytest.approx(0.6)
    assert values["compiled"]["mfu"]["full"] == pytest.approx(0.3 / 0.6)
    assert plan._time_lines(values, "compiled")[-1].startswith("  at most 13 tokens/s, MFU 50.0%")


def test_large_numbers_of_bytes_and_seconds_have_no_exponent():
    """A step of several minutes that moves 5,000 TB on each device."""
    h100 = topologies.parse("h100:1x8")
    gather = Collective("all-gather", ("fsdp",), 8, 2**51, 1, overlapped=False)
    values = timed(h100, Work({"bfloat16": 1234 * h100.chip.peak()}, 5e15), gather)
    row, *rest = plan._collective_lines(values, "compiled")[2:]
    assert row.split()[3] == "1,840,000"
    lines = plan._time_lines(values, "compiled")
    assert lines[1].startswith("  compute    1,230 ") and "about 5,000,000 GB at 3,352 GB/s" in lines[3]
    shown = " ".join([row, *rest, *lines])
    assert re.findall(r"\S*e\+\d\S*", shown) == ["1.22e+18"], "of FLOPs"
    assert "14,400" in "".join(plan._candidate_lines([candidate(14416.0, {})], "tokens"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("h100:1x8", "  host         0.5   32 GB from and to its memory at 64 GB/s"),
        ("v5p:2x2x2", "  host           ?   32 GB from and to its memory at an unpublished speed"),
    ],
)
def test_traffic_with_the_host_has_a_line(name, line):
    """Without it, nothing would show what a "host bound" step waits for."""
    values = timed(topologies.parse(name), Work({"bfloat16": 1.0}, 1.0, host=32e9))
    assert any(text.startswith(line) for text in plan._time_lines(values, "compiled"))


def test_what_does_not_run_in_every_step_is_apart():
    h100 = topologies.parse("h100:1x8")
    usual = Collective("all-gather", ("fsdp",), 8, 2**33, 1, overlapped=True)
    rare = dataclasses.replace(usual, bytes=2**34, rare=True)
    work = Work({"bfloat16": 1.0}, 0.0)
    values = timed(h100, work, usual, rare)
    assert values["compiled"]["time"] == timed(h100, work, usual)["compiled"]["time"]
    row, last = plan._collective_lines(values, "compiled")[2:]
    assert row.split()[3] == "7" and last.startswith("  not in every step") and last.split()[-2] == "14"
