"""Every test sees eight CPU devices, whatever the machine has."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

from absl import flags

# Grain's worker processes read absl flags, which only `app.run` parses.
flags.FLAGS.mark_as_parsed()
