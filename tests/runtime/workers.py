"""Processes of a small distributed run: `Workers` starts and commands them, `main` is one of them.

A worker reads commands from standard input, one JSON list ``[name, *arguments]`` per line, and prints
JSON objects, one per line.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.runtime import (
    checkpoint,
    distributed,
    files,
    lock,
    manifest,
    mirror,
    preemption,
    shared_workdir,
)
from tests.training_runs import ROOT, environments

SHAPE = (64, 4096)  # 1 MiB: a save takes long enough to be interrupted


class Workers:
    """The processes of one run, each with two simulated devices."""

    def __init__(self, num_processes=1):
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAXLP_")}
        env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__],
                env=env | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for own in (environments(num_processes) if num_processes > 1 else [{}])
        ]

    def send(self, *command):
        for process in self.processes:
            process.stdin.write(json.dumps(command, default=str) + "\n")
            process.stdin.flush()

    def call(self, *command):
        """The next reply of each process to a command."""
        self.send(*command)
        return [self.read(rank) for rank in range(len(self.processes))]

    def read(self, rank=0, until=None):
        """The next reply of a process, or its first reply that equals `until`."""
        lines = []
        with killed_after(60, self.processes[rank]):
            for line in self.processes[rank].stdout:
                lines.append(line)
                if line[0] == "{" and (until is None or json.loads(line) == until):
                    return json.loads(line)
        raise AssertionError(f"process {rank} ended:\n{''.join(lines)[-4000:]}")

    def finish(self, *codes):
        """Waits for all processes to end with these exit codes; returns the last reply of each."""
        for process in self.processes:  # before waiting for any, because they wait for each other
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        last = []
        for rank, process in enumerate(self.processes):
            with killed_after(60, process):
                lines = list(process.stdout)
                code = process.wait()
            assert code == codes[rank], f"process {rank} ended with {code}:\n{''.join(lines)[-4000:]}"
            last.append(next((json.loads(line) for line in reversed(lines) if line[0] == "{"), None))
        return last


@contextlib.contextmanager
def killed_after(seconds, process):
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def abstract_state():
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    sharded, replicated = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    return {
        "params": {"kernel": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharded)},
        "step": jax.ShapeDtypeStruct((), np.int32, sharding=replicated),
    }


def expected(step):
    """The state after `step`, as numpy: every element depends on the step."""
    kernel = (np.arange(np.prod(SHAPE), dtype=np.float32) * np.float32(step + 0.1)).reshape(SHAPE)
    return {"params": {"kernel": kernel}, "step": np.int32(step)}


def device_state(step):
    return jax.tree.map(
        lambda spec, x: jax.make_array_from_callback(spec.shape, spec.sharding, lambda index: x[index]),
        abstract_state(),
        expected(step),
    )


def assert_equals_expected(state, step):
    for array, x in zip(jax.tree.leaves(state), jax.tree.leaves(expected(step)), strict=True):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])


def restore(checkpointer):
    """Restores the newest step and compares it bit for bit."""
    restored = checkpointer.restore_latest(abstract_state())
    if restored is not None:
        assert_equals_expected(restored.state, restored.step)
    return restored


def reply(**values):
    print(json.dumps(values), flush=True)


def run_gather():
    rank = jax.process_index()
    gathered = distributed.gather_json({"rank": rank, "text": "é" * 7 * rank, "list": [None, 1.5] * rank})
    distributed.barrier("gathered")
    reply(gathered=gathered, primary=distributed.is_primary())


def run_save(directory, steps):
    with checkpoint.Checkpointer(directory, every_steps=1) as checkpointer:
        for step in range(1, steps + 1):
            data_state = {"position": distributed.gather_json(step)}
            checkpointer.save(step, device_state(step), data_state, {"processes": jax.process_count()})
    reply(saved=steps)


def run_restore(directory):
    with checkpoint.Checkpointer(directory, every_steps=1) as checkpointer:
        restored = restore(checkpointer)
    reply(step=restored.step, data_state=restored.data_state, meta=restored.meta)


def run_until_signalled(directory):
    """Prints every step when it begins; saves and exits after the step in which a signal arrives."""
    with (
        checkpoint.Checkpointer(directory, every_steps=10_000) as checkpointer,
        preemption.PreemptionGuard() as guard,
    ):
        for step in range(1, 2_000):
            reply(step=step)
            time.sleep(0.02)
            if guard.should_stop(step):
                checkpointer.save(step, device_state(step), {})
                checkpointer.wait()
                reply(stopped=step)
                sys.exit(guard.exit_code)


def run_killed_in_save(directory, place):
    """Resumes, saves two steps, and kills its process in a third save, whatever the speed of the machine.

    Args:
      place: a function of `manifest` or `files` at whose call it is killed; "arrays" kills it as soon as
        the folder of the step exists.
    """
    checkpointer = checkpoint.Checkpointer(directory, every_steps=1)
    restored = restore(checkpointer)
    start = restored.step if restored else 0
    reply(start=start)
    for step in (start + 1, start + 2):
        checkpointer.save(step, device_state(step), {})
        checkpointer.wait()

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def wait(*_):
        threading.Event().wait()  # for ever: all arrays may be written before the folder is seen

    if place == "arrays":
        manifest.shared_checksums = wait
    else:
        module, name = place.split(".")
        setattr(getattr(checkpoint, module), name, kill)
    checkpointer.save(start + 3, device_state(start + 3), {})
    while not (place == "arrays" and any(Path(directory).glob("*.unfinished*"))):
        time.sleep(0.001)
    kill()


def run_save_until_killed(directory):
    """Resumes, and saves one step after the other."""
    checkpointer = checkpoint.Checkpointer(directory, every_steps=1)
    restored = restore(checkpointer)
    start = restored.step if restored else 0
    reply(saved=start)
    for step in range(start + 1, 10_000):
        checkpointer.save(step, device_state(step), {})
        checkpointer.wait()
        reply(saved=step)


def run_lock(workdir):
    """Prints whether the lock was taken; holds it until the next command."""
    with lock.open_lock(files.local_path(workdir)) as held:
        try:
            held.acquire()
        except ValueError as error:
            reply(refused=str(error))
        else:
            reply(held=True)
            sys.stdin.readline()


def run_lock_apart(workdir):
    """As `run_lock`, with a disk of its own for each process."""
    shared_workdir.VISIBLE_SECONDS = 0.5
    run_lock(f"{workdir}/{jax.process_index()}")


def forget():
    """What a new process knows of buckets: nothing."""
    for one in mirror._mirrors.values():
        shutil.rmtree(one.folder, ignore_errors=True)  # not `files.remove`, which a holder's bucket follows
    mirror._mirrors.clear()


COMMANDS = {
    "lock": run_lock,
    "lock_apart": run_lock_apart,
    "gather": run_gather,
    "save": run_save,
    "restore": run_restore,
    "until_signalled": run_until_signalled,
    "killed_in_save": run_killed_in_save,
    "save_until_killed": run_save_until_killed,
}


def main():
    distributed.initialize()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        COMMANDS[name](*arguments)


if __name__ == "__main__":
    main()
