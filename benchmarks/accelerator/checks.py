"""Is it right on this device? Training that is killed and resumed, and kernels against the CPU's."""

import functools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.results import Result
from benchmarks.accelerator.tables import (
    attention_cases,
    attention_kernels,
    linear,
    segment_ids,
    with_gradients,
)
from maxlp import precision
from maxlp.nn import attention
from maxlp.parallel import sharding
from tests.run_outputs import checkpoint, records
from tests.training_runs import SMALL

ROOT = Path(__file__).parents[2]
# Outputs and gradients are rounded to bfloat16 (2^-9 of a value at most), and so are the probabilities and
# the gradients of the logits that they are made of; the norm of the error stays below four times that.
TOLERANCE = 2.0**-7

# --- training -------------------------------------------------------------------------------------------

STEPS, EVERY = 1200, 300  # updates, and updates between checkpoints: some seconds of a GPU's time
COMMON = [
    f"--config.train.total_steps={STEPS}",
    f"--config.checkpoint.every_steps={EVERY}",
    "--config.train.eval_every=0",
    "--config.train.eval_batches=2",
]
DEBUG = {  # configs that train without any files
    "llama": ["--config=configs/llama/debug.py", "--config.data.source=stdlib?validation=0.002"],
    "clip": ["--config=configs/clip/debug.py"],
}
TINY = {
    "llama": SMALL,
    "clip": [
        *(
            "--config=configs/clip/debug.py",
            "--config.model.embed_dim=16",
            "--config.model.visual.image_size=16",
        ),
        *("--config.data.image_size=16", "--config.data.batch_size=8", "--config.data.tokenizer=bytes"),
        *(
            "--config.model.visual.width=32",
            "--config.model.visual.num_layers=1",
            "--config.train.log_every=1",
        ),
        *("--config.model.visual.num_heads=2", "--config.model.text.num_layers=1"),
        "--config.model.text.eos_id=257",
    ],
}


def smoke(out: Result) -> None:
    """Trains the debug configs, each once as a whole and once killed after its first checkpoint.

    XLA's deterministic kernels are on: without them, sums by atomics differ from run to run.
    """
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        for row in pool.map(lambda family: resumed(family, Path(folder), out.tiny), DEBUG):
            out.add(**row)
    if not all(row["equal"] for row in out.rows):
        raise AssertionError("a resumed run differs from one that was not killed")


def resumed(family: str, folder: Path, tiny: bool) -> dict[str, Any]:
    """Whether a killed run ends with the records and the checkpoint of a whole one, to the bit."""
    every, steps = (EVERY // 10, STEPS // 10) if tiny else (EVERY, STEPS)
    short = [f"--config.train.total_steps={steps}", f"--config.checkpoint.every_steps={every}"]
    options = [*(TINY if tiny else DEBUG)[family], *COMMON, *short]
    whole, killed = folder / f"{family}-whole", folder / f"{family}-killed"
    start = time.monotonic()
    finish(begin(whole, options))
    seconds = time.monotonic() - start
    process = begin(killed, options)
    while process.poll() is None and not (killed / "checkpoints" / str(every) / "checkpoint.json").exists():
        time.sleep(0.005)
    process.kill()
    if process.wait() == 0:
        raise AssertionError(f"{family}: the run ended before it could be killed")
    process.communicate()
    told = finish(begin(killed, options))
    loss = [record["train/loss"] for record in records(whole) if "train/loss" in record]
    return {
        "run": family,
        "resumed": "resuming at step" in told,
        "equal": records(killed) == records(whole)
        and checkpoint(killed, steps) == checkpoint(whole, steps),
        "first_loss": loss[0],
        "last_loss": loss[-1],
        "seconds": seconds,
    }


def begin(workdir: Path, options: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "maxlp.train", f"--workdir={workdir}", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    """What a run has printed when it has ended."""
    told = process.communicate()[0]
    if process.returncode:
        print(told)
        raise AssertionError(f"maxlp.train failed: {told.strip().splitlines()[-1]}")
    return told


# --- kernels and recipes --------------------------------------------------------------------------------


def kernels(out: Result) -> None:
    """Outputs and gradients of attention and of every recipe's matmuls, compared with the CPU's."""
    if (platforms := jax.config.jax_platforms) and "cpu" not in platforms:
        jax.config.update("jax_platforms", f"{platforms},cpu")
    for case in attention_cases(small=True):
        reference = attend("xla", case, jax.devices("cpu")[0], jnp.float32)
        for name in attention_kernels(case):
            got = attend(name, case, jax.devices()[0], jnp.bfloat16)
            out.add(what="attention", kernel=name, case=case.name, error=error(got, reference))
    for name, recipe in precision.RECIPES.items():
        reference = multiply(recipe, jax.devices("cpu")[0])
        got = multiply(recipe, jax.devices()[0])
        out.add(what="recipe", kernel=name, case="linear layer", error=error(got, reference))
    wrong = [f"{row['kernel']} ({row['case']})" for row in out.rows if not row["error"] <= TOLERANCE]
    if wrong:
        raise AssertionError(f"differs from the CPU's by more than {TOLERANCE}: {', '.join(wrong)}")


def attend(name: str, case: Any, device: jax.Device, dtype: Any) -> list[np.ndarray]:
    """The output of an attention kernel and its gradients, for the same random inputs everywhere."""
    rng = np.random.default_rng(0)
    shapes = [
        (case.batch, case.length, heads, case.head_dim) for heads in (case.heads, *[case.kv_heads] * 2)
    ]
    inputs = [jnp.bfloat16(rng.standard_normal(shape)) for shape in (shapes[0], *shapes)]
    with jax.default_device(device), jax.set_mesh(sharding.make_mesh(devices=[device])):
        ids = segment_ids(case) if case.documents else None
        function = functools.partial(attention.kernel(name), causal=case.causal, segment_ids_BS=ids)
        found = jax.jit(with_gradients(function))(*(jnp.asarray(x, dtype) for x in inputs))
    return [np.float64(x) for x in found]


def multiply(recipe: precision.Recipe, device: jax.Device) -> list[np.ndarray]:
    """The output of a linear layer and the gradients of its input and kernel."""
    rng = np.random.default_rng(0)
    shapes = (512, 384), (512, 256), (256, 384)
    arrays = [jnp.bfloat16(rng.standard_normal(shape)) for shape in shapes]
    function, state = linear(recipe)
    with jax.default_device(device):
        return [np.float64(x) for x in jax.jit(function)(*jax.device_put((state, *arrays), device))]


def error(got: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """The largest ‖got - reference‖ / ‖reference‖ of the arrays; NaN if there is any."""
    pairs = zip(got, reference, strict=True)
    return float(np.max([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]))
