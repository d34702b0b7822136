"""maxlp: low-precision, low-memory training of Llama, Qwen3 and CLIP in Flax NNX."""

import signal
import sys
import time

__version__ = "0.2.0"

IMPORTED_AT = time.monotonic()  # commands import this first, and measure their start-up time from here

# While a command is imported (`python -m maxlp.train`, `maxlp train`), Ctrl-C ends the process at once.
_is_command = sys.argv[0].rpartition("/")[2] in ("-m", "maxlp")
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
