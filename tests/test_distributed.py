"""Start-up from the environment, exchange between processes, signals."""

import os
import signal
import sys
from pathlib import Path

import jax
import pytest

from maxlp.runtime import distributed

sys.path.append(str(Path(__file__).parent))
import distributed_worker

EXPLICIT = {"MAXLP_COORDINATOR": "localhost:1", "MAXLP_NUM_PROCESSES": "2", "MAXLP_PROCESS_ID": "0"}
SRUN = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2"}
INDEXED_JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.fixture
def calls(monkeypatch):
    """An environment that speaks of nobody, and the calls that would join other processes."""
    for name in list(os.environ):
        if name.startswith(("MAXLP_", "SLURM_", "KUBERNETES_", "JOB_COMPLETION_")):
            monkeypatch.delenv(name)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


def set_environment(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_alone_nothing_is_started(calls):
    distributed.initialize()
    assert calls == []
    assert distributed.is_primary()
    assert distributed.gather_json({"a": ("x", None)}) == [{"a": ["x", None]}]


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "32"),
        ({"XLA_FLAGS": ""}, "64"),  # of JAX_NUM_CPU_DEVICES=8
        ({"NPROC": "5"}, "5"),
    ],
)
def test_simulated_devices_have_threads_to_wait_in(calls, monkeypatch, environment, threads):
    monkeypatch.delenv("NPROC", raising=False)
    set_environment(monkeypatch, environment)
    distributed.initialize()
    assert os.environ["NPROC"] == threads


def test_explicit_environment_is_passed_on(calls, monkeypatch):
    environment = {"MAXLP_INIT_TIMEOUT": "7", "MAXLP_HEARTBEAT_TIMEOUT": "11"}
    set_environment(monkeypatch, EXPLICIT | environment)
    distributed.initialize()
    [(args, kwargs)] = calls
    assert args == ("localhost:1", 2, 0)
    assert kwargs["initialization_timeout"] == 7 and kwargs["heartbeat_timeout_seconds"] == 11


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SRUN, 1),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, 0),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 0),  # salloc without srun
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 0),
        ({"MAXLP_DISTRIBUTED": "1"}, 1),
        (SRUN | {"MAXLP_DISTRIBUTED": "0"}, 0),
        (EXPLICIT | {"MAXLP_DISTRIBUTED": "0"}, 0),
        (EXPLICIT | {"MAXLP_NUM_PROCESSES": "1"}, 0),
    ],
)
def test_clusters_are_recognised(calls, monkeypatch, environment, expected):
    set_environment(monkeypatch, environment)
    distributed.initialize()
    assert len(calls) == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"MAXLP_COORDINATOR": "a:1"}, "MAXLP_NUM_PROCESSES, MAXLP_PROCESS_ID not set"),
        ({"MAXLP_PROCESS_ID": "0"}, "MAXLP_COORDINATOR, MAXLP_NUM_PROCESSES not set"),
        (EXPLICIT | {"MAXLP_COORDINATOR": "localhost"}, "MAXLP_COORDINATOR='localhost'"),
        (EXPLICIT | {"MAXLP_PROCESS_ID": "2"}, "MAXLP_PROCESS_ID=2 is out of range"),
        (EXPLICIT | {"MAXLP_PROCESS_ID": "-1"}, "MAXLP_PROCESS_ID='-1'"),
        (EXPLICIT | {"MAXLP_NUM_PROCESSES": "two"}, "MAXLP_NUM_PROCESSES='two'"),
        ({"MAXLP_DISTRIBUTED": "yes"}, "MAXLP_DISTRIBUTED='yes'"),
        ({"MAXLP_HEARTBEAT_TIMEOUT": "0"}, "MAXLP_HEARTBEAT_TIMEOUT='0'"),
        (INDEXED_JOB, "JOB_COMPLETION_INDEX"),
    ],
)
def test_contradictions_are_one_clear_line(calls, monkeypatch, environment, named):
    set_environment(monkeypatch, environment)
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as error:
        distributed.initialize()
    assert named in str(error.value) and "\n" not in str(error.value)
    assert calls == []


def test_failed_detection_tells_the_way_out(calls, monkeypatch):
    def fails(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    set_environment(monkeypatch, SRUN)
    with pytest.raises(ValueError, match=r"SLURM_STEP_NUM_TASKS.*MAXLP_COORDINATOR.*MAXLP_DISTRIBUTED=0"):
        distributed.initialize()


def test_two_processes_gather_in_order():
    said = distributed_worker.finish(distributed_worker.start("gather", processes=2))
    gathered = [
        {"rank": 0, "text": "", "list": []},
        {"rank": 1, "text": "é" * 7, "list": [None, 1.5]},
    ]
    assert said == [[{"gathered": gathered, "primary": rank == 0}] for rank in range(2)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_not_the_process(number, code):
    before = signal.getsignal(number)
    with distributed.PreemptionGuard() as guard:
        assert not guard.should_stop(1)
        os.kill(os.getpid(), number)
        assert guard.should_stop(2) and guard.should_stop(3)
        assert guard.exit_code == code
        if number == signal.SIGINT:
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # the second Ctrl-C kills
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_run_saves_and_leaves_with_its_code_and_resumes(tmp_path, number, code):
    [process] = distributed_worker.start("preempt", tmp_path)
    signal_at_step(process, 5, number)
    [said] = distributed_worker.finish([process], code)
    stopped = said[-1]["stopped"]
    assert stopped >= 5

    [process] = distributed_worker.start("save", tmp_path)
    [said] = distributed_worker.finish([process])
    assert said[0] == {"start": stopped}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(tmp_path, number):
    processes = distributed_worker.start("preempt", tmp_path, processes=2)
    signal_at_step(processes[1], 5, number)
    if number == signal.SIGTERM:
        first, second = distributed_worker.finish(processes, 75)
    else:
        [first] = distributed_worker.finish(processes[:1], 75)
        [second] = distributed_worker.finish(processes[1:], 130)
    assert first[-1] == second[-1] and first[-1]["stopped"] >= 5
    assert [path.name for path in tmp_path.iterdir()] == [str(first[-1]["stopped"])]


def signal_at_step(process, step, number):
    distributed_worker.said_until(process, {"step": step})
    process.send_signal(number)
