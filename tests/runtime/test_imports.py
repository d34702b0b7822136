"""Importing the library stays cheap."""

import subprocess
import sys

PROGRAM = """
import sys
from maxlp.runtime import checkpoint, distributed, hardware, profiler, throughput, writers
print(*{"orbax", "tensorboardX", "wandb", "flax", "optax"} & {name.split(".")[0] for name in sys.modules})
"""


def test_optional_and_slow_packages_are_imported_only_when_used():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
