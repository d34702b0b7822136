"""Are results right on this device? Runs that are killed and resumed, and kernels compared with the CPU."""

import functools
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.results import TOLERANCE, Result
from benchmarks.accelerator.tables import (
    Case,
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

# --- training -------------------------------------------------------------------------------------------

STEPS, EVERY = 400, 100  # of a run, and between checkpoints: a few seconds on a GPU
# Without deterministic kernels, sums by atomics differ from run to run. With them XLA does not autotune,
# and has no tile sizes for matmuls in Triton, so cuBLAS computes all of them.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"
COMMON = [
    f"--config.train.total_steps={STEPS}",
    f"--config.checkpoint.every_steps={EVERY}",
    "--config.train.eval_every=0",
    "--config.train.eval_batches=2",
]
DEBUG = {  # configs that need no files
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
    """Trains the debug configs, each once as a whole and once killed after its first checkpoint."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        runs = {family: pool.submit(resumed, family, Path(folder), out.tiny) for family in DEBUG}
        for family, run in runs.items():
            try:
                out.add(run=family, **run.result())
            except Exception as error:  # the other run is still checked
                traceback.print_exception(error)
                out.add(run=family, equal=False, error=" ".join(str(error).split())[:300])
    if wrong := [row.get("error", f"{row['run']} differs") for row in out.rows if not row["equal"]]:
        raise AssertionError(f"resumed runs: {'; '.join(wrong)}")


def resumed(family: str, folder: Path, tiny: bool) -> dict[str, Any]:
    """Whether a killed and resumed run ends with the records and the checkpoint of an uninterrupted one."""
    every, steps = (EVERY // 3, STEPS // 3) if tiny else (EVERY, STEPS)
    short = [f"--config.train.total_steps={steps}", f"--config.checkpoint.every_steps={every}"]
    options = [*(TINY if tiny else DEBUG)[family], *COMMON, *short]
    whole, killed = folder / f"{family}-whole", folder / f"{family}-killed"
    start = time.monotonic()
    finish(begin(whole, options), whole)
    seconds = time.monotonic() - start
    process = begin(killed, options)
    while process.poll() is None and not (killed / "checkpoints" / str(every) / "checkpoint.json").exists():
        time.sleep(0.005)
    process.kill()
    if process.wait() >= 0:
        raise AssertionError(f"{family}: the run ended before it could be killed: {last_line(killed)}")
    output = finish(begin(killed, options), killed)
    loss = [record["train/loss"] for record in records(whole) if "train/loss" in record]
    if "resuming at step" not in output:
        raise AssertionError(f"{family}: the killed run did not resume: {last_line(killed)}")
    return {
        "equal": records(killed) == records(whole)
        and checkpoint(killed, steps) == checkpoint(whole, steps),
        "first_loss": loss[0],
        "last_loss": loss[-1],
        "seconds": seconds,
    }


def begin(workdir: Path, options: list[str]) -> subprocess.Popen:
    """Starts a run with its output in a file: a compiler's warnings could fill a pipe that nobody reads."""
    command = [sys.executable, "-m", "maxlp.train", f"--workdir={workdir}", *options]
    with output_file(workdir).open("w") as output:
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, workdir: Path) -> str:
    """Waits for a run; returns what it has printed.

    Raises:
      AssertionError: it ended with another exit code than 0.
    """
    if process.wait():
        print(output_file(workdir).read_text(errors="replace"))
        raise AssertionError(f"maxlp.train failed: {last_line(workdir)}")
    return output_file(workdir).read_text(errors="replace")


def output_file(workdir: Path) -> Path:
    return workdir.with_suffix(".log")


def last_line(workdir: Path) -> str:
    lines = output_file(workdir).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


# --- kernels and recipes --------------------------------------------------------------------------------

# Otherwise XLA compiles and times dozens of Triton kernels for each of these small matmuls, which takes the
# CPU minutes. (When XLA autotunes a train step, it checks each Triton kernel against cuBLAS.)
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def kernels(out: Result) -> None:
    """Compares outputs and gradients of attention and of every recipe's matmuls with the CPU's."""
    if (platforms := jax.config.jax_platforms) and "cpu" not in platforms:
        jax.config.update("jax_platforms", f"{platforms},cpu")
    here, cpu = jax.devices()[0], jax.devices("cpu")[0]
    for case in attention_cases(small=True):
        reference = attend("xla", case, cpu, jnp.float32)
        for name in attention_kernels(case):
            compute = functools.partial(attend, name, case, here, jnp.bfloat16)
            compare(out, reference, compute, what="attention", kernel=name, case=case.name)
    for name, recipe in precision.RECIPES.items():
        compute = functools.partial(multiply, recipe, here)
        compare(out, multiply(recipe, cpu), compute, what="recipe", kernel=name, case="linear layer")
    wrong = [f"{row['kernel']} ({row['case']})" for row in out.rows if not row["error"] <= TOLERANCE]
    if wrong:
        raise AssertionError(f"differs from the CPU's by more than {TOLERANCE}: {', '.join(wrong)}")


def compare(
    out: Result, reference: list[np.ndarray], compute: Callable[[], list[np.ndarray]], **row: Any
) -> None:
    """Adds a row with the error of what this device computes; infinite if it raises an exception."""
    try:
        out.add(**row, error=error(compute(), reference))
    except Exception as reason:  # the others are still checked
        traceback.print_exception(reason)
        refused = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
        out.add(**row, error=math.inf, refused=refused[:300])


def attend(name: str, case: Case, device: jax.Device, dtype: Any) -> list[np.ndarray]:
    """The output of an attention kernel and its gradients, for the same random inputs everywhere."""
    rng = np.random.default_rng(0)
    inputs = [jnp.bfloat16(rng.standard_normal(shape)) for shape in case.shapes]
    with jax.default_device(device), jax.set_mesh(sharding.make_mesh(devices=[device])):
        ids = segment_ids(case) if case.documents else None
        function = functools.partial(attention.kernel(name), causal=case.causal, segment_ids_BS=ids)
        compute = jax.jit(with_gradients(function), compiler_options=BY_CUBLAS)
        found = compute(*(jnp.asarray(x, dtype) for x in inputs))
    return [np.float64(x) for x in found]


def multiply(recipe: precision.Recipe, device: jax.Device) -> list[np.ndarray]:
    """The output of a linear layer and the gradients of its input and kernel."""
    rng = np.random.default_rng(0)
    shapes = (512, 384), (512, 256), (256, 384)
    arrays = [jnp.bfloat16(rng.standard_normal(shape)) for shape in shapes]
    function, state = linear(recipe)
    with jax.default_device(device):
        compute = jax.jit(function, compiler_options=BY_CUBLAS)
        results, _ = compute(*jax.device_put((state, *arrays), device))
        return [np.float64(x) for x in results]


def error(got: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """The largest ‖got - reference‖ / ‖reference‖ of the arrays; NaN if an array contains NaN."""
    pairs = zip(got, reference, strict=True)
    return float(np.max([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]))
