import subprocess
import sys

import numpy as np
import psutil
import pytest

from maxlp.data import common


@pytest.mark.parametrize("size", [1, 2, 1000, 2**16 + 3])
def test_shuffled_is_a_permutation_for_any_size(size):
    orders = [[common.shuffled(i, size, (seed, 5)) for i in range(size)] for seed in (0, 1)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert size < 1000 or np.mean(np.equal(*orders)) < 0.01


@pytest.mark.full
def test_workers_end_with_a_killed_process():
    """They wait for a place in a queue that nobody empties any more."""
    code = (
        "import grain; from maxlp.data import common;"
        "numbers = grain.MapDataset.range(10**9).to_iter_dataset();"
        "iterator = iter(common.in_workers(numbers, grain.MultiprocessingOptions(2)));"
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
