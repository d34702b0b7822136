"""Do the claims about CLIP in low precision hold? Small runs on drawn characters, seed by seed.

    python benchmarks/fidelity_clip.py precision --runs /tmp/runs    # twelve full runs of 4 to 6 minutes
    python benchmarks/fidelity_clip.py spikes layer_scale layer_scale_deep    # variants of a smaller model

`precision` runs `python -m maxlp.train` with `configs/clip/debug.py` and reads the last evaluation; a run
that has finished in the folder is not repeated. The other experiments train in this process, as those of
`fidelity.py` do; a run of `spikes` takes 20 seconds of CPU time. The measurements are written to
`benchmarks/results/fidelity_clip_<experiment>.json`.
`docs/fidelity.md` has the claims, the criteria and the results.
"""

import dataclasses
import functools
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fidelity_clip_figures
import jax
import jax.numpy as jnp
import numpy as np
from fidelity_clip_figures import GROWTH, SHIFTS
from fidelity_runs import (
    ROOT,
    Data,
    Results,
    Trainer,
    check_names,
    digits,
    make_parser,
    run_missing,
    watch_nothing,
)
from flax import nnx
from training import changed

from configs.clip import debug
from maxlp.core.gradients import Batch, Metrics
from maxlp.core.train_state import State
from maxlp.families.clip.encoder import Encoder
from maxlp.monitoring.run_record import read_jsonl
from maxlp.nn.stack import apply_stack
from maxlp.optim.stable_adamw import last_rms
from maxlp.run.experiment import Experiment

# --- the debug config in every precision --------------------------------------------------------------

PRECISIONS = {  # (argument of the config, flags); all but float32 compute activations in bfloat16
    "float32": ("", []),
    "bf16": ("", ["--config.model.dtype=bfloat16"]),
    "fp8_delayed": (":precision=fp8_delayed", ["--config.model.dtype=bfloat16"]),
    "int8_switchback": (":precision=int8_switchback", ["--config.model.dtype=bfloat16"]),
}


def precision(seeds: list[int], only: list[str], folder: Path) -> None:
    """Trains the debug config with each recipe and seed, each in its own process."""
    results = Results("clip_precision")
    for seed, (name, (arg, flags)) in itertools.product(seeds, PRECISIONS.items()):
        if results.has(name, seed) or (only and name not in only):
            continue
        workdir = folder / f"{name}-{seed}"
        command = [sys.executable, "-m", "maxlp.train", f"--config=configs/clip/debug.py{arg}"]
        command += [f"--workdir={workdir}", f"--config.train.seed={seed}", *flags]
        measured = outcome(workdir)
        if not measured:
            subprocess.run(command, cwd=ROOT, check=True)
            measured = outcome(workdir)
        results.add(name, seed, measured)
        print(f"precision / {name} / seed {seed}: top-1 {measured['top1']:.4f}", flush=True)


def outcome(workdir: Path) -> dict[str, Any]:
    """The logged losses and the last evaluation of a finished run; {} if it has not finished."""
    records = read_jsonl(workdir / "metrics.jsonl")
    last = next((r for r in reversed(records) if "eval/zero_shot_top1" in r), {})
    if last.get("step") != debug.get_config().train.total_steps:
        return {}
    return {
        "top1": digits(last["eval/zero_shot_top1"]),
        "top5": digits(last["eval/zero_shot_top5"]),
        "images": int(last["eval/images"]),
        "loss": [digits(r["train/loss"]) for r in records if "train/loss" in r],
    }


# --- a smaller model for the rest ---------------------------------------------------------------------

SMALL = {
    "data.batch_size": 64,
    "model.embed_dim": 64,
    "model.visual.width": 64,
    "model.visual.num_heads": 2,
    "model.visual.mlp_dim": 256,
    "model.text.width": 48,
    "model.text.mlp_dim": 192,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 20,
    "optimizer.clip_norm": 0.0,
}


# --- spikes -------------------------------------------------------------------------------------------

STABLE = {
    "optimizer.name": "stable_adamw",
    "optimizer.b2": 0.999,
    "optimizer.eps": 1e-8,  # so that the smallest gradients count
    "optimizer.learning_rate": 5e-3,
    "optimizer.warmup_steps": 60,
}
# StableAdamW that never clips is AdamW that records RMS_t.
ADAMW = STABLE | {"optimizer.options": {"clip_threshold": 1e30}}
SPIKE_STEPS = 260
OPTIMIZERS = {
    "AdamW": ADAMW,
    "AdamW, gradient clip 1": ADAMW | {"optimizer.clip_norm": 1.0},
    "StableAdamW": STABLE,
    "AdamW, β2 0.98": ADAMW | {"optimizer.b2": 0.98},
    "AdamW, β2 0.9": ADAMW | {"optimizer.b2": 0.9},
}


def spikes(seeds: list[int], only: list[str], data: Data) -> None:
    """Trains while the gradients suddenly grow, after v̂ has averaged the squares of small ones."""

    def measure(run: Trainer, seed: int) -> dict[str, Any]:
        return run.train(run.init(seed), data.batches(seed, SPIKE_STEPS), watch_rms)[1]

    run_missing("clip_spikes", OPTIMIZERS, seeds, data, measure, only, growing)


def growing(run: Experiment) -> Experiment:
    """The experiment with gradients times a factor that grows by `GROWTH` at each of `SHIFTS`, up to 1."""

    def scaled(
        graphdef: nnx.GraphDef, state: State, batch: Batch, loss_scale: jax.Array | None
    ) -> tuple[dict, dict, Metrics]:
        grads, model_state, metrics = run.gradients(graphdef, state, batch, loss_scale)
        remaining = jnp.sum(state["step"] < jnp.array(SHIFTS))
        return jax.tree.map(lambda g: g * GROWTH**-remaining, grads), model_state, metrics

    return dataclasses.replace(run, step=functools.partial(run.step, gradients=scaled))


@jax.jit
def watch_rms(state: State) -> dict[str, jax.Array]:
    """RMS_t of the patch embedding and of a kernel in the middle of the image tower."""
    visual = last_rms(state["opt_state"])["visual"]
    up_L = visual["layers"]["mlp"]["up_proj"]["kernel"]
    return {"rms_patch": visual["patch_embed"]["kernel"], "rms_middle": up_L[len(up_L) // 2]}


# --- layer-scale --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tower:
    """An image tower of an experiment.

    Attributes:
      residual: a factor on the initial kernels that add to the residual stream. The norms of the blocks
        undo it, so that without layer-scale it makes the outputs large and the steps relatively small.
    """

    num_layers: int
    learning_rate: float
    steps: int
    residual: float = 1.0


TOWERS = {
    "layer_scale": Tower(8, 3e-3, 100),
    # Float32 learns at this rate, and the mean of |x| is about 1,000; chosen with seed 0.
    "layer_scale_deep": Tower(24, 1e-3, 150, residual=600.0),
}
FORMATS = {
    "float32": {},
    "fp8_current": {"precision.recipe": "fp8_current"},
    "e3m1": {"precision.recipe": "simulate", "precision.options": {"format": "e3m1"}},
}


LAYER_SCALES = {
    f"{name}, {words}": changes | {"model.layer_scale": start}
    for name, changes in FORMATS.items()
    for words, start in (("none", None), ("from zero", 0.0))
}


def layer_scale(experiment: str, seeds: list[int], only: list[str], data: Data) -> None:
    """Trains a deep, narrow image tower with and without layer-scale, with all matmuls in one format."""
    tower, images = TOWERS[experiment], data.validation_batches[0]["image"]
    sizes = {
        "model.visual.num_layers": tower.num_layers,
        "optimizer.learning_rate": tower.learning_rate,
    }
    variants = {name: sizes | changes for name, changes in LAYER_SCALES.items()}

    def measure(run: Trainer, seed: int) -> dict[str, Any]:
        state = with_large_outputs(run.init(seed), tower.residual)
        before = block_sizes(run, state, images)
        state, records = run.train(state, data.batches(seed, tower.steps), watch_nothing)
        top1 = run.evaluate(state)["zero_shot_top1"]
        return {"before": before, "after": block_sizes(run, state, images), "top1": top1} | records

    run_missing(f"clip_{experiment}", variants, seeds, data, measure, only)


def with_large_outputs(state: State, factor: float) -> State:
    """The state with the kernels that add to the image tower's residual stream multiplied by ``factor``."""

    def scaled(path: tuple, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return x * factor if "visual/layers" in name and ("out_proj" in name or "down_proj" in name) else x

    return state | {"params": jax.tree_util.tree_map_with_path(scaled, state["params"])}


def block_sizes(run: Trainer, state: State, image_BHWC: np.ndarray) -> dict[str, list[float]]:
    """Mean and maximum of |x| after each block of the image tower, for a batch of images."""
    mean_L, largest_L = jax.device_get(_block_sizes(run.graphdef, state, image_BHWC))
    return {"mean": [*map(digits, mean_L)], "max": [*map(digits, largest_L)]}


@functools.partial(jax.jit, static_argnums=0)
def _block_sizes(
    graphdef: nnx.GraphDef, state: State, image_BHWC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    tower = nnx.merge(graphdef, state["params"], state["model_state"]).visual
    recorder = tower.encoder = Recorder(tower.encoder)
    tower(jnp.float32(image_BHWC) / 127.5 - 1)
    return recorder.sizes


class Recorder:
    """Replaces a tower's `Encoder`: runs its blocks, and records the mean and maximum of |output|."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder

    def run(self, blocks: nnx.Module, x_BSD: jax.Array) -> jax.Array:
        def call(block: Any, x_BSD: jax.Array, *_: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            y_BSD = block(x_BSD, x_BSD.shape[1])
            return y_BSD, (jnp.mean(jnp.abs(y_BSD)), jnp.max(jnp.abs(y_BSD)))

        c = self.encoder
        y_BSD, self.sizes = apply_stack(
            blocks,
            x_BSD,
            call,
            num_layers=c.sizes.num_layers,
            scan=c.model.scan_layers,
            remat=c.model.remat,
        )
        return y_BSD


def main() -> None:
    parser = make_parser(__doc__, ["precision", "spikes", *TOWERS])
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "maxlp_fidelity_clip")
    args = parser.parse_args()
    variants = {"precision": PRECISIONS, "spikes": OPTIMIZERS} | dict.fromkeys(TOWERS, LAYER_SCALES)
    check_names(parser, args.only, *(variants[experiment] for experiment in args.experiments))
    trains_here = not args.draw and {*args.experiments} - {"precision"}
    with tempfile.TemporaryDirectory() as folder:
        data = Data(changed(debug.get_config(), SMALL), Path(folder)) if trains_here else None
        for experiment in args.experiments:
            if experiment == "precision" and not args.draw:
                precision(args.seeds, args.only, args.runs)
            elif data and experiment == "spikes":
                spikes(args.seeds, args.only, data)
            elif data:
                layer_scale(experiment, args.seeds, args.only, data)
            runs = Results(f"clip_{experiment}").runs
            fidelity_clip_figures.show(experiment, runs, ROOT / "docs" / "figures")


if __name__ == "__main__":
    main()
