"""One piece of the campaign, in this process: `piece NAME MODULE:FUNCTION FOLDER SECONDS`."""

import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from benchmarks.accelerator.results import (
    DONE,
    FAILED,
    INTERRUPTED,
    LEFT_OUT,
    NO_TIME,
    LeftOut,
    OutOfTime,
    Result,
)


def main() -> int:
    name, function, folder, seconds = sys.argv[1:]
    result = Result(name, Path(folder), float(seconds))
    try:
        pkgutil.resolve_name(function)(result)
    except LeftOut as reason:
        result.write(LEFT_OUT, error=str(reason))
        return 0
    except OutOfTime:
        result.write(INTERRUPTED, error=NO_TIME)
        return 0
    except Exception as error:
        traceback.print_exc()
        result.write(FAILED, error=f"{type(error).__name__}: {error}"[:2000])
        return 1
    errors = [row["error"] for row in result.rows if isinstance(row.get("error"), str)]
    if errors and len(errors) == len(result.rows):
        result.write(FAILED, error=f"every row failed: {errors[0]}")
        return 1
    result.write(DONE)
    return 0


def end_with(campaign: int) -> None:
    """Kills this piece and its child processes when the process that started it has ended, in any way.

    Otherwise it would keep the device, and disturb the measurements of the next piece.
    """
    while os.getppid() == campaign:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    sys.exit(main())
