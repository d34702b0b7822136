"""SIGTERM outside of the training loop: the process ends at once, whatever it is doing."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, ctypes, os, signal, sys
from maxlp.runtime import preemption
preemption.exit_on_sigterm()
guarded = sys.argv[1] == "guarded"
with preemption.PreemptionGuard() if guarded else contextlib.nullcontext() as guard:
    print("ready", flush=True)
    if guarded:
        signal.pause()
        sys.exit(3 if guard.should_stop(1) else 4)
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
        _, err = process.communicate(timeout=30)
    assert process.returncode == code and line in err and err.count("\n") == 1
