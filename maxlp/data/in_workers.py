"""Datasets whose elements other processes compute.

Not with Grain's `mp_prefetch`: it waits up to 25 seconds for each worker that has an element which nobody
reads, and forever for one that was killed while it sent; and signals to all processes end its workers.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import grain

from maxlp.data.workers import serve


class InWorkers(grain.IterDataset):
    """The elements of several datasets in turn, up to the end of one; each is computed by a process.

    Elements come through pipes: the shared memory of a container is often smaller than a few of them.

    Args:
      per_round: number of elements in a round; each round begins with the first part. By default a round
        has one element of each part.
    """

    def __init__(self, parts: Sequence[Iterable], per_round: int | None = None):
        super().__init__()
        self._parts, self._per_round = parts, per_round or len(parts)

    def __iter__(self) -> grain.DatasetIterator:
        return _FromWorkers(self._parts, self._per_round)


class _FromWorkers(grain.DatasetIterator):
    def __init__(self, parts: Sequence[Iterable], per_round: int):
        super().__init__()
        self._parts, self._per_round, self._turn = parts, per_round, 0
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._kill = util.Finalize(self, _kill, (self._workers,), exitpriority=1)

    def __next__(self) -> Any:
        try:
            if not self._workers:
                self._start()
            element, failure = self._workers[self._turn % len(self._workers)][1].recv()
        except (EOFError, OSError):
            raise ChildProcessError(
                "a data worker died (out of memory?); start again, or with a lower data.num_workers"
            ) from None
        if failure is not None:
            error, where = failure
            error.add_note(f"In a data worker:\n{where}")
            raise error
        self._turn = (self._turn + 1) % self._per_round
        return element

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in self._parts:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there,), daemon=True)
            with _signals_blocked():
                process.start()
            there.close()  # so that `here` ends with the process
            self._workers.append((process, here))
        for (_, here), part in zip(self._workers, self._parts, strict=True):
            here.send(part)  # waits until the process has started

    def close(self) -> None:
        super().close()
        self._kill()

    # Grain reads a state after each element; the state that matters is in the elements.
    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks the signals that a terminal or Slurm sends to all processes of a run, also in what it starts.

    The run that gets one ends its step, for which it needs its workers.
    """
    resource_tracker.ensure_running()  # would unblock them when the first process starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(workers: list[tuple[BaseProcess, Connection]]) -> None:
    for process, _ in workers:
        process.kill()  # it has nothing to lose, and waits for somebody to read its next element
    for process, _ in workers:
        process.join()
