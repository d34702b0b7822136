r"""Predicts the memory, traffic and time of a step on other machines.

    python -m maxlp.plan --config=configs/llama/8b.py --topology=v5p:4x4x4

Compiles the train step of `maxlp.train` for a topology and prints its memory
and time, beside an estimate from formulas (the "closed form"). --estimate_only
prints the estimate alone. Compiling needs Linux and pip install 'maxlp[aot]',
but no device. Then it searches for the fastest settings that fit, and prints
them as flags (--nosearch omits this). --list_topologies lists the known chips.
"""

import dataclasses
import json
import shlex
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from flax import nnx
from ml_collections import ConfigDict, config_flags

from maxlp.optim import targets
from maxlp.parallel import sharding
from maxlp.planning import compiled, plot, search, topologies
from maxlp.planning.cost_model import Work, cost_of, state_shapes
from maxlp.planning.hlo import Collective
from maxlp.planning.roofline import group, roofline
from maxlp.planning.topologies import GIB, Topology
from maxlp.run import cli, constraints, emulation
from maxlp.run.config import ConfigError, choices
from maxlp.run.experiment import assemble
from maxlp.run.settings import Machine, Settings, read
from maxlp.runtime.messages import rounded


def define_flags() -> None:
    cli.define_config()
    cli.define_from()
    flags.adopt_module_key_flags(cli)
    flags.DEFINE_string(
        "topology", None, "Machines as CHIP:SHAPE, for example v5p:8x8x8, v5e:16x16*2, h100:64x8."
    )
    flags.DEFINE_bool("list_topologies", False, "List the known chips and their shapes, and stop.")
    flags.DEFINE_bool("estimate_only", False, "Print only the estimate, without compiling.")
    flags.DEFINE_bool("search", True, "Search for the fastest settings that fit.")
    flags.DEFINE_string("json", None, "Write the plan to this file as JSON.")
    flags.DEFINE_string("hlo", None, "Write the compiled program to this file as text.")
    flags.DEFINE_string("plot", None, "Draw the plan to this file (.png, .svg, .pdf).")


def main() -> int:
    topologies.compile_without_devices()
    if flags.FLAGS.list_topologies:
        print(topologies.listing())
        return 0
    for name, hint in (("config", choices()), ("topology", "see --list_topologies")):
        if flags.FLAGS[name].value is None:
            raise ValueError(f"--{name} is missing; {hint}")
    topology, compiles = topologies.parse(flags.FLAGS.topology), not flags.FLAGS.estimate_only
    check_files({name: flags.FLAGS[name].value for name in ("json", "hlo", "plot")}, compiles)
    s = read(with_placeholder_data(cli.read_config(None)))
    plan: dict[str, Any] = {"command": command()}
    refusal = None
    try:
        plan |= make_plan(s, topology, compiles, flags.FLAGS.hlo)
        print(report(plan))
    except ConfigError as error:
        if not flags.FLAGS.search or flags.FLAGS.plot:
            raise
        refusal = error
        plan |= {"topology": topology.name, "refused": str(error)}
    if flags.FLAGS.search:
        plan["search"] = search_settings(s, topology, compiles, plan.get("fits", False))
        if refusal is not None:
            if plan["search"] is None:
                raise refusal
            print(f"\nThe config's own settings cannot run here: {refusal}")
    if flags.FLAGS.json:
        Path(flags.FLAGS.json).write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    if flags.FLAGS.plot:
        plot.draw(plan, flags.FLAGS.plot)
    return 0


def check_files(files: dict[str, str | None], compiles: bool) -> None:
    """Raises a ValueError, before the plan is made, for an output file that cannot be written."""
    for name, path in files.items():
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{name}={path}: the folder does not exist; create it first")
        if path is not None and Path(path).is_dir():  # as "" is
            raise ValueError(f"--{name}={path} is a folder; give the name of a file")
    if files["hlo"] and not compiles:
        raise ValueError(f"--hlo={files['hlo']} needs a compiled program; omit --estimate_only")
    path = files["plot"]
    if path and Path(path).suffix not in plot.FORMATS:
        raise ValueError(f"--plot={path} must end in one of {', '.join(plot.FORMATS)}")


def with_placeholder_data(c: ConfigDict) -> ConfigDict:
    """The config with placeholders for an unset source and tokenizer, because a plan reads no data."""
    copy: Any = c.copy_and_resolve_references()
    data = copy.get("data")
    if isinstance(data, ConfigDict):
        with copy.unlocked():
            for key in ("source", "tokenizer"):
                if data.get(key, "") is None:
                    data[key] = "unread"
    return copy


def command() -> str:
    """The command line that makes this plan again, without its output files."""
    parts = [f"--config={config_flags.get_config_filename(flags.FLAGS['config'])}"]
    values = ((name, flags.FLAGS[name].value) for name in ("from", "swap_tokenizer", "topology"))
    given = {name: value for name, value in values if value is not None}
    given |= {f"config.{key}": value for key, value in cli.overrides().items()}  # None unsets a key
    parts += [f"--{name}={value}" for name, value in given.items()]
    return "python -m maxlp.plan " + shlex.join(parts)


def make_plan(
    s: Settings, topology: Topology, compiles: bool, hlo_file: str | None = None
) -> dict[str, Any]:
    """A plan as plain numbers: bytes and seconds of one device and step, unless a key states otherwise.

    Args:
      compiles: whether to compile the step, or to use the closed form alone.
      hlo_file: where to write the compiled program as text.

    Raises:
      ValueError: invalid settings, a mesh that the topology does not have, or a missing compiler.
    """
    start = time.perf_counter()
    machine = topology.machine(s)
    constraints.check(s, machine)
    state, cost = state_shapes(s, machine), cost_of(s)
    traced = time.perf_counter()
    full, causal = s.flops_per_unit
    plan: dict[str, Any] = {
        "topology": topology.name,
        "devices": topology.size,
        "mesh": dict(machine.axes),
        "chip": dataclasses.asdict(topology.chip) | {"peak_bfloat16": topology.chip.peak()},
        "parameters": s.num_params,
        "units_per_step": s.family.units_per_step(s.data),
        "unit": s.family.unit,
        "flops_per_unit": {"full": full, "causal": causal},
        "has": topology.chip.memory,
        "not_timed": sorted(state.decompositions),
        "warnings": [
            *emulation.warnings(s, topology.chip.kind),
            *targets.warnings(nnx.to_pure_dict(s.params), s.optimizer),
        ],
    }
    parts, work = cost.memory(s, machine, state), cost.work(s, machine, state)
    dcn = s.mesh.get("dcn_data", 1)
    plan["estimate"] = {
        "memory": parts,
        "peak": sum(parts.values()),
        "seconds": time.perf_counter() - traced,
    } | timing(plan, work, cost.collectives(s, machine), topology, dcn)
    fits = plan["estimate"]["peak"] <= topology.chip.memory
    if compiles:
        done = compile_for(s, machine, topology, hlo_file)
        plan["compiled"] = {
            "memory": done.memory and dataclasses.asdict(done.memory),
            "peak": done.peak,
            "needs": done.needs,
            "refused": done.memory is None,
            "kernels": done.kernels,
            "compile_seconds": done.seconds,
            "host_memory": done.host_memory,
            "compiler": compiled.versions(topology.chip.platform),
        }
        if done.memory is not None:
            plan["compiled"] |= timing(plan, work, done.collectives, topology, dcn)
        fits = done.fits(topology.chip.memory)
    plan["fits"] = fits
    plan["seconds"] = time.perf_counter() - start
    return plan


def compile_for(
    s: Settings, machine: Machine, topology: Topology, hlo_file: str | None = None
) -> compiled.Compiled:
    """The train step of these settings, compiled for a topology.

    Raises:
      ValueError: a missing compiler, or one that cannot compile the step.
    """
    mesh = sharding.make_mesh(**s.mesh, devices=topologies.devices(topology))
    try:
        return compiled.compile_step(assemble(s, machine, mesh), hlo_file)
    except (jax.errors.JaxRuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the compiler cannot compile this step for {topology.name}: {reason}; change the sizes of the "
            "config, or add --estimate_only"
        ) from error


def timing(
    plan: dict[str, Any], work: Work, found: Sequence[Collective], topology: Topology, dcn: int
) -> dict[str, Any]:
    """The collectives by kind and axes, the rare ones listed apart; the seconds of a step, and the MFU.

    Args:
      plan: the plan so far: its mesh, units and FLOPs.
      found: the collectives of a step on one device.
      dcn: ``mesh.dcn_data`` of the config.
    """
    groups = group([one for one in found if not one.rare], topology, plan["mesh"], dcn)
    rare = group([one for one in found if one.rare], topology, plan["mesh"], dcn)
    step = roofline(work, groups, topology)
    seconds_per_flop = plan["units_per_step"] / plan["devices"] / topology.chip.peak()
    return {
        "work": dataclasses.asdict(work),
        "collectives": [dataclasses.asdict(row) for row in groups],
        "rare_collectives": [dataclasses.asdict(row) for row in rare],
        "time": dataclasses.asdict(step)
        | {"least": step.least, "expected": step.expected, "limit": step.limit},
        "mfu": {
            name: flops * seconds_per_flop / step.expected for name, flops in plan["flops_per_unit"].items()
        },
    }


def search_settings(
    s: Settings, topology: Topology, compiles: bool, fits: bool = False
) -> dict[str, Any] | None:
    """Prints and returns the fastest settings that fit, or what the smallest ones need.

    Args:
      compiles: whether to verify them with the compiler; the first one that fits ends the search.
      fits: whether the config's own settings fit, so that no alternative needs to be compiled.

    Returns:
      None if the settings cannot run on this topology, whatever their layout.
    """
    found = search.find(s, topology)
    if not found.combinations:
        return None
    print(found_report(found, topology, s.family.unit))
    values = dataclasses.asdict(found)
    if compiles and not fits:
        for i, candidate in enumerate((found.layouts or found.numerics)[:3]):
            changes = " ".join(search.flags(candidate.changes))
            try:
                one = checked_candidate(candidate, s, topology)
            except ValueError as error:
                print(f"does not compile: {changes}: {error}")
                continue
            values["layouts" if found.layouts else "numerics"][i] = one
            verdict = "fits" if one["fits"] else "does not fit"
            print(f"{verdict} when compiled, {one['compiled_needs'] / GIB:.1f} GiB: {changes}")
            if one["fits"]:
                break
    return values


def checked_candidate(candidate: search.Candidate, s: Settings, topology: Topology) -> dict[str, Any]:
    """A candidate as plain numbers, compiled: with ``compiled_needs`` and ``fits``."""
    changed = search.changed(s, candidate.changes)
    done = compile_for(changed, topology.machine(changed), topology)
    fits = done.fits(topology.chip.memory)
    return dataclasses.asdict(candidate) | {"compiled_needs": done.needs, "fits": fits}


# --- the report -----------------------------------------------------------------------------------------


def report(plan: dict[str, Any]) -> str:
    """A plan as text."""
    mesh = sharding.describe(plan["mesh"])
    units = plan["units_per_step"]
    full, causal = (plan["flops_per_unit"][name] for name in ("full", "causal"))
    lines = [
        f"{plan['topology']}: {plan['devices']:,} × {plan['chip']['kind']}, mesh {mesh}",
        f"{plan['parameters']:,} parameters; {units:,} {plan['unit']} per step",
        f"{full:.3g} FLOPs per {plan['unit'].removesuffix('s')}, {units * full:.3g} per step "
        f"({units * causal:.3g} with causal attention)",
        *(f"warning: {warning}" for warning in plan["warnings"]),
        "",
        *_memory_lines(plan),
    ]
    source = "compiled" if "time" in plan.get("compiled", {}) else "estimate"
    if plan[source]["collectives"]:
        lines += ["", *_collective_lines(plan, source)]
    lines += ["", *_time_lines(plan, source)]
    lines += ["", _fits_line(plan)]
    return "\n".join(lines)


def _memory_lines(plan: dict[str, Any]) -> list[str]:
    lines = ["memory per device, GiB"]
    lines += [f"  {name:28} {size / GIB:8,.2f}" for name, size in plan["estimate"]["memory"].items()]
    lines.append(f"  {'estimated peak':28} {plan['estimate']['peak'] / GIB:8,.2f}")
    if (done := plan.get("compiled")) is not None:
        if done["memory"]:
            for name in ("arguments", "temporaries", "outputs", "code", "host"):
                if done["memory"][name] > 2**20:
                    lines.append(f"  {'compiled: ' + name:28} {done['memory'][name] / GIB:8,.2f}")
        lines.append(f"  {'compiled peak':28} {done['peak'] / GIB:8,.2f}")
        if done["needs"] > done["peak"]:
            lines.append(f"  {'with gaps between arrays':28} {done['needs'] / GIB:8,.2f}")
        lines.append(
            f"  compiled in {done['compile_seconds']:.0f} s with {done['host_memory'] / GIB:.1f} GiB"
        )
    return lines


def _collective_lines(plan: dict[str, Any], source: str) -> list[str]:
    lines = [
        f"collectives per device and step ({source})",
        f"{'kind':>6}{'axes':>19}{'times':>19}{'GiB sent':>10}{'overlapped':>12}{'seconds':>9}",
    ]
    for row in plan[source]["collectives"]:
        if row["seconds"] * 1000 < plan[source]["time"]["network"]:
            continue  # below a thousandth of the sum
        overlapped = f"{row['overlapped'] / row['sent']:10.0%}" if source == "compiled" else "         ?"
        lines.append(
            f"  {row['kind']:18} {'+'.join(row['axes']):14} {row['times']:8,} "
            f"{rounded(row['sent'] / GIB, 3):>9}  {overlapped} {rounded(row['seconds'], 3):>8}"
        )
    if rare := plan[source]["rare_collectives"]:
        sent, seconds = (sum(row[name] for row in rare) for name in ("sent", "seconds"))
        numbers = f"{rounded(sent / GIB, 3):>15} {rounded(seconds, 3):>21}"
        lines.append(f"  not in every step, and not counted below:{numbers}")
    return lines


def _time_lines(plan: dict[str, Any], source: str) -> list[str]:
    t, work, chip, unit = plan[source]["time"], plan[source]["work"], plan["chip"], plan["unit"]
    seconds = {name: rounded(value, 3) for name, value in t.items() if name != "limit"}
    flops = " + ".join(f"{n:.3g} {dtype}" for dtype, n in work["flops"].items())
    mfu = plan[source]["mfu"]
    rate = plan["units_per_step"] / t["expected"]
    host = []
    if work["host"]:
        time_of_host, speed = seconds["host"], f"at {chip['host'] / 1e9:.0f} GB/s"
        if not chip["host"]:
            time_of_host, speed = "?", "at an unpublished speed"
        size = rounded(work["host"] / 1e9, 3)
        host = [f"  host    {time_of_host:>8}   {size} GB from and to its memory {speed}"]
    not_timed = []
    if plan["not_timed"]:
        not_timed = [f"  without the optimizer's decompositions ({', '.join(plan['not_timed'])})"]
    return [
        "seconds per step at published speeds",
        *not_timed,
        f"  compute {seconds['compute']:>8}   {flops} FLOPs, with recomputation",
        f"  {'':16}   (peak {chip['peak_bfloat16'] / 1e12:,.0f} TFLOP/s in bfloat16)",
        f"  memory  {seconds['memory']:>8}   about {rounded(work['bytes'] / 1e9, 3)} GB "
        f"at {chip['hbm'] / 1e9:,.0f} GB/s",
        f"  network {seconds['network']:>8}   of which {seconds['exposed']} exposed",
        *host,
        f"  step at least {seconds['least']} s ({t['limit']} bound), "
        f"{seconds['expected']} s with exposed collectives:",
        f"  at most {rate:,.0f} {unit}/s, "
        f"MFU {mfu['full']:.1%} ({mfu['causal']:.1%} with causal attention)",
    ]


def _fits_line(plan: dict[str, Any]) -> str:
    source = "compiled" if "compiled" in plan else "estimate"
    needed = plan[source]["needs" if source == "compiled" else "peak"] / GIB
    verdict = "fits" if plan["fits"] else "does not fit"
    return f"{verdict}: {needed:,.2f} of {plan['has'] / GIB:.2f} GiB ({source})"


WIDTH = 80  # of the terminal


def found_report(found: search.Found, topology: Topology, unit: str) -> str:
    """The result of a search as text."""
    memory = f"{search.MARGIN:.0%} of {topology.chip.memory / GIB:.1f} GiB"
    if found.layouts:
        title = f"fastest of {found.combinations:,} layouts by the estimate, in {memory}:"
        lines = ["", title, *_candidate_lines(found.layouts, unit), *_flag_lines(found.layouts[0])]
        if found.numerics:
            lines += ["", "faster only with other numerics:", *_candidate_lines(found.numerics, unit)]
            lines += _flag_lines(found.numerics[0])
        return "\n".join(lines)
    if found.numerics:
        title = f"no layout fits in {memory} ({found.combinations:,} tried); fits only with other numerics:"
        shown = found.numerics[: search.COUNT]
        lines = ["", *textwrap.wrap(title, WIDTH), *_candidate_lines(shown, unit), *_flag_lines(shown[0])]
        return "\n".join(lines)
    smallest = found.smallest
    assert smallest is not None, "something was tried and did not fit"
    missing = smallest.peak - search.MARGIN * topology.chip.memory
    title = (
        f"nothing fits in {memory}: over every mesh, remat, number of microbatches and of parts of the "
        f"loss, with and without {', '.join(search.NUMERICS)}, the least is "
        f"{smallest.peak / GIB:,.1f} GiB, {missing / GIB:,.1f} GiB too much. Use more or larger devices, "
        "or shorter sequences. It is:"
    )
    return "\n".join(["", *textwrap.wrap(title, WIDTH), *_candidate_lines([smallest], unit)])


def _candidate_lines(candidates: Sequence[search.Candidate], unit: str) -> list[str]:
    """A table of candidates."""
    lines = [f"    s/step {unit + '/s':>11}    GiB  settings"]
    for one in candidates:
        numbers = f"{rounded(one.seconds, 3):>10} {one.rate:11,.0f} {one.peak / GIB:6,.1f}  "
        rows = textwrap.wrap(" + ".join(one.numerics), WIDTH - len(numbers))
        rows += textwrap.wrap(describe_layout(one), WIDTH - len(numbers))
        lines += [numbers + rows[0], *(" " * len(numbers) + row for row in rows[1:])]
    return lines


def _flag_lines(one: search.Candidate) -> list[str]:
    """The flags that turn the config into a candidate, to copy."""
    words = search.flags(one.changes)
    if not words:
        return ["The first is the config as it is."]
    wrapped = textwrap.wrap(
        " ".join(map(shlex.quote, words)), WIDTH - 4, break_long_words=False, break_on_hyphens=False
    )
    return ["For the first, add:", *("  " + row + " \\" for row in wrapped[:-1]), "  " + wrapped[-1]]


def describe_layout(one: search.Candidate) -> str:
    """The layout of a candidate, as in "fsdp 4 × tensor 2, remat none, 128 microbatches"."""
    layout = one.layout
    words = [sharding.describe(layout["mesh"])]
    released = layout["train.release_gradients"]
    words.append("released gradients" if released else f"remat {layout['model.remat']}")
    if not released:
        n = layout["train.microbatches"]
        words.append("one pass" if n == 1 else f"{n} microbatches")
    words += [f"{key.split('.')[1]} {v}" for key, v in one.changes.items() if key.startswith("loss.")]
    return ", ".join([*words, layout["kernel"]])


if __name__ == "__main__":
    define_flags()
    cli.run(main)
