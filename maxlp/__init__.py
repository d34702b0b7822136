"""maxlp: low-precision, low-memory training of Llama, Qwen3 and CLIP in Flax NNX."""

import time

__version__ = "0.2.0"

IMPORTED_AT = time.monotonic()  # commands import this first, and measure their start-up time from here
