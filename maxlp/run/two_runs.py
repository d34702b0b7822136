"""Makes the two programs that `difference` compares, from two runs or one run and changes of its config."""

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxlp.core.train_state import State
from maxlp.parallel.batches import device_batches
from maxlp.run import changes, difference
from maxlp.run.config import ConfigError
from maxlp.run.difference import FACTOR, SEEDS, Batch, CompiledProgram, Difference, Program
from maxlp.run.experiment import Experiment, resolve_settings
from maxlp.run.reopen import OpenRun, batch_of, open_or_create_run
from maxlp.run.settings import OBSERVING, Settings
from maxlp.run.tokenizer import saved_tokenizer
from maxlp.runtime import files

WIDTH = 44  # of the names in the table


@dataclasses.dataclass(frozen=True)
class Report:
    """The comparison of one step.

    Attributes:
      tensors: all of them in the order of the program.
      source: the operation in B that makes the first one beyond its bound; "" if it is unknown or none is.
    """

    step: int
    tensors: list[Difference]
    source: str

    @property
    def beyond(self) -> list[Difference]:
        return [found for found in self.tensors if found.excess > 1]


def changed(config: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A config with other values, as in ``model.remat=block``; a value that is not JSON is a string.

    Raises:
      ConfigError: no assignment, or a key that the config does not have.
    """
    config = copy.deepcopy(config)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        *sections, name = key.split(".")
        here: Any = config
        for section in sections:
            here = here.get(section) if isinstance(here, dict) else None
        if not equals or not isinstance(here, dict) or not sections:
            raise ConfigError(
                f"--other={assignment} is not SECTION.KEY=VALUE with a section of the config; write it as "
                "in --other=model.remat=block"
            )
        try:
            here[name] = json.loads(text)
        except ValueError:
            here[name] = text
    return config


def check(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The lines of the keys in which two configs differ.

    Raises:
      ConfigError: they differ in the model or the data, or in nothing that a step computes.
    """
    lines = changes.differences(a, b)
    if fixed := [line for key, line in lines.items() if changes.is_fixed(key, a, b)]:
        raise ConfigError(
            f"{fixed[0]}: diff needs the same model, data and seed in A and B; give such runs"
        )
    lines = {key: line for key, line in lines.items() if not changes.is_in(OBSERVING, key)}
    if not lines:
        raise ConfigError(
            "A and B have the same config; give one that differs, or --other=SECTION.KEY=VALUE"
        )
    return list(lines.values())


def check_tokenizers(s: Settings, a: Path, b: Path) -> None:
    """Raises a ConfigError unless two runs whose configs name the same tokenizer have the same one."""
    specs = [saved_tokenizer(s.data.tokenizer, workdir).partition("?")[0] for workdir in (a, b)]
    if specs[0] != specs[1] and Path(specs[0]).read_bytes() != Path(specs[1]).read_bytes():
        raise ConfigError(f"{specs[0]} and {specs[1]} differ: diff needs runs with the same tokenizer")


def reports(
    a: Settings, workdir: Path | None, b: Settings, step: int | None, number: int
) -> Iterator[Report]:
    """Compares up to ``number`` steps, and ends at one that differs; trains up to the first if need be.

    Args:
      workdir: of run A; None starts from the seed of its settings.
      step: the first one; None takes that after the newest checkpoint.

    Raises:
      ValueError: no such step, or settings whose programs cannot be compared.
    """
    bits, run_b = min(_bits(a, b), _bits(b, a)), resolve_settings(b)
    with open_or_create_run(a, workdir, step) as at:
        programs = [program_of(run, bits) for run in (at.run, run_b)]
        _check_states(*programs)
        state, first_batch, batches = steps_of(at, step, number, b)
        tapped = same_positions(positions(at.run), positions(run_b))
        program_a, program_b = (CompiledProgram(program, first_batch, tapped) for program in programs)
        for n, batch in batches:
            tensors, state = difference.compare(program_a, program_b, state, batch, seed=n)
            report = report_of(n, tensors, program_b)
            yield report
            if report.beyond:
                return


def steps_of(
    at: OpenRun, step: int | None, number: int, *others: Settings
) -> tuple[State, Batch, Iterator[tuple[int, Batch]]]:
    """The state before a step, its batch, and each of ``number`` steps with its batch; all on the host.

    Args:
      others: settings of further runs that take these steps.

    Raises:
      ConfigError: one of the runs changes its precision between these steps.
    """
    start = at.start + 1 if step is None else step
    for s in (at.run.settings, *others):
        late = s.precision.high_precision_from
        if s.is_quantized and start <= late < start + number - 1:
            raise ConfigError(
                f"--steps={number} from step {start} passes step {late}, after which a run computes in "
                f"high precision (config.precision.high_precision_from); use --steps={late - start + 1} "
                "or a later --step"
            )
    state, first, start = batch_of(at, step)
    state, first = jax.device_get((state, first))
    more = (jax.device_get(batch) for batch, _ in device_batches(at.batches, at.run.mesh, number - 1))
    return state, first, enumerate(itertools.chain([first], more), start)


def report_of(step: int, tensors: list[Difference], b: CompiledProgram) -> Report:
    first = next((found for found in tensors if found.excess > 1), None)
    return Report(step, tensors, difference.source(b, first.site) if first else "")


def program_of(run: Experiment, bits: int) -> Program:
    s = run.settings
    with jax.set_mesh(run.mesh):
        graphdef, abstract = run.abstract_state()
    return Program(
        graphdef=graphdef,
        abstract=abstract,
        mesh=run.mesh,
        one_pass=s.family.gradients(s.loss, s.train.seed, 1, False),
        gradients=run.gradients,
        step=run.step,
        bits=bits,
        is_quantized=s.is_quantized,
        initial=lambda: run.initial_state(abstract),
    )


def _bits(s: Settings, other: Settings) -> int:
    """Of the mantissa of the model's dtype; of the recipes' formats, if two recipes are compared."""
    bits = jnp.finfo(s.model.dtype).nmant
    if all(
        getattr(s.precision, key) == getattr(other.precision, key) for key in ("recipe", "options", "rules")
    ):
        return bits
    names = (s.precision.recipe, *(name for _, name in s.precision.rules))
    return min(bits, *(s.precision.make(name).mantissa_bits for name in names))


def _check_states(a: Program, b: Program) -> None:
    for part in ("params", "opt_state"):
        if difference.shapes(a.abstract[part]) != difference.shapes(b.abstract[part]):
            key = "config.optimizer" if part == "opt_state" else "config.model"
            raise ConfigError(
                f"{key}: A and B keep different states, so that no step can be compared; give runs that "
                "keep the same"
            )


def positions(run: Experiment) -> str:
    """The kernel of attention, which orders the sequence that taps see; "" if a run can have no taps."""
    if run.mesh.shape["stage"] > 1 or run.settings.precision.scalify != "none":
        return ""
    return run.settings.model.attention


def same_positions(a: str, b: str) -> bool:
    """Whether taps of two runs with these `positions` see the same tokens at the same places."""
    from maxlp.nn.attention import sequence_order

    if not a or not b:
        return False
    return a == b or not (sequence_order(a) or sequence_order(b))


# --- output ---------------------------------------------------------------------------------------------


def lines(report: Report, top: int) -> Iterator[str]:
    """What to print of a step, in at most 80 columns."""
    beyond = report.beyond
    if not beyond:
        worst = max(report.tensors, key=lambda found: found.excess)
        yield f"step {report.step}: none of {len(report.tensors):,} tensors differs by more than rounding;"
        yield f"  the nearest to its bound, {worst.excess:.2f} of it: {worst.site}"
        return
    first = beyond[0]
    differ = f"tensors {'differ' if len(beyond) > 1 else 'differs'} by more than rounding; the first is"
    yield f"step {report.step}: {len(beyond):,} of {len(report.tensors):,} {differ}"
    yield f"  {first.site} ({first.site.part})"
    yield f"  it differs by {first.value:.1e} ({first.norm}); rounding explains {first.bound:.1e}"
    yield f"  {report.source or 'no line of the source is known'}"
    yield ""
    yield f"{'tensor':<{WIDTH}} {'compared':<13} {'differs':>8} {'bound':>8}"
    for found in beyond[:top]:
        name = str(found.site)
        name = name if len(name) <= WIDTH else f"…{name[1 - WIDTH :]}"
        yield f"{name:<{WIDTH}} {found.site.part:<13} {found.value:8.1e} {found.bound:8.1e}"


def write(found: Sequence[Report], differing: Sequence[str], folder: Path) -> Path:
    """Writes all tensors of all steps as JSON; what is not finite is null."""
    steps = [
        {
            "step": report.step,
            "source": report.source,
            "tensors": [
                one.site._asdict() | {"value": one.value, "bound": one.bound, "norm": one.norm}
                for one in report.tensors
            ],
        }
        for report in found
    ]
    path = folder / f"diff_{found[0].step}.json"
    numbers = {"differing": list(differing), "seeds": SEEDS, "factor": FACTOR, "steps": steps}
    files.write_json(path, files.finite(numbers))
    return path
