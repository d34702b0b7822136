"""Finds where low precision changes a run: the numerics lab.

    python -m maxlp.lab attribute /tmp/run --step=2300
    python -m maxlp.lab attribute --out=/tmp/lab \\
        --config=llama/debug:precision=fp8_current
    python -m maxlp.lab predict /tmp/run \\
        --recipes=fp8_current,int8_all,simulate:format=e3m1
    python -m maxlp.lab choose /tmp/run --budget=0.1
    python -m maxlp.lab diff /tmp/a /tmp/b
    python -m maxlp.lab diff --out=/tmp/lab \\
        --config=llama/debug --other=model.remat=block

attribute takes the state of a run before a step, and the batch of that step. It
quantizes the operands of all matmuls one at a time, and then all but one at a
time (`run.attribution`). It prints the operands with the largest effect on the
gradients, and writes the effects of all as JSON and as a heat map. With
--config, it uses the initial weights of that config.

predict ranks recipes by how much they change the gradients of a few batches,
before training with them (`run.prediction`). choose picks matmuls of single
layers to keep in high precision, within a budget of FLOPs (`run.choice`).

diff runs the programs of two runs, or of a run and its config changed by
--other, on the same state and batches. It prints the first tensor that differs
by more than rounding explains, and the source line that computes it
(`run.difference`). To compare two versions of maxlp or JAX, or two machines,
record steps with --record on one, and compare with --against on the other
(`run.recorded_steps`).
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from maxlp import schema
from maxlp.precision import RecipeName
from maxlp.run import cli, late_phase, run_dir
from maxlp.run.config import ConfigError
from maxlp.run.settings import Settings, read
from maxlp.runtime import cpu
from maxlp.runtime.files import local_path, send, shown
from maxlp.runtime.messages import counted, format_seconds

LOG_SECONDS = 10.0

TOOLS = {  # the flags of each, besides those of all
    "attribute": ("recipe", "top"),
    "predict": ("recipes", "batches"),
    "choose": ("recipe", "top", "budget"),
    "diff": ("other", "record", "against", "steps", "top"),
}


def define_flags() -> None:
    cli.define_config()
    flags.adopt_module_key_flags(cli)
    flags.DEFINE_integer(
        "step",
        None,
        "Step whose batch is used; by default the one after the newest checkpoint.",
        lower_bound=1,
    )
    flags.DEFINE_string(
        "recipe",
        None,
        "attribute, choose: a recipe in place of the run's, with its own options and no rules.",
    )
    flags.DEFINE_list(
        "recipes", None, "predict: recipes, such as simulate:format=e3m1; all that fit by default."
    )
    flags.DEFINE_integer("batches", 8, "predict: how many batches to measure.", lower_bound=1)
    flags.DEFINE_float("budget", 0.1, "choose: share of the blocks' matmul FLOPs in high precision.")
    flags.DEFINE_string("out", None, "Folder for the results; DIR/lab by default.")
    flags.DEFINE_integer(
        "top", 20, "attribute, choose, diff: number of operands or tensors to print.", lower_bound=1
    )
    flags.DEFINE_multi_string("other", [], "diff: SECTION.KEY=VALUE in which B differs from A")
    flags.DEFINE_string("record", None, "diff: folder to record steps in, for a later --against.")
    flags.DEFINE_string("against", None, "diff: folder of steps that another version has recorded.")
    flags.DEFINE_integer(
        "steps", 3, "diff: number of steps to compare; it stops at the first difference.", lower_bound=1
    )


def main(tool: str = "", directory: str = "", second: str = "") -> None:
    f = flags.FLAGS
    cli.check_first_argument(tool, TOOLS)
    if bool(directory) == (f.config is not None):
        raise ValueError(f"give either a workdir, as in python -m maxlp.lab {tool} DIR, or --config=NAME")
    if not directory and f.out is None and f.record is None:
        raise ValueError("--config needs a folder for the results; add --out=FOLDER")
    if second and tool != "diff":
        raise ValueError(f"{tool} takes one run; leave out {second}")
    for name in sorted(set().union(*TOOLS.values()) - {*TOOLS[tool]}):
        if f[name].present:
            own = ", ".join(f"--{flag}" for flag in TOOLS[tool])
            raise ValueError(f"--{name} is not for {tool}, which takes {own}; leave it out")
    workdir = local_path(directory, "DIR") if directory else None
    c = f.config if workdir is None else late_phase.config_at(workdir, f.step)
    name, folder = ("--out", f.out) if f.record is None else ("--record", f.record)
    out = local_path(f"{directory}/lab" if folder is None else folder, name)
    run_dir.check_writable(out, name)  # before anything is measured
    cpu.configure_client(alone=True)
    if tool == "diff":
        diff(json.loads(c.to_json_best_effort()), workdir, second, out)
        return
    s = read(c)
    if tool == "predict":
        predict(s, workdir, f.step, f.recipes, f.batches, out)
    else:
        budget = f.budget if tool == "choose" else None
        attribute(s, workdir, f.step, f.recipe, out, f.top, budget)


def diff(config: dict[str, Any], workdir: Path | None, second: str, out: Path) -> None:
    """Prints and writes where the programs of two runs, or of one run in two versions, first differ.

    Args:
      config, workdir: of run A; the workdir is None for a new run.
      second: the workdir of run B; "" for another B, which a flag names.

    Raises:
      ValueError: not exactly one B, or one that cannot be compared with A.
    """
    from maxlp.run import recorded_steps, two_runs  # imports the training code

    f = flags.FLAGS
    if sum(map(bool, (second, f.other, f.record, f.against))) != 1:
        raise ValueError(
            "give one of: a second workdir, as in diff A B; --other=SECTION.KEY=VALUE; --record=FOLDER; "
            "--against=FOLDER"
        )
    a = read(ConfigDict(config))
    if f.record:
        if f["out"].present or f["top"].present:
            raise ValueError("--record compares nothing, and writes to FOLDER; leave out --out and --top")
        for path in recorded_steps.record(a, config, workdir, f.step, f.steps, out):
            _wrote(path)
        return
    if f.against:
        if f["step"].present or f["steps"].present:
            raise ValueError("--against compares what was recorded; leave out --step and --steps")
        folder = local_path(f.against, "--against")
        differing, reports = recorded_steps.check(folder, config), recorded_steps.reports(a, folder)
    else:
        other, b = other_run(config, second, f.other, f.step)
        differing, reports = two_runs.check(config, other), two_runs.reports(a, workdir, b, f.step, f.steps)
        if second and workdir is not None:
            two_runs.check_tokenizers(b, workdir, local_path(second, "B"))
    print("\n".join(differing))
    found = []
    for report in reports:
        found.append(report)
        print("\n".join(two_runs.lines(report, f.top)), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    _wrote(two_runs.write(found, differing, out))


def other_run(
    config: dict[str, Any], second: str, changes: list[str], step: int | None
) -> tuple[dict[str, Any], Settings]:
    """Config and settings of B: those of its workdir, or A's with changes."""
    from maxlp.run import two_runs  # imports the training code

    if not second:
        other = two_runs.changed(config, changes)
        return other, read(ConfigDict(other))
    c = late_phase.config_at(local_path(second, "B"), step)
    return json.loads(c.to_json_best_effort()), read(c)


def attribute(
    s: Settings,
    workdir: Path | None,
    step: int | None,
    recipe: str | None,
    out: Path,
    top: int,
    budget: float | None = None,
) -> None:
    """Prints and writes the effects of all operands; see `run.attribution.evaluator` for the arguments.

    Args:
      budget: of `run.choice`, whose choice is printed as well; None for none.
    """
    from maxlp.run import attribution, choice, prediction  # imports the training code

    own = s.precision
    if recipe is not None:
        schema.check_value("--recipe", recipe, RecipeName)
        s = prediction.with_recipe(s, recipe)
        try:
            _ = s.matmuls
        except ConfigError as error:
            if workdir is None:
                raise
            raise ValueError(
                f"--recipe={recipe} does not fit this run, whose other settings stay ({error}); "
                "give another recipe, or --config=NAME with these keys instead of the workdir"
            ) from error
    same = s.precision == own
    if budget is not None:
        s = choice.check(s, budget)
        same &= s.precision.rules == own.rules
    with attribution.evaluator(s, workdir, step, same_precision=same) as (evaluate, step):
        out.mkdir(parents=True, exist_ok=True)
        found = attribution.attribution(evaluate, step, Bar())
        print(f"step {step}: loss {found.loss:#.5g} in high precision")
        print("\n".join(attribution.table(found, top)))
        for path in attribution.write(found, out):
            _wrote(path)
        if budget is not None:
            print("\n".join(choice.table(evaluate, found, budget)))


def predict(
    s: Settings, workdir: Path | None, step: int | None, specs: list[str] | None, batches: int, out: Path
) -> None:
    """Prints and writes the ranking of recipes; see `run.prediction.predictions` for the arguments."""
    from maxlp.run import prediction  # imports the training code

    specs = specs or prediction.fitting(s)
    step, found = prediction.predictions(s, specs, workdir, step, batches, Bar())
    out.mkdir(parents=True, exist_ok=True)
    print(f"step {step}: relative to high precision, {counted(batches, 'batch', 'batches')}")
    print("\n".join(prediction.table(found)))
    _wrote(prediction.write(found, step, out))


class Bar:
    """Progress on stderr: a bar in a terminal, elsewhere a line every `LOG_SECONDS`."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.shown = -math.inf

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        left = "compiling"
        if done:
            left = f"{format_seconds((now - self.start) * (total - done) / done)} left"
        line = f"{done:,} of {total:,}, {left}"
        if sys.stderr.isatty():
            filled = 40 * done // total
            bar = "█" * filled + "·" * (40 - filled)
            print(f"\r\x1b[K{bar} {line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total or now - self.shown >= LOG_SECONDS:
            self.shown = now
            print(line, file=sys.stderr, flush=True)


def _wrote(path: Path) -> None:
    send(path)
    print(shown(f"wrote {path}"))


if __name__ == "__main__":
    define_flags()
    cli.run(main, num_arguments=3)
