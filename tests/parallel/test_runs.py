"""Whole runs of the training command that a context or a stage axis changes."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import training_runs
from tests.run_outputs import losses
from tests.training_runs import environments, finish

CHANGES = (
    "--config.model.num_layers=4",
    "--config.optimizer.schedule=constant",
    "--config.train.eval_every=0",
)

pytestmark = pytest.mark.slow


def start(workdir: Path, *options: str, **how) -> subprocess.Popen:
    return training_runs.start(workdir, *CHANGES, *options, **how)


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
    # An amax may differ in its last bit, and then values round to their other neighbours in E4M3.
    assert_same_losses(tmp_path / "moved", tmp_path / "whole", 9, rtol=2e-4)


def test_processes_that_share_their_rows_train_like_one(tmp_path):
    """Two processes with one device each hold halves of the same sequences."""
    steps = "--config.train.total_steps=4"
    ring = ("--config.mesh.context=2", "--config.model.attention=ring")
    group = [start(tmp_path / "two", steps, *ring, **env) for env in environments(2)]
    for process in group:
        finish(process)
    finish(start(tmp_path / "one", steps))
    # Float32 sums in another order; where gradients are nearly zero, they turn Adam's steps.
    assert_same_losses(tmp_path / "two", tmp_path / "one", 4, rtol=1e-4)
