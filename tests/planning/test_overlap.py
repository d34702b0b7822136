"""Compilers overlap the collectives of FSDP and ring attention, with the options in docs/launching.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Four layers of Llama 3.1 8B with a small vocabulary: the head, which nothing overlaps, is as small a
# part as in 32 layers with the whole vocabulary.
SMALL = ["--config.model.num_layers=4", "--config.model.vocab_size=8192", "--config.data.seq_len=8192"]
GATHERED_AT_ONCE = "--xla_gpu_all_gather_combine_threshold_bytes=1073741824"


def plan(tmp_path: Path, topology: str, *changes: str, **environment: str) -> dict:
    command = [sys.executable, "-m", "maxlp.plan", "--config=configs/llama/8b.py", "--nosearch", *SMALL]
    command += [f"--topology={topology}", f"--json={tmp_path / 'plan.json'}", *changes]
    # The flags of tests/conftest.py are for programs that run here.
    env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)} | environment
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    return json.loads((tmp_path / "plan.json").read_text())


def hidden(plan: dict, kind: str) -> float:
    """The share of the bytes of a kind of collective that is overlapped with a matmul or a kernel."""
    rows = [row for row in plan["compiled"]["collectives"] if row["kind"] == kind]
    return sum(row["overlapped"] for row in rows) / sum(row["sent"] for row in rows)


@pytest.mark.slow  # these compilations take 4 and 15 minutes
@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(("chip", "topology"), [("v5p", "v5p:4x4x4"), ("v6e", "v6e:8x8")])
def test_gathers_are_hidden_and_gradients_scattered(chip, topology, tmp_path):
    """At least 80 % of gathered bytes are overlapped with matmuls, and no more is sent than estimated.

    The compiler may gather the weights of q and k once more (40 of 416 MiB a layer): 5 % of the bytes of a
    layer's two gathers and one scatter. An all-reduce in place of the scatter would be 33 %.
    """
    lines = (ROOT / "launch" / "xla_flags" / f"tpu_{chip}.txt").read_text().splitlines()
    flags = " ".join(line for line in lines if not line.startswith("#"))
    values = plan(tmp_path, topology, "--config.data.batch_size=64", LIBTPU_INIT_ARGS=flags)
    assert hidden(values, "all-gather") >= 0.8
    compiled, estimate = (values[name]["collectives"] for name in ("compiled", "estimate"))
    assert sum(row["sent"] for row in compiled) <= 1.1 * sum(row["sent"] for row in estimate)


@pytest.mark.aot("jax_cuda13_plugin")
def test_level_o1_hides_gathers_and_gradients_between_gpus(tmp_path):
    """At least 80 % of the bytes of both are overlapped, for less than 5 % more memory."""
    changes = ["--config.data.batch_size=8", "--config.model.num_layers=32"]
    o1 = plan(tmp_path, "h100:1x8", *changes, JAX_OPTIMIZATION_LEVEL="O1", XLA_FLAGS=GATHERED_AT_ONCE)
    assert min(hidden(o1, "all-gather"), hidden(o1, "reduce-scatter")) >= 0.8
    default = plan(tmp_path, "h100:1x8", *changes)
    assert hidden(default, "reduce-scatter") < 0.8
    assert o1["compiled"]["peak"] <= 1.05 * default["compiled"]["peak"]


@pytest.mark.aot("jax_cuda13_plugin")
def test_the_ring_is_hidden_between_gpus(tmp_path):
    """XLA runs one permute at a time: one for the values would wait for that of the keys."""
    ring = ["--config.model.attention=ring", "--config.mesh.context=8", "--config.mesh.fsdp=1"]
    ring += ["--config.data.seq_len=131072", "--config.data.batch_size=1"]
    assert hidden(plan(tmp_path, "h100:1x8", *ring), "collective-permute") >= 0.8
