"""Every test sees eight CPU devices, whatever the machine has."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["NPROC"] = "64"  # threads: with one for each device, collectives of independent branches hang
# Most of the time would go into compiling what then runs for milliseconds.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
# The commands that tests start share what they compile, and nothing of it stays.
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="maxlp-tests-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
from absl import flags

atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
jax.config.update("jax_enable_compilation_cache", False)  # this process measures what it compiles itself
# Grain's worker processes read absl flags, which only `app.run` parses.
flags.FLAGS.mark_as_parsed()
