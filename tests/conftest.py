"""Eight simulated CPU devices for every test."""

import atexit
import importlib.util
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["NPROC"] = "64"  # with one thread for each device, collectives of independent branches deadlock
# Most of the time would go into optimizing programs that then run for milliseconds.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # The commands that tests start share what they compile; it is deleted at the end.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="maxlp-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import pytest
from absl import flags

jax.config.update("jax_enable_compilation_cache", False)  # this process measures what it compiles itself
jax.config.update("jax_numpy_rank_promotion", "raise")
# Grain's worker processes read absl flags, which only `app.run` parses.
flags.FLAGS.mark_as_parsed()


def pytest_runtest_setup(item: pytest.Item):
    for package in (name for mark in item.iter_markers("aot") for name in mark.args):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'maxlp[aot]'")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """No other module uses a module's compiled programs, and all of them would fill the memory."""
    yield
    jax.clear_caches()
