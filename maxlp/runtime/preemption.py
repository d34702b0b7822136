"""Saving and exiting on SIGTERM, SIGHUP and Ctrl-C, in all processes after the same step."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import ClassVar, NoReturn

import jax
from absl import logging
from jax.experimental import multihost_utils

from maxlp.runtime.exits import EXIT_INTERRUPTED, EXIT_PREEMPTED, drop_unread_output, hard_exit


def exit_on_sigterm() -> None:
    """From now on SIGTERM ends the run at once with `EXIT_PREEMPTED`, except in a `PreemptionGuard`.

    For the parts of a run in which there is nothing to save. A Python handler would wait until a
    compilation in the main thread has ended, so a thread reads the number of the signal, which the
    interpreter writes to a pipe at once. Call it before `distributed.initialize`, which can wait for a
    long time, and `exit_with_others` after it.

    The thread also turns SIGHUP, which a run gets when its terminal or ssh session is closed, into SIGTERM,
    here and in a `PreemptionGuard`; a run that ignores SIGHUP, as under nohup, goes on.
    """

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGHUP:
                drop_unread_output()  # a closed terminal takes none
                os.kill(os.getpid(), signal.SIGTERM)
            elif number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _receive_at_start_up:
                if jax.distributed.is_initialized():
                    from maxlp.runtime import peers

                    peers.tell()
                else:
                    exit_preempted("SIGTERM")

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, _receive_at_start_up)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: None)  # only signals with a handler reach the pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="SIGTERM", daemon=True).start()


def exit_with_others() -> contextlib.AbstractContextManager[None]:
    """With several processes: until they train, the SIGTERM that ends one of them ends this one, too."""
    if not jax.distributed.is_initialized():
        return contextlib.nullcontext()
    from maxlp.runtime import peers

    return peers.watching()


def exit_preempted(reason: str) -> NoReturn:
    print(f"{reason}: nothing to save; the same command continues the run", file=sys.stderr)
    hard_exit(EXIT_PREEMPTED)


def exit_if_received() -> None:
    """Ends a run whose signal came after a loop's last `should_stop`; several processes end in the next."""
    if PreemptionGuard.received and jax.process_count() == 1:
        print(f"{PreemptionGuard.received.name}: stopped; the same command continues the run")
        sys.exit(PreemptionGuard().exit_code)


def _receive_at_start_up(*_: object) -> None:
    if peers := sys.modules.get("maxlp.runtime.peers"):
        peers.receive()


class PreemptionGuard:
    """Turns SIGTERM and Ctrl-C into a flag that the training loop checks after every step.

    ::

        with PreemptionGuard() as guard:
            for step in range(start, total_steps):
                ...
                if guard.should_stop(step):
                    save; wait; sys.exit(guard.exit_code)

    The first signal only sets a flag, so the current step ends and is saved; a second Ctrl-C kills the
    process. With several processes, a signal to any of them stops all after the same step
    (`multihost_utils.reached_preemption_sync_point`; the JAX runtime itself handles SIGTERM then). Entering
    is a collective: while one process is still starting, a signal to any of them ends all.
    """

    received: ClassVar[signal.Signals | None] = None  # in the newest guard; for `exit_if_received`

    def __enter__(self) -> "PreemptionGuard":
        PreemptionGuard.received = None
        signals = [signal.SIGINT, signal.SIGTERM]
        if jax.process_count() > 1:
            from maxlp.runtime import peers

            peers.begin_training()
            signals = [signal.SIGINT]
        self._previous = {number: signal.signal(number, self._receive) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        PreemptionGuard.received = signal.Signals(number)
        logging.warning("%s: saving a checkpoint after this step, then exiting", self.received.name)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if jax.process_count() > 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def should_stop(self, step: int) -> bool:
        """Whether to save after `step` and exit; every process calls it after every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self.received is not None

    @property
    def signal_name(self) -> str:
        """The name of the signal after `should_stop`: "SIGTERM" also if another process received one."""
        return (self.received or signal.SIGTERM).name

    @property
    def exit_code(self) -> int:
        """The exit code after `should_stop`: `EXIT_INTERRUPTED` on Ctrl-C, else `EXIT_PREEMPTED`."""
        return EXIT_INTERRUPTED if self.received == signal.SIGINT else EXIT_PREEMPTED
