"""The processes of a run have the same config, workdir and code."""

import re

import pytest

from maxlp.run import processes, run_dir
from maxlp.run.config import ConfigError
from tests.run.fixtures import changed, load


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"values": {"optimizer.learning_rate": 0.5}}, "config.optimizer.learning_rate: 0.004 -> 0.5"),
        ({"workdir": "b"}, "--workdir: a -> b"),
        ({"versions": {"jax": "0.1"}}, f"jax: {run_dir.versions()['jax']} -> 0.1"),
        ({"values": {}}, None),
    ],
)
def test_processes_of_different_commands_do_not_train_together(other, message, monkeypatch):
    """Each would train its part of the state with its own settings."""
    monkeypatch.setattr(run_dir, "git_revision", lambda: None)  # unknown in one of them: not compared
    sent = []
    monkeypatch.setattr(processes.distributed, "gather_json", lambda own: sent.append(own) or sent)
    processes.check(load("debug"), "a")
    with monkeypatch.context() as patch:
        if versions := other.get("versions"):
            patch.setattr(run_dir, "versions", lambda: versions)
        patch.setattr(run_dir, "git_revision", lambda: "c0ffee")
        c = changed(load("debug"), other.get("values", {}))
        if message is None:
            processes.check(c, "a")
            return
        with pytest.raises(
            ConfigError, match=re.escape(f"process 1 is not of the run of process 0 ({message})")
        ):
            processes.check(c, other.get("workdir", "a"))
