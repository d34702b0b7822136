"""Commands of maxlp run in forked children of a process that has imported everything: milliseconds each.

A child runs the module as ``python -m`` does, with the standard streams in files, so that it sees what a
user's command sees except for the imports. A process with a JAX backend must not be forked: `run_command`
asks another one.
"""

import contextlib
import functools
import importlib
import json
import os
import resource
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).parent.parent
COMMANDS = ("train", "evaluate", "generate", "plan", "report", "prepare", "convert", "lab")
# Modules that commands import only when they need them: imported in advance, they cost no case its time.
LATE = (
    *("orbax.checkpoint.experimental.v1", "orbax.checkpoint", "pyarrow.parquet", "sentencepiece"),
    "tensorflow_datasets",
    *("tensorboardX", "matplotlib.pyplot", "PIL.Image", "tokenizers", "safetensors.numpy", "grain"),
    *("array_record.python.array_record_module", "maxlp.data.tokenizers.training", "maxlp.run.replay"),
    *("maxlp.families.llama.task", "maxlp.families.clip.task", "maxlp.families.llama.export"),
    *("maxlp.families.clip.export", "maxlp.optim.low_bit", "maxlp.optim.galore", "maxlp.precision.health"),
    *(
        "maxlp.data.glyphs",
        "maxlp.data.readers.tars",
        "maxlp.data.readers.parquet",
        "maxlp.data.readers.jsonl",
    ),
)
WALL_LIMIT = 60.0  # seconds until a command that waits is killed; tests judge the CPU time
MEMORY_LIMIT = 12 * 2**30  # bytes of heap; a case that allocates more fails alone
NOBODY = 65534


class Command(NamedTuple):
    """A module of maxlp and its arguments."""

    module: str
    args: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(["python -m", f"maxlp.{self.module}", *map(_quoted, self.args)])


class Job(NamedTuple):
    """A command, the folder to run it in, additional environment variables, and whether root is dropped."""

    command: Command
    folder: Path
    environment: Mapping[str, str] = {}
    unprivileged: bool = False


class Done(NamedTuple):
    """How a command ended; ``code`` is negative for a signal, ``seconds`` of CPU time after the imports."""

    code: int
    out: str
    err: str
    seconds: float


def warm_up(*late: str) -> None:
    """Imports the commands and these modules; starts no JAX backend, so that the process can be forked."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in (*(f"maxlp.{command}" for command in COMMANDS), *late):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def run_all(jobs: Iterator[Job], finished: Callable[[int, Done], None], workers: int) -> None:
    """Runs jobs, ``workers`` at a time, and calls ``finished`` with the number and the end of each.

    Args:
      jobs: each is drawn when a worker is free.
    """
    running: dict[int, _Child] = {}
    numbered = enumerate(jobs)
    while True:
        while len(running) < workers and (numbered_job := next(numbered, None)) is not None:
            child = _Child(*numbered_job)
            running[child.pid] = child
        if not running:
            return
        for child in [each for each in running.values() if each.has_ended()]:
            del running[child.pid]
            finished(child.number, child.result())
        time.sleep(0.005)


def run_one(command: Command, folder: Path) -> Done:
    """Runs one command to its end."""
    results: list[Done] = []
    run_all(iter([Job(command, folder)]), lambda _, done: results.append(done), 1)
    return results[0]


def run_command(module: str, *args: str) -> subprocess.CompletedProcess:
    """Runs ``python -m maxlp.MODULE`` in an empty folder, for at most `WALL_LIMIT` seconds.

    Its environment is that of the first call.
    """
    server = _server()
    print(json.dumps([module, *args]), file=server.stdin, flush=True)
    done = Done(*json.loads(server.stdout.readline()))
    return subprocess.CompletedProcess([module, *args], done.code, done.out, done.err)


@functools.cache
def _server() -> subprocess.Popen:
    """A process that runs `main`, until this one ends."""
    command = [sys.executable, "-m", "tests.commands"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Runs the commands that are read, a JSON list a line, and prints how each ended."""
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder) / "box"
        box.mkdir()
        for line in sys.stdin:
            module, *args = json.loads(line)
            print(json.dumps(run_one(Command(module, tuple(args)), box)), flush=True)


class _Child:
    def __init__(self, number: int, job: Job):
        self.number, self.streams = number, (job.folder.parent / "stdout", job.folder.parent / "stderr")
        self.began, self.ended = time.monotonic(), None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; there is no backend and no thread yet
            self.pid = os.fork()
        if self.pid == 0:
            _become(job, self.streams)

    def has_ended(self) -> bool:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self.ended = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        elif time.monotonic() - self.began > WALL_LIMIT:
            os.killpg(self.pid, signal.SIGKILL)
        return bool(pid)

    def result(self) -> Done:
        assert self.ended is not None
        code, seconds = self.ended
        out, err = (path.read_text(errors="replace") for path in self.streams)
        return Done(code, out, err, seconds)


def _become(job: Job, streams: tuple[Path, Path]) -> NoReturn:
    """Turns a forked child into the command; never returns."""
    code = 99
    try:
        os.setpgid(0, 0)
        for descriptor, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
        os.chdir(job.folder)
        os.environ.update(job.environment)
        if job.unprivileged and os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        code = _run_module(job.command)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run_module(command: Command) -> int:
    """Runs a module as ``python -m`` does; returns the exit code."""
    name = f"maxlp.{command.module}"
    sys.modules.pop(name, None)  # imported in advance; `runpy` would warn of it
    sys.argv = [name, *command.args]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _quoted(argument: str) -> str:
    return shlex.quote(argument if len(argument) < 200 else f"{argument[:60]}…({len(argument)} characters)")


if __name__ == "__main__":
    main()
