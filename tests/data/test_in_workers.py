import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from maxlp.data.in_workers import InWorkers

LARGE = bytes(2**20)  # more than a pipe takes


def test_the_life_of_workers():
    """Signals to all processes end none, one that dies is an error, and closing waits for none."""
    iterator = iter(InWorkers([[0, LARGE, LARGE, LARGE], [1, LARGE, LARGE, LARGE]]))
    with ThreadPoolExecutor() as pool:
        element = pool.submit(next, iterator)
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.001)
        first, second = multiprocessing.active_children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for process in (first, second):
                os.kill(process.pid, number)
        assert element.result() == 0
    assert [next(iterator) for _ in range(3)] == [1, LARGE, LARGE]
    second.kill()
    with pytest.raises(ChildProcessError, match="a data worker died"):
        for _ in range(5):
            next(iterator)
    iterator.close()
    assert first.exitcode == -signal.SIGKILL and not multiprocessing.active_children()


def test_elements_come_in_turn_and_errors_arrive_with_their_tracebacks():
    iterator = iter(InWorkers([range(0, 5, 2), map(json.loads, ["1", "x"])]))
    assert [next(iterator), next(iterator), next(iterator)] == [0, 1, 2]
    with pytest.raises(ValueError, match="Expecting value") as error:
        next(iterator)
    assert "in raw_decode" in error.value.__notes__[0]
    assert not list(iterator)
    iterator.close()


def test_a_round_may_leave_some_workers_fewer_elements():
    """Five elements a round by three workers."""
    elements = [[0, 3, 5, 8], [1, 4, 6, 9], [2, 7]]
    iterator = iter(InWorkers(elements, per_round=5))
    assert list(iterator) == [*range(10)]
    iterator.close()


@pytest.mark.full
def test_workers_end_with_a_killed_process():
    """They wait for somebody to read."""
    code = (
        "from maxlp.data.in_workers import InWorkers; iterator = iter(InWorkers([range(10**9)] * 2));"
        "next(iterator); print('started', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "started\n"
        workers = [
            each
            for each in psutil.Process(process.pid).children(recursive=True)
            if "spawn_main" in " ".join(each.cmdline())
        ]
        assert len(workers) == 2
        process.kill()
    assert not psutil.wait_procs(workers, timeout=20)[1]
