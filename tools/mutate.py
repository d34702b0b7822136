r"""Checks that the tests notice mistakes: puts small faults into the code, one at a time, and runs tests.

    python -m tools.mutate                        all faults; takes about an hour on two cores
    python -m tools.mutate --only=optim/ --jobs=4
    python -m tools.mutate --list

`tools/faults.py` lists the faults, each with the tests that should notice it. A fault is noticed if one of
them fails, or does not end in time. First the tests of all chosen faults run once on the code as it is,
because a test that fails anyway notices nothing. The working tree stays unchanged: faults go into copies.

The exit code is 1 if less than 95 % are noticed, 2 if a fault cannot be tried: its text is not in its file
exactly once, its tests do not exist or cannot run, or tests fail without any fault.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import enum
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tools.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
_parsing = threading.Lock()  # CPython's `ast.parse` can fail when several threads run it
REQUIRED = 0.95  # of the faults
TIMEOUT = 300.0  # seconds for the tests of one fault
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=--import-mode=importlib")
# Tests run in forks of a process that has imported the libraries; importing takes longer than most tests.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.conftest",  # sets what JAX reads when it is imported
        *("flax.nnx", "optax.contrib", "orbax.checkpoint.v1", "grain", "ml_collections.config_flags"),
        *("PIL.Image", "tokenizers", "matplotlib.figure", "jax.experimental.multihost_utils"),
    ]
)


Item, Result = TypeVar("Item"), TypeVar("Result")


class Outcome(enum.Enum):
    """What the tests of a fault did."""

    NOTICED = "noticed"
    MISSED = "NOT NOTICED"
    BROKEN = "broken entry"


# --- the list -------------------------------------------------------------------------------------------


def title(fault: Fault) -> str:
    """A fault in one line: the file, and what replaces what."""
    old, new = (" ".join(text.split()) for text in (fault.old, fault.new))
    return f"{fault.file}: {old} → {new or 'nothing'}"


def problem(fault: Fault, root: Path = ROOT) -> str | None:
    """Why a fault cannot be tried; None if it can."""
    path = root / "maxlp" / fault.file
    if not path.is_file():
        return f"there is no maxlp/{fault.file}"
    count = (text := path.read_text()).count(fault.old)
    if count != 1:
        return f"its text occurs {count} times in maxlp/{fault.file}"
    if fault.new == fault.old:
        return "it changes nothing"
    try:
        with _parsing:
            ast.parse(text.replace(fault.old, fault.new))
    except SyntaxError as error:
        return f"it is not Python: {error}"
    missing = [test for test in fault.tests if not _exists(test, root)]
    return f"there is no test {missing[0]}" if missing else None


def _exists(test: str, root: Path) -> bool:
    file, _, name = test.partition("::")
    path = root / "tests" / file
    return path.is_file() and (not name or f"\ndef {name.partition('[')[0]}(" in path.read_text())


def chosen(pattern: str) -> list[Fault]:
    """The faults whose file or text contains the pattern."""
    return [fault for fault in FAULTS if pattern in fault.file or pattern in title(fault)]


# --- running --------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> Path:
    """Copies the files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def run_tests(copy: Path, tests: Iterable[str], timeout: float | None = None) -> tuple[int, str]:
    """The exit code of pytest, 1 for a timeout, and the end of its output."""
    log = copy / "pytest.log"
    process = FORKS.Process(target=_run_pytest, args=(str(copy), [f"tests/{test}" for test in tests]))
    process.start()
    assert process.pid
    process.join(timeout)
    code = 1 if process.exitcode is None else process.exitcode
    with contextlib.suppress(ProcessLookupError):  # what the tests started ends with them
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return code, "\n".join(log.read_text().splitlines()[-15:])


def _run_pytest(copy: str, tests: list[str]) -> None:
    """In a process of its own, whose libraries are imported already, but nothing of this project."""
    os.setsid()
    os.chdir(copy)
    sys.path[:] = [copy, *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("maxlp", "tests", "configs")]:
        del sys.modules[name]
    (scratch := Path(f"{copy}-scratch")).mkdir(exist_ok=True)  # beside the copy: tests pack what is in it
    tempfile.tempdir = None
    os.environ |= {"PYTHONPATH": copy, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    output = os.open("pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = pytest.main([*PYTEST, *tests])
    sys.stdout.flush()
    os._exit(code)


def try_fault(fault: Fault, copy: Path) -> tuple[Fault, Outcome, str]:
    """Runs the tests of a fault in a copy of the tree, and then restores the copy.

    Returns:
      the fault, what its tests did, and a detail: why it is broken, or its `Fault.why`.
    """
    if reason := problem(fault, copy):
        return fault, Outcome.BROKEN, reason
    path = copy / "maxlp" / fault.file
    sound = path.read_text()
    path.write_text(sound.replace(fault.old, fault.new))
    try:
        code, output = run_tests(copy, fault.tests, timeout=TIMEOUT)
    finally:
        path.write_text(sound)
    if code > 1:  # nothing was tested
        return fault, Outcome.BROKEN, output
    return fault, Outcome.NOTICED if code else Outcome.MISSED, fault.why


def each(
    items: Sequence[Item], copies: Sequence[Path], work: Callable[[Item, Path], Result]
) -> Iterator[Result]:
    """``work(item, copy)`` for every item, as many at a time as there are copies; in the order they end."""
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def one(item: Item) -> Result:
        copy = free.get()
        try:
            return work(item, copy)
        finally:
            free.put(copy)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        for done in concurrent.futures.as_completed([pool.submit(one, item) for item in items]):
            yield done.result()


def failures_without_faults(faults: Sequence[Fault], copies: Sequence[Path]) -> str | None:
    """The output of the tests that fail without any fault; None if all pass."""
    tests: dict[str, dict[str, None]] = {}  # by file
    for fault in faults:
        for test in fault.tests if problem(fault) is None else ():
            tests.setdefault(test.partition("::")[0], {})[test] = None
    # A whole file includes its single tests.
    groups = [[file] if file in own else list(own) for file, own in tests.items()]
    found = each(groups, copies, lambda group, copy: run_tests(copy, group))
    failures = [output for code, output in found if code]
    return "\n".join(failures) or None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="faults whose file or text contains this"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at a time")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    flags = parser.parse_args(argv)
    faults = chosen(flags.only)
    if flags.list or not faults:
        print("\n".join(map(title, faults)) or f"error: no fault matches --only={flags.only}")
        return 0 if faults else 2
    counts = dict.fromkeys(Outcome, 0)
    with tempfile.TemporaryDirectory(prefix="maxlp-mutate-") as folder:
        copies = [copy_tree(Path(folder, str(job))) for job in range(flags.jobs)]
        if failure := failures_without_faults(faults, copies):
            print(f"error: tests fail without any fault\n{failure}")
            return 2
        for fault, outcome, detail in each(faults, copies, try_fault):
            counts[outcome] += 1
            print(f"{outcome.value:12} {title(fault)}", flush=True)
            if outcome is not Outcome.NOTICED and detail:
                print(f"             {detail}")
    share = counts[Outcome.NOTICED] / len(faults)
    print(f"{counts[Outcome.NOTICED]} of {len(faults)} faults noticed ({share:.1%})")
    return 2 if counts[Outcome.BROKEN] else int(share < REQUIRED)


if __name__ == "__main__":
    sys.exit(main())
