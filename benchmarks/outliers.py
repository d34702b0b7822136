"""Do outliers appear on their own, and does Smooth-SwiGLU keep them out of FP8? One small SwiGLU network.

    python benchmarks/outliers.py              # 2 minutes of CPU time; run it again to continue
    python benchmarks/outliers.py --report     # the tables and the figure of what has been run

Fishman et al. 2024 (arXiv:2409.12517, theorem 1): where the loss has an ℓ2 term and the gate of a SwiGLU
is saturated, a stationary point has gate and up weights that are equal or opposite. Their product is then
quadratic in its input, and delayed FP8 scales, which come from earlier steps, are too small for it.

Here a residual block without attention, x + down(silu(gate(x)) * up(x)), learns a network that has no
product in it: 512 random GELUs. Inputs have 16 dims and log-normal sizes (σ 0.5); each step has 64 new
ones. The loss is the squared error of the output, relative to the square of `SIZE`, the size of the
targets, plus half of `Setting.l2` times the squared norm of all weights. Adam brings it to a stationary
point: its rate falls linearly to 0. Nothing is aligned or enlarged by hand. The control has GELUs instead,
half as many again, so that it has as many weights.

    cosine       |cos| of gate and up weights of a channel; "longest" is the channel with the largest
                 product of the two norms, "mean" is weighted by these products
    product      the largest input of the down projection in a window of `WINDOW` steps
    saturated    share of the elements of that input beyond the largest number of E4M3, counted at every
                 step (`maxlp.precision.health`)
    error        squared error on 4,096 new inputs, relative to that of predicting 0
    overshoot    the output for the largest hundredth of these, projected on the target and relative to it

Criteria, written before the runs, to hold with each of `SEEDS`:

1. Unforced alignment: without quantization the mean cosine is below 0.5 at first and above 0.9 in the end,
   as is the longest's in the end; without ℓ2 the mean is lower in the end.
2. The product grows: in the end it is 5 times as large as in the first window, and 4 times as large as
   the control's.
3. Delayed FP8 saturates after the alignment: more than one element in 100,000 in some window, the first
   of which is not before the mean cosine is 0.9; and over the second half of the run at least twice as
   often as the control.
4. This costs: the error with delayed FP8 is more than 5 % above that without quantization. Smooth-SwiGLU
   (`channel`) cures it: nothing saturates, and the error is at most 1 % above.

What trials with seed 0 (4,000 steps) had shown by then: cosines of 0.99; with targets from a SwiGLU
network, or with the second of two blocks, often no alignment; with inputs of equal size hardly any
saturation, with these about one element in 100,000, four times the control's; and no loss from it.
"""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import fidelity_figures
import jax
import jax.numpy as jnp
import numpy as np
from fidelity_runs import RESULTS, digits
from flax import nnx
from matplotlib.figure import Figure
from optimizers_fair import Plan, parse

from configs.llama import tiny
from maxlp import optim, precision
from maxlp.core.gradients import Batch, Metrics, batch_gradients
from maxlp.core.train_state import State, init_state
from maxlp.core.train_step import train_step
from maxlp.families.llama.model import LlamaConfig, Mlp
from maxlp.nn import stack
from maxlp.optim.config import OptimizerConfig
from maxlp.precision import health, magnitudes
from maxlp.run.settings import read

SEEDS = (1, 2, 3)
WINDOW = 100  # steps of one record
D, F, TEACHERS = 16, 32, 512
SIZE = 30.0
ALIGNED, SATURATED = 0.9, 1e-5  # bounds of the criteria: a mean cosine, a share of elements
MEAN_OF = 11  # windows over which the figure averages


@dataclasses.dataclass(frozen=True)
class Setting:
    """A variant.

    Attributes:
      gated: SwiGLU; False for the control, a GELU.
      l2: factor of half the squared norm of the weights.
      recipe, smooth: arguments of `precision.inject`; "bf16" leaves the matmuls in float32.
      history: steps whose amaxes delayed scales come from.
      tokens: inputs of a step.
    """

    gated: bool = True
    l2: float = 1e-3
    recipe: str = "bf16"
    smooth: str = "none"
    history: int = 16
    learning_rate: float = 5e-3
    steps: int = 12_000
    tokens: int = 64


VARIANTS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu_no_l2": {"l2": 0.0},
    "swiglu_fp8_delayed": {"recipe": "fp8_delayed"},
    "swiglu_fp8_delayed_channel": {"recipe": "fp8_delayed", "smooth": "channel"},
    "gelu": {"gated": False},
    "gelu_fp8_delayed": {"gated": False, "recipe": "fp8_delayed"},
}


# --- the network and its data -------------------------------------------------------------------------


class GeluMlp(nnx.Module):
    """``down(gelu(up(x)))``, with as many weights as the SwiGLU."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        hidden = c.mlp_dim * 3 // 2
        self.up_proj = c.linear(c.embed_dim, hidden, ("embed", "mlp"), rngs)
        self.down_proj = c.linear(hidden, c.embed_dim, ("mlp", "embed"), rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.gelu(self.up_proj(x)))


class Block(stack.Block):
    """The residual branch of an MLP, without a norm."""

    def __init__(self, c: LlamaConfig, gated: bool, rngs: nnx.Rngs):
        self.mlp = Mlp(c, rngs) if gated else GeluMlp(c, rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return x_BSD + self.mlp(x_BSD)


class Net(nnx.Module):
    """A stack of one block, so that recipes and measurements treat it as they do a Llama."""

    def __init__(self, setting: Setting, rngs: nnx.Rngs):
        sizes = {"embed_dim": D, "mlp_dim": F, "num_layers": 1, "dtype": "float32"}
        c = dataclasses.replace(read(tiny.get_config()).model, **sizes)
        self.layers = stack.stack(lambda rngs: Block(c, setting.gated, rngs), 1, rngs)
        precision.inject(
            self,
            precision.make_recipe(setting.recipe, history=setting.history),
            smooth_swiglu=setting.smooth,
            gated_products=("layers/mlp/down_proj",) if setting.gated else (),
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        def call(block: Any, x_BSD: jax.Array, *_: Any) -> tuple[jax.Array, None]:
            return block(x_BSD), None

        return stack.apply_stack(self.layers, x_BSD, call, num_layers=1, scan=False, remat="none")[0]


def make_batch(seed: int, step: jax.Array | int, tokens: int) -> Batch:
    """Inputs x_BSD and targets y_BSD of one row; each seed has another network that makes the targets."""
    rng = np.random.default_rng(seed)
    into, out = rng.standard_normal((D, TEACHERS)) / D**0.5, rng.standard_normal((TEACHERS, D))
    of_x, of_size = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    x_BSD = jax.random.normal(of_x, (1, tokens, D))
    x_BSD *= jnp.exp(0.5 * jax.random.normal(of_size, (1, tokens, 1)))
    return {"x": x_BSD, "y": SIZE * jax.nn.gelu(2 * x_BSD @ into) @ out / TEACHERS**0.5}


def squared_error(model: nnx.Module, batch: Batch) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"])) / SIZE**2


def loss_with_l2(
    setting: Setting, model: nnx.Module, batch: Batch, step: jax.Array
) -> tuple[jax.Array, Metrics]:
    """A `core.gradients.Loss`."""
    del step
    squares = sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(nnx.state(model, nnx.Param)))
    error = squared_error(model, batch)
    return error + setting.l2 / 2 * squares, {"loss": error}


# --- what is measured ---------------------------------------------------------------------------------


def cosines(gate_DF: jax.Array, up_DF: jax.Array) -> dict[str, jax.Array]:
    """|cos| of gate and up weights: "longest" and "mean" as defined at the top of the file."""
    norm_F = jnp.linalg.norm(gate_DF, axis=0) * jnp.linalg.norm(up_DF, axis=0)
    dot_F = jnp.abs(jnp.sum(gate_DF * up_DF, axis=0))  # |cos| times norm
    longest = jnp.argmax(norm_F)
    return {"longest": dot_F[longest] / norm_F[longest], "mean": jnp.sum(dot_F) / jnp.sum(norm_F)}


def hidden_amax(kernels: dict[str, jax.Array], x_BSD: jax.Array) -> jax.Array:
    """The largest input of the down projection, in float32."""
    up_BSF = x_BSD @ kernels["up_proj"]
    if "gate_proj" in kernels:
        return jnp.max(jnp.abs(jax.nn.silu(x_BSD @ kernels["gate_proj"]) * up_BSF))
    return jnp.max(jnp.abs(jax.nn.gelu(up_BSF)))


def overshoot(model: nnx.Module, batch: Batch) -> jax.Array:
    """The output for the largest hundredth of the inputs, projected on the target and relative to it."""
    sizes = jnp.linalg.norm(batch["x"], axis=-1, keepdims=True)
    is_large = sizes > jnp.quantile(sizes, 0.99)
    y_BSD = jnp.where(is_large, batch["y"], 0.0)
    return jnp.sum(model(batch["x"]) * y_BSD) / jnp.sum(jnp.square(y_BSD))


class Run:
    """A run of a variant with a seed."""

    def __init__(self, setting: Setting, seed: int):
        self.setting, self.seed = setting, seed
        config = OptimizerConfig(
            learning_rate=setting.learning_rate,
            schedule="linear",
            warmup_steps=30,
            final_lr_fraction=0.0,
            clip_norm=1.0,
            weight_decay=0.0,
            b1=0.9,
            b2=0.95,
            eps=1e-8,
        )
        self.optimizer = optim.make_tx(config, total_steps=setting.steps)
        self.gradients = batch_gradients(functools.partial(loss_with_l2, setting))
        make_model = functools.partial(Net, setting)
        self.graphdef, *_ = nnx.split(nnx.eval_shape(lambda: make_model(nnx.Rngs(0))), nnx.Param, ...)
        self.state = init_state(make_model, self.optimizer.tx, seed)
        self.window = jax.jit(self._window)

    def model(self, state: State) -> nnx.Module:
        return nnx.merge(self.graphdef, state["params"], state["model_state"])

    def _step(self, state: State, _: None) -> tuple[State, dict[str, jax.Array]]:
        batch = make_batch(self.seed, state["step"], self.setting.tokens)
        kernels = {name: w["kernel"][0] for name, w in state["params"]["layers"]["mlp"].items()}
        found = {"product": hidden_amax(kernels, batch["x"])}
        if self.setting.recipe != "bf16":
            measured = health.measure(state, batch, graphdef=self.graphdef, gradients=self.gradients)
            found["saturated"] = measured["layers/mlp/down_proj"]["input/saturated"][0]
        state, metrics = train_step(
            self.graphdef, state, batch, gradients=self.gradients, tx=self.optimizer.tx
        )
        return state, found | {"loss": metrics["loss"]}

    def _window(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Trains for `WINDOW` steps; the record's cosines and magnitude are those before the first step."""
        kernels = {name: w["kernel"][0] for name, w in state["params"]["layers"]["mlp"].items()}
        found = cosines(kernels["gate_proj"], kernels["up_proj"]) if self.setting.gated else {}
        model, batch = self.model(state), make_batch(self.seed, state["step"], self.setting.tokens)
        found["magnitude"] = magnitudes.of_blocks(model, lambda: model(batch["x"]))["layers"][0]
        state, steps = jax.lax.scan(self._step, state, length=WINDOW)
        kind = {"product": jnp.max, "saturated": jnp.mean, "loss": jnp.mean}
        return state, found | {name: kind[name](values) for name, values in steps.items()}

    def measure(self) -> dict[str, Any]:
        """Trains to the end; returns the windows' values by name, and error and overshoot on new inputs."""
        records = []
        for _ in range(self.setting.steps // WINDOW):
            self.state, record = self.window(self.state)
            records.append(record)
        records = jax.device_get(records)
        batch = make_batch(self.seed, self.setting.steps, 4096)
        error = squared_error(self.model(self.state), batch) / (jnp.mean(jnp.square(batch["y"])) / SIZE**2)
        over = overshoot(self.model(self.state), batch)
        curves = {name: [digits(record[name]) for record in records] for name in records[0]}
        return curves | {"error": digits(error), "overshoot": digits(over)}


def run_missing(plan: Plan, only: list[str]) -> None:
    for variant in only:
        for seed in plan.seeds:
            if plan.measured(variant, f"seed{seed}"):
                continue
            start = time.process_time()
            measured = Run(Setting(**plan.base | plan.methods[variant]), seed).measure()
            plan.save(variant, f"seed{seed}", measured)
            taken = time.process_time() - start
            print(f"{variant}, seed {seed}: error {measured['error']:.4f} ({taken:.0f} s)", flush=True)


# --- the report ---------------------------------------------------------------------------------------

Runs = dict[str, list[dict[str, Any]]]  # variant → its seeds


def report(plan: Plan, figure: Path) -> None:
    """Prints the table and whether the criteria are met, and draws; or prints what has not been run."""
    every = {v: [plan.measured(v, f"seed{seed}") for seed in plan.seeds] for v in plan.methods}
    missing = [variant for variant, runs in every.items() if None in runs]
    if missing:
        print("not run yet: " + ", ".join(missing))
        return
    runs: Runs = {v: [run for run in of_seeds if run] for v, of_seeds in every.items()}
    header = ["variant", "error", "longest cosine", "mean cosine", "product", "saturated"]
    header += [r"mean of \|x\|", "overshoot"]
    fidelity_figures.print_table(header, [row(variant, of_seeds) for variant, of_seeds in runs.items()])
    print("\n" + "\n".join(criteria(runs)))
    draw(runs, figure)


def row(variant: str, runs: list[dict[str, Any]]) -> list[str]:
    """A line of the table: at the end of training, mean of the seeds; saturated, over the second half."""

    def cell(key: str, form: str) -> str:
        return (
            fidelity_figures.plus_minus(np.array([run[key][-1] for run in runs]), form)
            if key in runs[0]
            else ""
        )

    errors = fidelity_figures.plus_minus(np.array([run["error"] for run in runs]))
    shares = f"{np.mean([late(run) for run in runs]):.1e}" if "saturated" in runs[0] else ""
    cells = [cell("longest", ".3f"), cell("mean", ".3f"), cell("product", ".0f"), shares]
    over = fidelity_figures.plus_minus(np.array([run["overshoot"] for run in runs]), ".2f")
    return [variant, errors, *cells, cell("magnitude", ".2f"), over]


def late(run: dict[str, Any]) -> float:
    """The share of saturated elements over the second half of a run."""
    return float(np.mean(run["saturated"][len(run["saturated"]) // 2 :]))


def first_above(values: list[float], limit: float) -> float:
    """The first step of the first window with a value above a limit; infinite if there is none."""
    above = np.flatnonzero(np.array(values) > limit)
    return float(above[0] * WINDOW) if len(above) else np.inf


def criteria(runs: Runs) -> list[str]:
    plain, loose, gelu = (runs[v] for v in ("swiglu", "swiglu_no_l2", "gelu"))
    delayed, smooth = (runs[f"swiglu_fp8_delayed{form}"] for form in ("", "_channel"))
    control = runs["gelu_fp8_delayed"]
    growth = [run["product"][-1] / run["product"][0] for run in plain]
    against = [a["product"][-1] / b["product"][-1] for a, b in zip(plain, gelu, strict=True)]
    begins = [first_above(run["saturated"], SATURATED) for run in delayed]
    aligns = [first_above(run["mean"], ALIGNED) for run in delayed]
    times = [late(a) / max(late(b), 1e-12) for a, b in zip(delayed, control, strict=True)]
    excess = [
        [a["error"] / b["error"] - 1 for a, b in zip(v, plain, strict=True)] for v in (delayed, smooth)
    ]
    largest = max(max(run["saturated"]) for run in smooth)
    return [
        outcome(
            "alignment: mean cosine {} in the end, {} without ℓ2",
            [[run["mean"][-1] for run in v] for v in (plain, loose)],
            ".3f",
            all(
                run["mean"][0] < 0.5 and min(run["mean"][-1], run["longest"][-1]) > ALIGNED for run in plain
            )
            and all(b["mean"][-1] < a["mean"][-1] for a, b in zip(plain, loose, strict=True)),
        ),
        outcome(
            "growth: product {} times as large as at first, {} times the control's",
            [growth, against],
            ".1f",
            min(growth) >= 5 and min(against) >= 4,
        ),
        outcome(
            "saturation: 1 in 100,000 from step {}, aligned from step {}, then {} times the control's",
            [begins, aligns, times],
            ".4g",
            max(begins) < np.inf
            and all(a >= b for a, b in zip(begins, aligns, strict=True))
            and min(times) >= 2,
        ),
        outcome("damage: error {} with delayed FP8", excess[:1], "+.1%", min(excess[0]) > 0.05),
        outcome(
            f"cure: error {{}} with Smooth-SwiGLU, of which at most {largest:.1e} saturates",
            excess[1:],
            "+.1%",
            max(excess[1]) <= 0.01 and largest == 0,
        ),
    ]


def outcome(text: str, values: list[list[float]], form: str, met: bool) -> str:
    """A line about a criterion: the text with the seeds' values in its braces, and whether it is met."""
    cells = [", ".join(f"{x:{form}}" for x in of_seeds) for of_seeds in values]
    return f"* {text.format(*cells)}: {'met' if met else 'not met'}"


def draw(runs: Runs, path: Path) -> None:
    """Mean cosine, product, saturated share and loss over the steps: means of the seeds."""
    panels = {
        "mean": "mean |cos| of gate and up weights",
        "product": "largest input of the down\nprojection (log)",
        "saturated": f"saturated share,\nmean of {MEAN_OF} windows",
        "loss": "training error relative to swiglu,\nminus 1",
    }
    figure = Figure(figsize=(13, 7), layout="constrained", facecolor="white")
    for axes, (key, label) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for color, (variant, of_seeds) in zip(fidelity_figures.COLORS, runs.items(), strict=False):
            if key not in of_seeds[0] or (key == "loss" and variant.startswith("gelu")):
                continue
            curve = np.mean([run[key] for run in of_seeds], axis=0)
            if key == "loss":
                curve = curve / np.mean([run[key] for run in runs["swiglu"]], axis=0) - 1
            if key in ("saturated", "loss"):
                curve = fidelity_figures.running(curve, MEAN_OF // 2)
            axes.plot(np.arange(len(curve)) * WINDOW, curve, color=color, linewidth=1.2, label=variant)
        axes.set_ylabel(label)
        axes.set_xlabel("step")
    figure.axes[0].axhline(ALIGNED, color="black", linewidth=0.8, linestyle=":")
    figure.axes[1].set_yscale("log")
    fidelity_figures.legend_below(figure, figure.axes[1])
    fidelity_figures.save(figure, path)


def main() -> None:
    quick = {"base": dataclasses.asdict(Setting(steps=2 * WINDOW)), "seeds": SEEDS[:1]}
    plan = Plan(RESULTS / "outliers", dataclasses.asdict(Setting()), VARIANTS, seeds=SEEDS)
    plan, variants, figure = parse(plan, __doc__, quick)
    run_missing(plan, variants)
    report(plan, figure)


if __name__ == "__main__":
    main()
