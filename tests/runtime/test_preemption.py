"""Signals outside of the training loop: the process ends at once, whatever it is doing."""

import os
import signal
import subprocess
import sys

import pytest

from tests.training_runs import environments

PROGRAM = """
import contextlib, ctypes, os, signal, sys, time
from maxlp.runtime import preemption
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
preemption.exit_on_sigterm()
guarded = sys.argv[1] == "guarded"
with preemption.PreemptionGuard() if guarded else contextlib.nullcontext() as guard:
    print("ready", flush=True)
    if guarded:
        while not guard.should_stop(1):
            time.sleep(0.01)
        sys.exit(3)
    while True:  # the signal interrupts it
        ctypes.CDLL(None).sleep(60)  # like a compilation: no handler in Python runs meanwhile
"""


@pytest.mark.parametrize(
    ("place", "code", "line"), [("start-up", 75, "SIGTERM: nothing to save"), ("guarded", 3, "")]
)
def test_sigterm_ends_the_process_at_once_except_in_the_loop(place, code, line):
    command = [sys.executable, "-c", PROGRAM, place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code and line in err and err.count("\n") == 1


@pytest.mark.parametrize(("place", "code"), [("start-up", 75), ("guarded", 3)])
def test_sighup_of_a_closed_terminal_acts_as_sigterm(place, code):
    terminal, output = os.openpty()
    with subprocess.Popen([sys.executable, "-c", PROGRAM, place], stdout=output, stderr=output) as process:
        os.close(output)
        try:
            with open(terminal, "rb") as lines:
                assert lines.readline() == b"ready\r\n"
            process.send_signal(signal.SIGHUP)  # and what the process prints from now on fails
            assert process.wait(timeout=60) == code
        finally:
            process.kill()


def test_under_nohup_sighup_stays_ignored():
    program = (
        "import signal; from maxlp.runtime import preemption; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "preemption.exit_on_sigterm(); signal.raise_signal(signal.SIGHUP);"
        "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


START_UP = """
import ctypes, jax
from maxlp.runtime import distributed, preemption
preemption.exit_on_sigterm()
distributed.initialize()
with preemption.exit_with_others():
    print("ready", flush=True)
    while jax.process_index() == 0:
        ctypes.CDLL(None).sleep(60)  # like a compilation
    distributed.barrier("compiled")
"""


@pytest.mark.parametrize("signalled", [(0,), (1,), (0, 1)])
def test_sigterm_to_one_of_two_processes_ends_both_at_once_before_the_loop(signalled):
    group = [
        subprocess.Popen(
            [sys.executable, "-c", START_UP],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env in environments(2)
    ]
    try:
        assert all("ready\n" in iter(process.stdout.readline, "") for process in group)
        for rank in signalled:
            group[rank].send_signal(signal.SIGTERM)
        for process in group:
            _, err = process.communicate(timeout=60)
            told = [line for line in err.splitlines() if "[Gloo]" not in line]
            assert process.returncode == 75 and len(told) == 1, err
            rank = told[0].removeprefix("SIGTERM in process ").partition(":")[0]
            assert int(rank) in signalled and "nothing to save" in told[0]
    finally:
        for process in group:
            process.kill()


TWO_LOOPS = """
import os, signal
from maxlp import train

def loop(*_):
    with train.preemption.PreemptionGuard():
        print("step", flush=True)
        os.kill(os.getpid(), signal.{name})
        if "{end}" == "rollback":
            raise train.rollback.RollbackRequested(train.rollback.Spike(3, 9.0, 2.0, 1.0, True), None)

train.train = loop
train.rollback.roll_back = lambda *_: "rolled back"
train.define_flags()
train.cli.run(train.main)
"""


@pytest.mark.parametrize(
    ("end", "name", "code"),
    [("rollback", "SIGTERM", 75), ("phase", "SIGTERM", 75), ("rollback", "SIGINT", 130)],
)
def test_a_signal_in_the_last_step_before_another_loop_ends_the_run(tmp_path, end, name, code):
    """As before a rollback, after which the run would continue."""
    program = TWO_LOOPS.format(end=end, name=name)
    command = [sys.executable, "-c", program, "--config=llama/debug", f"--workdir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and done.stdout.count("step\n") == 1, done.stderr
    assert ("rolled back" in done.stdout) == (end == "rollback")
