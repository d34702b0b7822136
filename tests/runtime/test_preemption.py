"""SIGTERM outside of the training loop: the process ends at once, whatever it is doing."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, ctypes, os, signal, sys, time
from maxlp.runtime import preemption
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
