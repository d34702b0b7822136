"""maxlp: low-precision, low-memory training of Llama and CLIP in Flax NNX."""

import time

__version__ = "0.2.0"

IMPORTED_AT = time.time()  # the first thing a command does: its start-up times count from here
