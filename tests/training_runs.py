"""Processes that run the training command on a small model."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL = [
    "--config=configs/llama/debug.py",
    "--config.model.embed_dim=32",
    "--config.model.num_layers=2",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=2",
    "--config.model.head_dim=16",
    "--config.model.mlp_dim=64",
    "--config.model.vocab_size=512",
    "--config.data.source=stdlib?validation=0.002",
    "--config.data.tokenizer=bytes",
    "--config.data.seq_len=64",
    "--config.data.shuffle_tokens=16384",
    "--config.optimizer.warmup_steps=2",
    "--config.train.log_every=1",
    "--config.train.eval_batches=2",
    "--config.checkpoint.every_steps=3",
]


def start(
    workdir: Path | str,
    *options: str,
    config: Sequence[str] = SMALL,
    devices: int = 1,
    cwd: Path = ROOT,
    command: Sequence[str] = (sys.executable, "-m", "maxlp.train"),
    **env: str,
) -> subprocess.Popen:
    """Starts a run.

    Args:
      workdir: a folder or a URL.
      options: flags after those of `config`, which they override.
      devices: number of simulated devices.
      command: the command line without its flags.
      env: additional environment variables.
    """
    command = [*command, f"--workdir={workdir}", *config, *options]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"} | env
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def environments(processes: int) -> list[dict[str, str]]:
    """Environment variables for each process of a run in several processes on this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    shared = {"MAXLP_COORDINATOR": address, "MAXLP_NUM_PROCESSES": str(processes)}
    return [shared | {"MAXLP_PROCESS_ID": str(rank)} for rank in range(processes)]


def finish(process: subprocess.Popen, code: int = 0, timeout: float = 300) -> str:
    """Waits for a run; asserts its exit code, and returns its output."""
    try:
        out = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, out
    return out


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Returns once the condition holds; fails if it does not within this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def shown(command: str, *options: str) -> str:
    """Runs a command to its end; returns what it prints."""
    args = [sys.executable, "-m", f"maxlp.{command}", *options]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
