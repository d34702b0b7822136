"""The transcript at the top of docs/finetuning.md, with a tiny random model for the one that it names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxlp.runtime.safetensors import Tensors
from tests.fake_hub import FakeHub, serving
from tests.pretrained import write_llama

ROOT = Path(__file__).parent.parent
MODEL, RESULT = "HuggingFaceTB/SmolLM2-135M", "YOU/tuned"
COMMANDS = {
    "pip": 'true "$@"',
    "python": f'exec {sys.executable} "$@"',
    "maxlp": f'PYTHONPATH={ROOT} exec {sys.executable} -m maxlp "$@"',
    "hf": 'cp -r "$3" uploaded',
}


@pytest.fixture
def shell(tmp_path):
    """Runs a script in an empty folder, with this checkout as maxlp and a hub on this machine."""
    (tmp_path / "bin").mkdir()
    for name, line in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "work").mkdir()
    with serving(FakeHub()) as fake:
        env = os.environ | dict(
            PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
            HF_ENDPOINT=fake.url,
            HF_HOME=f"{tmp_path}/cache",
            JAX_NUM_CPU_DEVICES="1",
        )

        def run(script: str) -> str:
            done = subprocess.run(
                ["bash", "-e", "-c", script], cwd=tmp_path / "work", env=env, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield fake, run


def bits_per_byte(out: str) -> float:
    return float(re.findall(r"bits_per_byte +([\d.]+)", out)[-1])


@pytest.mark.full
def test_the_transcript_makes_a_model_that_loads_again(shell, tmp_path):
    fake, run = shell
    fake.push(MODEL, write_llama(tmp_path / "tiny"))
    script = re.search(r"```bash\n(.*?)```", (ROOT / "docs" / "finetuning.md").read_text(), re.S)[1]
    assert len(script.splitlines()) <= 24 and MODEL in script and RESULT in script
    out = run(script)
    assert "step 20/20" in out and "Note 7:" in out

    uploaded = tmp_path / "work" / "uploaded"
    before, after = Tensors(tmp_path / "tiny"), Tensors(uploaded)
    assert {name: before[name].shape for name in before} == {name: after[name].shape for name in after}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (uploaded / name).read_bytes() == (tmp_path / "tiny" / name).read_bytes()
    fake.push(RESULT, uploaded)
    again = run(
        f"maxlp train --from={RESULT} --workdir=again "
        "--config.data.source='jsonl:notes.jsonl?validation=0.1' "
        "--config.data.seq_len=64 --config.data.batch_size=4 --config.train.total_steps=1 "
        "--config.optimizer.learning_rate=1e-30 --config.optimizer.warmup_steps=0\n"
        "maxlp evaluate --workdir=again"
    )
    # 2^-8 is the rounding of a weight to bfloat16 in the export
    assert bits_per_byte(again) == pytest.approx(bits_per_byte(out), rel=2**-8)
