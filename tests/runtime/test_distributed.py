"""Start-up from the environment, exchange between processes, signals."""

import os
import signal
import socket
import subprocess
import sys

import jax
import pytest

from maxlp.runtime import distributed, exits, preemption
from maxlp.runtime.checkpoint import Checkpointer
from tests.runtime import workers
from tests.training_runs import environments

EXPLICIT = {"MAXLP_COORDINATOR": "localhost:1", "MAXLP_NUM_PROCESSES": "2", "MAXLP_PROCESS_ID": "0"}
SRUN = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2"}
INDEXED_JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.fixture
def calls(monkeypatch):
    """An environment without a cluster, and the calls that would join other processes."""
    for name in list(os.environ):
        if name.startswith(("MAXLP_", "SLURM_", "KUBERNETES_", "JOB_COMPLETION_")):
            monkeypatch.delenv(name)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


def set_environment(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_single_process_does_not_join_a_cluster(calls):
    distributed.initialize()
    assert calls == []
    assert distributed.is_primary()
    assert distributed.gather_json({"a": ("x", None)}) == [{"a": ["x", None]}]


def test_explicit_environment_is_passed_on(calls, monkeypatch):
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"  # process 0 tries whether it can listen there
    environment = {"MAXLP_INIT_TIMEOUT": "7", "MAXLP_HEARTBEAT_TIMEOUT": "11"}
    set_environment(monkeypatch, EXPLICIT | environment | {"MAXLP_COORDINATOR": address})
    distributed.initialize()
    [(args, kwargs)] = calls
    assert args == (address, 2, 0)
    assert kwargs["initialization_timeout"] > 7  # the process ends itself after 7 s, before JAX aborts it
    assert kwargs["heartbeat_timeout_seconds"] == 11


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
def test_clusters_are_recognized(calls, monkeypatch, environment, expected):
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
def test_contradictions_are_reported_in_one_line(calls, monkeypatch, environment, named):
    set_environment(monkeypatch, environment)
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as error:
        distributed.initialize()
    assert named in str(error.value) and "\n" not in str(error.value)
    assert calls == []


def test_64_bit_types_are_refused_because_they_change_the_numbers_of_a_run(calls):
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"^JAX_ENABLE_X64 is set; unset it"):
        distributed.initialize()
    assert calls == []


INITIALIZE = "from maxlp.runtime import distributed; distributed.initialize()"


@pytest.mark.parametrize(("rank", "reason"), [(1, "nobody answers"), (0, "not all processes joined")])
def test_processes_that_do_not_find_each_other_end_in_time_with_one_line(rank, reason):
    env = environments(2)[rank]
    address = env["MAXLP_COORDINATOR"]
    env = os.environ | env | {"MAXLP_INIT_TIMEOUT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INITIALIZE], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == exits.EXIT_FAILED
    assert f"error: {address}: {reason} within MAXLP_INIT_TIMEOUT=1 s" in done.stderr.splitlines()[-1]
    assert "Check failure" not in done.stderr


def test_a_port_in_use_is_named_before_jax_crashes(monkeypatch):
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        for name, value in zip(distributed.EXPLICIT, (address, "2", "0"), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match=f"in use.*MAXLP_COORDINATOR={address}"):
            distributed.initialize()


def test_a_failed_detection_is_reported_with_the_remedy(calls, monkeypatch):
    def fails(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    set_environment(monkeypatch, SRUN)
    with pytest.raises(ValueError, match=r"SLURM_STEP_NUM_TASKS.*MAXLP_COORDINATOR.*MAXLP_DISTRIBUTED=0"):
        distributed.initialize()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_loop_and_not_the_process(number, code):
    before = signal.getsignal(number)
    with preemption.PreemptionGuard() as guard:
        assert not guard.should_stop(1)
        os.kill(os.getpid(), number)
        assert guard.should_stop(2) and guard.should_stop(3)
        assert guard.exit_code == code
        if number == signal.SIGINT:
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # the second Ctrl-C kills
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signalled_run_saves_exits_with_its_code_and_can_be_resumed(tmp_path, number, code):
    run = workers.Workers()
    run.send("until_signalled", tmp_path)
    run.read(until={"step": 5})
    run.processes[0].send_signal(number)
    [last] = run.finish(code)
    assert last["stopped"] >= 5
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        assert workers.restore(checkpointer).step == last["stopped"]


@pytest.mark.parametrize(("number", "codes"), [(signal.SIGTERM, (75, 75)), (signal.SIGINT, (75, 130))])
def test_two_processes_gather_in_order_and_a_signal_to_one_stops_both_after_the_same_step(
    tmp_path, number, codes
):
    pair = workers.Workers(2)
    gathered = [
        {"rank": 0, "text": "", "list": []},
        {"rank": 1, "text": "é" * 7, "list": [None, 1.5]},
    ]
    assert pair.call("gather") == [{"gathered": gathered, "primary": rank == 0} for rank in range(2)]
    pair.send("until_signalled", tmp_path)
    pair.read(1, until={"step": 5})
    pair.processes[1].send_signal(number)
    first, second = pair.finish(*codes)
    assert first == second and first["stopped"] >= 5
    assert [path.name for path in tmp_path.iterdir()] == [str(first["stopped"])]
