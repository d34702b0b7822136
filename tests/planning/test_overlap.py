"""With the flags of `launch/xla_flags`, TPU programs hide FSDP's gathers and scatter its gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Four layers of Llama 3.1 8B with a small vocabulary: the head, which nothing hides, is as small a part as
# in 32 layers with the whole vocabulary.
SMALL = ["--config.model.num_layers=4", "--config.model.vocab_size=8192", "--config.data.seq_len=8192"]


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(("chip", "topology"), [("v5p", "v5p:4x4x4"), ("v6e", "v6e:8x8")])
def test_gathers_are_hidden_and_gradients_scattered(chip, topology, tmp_path):
    """At least 80 % of the bytes of gathers beside matmuls, and no more sent than the closed form expects.

    The compiler may gather the weights of q and k once more (40 of 416 MiB a layer): 5 % of the bytes of a
    layer's two gathers and one scatter. An all-reduce in place of the scatter would be 33 %.
    """
    lines = (ROOT / "launch" / "xla_flags" / f"tpu_{chip}.txt").read_text().splitlines()
    command = [sys.executable, "-m", "maxlp.plan", "--config=configs/llama/8b.py", "--nosearch", *SMALL]
    command += [f"--topology={topology}", f"--json={tmp_path / 'plan.json'}", "--config.data.batch_size=64"]
    flags = " ".join(line for line in lines if not line.startswith("#"))
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    values = json.loads((tmp_path / "plan.json").read_text())
    compiled, estimate = (values[name]["collectives"] for name in ("compiled", "estimate"))
    gathers = [row for row in compiled if row["kind"] == "all-gather"]
    assert sum(row["overlapped"] for row in gathers) >= 0.8 * sum(row["sent"] for row in gathers)
    assert sum(row["sent"] for row in compiled) <= 1.1 * sum(row["sent"] for row in estimate)
