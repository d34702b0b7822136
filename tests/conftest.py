"""Eight simulated CPU devices for every test."""

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["NPROC"] = "64"  # with one thread for each device, collectives of independent branches deadlock
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Deleted at the end: what commands that tests kill leave behind, and the programs that commands share.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # of `tmp_path`, which stays
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="maxlp-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(tempfile.tempdir, "xla")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import pytest
from absl import flags

from tests.buckets import _servers, bucket, buckets  # noqa: F401  # fixtures
from tests.fake_hub import fake_hub  # noqa: F401

# Most of the time would go into compiling programs that then run for milliseconds: XLA is to optimize less,
# and not to split each program for several threads, which costs CPU time, and every core has tests to run.
# Flags of the environment come later, and win.
_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # the older emitters of fusions; later versions abort on the flag
    _XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = _XLA_FLAGS = f"{_XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"

jax.config.update("jax_enable_compilation_cache", False)  # this process measures what it compiles itself
jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(50_000)  # tracing makes many objects that stay: a default of 700 takes a test 6 % longer
# Grain's worker processes read absl flags, which only `app.run` parses.
flags.FLAGS.mark_as_parsed()


def pytest_runtest_setup(item: pytest.Item):
    for package in (name for mark in item.iter_markers("aot") for name in mark.args):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'maxlp[aot]'")
    older = _XLA_FLAGS.split("--xla_cpu_use_fusion_emitters=")[-1].startswith("false")
    if older and item.get_closest_marker("default_emitters"):
        pytest.skip("needs XLA_FLAGS=--xla_cpu_use_fusion_emitters=true")


@functools.cache
def _converts_float16() -> bool:
    """Whether XLA compiles conversions of float16; on x86 only for CPUs with F16C (since 2012).

    ``XLA_FLAGS=--xla_cpu_max_isa=SSE4_2`` takes F16C away (https://github.com/openxla/xla/issues/6787).
    """
    try:
        jax.jit(lambda x: x.astype("float16"))(jax.numpy.ones(())).block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    error = call.excinfo and call.excinfo.value
    missing = isinstance(error, jax.errors.JaxRuntimeError) and "materialize symbols" in str(error)
    if missing and not _converts_float16():
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, "XLA has no float16 on this CPU")
    return report


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """No other module uses a module's compiled programs, and all of them would fill the memory."""
    yield
    jax.clear_caches()
