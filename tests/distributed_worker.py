"""A process of a small run, and `start`, by which the tests of several processes start it.

    python distributed_worker.py MODE [DIRECTORY]

It prints one JSON value a line.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.runtime import checkpoint, distributed

SHAPE = (64, 4096)  # 1 MiB: large enough that a kill falls into a save


def start(mode, *arguments, processes=1, devices=2):
    """Starts the processes of one run, each with its own devices; the caller waits for them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, mode, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAXLP_")}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    several = {"MAXLP_COORDINATOR": f"localhost:{port}", "MAXLP_NUM_PROCESSES": str(processes)}
    return [
        subprocess.Popen(
            command,
            env=environment | ({**several, "MAXLP_PROCESS_ID": str(rank)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]


def said_until(process, last):
    """Reads what a process says up to a value, and kills it if that does not come."""
    timer = threading.Timer(60, process.kill)
    timer.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line[0] == "{" and json.loads(line) == last:
            break
    timer.cancel()
    return lines


def finish(processes, code=0):
    """What each process said since, after all ended with `code`."""
    said = []
    for process in processes:
        lines = said_until(process, None)
        process.wait()
        assert process.returncode == code, f"ended with {process.returncode}:\n{''.join(lines)[-4000:]}"
        said.append([json.loads(line) for line in lines if line[0] == "{"])
    return said


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


def say(value):
    print(json.dumps(value), flush=True)


def gather():
    rank = jax.process_index()
    gathered = distributed.gather_json({"rank": rank, "text": "é" * 7 * rank, "list": [None, 1.5] * rank})
    distributed.barrier("done")
    say({"gathered": gathered, "primary": distributed.is_primary()})


def run(directory, every_steps=1, total_steps=1000, pause=0.0):
    """Trains for `total_steps` from wherever the directory is; says every step it begins."""
    with (
        checkpoint.Checkpointer(directory, every_steps=every_steps) as checkpointer,
        distributed.PreemptionGuard() as guard,
    ):
        restored = checkpointer.restore_latest(abstract_state())
        start = restored.step if restored else 0
        if restored:
            assert_equals_expected(restored.state, start)
            assert restored.data_state == {"position": [start] * jax.process_count()}
        say({"start": start})
        for step in range(start + 1, start + total_steps + 1):
            say({"step": step})
            time.sleep(pause)
            state = device_state(step)
            data_state = {"position": distributed.gather_json(step)}
            stop = guard.should_stop(step)
            if stop or checkpointer.should_save(step):
                checkpointer.save(step, state, data_state, {"processes": jax.process_count()})
            if stop:
                checkpointer.wait()
                say({"stopped": step})
                sys.exit(guard.exit_code)


def restore(directory):
    restored = checkpoint.Checkpointer(directory, every_steps=1).restore_latest(abstract_state())
    assert_equals_expected(restored.state, restored.step)
    say({"step": restored.step, "data_state": restored.data_state, "meta": restored.meta})


if __name__ == "__main__":
    distributed.initialize()
    mode, *arguments = sys.argv[1:]
    if mode == "gather":
        gather()
    elif mode == "save":
        run(*arguments, total_steps=2)
    elif mode == "restore":
        restore(*arguments)
    elif mode == "kill":
        run(*arguments)
    elif mode == "preempt":
        run(*arguments, every_steps=10_000, total_steps=2_000, pause=0.02)
