"""Whole runs of the training command that a context or a stage axis changes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.run_outputs import losses

ROOT = Path(__file__).parents[2]
SMALL = (
    "--config=configs/llama/debug.py",
    "--config.model.embed_dim=32",
    "--config.model.num_layers=4",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=2",
    "--config.model.head_dim=16",
    "--config.model.mlp_dim=64",
    "--config.model.vocab_size=512",
    "--config.data.source=stdlib?validation=0.002",
    "--config.data.tokenizer=bytes",
    "--config.data.seq_len=64",
    "--config.data.shuffle_tokens=16384",
    "--config.optimizer.schedule=constant",
    "--config.optimizer.warmup_steps=2",
    "--config.train.log_every=1",
    "--config.train.eval_every=0",
    "--config.train.eval_batches=2",
    "--config.checkpoint.every_steps=3",
)

pytestmark = pytest.mark.slow


def start(workdir: Path, *options: str, devices: int = 1, **env: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "maxlp.train", f"--workdir={workdir}", *SMALL, *options]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"} | env
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen) -> None:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output


def assert_same_losses(actual: Path, expected: Path, steps: int, rtol: float):
    ours, theirs = losses(actual), losses(expected)
    assert list(ours) == list(theirs) == list(range(1, steps + 1))
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=rtol)


def test_a_run_continues_with_other_stages(tmp_path):
    """Checkpoints are independent of stages: one device starts, four stages continue, one device ends."""
    options = (
        "--config.precision.recipe=fp8_delayed",
        "--config.precision.first_blocks=0",
        "--config.precision.last_blocks=0",
    )
    one_device = (*options, "--config.train.microbatches=4")
    stages = (*options, "--config.mesh.stage=4", "--config.model.remat=block")
    finish(start(tmp_path / "whole", *one_device, "--config.train.total_steps=9"))
    finish(start(tmp_path / "moved", *one_device, "--config.train.total_steps=3"))
    finish(start(tmp_path / "moved", *stages, "--config.train.total_steps=6", devices=4))
    finish(start(tmp_path / "moved", *one_device, "--config.train.total_steps=9"))
    assert_same_losses(tmp_path / "moved", tmp_path / "whole", 9, rtol=2e-4)


def test_processes_that_share_their_rows_train_like_one(tmp_path):
    """Two processes with one device each hold halves of the same sequences."""
    steps = "--config.train.total_steps=4"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = [
        start(
            tmp_path / "two",
            steps,
            "--config.mesh.context=2",
            "--config.model.attention=ring",
            MAXLP_COORDINATOR=f"localhost:{port}",
            MAXLP_NUM_PROCESSES="2",
            MAXLP_PROCESS_ID=str(rank),
        )
        for rank in range(2)
    ]
    for process in group:
        finish(process)
    finish(start(tmp_path / "one", steps))
    assert_same_losses(tmp_path / "two", tmp_path / "one", 4, rtol=1e-4)
