"""Do the claims about low precision and loss spikes hold? Small runs on real text, seed by seed.

    python benchmarks/fidelity.py precision recipes smooth_swiglu optimizers --seeds 0 1 2
    python benchmarks/fidelity.py nvfp4 nvfp4_tokens scalify

Each experiment trains variants of `configs/llama/tiny.py`, each with a few changed values that are listed
here. The seed sets the weights and the order of the data, and all variants share them, so that two runs
with the same seed differ by the variant alone. After each run the measurements are written to
`benchmarks/results/fidelity_<experiment>.json`; finished runs are not repeated. At the end each experiment
prints its table and draws its figure: 141 runs of about half a minute each on two CPU cores, and
six of two minutes.
`docs/fidelity.md` has the claims, the criteria and the results.
"""

import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fidelity_figures
import jax
import jax.numpy as jnp
import numpy as np
from fidelity_runs import (
    ROOT,
    Data,
    Results,
    Trainer,
    Watch,
    check_names,
    digits,
    make_parser,
    run_missing,
    watch_nothing,
    with_random_tokens,
)
from flax import nnx

from configs.llama import tiny
from maxlp import precision
from maxlp.core.train_state import State
from maxlp.optim.stable_adamw import last_rms
from maxlp.precision.dot import QuantDot
from maxlp.precision.recipes import RECIPES
from maxlp.precision.scalify import scaled_gradients
from maxlp.run.experiment import Experiment

VALIDATION_BATCHES = 64  # of 1,024 tokens each, the same for all runs

SPIKY = {  # a learning rate and a β2 with which broken batches make AdamW's loss spike
    "optimizer.learning_rate": 1e-2,
    "optimizer.schedule": "constant",
    "optimizer.b2": 0.999,
    "optimizer.clip_norm": 0.0,
    "optimizer.name": "stable_adamw",
}
# StableAdamW that never clips is AdamW that records RMS_t.
PLAIN = SPIKY | {"optimizer.options": {"clip_threshold": 1e30}}

NVFP4 = {"precision.recipe": "nvfp4"}
PARTS = {  # the recipes that these variants use in the place of nvfp4
    "forward only": dataclasses.replace(RECIPES["nvfp4"], dlhs=None, drhs=None, hadamard=False),
    "backward only": dataclasses.replace(RECIPES["nvfp4"], fwd=None),
}

# Scalify cannot propagate scales through a fused attention kernel.
SCALIFY = {"model.dtype": "float16", "model.attention": "xla"}
FLOAT16_PARAMS = SCALIFY | {
    "model.param_dtype": "float16",
    "optimizer.param_rounding": "nearest",
    "optimizer.low_bit": {"mu": "float16", "nu": "float16"},
}
SMALLER = 2.0**-10  # factor on the gradients: as with 1,024 times as many tokens in a batch

# Experiment → variant → changes of the tiny config.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {
        "bf16": {},
        "float32": {"model.dtype": "float32"},
        "fp8_current": {"precision.recipe": "fp8_current"},
        "fp8_delayed": {"precision.recipe": "fp8_delayed"},
        "mxfp8": {"precision.recipe": "mxfp8"},
        "int8_switchback": {"precision.recipe": "int8_switchback"},
        "int8_all": {"precision.recipe": "int8_all"},
        "e3m1": {"precision.recipe": "simulate", "precision.options": {"format": "e3m1"}},
    },
    "recipes": {  # the others
        name: {"precision.recipe": name}
        for name in (
            *("bf16", "fp8_rowwise", "fp8_rowwise_with_gw_hp", "fp8_switchback", "fp8_gaudi"),
            *("int8_switchback_m", "int8_switchback_q", "nvfp4", "quest", "wta_crs"),
        )
    }
    | {
        # The kernels are smaller than the recipe's blocks of 128.
        "fp8_blocks of 64": {"precision.recipe": "fp8_blocks", "precision.options": {"block_size": 64}},
        "fp16": {"model.dtype": "float16", "precision.loss_scale.initial": 2.0**15},
        "mxfp8, floor": {"precision.recipe": "mxfp8", "precision.options": {"block_scales": "floor"}},
        "mxfp8, e5m2 gradients": {
            "precision.recipe": "mxfp8",
            "precision.options": {"grad_format": "float8_e5m2"},
        },
    },
    "nvfp4": {  # and its parts
        "bf16": {},
        "nvfp4": NVFP4,
        "forward only": NVFP4,
        "backward only": NVFP4,
        "no rotation": NVFP4 | {"precision.options": {"hadamard": False}},
        "no stochastic rounding": NVFP4 | {"precision.options": {"grad_rounding": "nearest"}},
        "no square blocks": NVFP4 | {"precision.options": {"kernel_granularity": "block"}},
        "last block in bf16": NVFP4 | {"precision.last_blocks": 1},
    },
    "scalify": {
        "float32": {"model.dtype": "float32"},
        "scalify_fp16": SCALIFY | {"precision.scalify": "fp16"},
        "scalify_fp16_params": FLOAT16_PARAMS | {"precision.scalify": "fp16"},
        "scalify_fp8": SCALIFY | {"precision.scalify": "fp8"},
        "scalify_fp8, float16 parameters": FLOAT16_PARAMS | {"precision.scalify": "fp8"},
        "float16 without scales": {
            "model.dtype": "float16",
            "precision.loss_scale": {"initial": 1.0, "maximum": 1.0},
        },
        "the same, gradients / 1024": {
            "model.dtype": "float16",
            "precision.loss_scale": dict.fromkeys(("minimum", "initial", "maximum"), SMALLER),
        },
        "scalify_fp16, gradients / 1024": SCALIFY | {"precision.scalify": "fp16"},
    },
    "optimizers": {
        "AdamW": PLAIN,
        "AdamW, gradient clip 1": PLAIN | {"optimizer.clip_norm": 1.0},
        "StableAdamW": SPIKY,
    },
}
# Experiments whose baseline is the variant bf16 of "precision", and what their tables call it.
BASELINES = {"optimizers": "AdamW, usual rate and β2"}


# --- the experiments ----------------------------------------------------------------------------------


def compare(
    experiment: str,
    seeds: list[int],
    only: list[str],
    data: Data,
    adapt: Callable[[Experiment], Experiment] = lambda run: run,
) -> None:
    """Trains each variant with each seed, unless its result is recorded.

    Args:
      only: names of variants; all if empty.
      adapt: as in `Trainer`.
    """

    def measure(run: Trainer, seed: int) -> dict[str, Any]:
        batches = data.batches(seed, run.settings.train.total_steps)
        if experiment == "optimizers":
            batches = [
                with_random_tokens(batch, i) if i in fidelity_figures.BROKEN else batch
                for i, batch in enumerate(batches)
            ]
        state, records = run.train(run.init(seed), batches, watch(run))
        return {"validation": run.evaluate(state)["loss"], **records}

    run_missing(experiment, VARIANTS[experiment], seeds, data, measure, only, adapt)


def smaller_gradients(run: Experiment) -> Experiment:
    """Propagates scales from `SMALLER` times the loss; the update divides by it, as by a loss scale."""
    family, s = run.family, run.settings
    gradients = family.gradients(s.loss, s.train.seed, s.train.microbatches)

    def of_small_loss(graphdef: nnx.GraphDef, state: State, batch: dict, loss_scale: None) -> Any:
        return gradients(graphdef, state, batch, jnp.float32(SMALLER))

    step = functools.partial(run.step, gradients=scaled_gradients(of_small_loss))
    return dataclasses.replace(run, step=step)


ADAPTED = {"scalify_fp16, gradients / 1024": smaller_gradients}


def watch(run: Trainer) -> Watch:
    """Records RMS_t after each step if the optimizer keeps it."""
    return watch_rms if run.settings.optimizer.name == "stable_adamw" else watch_nothing


@jax.jit
def watch_rms(state: State) -> dict[str, jax.Array]:
    """RMS_t of the embedding, of the head, and the largest of the kernels in the blocks."""
    rms = last_rms(state["opt_state"])
    hidden = jnp.stack([jnp.max(x) for x in jax.tree.leaves((rms["layers"]["attn"], rms["layers"]["mlp"]))])
    embedding, head = rms["tok_embed"]["embedding"], rms["lm_head"]["kernel"]
    return {"rms_hidden": jnp.max(hidden), "rms_embedding": embedding, "rms_head": head}


# Smooth-SwiGLU: in a trained model, the gate and up weights of one channel of each layer are made parallel,
# and then grow in stages.
FORMS = {
    "bf16": {},
    "fp8_current": {"precision.recipe": "fp8_current"},
    "fp8_delayed": {"precision.recipe": "fp8_delayed"},
    "fp8_delayed, token": {"precision.recipe": "fp8_delayed", "precision.smooth_swiglu": "token"},
    "fp8_delayed, channel": {"precision.recipe": "fp8_delayed", "precision.smooth_swiglu": "channel"},
    "fp8_delayed, balanced": {"precision.recipe": "fp8_delayed", "precision.smooth_swiglu": "balanced"},
}
GROWTH = 4.0  # factor of the aligned channel's gate and up kernels at each stage; the product grows 16-fold
STAGES, STAGE_STEPS = 6, 15
TUNING = {
    "optimizer.learning_rate": 3e-7,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "train.total_steps": STAGES * STAGE_STEPS,
}


def smooth_swiglu(seeds: list[int], only: list[str], data: Data) -> None:
    """Trains in bfloat16, then continues in each of `FORMS` while one channel of each layer grows."""
    results = Results("smooth_swiglu")
    forms = [name for name in FORMS if not only or name in only]
    trainers: dict[str, Trainer] = {}
    before = Trainer({}, data)
    steps = before.settings.train.total_steps
    for seed in seeds:
        if all(results.has(name, seed) for name in forms):
            continue
        batches = data.batches(seed, steps + STAGES * STAGE_STEPS)
        trained, _ = before.train(before.init(seed), batches[:steps], watch_nothing)
        unaligned = before.evaluate(trained, 16)["loss"]
        aligned = align(jax.device_get(trained["params"]))
        for name in forms:
            if results.has(name, seed):
                continue
            start = time.time()
            if name not in trainers:
                trainers[name] = Trainer(TUNING | FORMS[name], data)
            stages = grow_in_stages(trainers[name], aligned, seed, batches[steps:])
            results.add(name, seed, {"unaligned": unaligned, "stages": stages})
            losses = " ".join(f"{stage['validation']:.3f}" for stage in stages)
            print(
                f"smooth_swiglu / {name} / seed {seed}: {losses} ({time.time() - start:.0f} s)", flush=True
            )


def grow_in_stages(run: Trainer, params: dict, seed: int, batches: list[dict]) -> list[dict]:
    """Trains `STAGE_STEPS` steps in each stage; returns each stage's measurements.

    Args:
      params: initial parameters, from `align`.
      batches: of all stages.
    """
    state = run.init(seed) | {"params": jax.device_put(params, run.shardings["params"])}
    stages = []
    for stage in range(STAGES):
        if stage:
            state = state | {"params": grow(state["params"])}
        part = batches[stage * STAGE_STEPS :][:STAGE_STEPS]
        state, records = run.train(state, part, watch_nothing)
        loss = run.evaluate(state, 16)["loss"]
        stages.append(records | {"validation": loss, **amax_of_product(state)})
    return stages


def align(params: dict) -> dict:
    """Makes one channel of each layer aligned: its gate and up kernels get the same direction.

    It is the channel whose kernels are most similar already, and it is swapped with channel 0, so that
    channel 0 is the outlier in every layer.
    """
    mlp = params["layers"]["mlp"]
    kernels = {name: np.array(mlp[name]["kernel"]) for name in ("gate_proj", "up_proj", "down_proj")}
    gate_LDF, up_LDF, down_LFD = kernels.values()
    size_LF = np.linalg.norm(up_LDF, axis=1) / np.linalg.norm(gate_LDF, axis=1)
    cosine_LF = np.sum(gate_LDF * up_LDF, axis=1) / np.sum(gate_LDF**2, axis=1) / size_LF
    layers, chosen_L = np.arange(len(cosine_LF)), np.argmax(np.abs(cosine_LF), axis=1)
    factor_LF = np.sign(cosine_LF) * size_LF
    for i, c in zip(layers, chosen_L, strict=True):
        up_LDF[i, :, c] = factor_LF[i, c] * gate_LDF[i, :, c]
        for kernel_xF in (gate_LDF[i], up_LDF[i], down_LFD[i].T):
            kernel_xF[:, [0, c]] = kernel_xF[:, [c, 0]]
    new = {name: {"kernel": kernel} for name, kernel in kernels.items()}
    return params | {"layers": params["layers"] | {"mlp": new}}


@jax.jit
def grow(params: dict) -> dict:
    """The aligned channel's product grows and its row of the down projection shrinks by the same factor.

    The model's function stays the same, except that silu approaches relu for large inputs.
    """
    mlp = params["layers"]["mlp"]
    new = {
        "gate_proj": {"kernel": mlp["gate_proj"]["kernel"].at[:, :, 0].multiply(GROWTH)},
        "up_proj": {"kernel": mlp["up_proj"]["kernel"].at[:, :, 0].multiply(GROWTH)},
        "down_proj": {"kernel": mlp["down_proj"]["kernel"].at[:, 0].divide(GROWTH**2)},
    }
    return params | {"layers": params["layers"] | {"mlp": new}}


def amax_of_product(state: dict) -> dict[str, float]:
    """The largest input of a down projection, if delayed scaling keeps a history of it."""
    down = state["model_state"].get("layers", {}).get("mlp", {}).get("down_proj", {}).get("dot_general", {})
    history = down.get("input_amax_history")
    return {} if history is None else {"amax": digits(jnp.max(history[:, 0]))}


TOKENS = {"train.total_steps": 900}  # three times those of the other experiments
LATE = 738  # where the last phase in bfloat16 begins: the last 18 % of the steps


def nvfp4_tokens(seeds: list[int], only: list[str], data: Data) -> None:
    """Trains in bfloat16, in NVFP4, and in NVFP4 with a last phase in bfloat16, for more tokens."""
    results = Results("nvfp4_tokens")
    seeds = [seed for seed in seeds if not results.has("nvfp4, then bf16", seed)]
    if not seeds:
        return
    high, low = Trainer(TOKENS, data), Trainer(TOKENS | NVFP4, data)
    for seed in seeds:
        batches = data.batches(seed, TOKENS["train.total_steps"])

        def finish(name: str, run: Trainer, state: State, records: dict, seed: int = seed) -> None:
            state, last = run.train(state, batches[LATE:], watch_nothing)  # noqa: B023
            both = {key: records[key] + last[key] for key in last}
            results.add(name, seed, {"validation": run.evaluate(state)["loss"], **both})

        finish("bf16", high, *high.train(high.init(seed), batches[:LATE], watch_nothing))
        state, records = low.train(low.init(seed), batches[:LATE], watch_nothing)
        before = jax.device_get(state)
        finish("nvfp4", low, state, records)
        finish("nvfp4, then bf16", high, jax.device_put(before, high.shardings), records)
        print({name: run[str(seed)]["validation"] for name, run in results.runs.items()}, flush=True)


def weight_gradient() -> None:
    """Error of a kernel's gradient summed over 2^10 to 2^16 tokens; SwitchBack leaves it in 16 bits."""
    D, N = 64, 64
    results = Results("weight_gradient")
    kinds = {"Gaussian": 1.0, "1 token in 1000 is 30 times as large": 30.0}
    numbers = (((1,), (0,)), ((), ()))
    for exponent, (kind, size), seed in itertools.product((10, 12, 14, 16), kinds.items(), range(3)):
        rng = np.random.default_rng(seed)
        size_T1 = np.where(rng.random((2**exponent, 1)) < 1e-3, size, 1.0)
        x_TD, g_TN = (jnp.bfloat16(size_T1 * rng.standard_normal((2**exponent, n))) for n in (D, N))
        w_DN = jnp.bfloat16(rng.standard_normal((D, N)) / 8)
        exact_DN = np.float64(x_TD).T @ np.float64(g_TN)
        for recipe in ("bf16", "int8_all", "fp8_current", "mxfp8"):
            dot = QuantDot(precision.make_recipe(recipe))
            _, pull = jax.vjp(functools.partial(_dot, dot, x_TD, numbers), w_DN)
            error = np.linalg.norm(np.float64(pull(g_TN)[0]) - exact_DN) / np.linalg.norm(exact_DN)
            results.add(f"{recipe}, {kind}, 2^{exponent}", seed, {"error": digits(error)})


def _dot(dot: QuantDot, x: jax.Array, numbers: Any, w: jax.Array) -> jax.Array:
    return dot(x, w, numbers)


# --- the command --------------------------------------------------------------------------------------


def main() -> None:
    parser = make_parser(__doc__, [*VARIANTS, "nvfp4_tokens", "smooth_swiglu", "weight_gradient"])
    args = parser.parse_args()
    variants = VARIANTS | {"smooth_swiglu": FORMS}
    check_names(parser, args.only, *(variants.get(experiment, {}) for experiment in args.experiments))
    with tempfile.TemporaryDirectory() as folder:
        data = None if args.draw else Data(tiny.get_config(), Path(folder), VALIDATION_BATCHES)
        for experiment in args.experiments:
            if data and experiment == "weight_gradient":
                weight_gradient()
            elif data and experiment == "smooth_swiglu":
                smooth_swiglu(args.seeds, args.only, data)
            elif data and experiment == "nvfp4_tokens":
                nvfp4_tokens(args.seeds, args.only, data)
            elif data and experiment == "nvfp4":
                for name in args.only or VARIANTS[experiment]:
                    with mock.patch.dict(RECIPES, {"nvfp4": PARTS.get(name, RECIPES["nvfp4"])}):
                        compare(experiment, args.seeds, [name], data)
            elif data and experiment == "scalify":
                for name in args.only or VARIANTS[experiment]:
                    compare(experiment, args.seeds, [name], data, ADAPTED.get(name, lambda run: run))
            elif data:
                compare(experiment, args.seeds, args.only, data)
            shared = Results("precision").runs.get("bf16", {}) if experiment in BASELINES else {}
            baseline = {BASELINES[experiment]: shared} if shared else {}
            fidelity_figures.show(experiment, Results(experiment).runs, ROOT / "docs" / "figures", baseline)


if __name__ == "__main__":
    main()
