"""The tables of a campaign in Markdown, from all results that there are so far."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.accelerator.results import DONE, TOLERANCE, is_of

Results = dict[str, dict[str, Any]]  # piece to the content of its file
Row = dict[str, Any]
GIB = 2**30


# --- targets, written down before the first run ---------------------------------------------------------


class Target(NamedTuple):
    """A number to reach.

    Attributes:
      value: the number in the results; None if it was not measured.
      bound: the smallest value that meets the target, or with `at_most` the largest.
      device: part of the name of the device that the target is for; "" for any device and any sizes.
      piece: the value is the worst of this piece's rows, so it is final only once the piece is done.
    """

    what: str
    value: Callable[[Results], float | None]
    bound: float
    form: str = "{:,.0f}"
    device: str = "H200"
    at_most: bool = False
    piece: str = ""


def rate(piece: str) -> Callable[[Results], float | None]:
    return lambda results: of_run(results, piece, "per_second")


def speed_up(results: Results) -> float | None:
    fp8, bf16 = (of_run(results, name, "per_second") for name in ("8b_fp8", "8b_bf16"))
    return fp8 / bf16 if fp8 and bf16 else None


def mfu_bf16(results: Results) -> float | None:
    shares = of_run(results, "8b_bf16", "mfu")
    return shares[0] if shares else None


def slowest_quantizer(results: Results) -> float | None:
    """The smallest share of the copy bandwidth; 0 for a recipe that failed."""
    found = (row.get("share", 0.0) for row in rows(results, "quantizers") if "recipe" in row)
    return min(found, default=None)


def memory_error(results: Results) -> float | None:
    return max(
        (abs(row["memory_error"]) for row in predictions(results) if row["memory_error"]), default=None
    )


def time_error(results: Results) -> float | None:
    return max((abs(row["time_error"]) for row in predictions(results)), default=None)


def unequal_resumes(results: Results) -> float | None:
    return sum(not row["equal"] for row in rows(results, "smoke")) if rows(results, "smoke") else None


def largest_error(results: Results) -> float | None:
    errors = (row["error"] for row in rows(results, "kernels"))
    return max((math.inf if math.isnan(error) else error for error in errors), default=None)


TARGETS = [
    Target("resumed runs that differ", unequal_resumes, 0, device="", at_most=True, piece="smoke"),
    Target("error against the CPU", largest_error, TOLERANCE, "{:.1e}", "", True, "kernels"),
    Target("8B FP8, tokens/s: TorchTitan", rate("8b_fp8"), 10_938),
    Target("8B FP8, tokens/s: stretch", rate("8b_fp8"), 14_400),
    Target("8B FP8 ÷ bfloat16", speed_up, 1.35, "{:.2f}"),
    Target("8B bfloat16, MFU", mfu_bf16, 0.55, "{:.1%}"),
    Target("1.5B bfloat16, tokens/s: LLM.Q", rate("1.5b_bf16"), 58_900),
    Target("1.5B FP8, tokens/s: LLM.Q", rate("1.5b_fp8"), 73_000),
    Target("slowest quantizer ÷ copy", slowest_quantizer, 0.7, "{:.0%}", piece="quantizers"),
    Target("planner: memory, largest error", memory_error, 0.05, "{:.0%}", at_most=True),
    Target("planner: time, largest error", time_error, 0.10, "{:.0%}", at_most=True),
]


def targets(results: Results) -> str:
    device = next(iter(results.values()))["device"] if results else {"kind": "", "tiny": True}
    lines = []
    for target in TARGETS:
        value = target.value(results)
        bound = f"{'at most' if target.at_most else 'at least'} {target.form.format(target.bound)}"
        if value is None:
            outcome = "not measured"
        elif target.device and (device["tiny"] or target.device not in device["kind"]):
            outcome = f"is for one {target.device}"
        else:
            met = value <= target.bound if target.at_most else value >= target.bound
            whole = not target.piece or results[target.piece]["status"] == DONE
            outcome = "**missed**" if not met else "met" if whole else "met so far"
        lines.append((target.what, bound, "" if value is None else target.form.format(value), outcome))
    return table(("target", "", "measured", ""), lines)


# --- sections -------------------------------------------------------------------------------------------


def render(results: Results) -> str:
    """All tables, the targets first: only of the device that was measured last."""
    if not results:
        return "nothing is measured yet"
    everything, newest = results, max(results.values(), key=lambda result: result.get("start", ""))
    results = {name: r for name, r in results.items() if is_of(r, newest["device"])}
    parts = [header(newest, commits(results)), *xla_flags(results), targets(results)]
    for title, (names, make) in SECTIONS.items():
        measured = {name: results[name] for name in names if name in results}
        if any(result["rows"] for result in measured.values()):
            parts.append(f"### {title}\n\n{make(measured | others(results, title))}")
    problems = [
        (name, r["status"], " ".join(r["error"].split())[:60])
        for name, r in results.items()
        if r.get("error")
    ]
    problems += [
        (name, "left out", f"of another device, {r['device']['kind']}")
        for name, r in everything.items()
        if name not in results
    ]
    pieces = dict.fromkeys(name for names, _ in SECTIONS.values() for name in names)
    problems += [(name, "not run", "") for name in pieces if name not in everything]
    if any(result.get("clocks") for result in results.values()):
        parts.append(f"### Clocks\n\n{clocks(results)}")
    if problems:
        parts.append("### Not finished\n\n" + table(("piece", "", "why"), problems))
    return "\n\n".join(parts)


def others(results: Results, title: str) -> Results:
    """Results of other pieces that a section needs."""
    return results if title == "Predictions" else {}


def section(name: str, results: Results) -> str:
    """The table of one piece, for the console."""
    make = next(make for names, make in SECTIONS.values() if name in names)
    return make(results) if results[name]["rows"] else ""


def commits(results: Results) -> str:
    """The abbreviated commits (with -dirty) of all results, which several calls may have measured."""
    found = dict.fromkeys(result.get("commit") or "unknown" for result in results.values())
    return ", ".join(re.sub(r"^(\w{12})\w+", r"\1", commit) for commit in found)


def header(result: dict[str, Any], commits: str) -> str:
    device, versions = result["device"], result.get("versions", {})
    named = ", ".join(f"{name} {versions[name]}" for name in ("jax", "flax", "maxlp") if name in versions)
    sizes = " Tiny sizes: these numbers say only that everything runs." if device["tiny"] else ""
    return f"{result.get('start', '')[:10]}, {device['kind']}, {named}, commit {commits}.{sizes}"


def xla_flags(results: Results) -> list[str]:
    """Which pieces ran with which XLA_FLAGS of the user, on which their speed may depend."""
    pieces: dict[str, list[str]] = {}
    for name, result in results.items():
        pieces.setdefault(result.get("xla_flags", ""), []).append(name)
    return [f"With XLA_FLAGS=`{flags}`: {', '.join(names)}." for flags, names in pieces.items() if flags]


def smoke(results: Results) -> str:
    lines = [
        (
            r["run"],
            "equal" if r["equal"] else "**differs**",
            f"{r['first_loss']:.3f}",
            f"{r['last_loss']:.3f}",
        )
        if "error" not in r
        else (r["run"], "**failed**", r["error"][:40], "")
        for r in rows(results, "smoke")
    ]
    return table(("debug run", "killed and resumed", "first loss", "last loss"), lines)


def kernels(results: Results) -> str:
    lines = [
        (r["what"], r["kernel"], r["case"], r.get("refused", f"{r['error']:.1e}")[:40])
        for r in rows(results, "kernels")
    ]
    return table(("", "name", "case", "error"), lines)


def runs(results: Results) -> str:
    lines = []
    for name, r in measured_runs(results):
        mfu = "" if not r.get("mfu") else " / ".join(f"{share:.1%}" for share in r["mfu"])
        low = r.get("f8_matmuls", 0) + r.get("int8_matmuls", 0)
        memory = f"{r['peak'] / GIB:.1f}" if r.get("peak") else ""
        lines.append((name, f"{r['per_second']:,.0f}", mfu, memory, str(low), r.get("attention", "")))
    head = ("run", "tokens or pairs/s", "MFU full / causal", "peak, GiB", "8-bit matmuls", "attention")
    chosen: dict[str, list[str]] = {}
    for name, r in measured_runs(results):
        chosen.setdefault(r["flags"].replace("--config.", "") or "the preset", []).append(name)
    settings = [f"- {', '.join(names)}: `{flags}`" for flags, names in chosen.items()]
    refused = [
        f"- {name} was refused with `{r['flags'].replace('--config.', '')}`: {r['refused']}"
        for name in results
        for r in rows(results, name)
        if "refused" in r
    ]
    return "\n".join([table(head, lines), "", *settings, *refused])


def predicted(results: Results) -> str:
    lines = [
        (
            r["run"],
            f"{r['predicted']['peak'] / GIB:.1f}",
            f"{r['peak'] / GIB:.1f}" if r["peak"] else "",
            f"{r['memory_error']:+.0%}" if r["memory_error"] is not None else "",
            f"{r['predicted']['seconds']:.3g}",
            f"{r['median_seconds']:.3g}",
            f"{r['time_error']:+.0%}",
        )
        for r in predictions(results)
    ]
    if not lines:
        return f"{len(rows(results, 'predict'))} runs predicted, none measured yet"
    return table(("run", "GiB, predicted", "measured", "", "s, predicted", "measured", ""), lines)


def quantizers(results: Results) -> str:
    lines = [
        (
            r.get("recipe", r["what"]),
            f"{r['ms']:.3f}" if "ms" in r else "",
            f"{r['bytes_per_second'] / 1e12:.3g}",
            percent(r),
        )
        if "error" not in r
        else (r.get("recipe", r["what"]), "refused", r["error"][:40], "")
        for r in rows(results, "quantizers")
    ]
    return table(("input quantized for", "ms", "TB/s", "of a copy"), lines)


def attention(results: Results) -> str:
    lines = []
    for r in rows(results, "attention"):
        if "error" in r:
            named = r.get("kernel", r["what"]), r.get("case", "")
            lines.append((*named, "refused", r["error"][:40], "", ""))
        elif "case" in r:
            speed = [
                f"{flops / 1e12:.0f} ({share:.0%})"
                for flops, share in zip(r["flops"], r["shares"], strict=True)
            ]
            lines.append(
                (r["kernel"], r["case"], *speed, f"{r['ms'][1]:.2f}", f"{r['temporaries'] / 2**20:.0f}")
            )
    head = ("kernel", "rows × tokens", "forward, TFLOP/s", "with backward", "ms", "temporaries, MiB")
    return table(head, lines) + "\n\nIn brackets: of a bfloat16 matmul."


def matmuls(results: Results) -> str:
    found = rows(results, "matmuls")
    base = {(r["layer"], r["what"]): r["ms"] for r in found if r.get("recipe") == "bf16" and "ms" in r}
    lines = []
    for r in found:
        if "error" in r:
            named = r.get("layer", ""), r["what"], r.get("recipe", "")
            lines.append((*named, "refused", "", r["error"][:40]))
        elif "layer" in r:
            first = base.get((r["layer"], r["what"]))
            times = f"{first / r['ms']:.2f}" if first else ""
            speed = f"{r['flops'] / 1e12:.0f} ({r['share']:.0%})"
            lines.append((r["layer"], r["what"], r["recipe"], speed, times, r["matmuls"]))
    head = ("layer", "", "recipe", "TFLOP/s", "× bf16", "matmuls")
    return table(head, lines) + "\n\nIn brackets: of a square bfloat16 matmul."


def contrastive(results: Results) -> str:
    lines = []
    for r in rows(results, "contrastive"):
        case = f"{r['pairs']:,}", str(r["width"]), r["method"]
        if "error" in r:
            lines.append((*case, "refused", r["error"][:40]))
        else:
            lines.append((*case, f"{r['ms']:.1f}", f"{r['temporaries'] / GIB:.2f}"))
    return table(("pairs", "width", "method", "ms", "temporaries, GiB"), lines)


def fidelity(results: Results) -> str:
    lines = []
    for name in results:
        losses = {r["variant"]: r.get("validation_loss") for r in rows(results, name)}
        base = losses.get("bf16")
        for r in rows(results, name):
            loss = losses[r["variant"]]
            measured = r["error"][:40] if loss is None else f"{loss:.4f}"
            difference = "" if loss is None or base is None else f"{loss - base:+.4f}"
            lines.append((name, r["variant"], measured, difference))
    return table(("model", "variant", "validation loss", "- bf16"), lines)


def clocks(results: Results) -> str:
    """The GPU's clock in each piece while busy: speeds at different clocks cannot be compared."""
    lines = []
    for name, result in results.items():
        if not (samples := result.get("clocks")):
            continue
        most = max(watts for _, _, watts, _ in samples)
        busy = [sample for sample in samples if sample[2] >= most / 2]  # not while it compiles
        mhz, _, _, celsius = zip(*busy, strict=True)
        median, span = f"{statistics.median(mhz):,.0f}", f"{min(mhz):,.0f} to {max(mhz):,.0f}"
        lines.append((name, median, span, f"{most:.0f}", f"{max(celsius):.0f}"))
    return table(("piece", "MHz, median", "from", "most W", "most °C"), lines)


RUNS = ("8b_fp8", "8b_bf16", "8b_int8", "8b_fp8_light", "torch_8b_bf16", "torch_8b_fp8")
SMALLER = ("1.5b_fp8", "1.5b_bf16", "1b_fp8", "1b_bf16", "3b_fp8", "3b_bf16")
CLIP = ("clip_b16", "clip_h14", "clip_h14_fp8", "clip_b16_131072")
SECTIONS: dict[str, tuple[tuple[str, ...], Callable[[Results], str]]] = {
    "Killed and resumed": (("smoke",), smoke),
    "Against the CPU": (("kernels",), kernels),
    "Llama 8B, and PyTorch": (RUNS, runs),
    "Smaller Llamas": (SMALLER, runs),
    "CLIP": (CLIP, runs),
    "Predictions": (("predict",), predicted),
    "Quantizers": (("quantizers",), quantizers),
    "Attention": (("attention",), attention),
    "Matmuls": (("matmuls",), matmuls),
    "The contrastive loss": (("contrastive",), contrastive),
    "Fidelity": (("fidelity_60m", "fidelity_130m"), fidelity),
}


# --- parts ----------------------------------------------------------------------------------------------


def rows(results: Results, piece: str) -> list[Row]:
    return results.get(piece, {}).get("rows", [])


def measured_runs(results: Results) -> Iterator[tuple[str, Row]]:
    return ((name, row) for name in results for row in rows(results, name) if "per_second" in row)


def of_run(results: Results, piece: str, key: str) -> Any:
    """A value of a training run; None if it was not measured."""
    return next((row.get(key) for name, row in measured_runs(results) if name == piece), None)


def predictions(results: Results) -> list[Row]:
    """The runs that were predicted and measured, with the errors of the prediction."""
    found = []
    for _, row in measured_runs(results):
        if (before := row.get("predicted")) is not None:
            memory = before["peak"] / row["peak"] - 1 if row["peak"] else None
            errors = {"memory_error": memory, "time_error": before["seconds"] / row["median_seconds"] - 1}
            found.append(row | errors)
    return found


def percent(row: Row) -> str:
    return f"{row['share']:.0%}" if "share" in row else ""


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    body = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return "\n".join([body[0], "|" + "---|" * len(head), *body[1:]])
