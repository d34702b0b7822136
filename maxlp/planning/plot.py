"""Draws a plan: memory as stacked bars, the seconds of a step and of its collectives as bars."""

from typing import Any

from maxlp.parallel import sharding
from maxlp.planning.topologies import GIB
from maxlp.runtime.messages import rounded

FORMATS = (".png", ".svg", ".pdf")


def draw(plan: dict[str, Any], path: str) -> None:
    """Draws a plan to a file.

    Args:
      plan: see `maxlp.plan.make_plan`.
      path: its ending selects the format, one of `FORMATS`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    memory, seconds = figure.subplots(1, 2, width_ratios=(1, 1.6))
    _memory(memory, plan)
    source = "compiled" if "time" in plan.get("compiled", {}) else "estimate"
    _seconds(seconds, plan[source], source)
    mesh = sharding.describe(plan["mesh"])
    billions = rounded(plan["parameters"] / 1e9, 3)
    figure.suptitle(f"{billions} B parameters on {plan['topology']}, {mesh}")
    figure.savefig(path, dpi=120)


def _memory(axes: Any, plan: dict[str, Any]) -> None:
    bars = {"estimate": plan["estimate"]["memory"]}
    if (memory := plan.get("compiled", {}).get("memory")) is not None:
        in_use = plan["compiled"]["peak"] - memory["arguments"] - memory["code"]
        bars["compiled"] = {"arguments": memory["arguments"], "temporaries": in_use, "code": memory["code"]}
    for name, parts in bars.items():
        bottom = 0.0
        for part, size in parts.items():
            axes.bar(name, size / GIB, bottom=bottom, width=0.8, edgecolor="white")
            if size > 0.025 * max(plan["has"], sum(parts.values())):
                axes.annotate(part, (name, bottom + size / GIB / 2), ha="center", va="center", fontsize=7)
            bottom += size / GIB
    axes.axhline(plan["has"] / GIB, color="black", linestyle="--", linewidth=1)
    axes.annotate("the chip's memory", (0, plan["has"] / GIB), va="bottom", ha="center", fontsize=8)
    axes.set_ylabel("GiB per device")
    axes.spines[["top", "right"]].set_visible(False)


def _seconds(axes: Any, values: dict[str, Any], source: str) -> None:
    time = values["time"]
    colors = {"compute": "tab:blue", "memory": "tab:green"}
    if time["host"]:
        colors["host"] = "tab:purple"
    names = list(colors)
    lengths = [time[name] for name in names]
    hidden = [0.0] * len(names)
    for row in values["collectives"]:
        if row["seconds"] < 0.01 * time["network"]:
            continue
        names.append(f"{row['kind']}\n{' + '.join(row['axes'])}")
        lengths.append(row["seconds"])
        hidden.append(row["seconds"] * row["overlapped"] / row["sent"] if row["sent"] else 0.0)
    axes.barh(names, lengths, color=[colors.get(name, "tab:red") for name in names])
    axes.barh(names, hidden, color="lightsalmon")
    axes.axvline(time["expected"], color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel(
        f"seconds per step, lower bounds ({source})\nlight: overlapped with other work; dashed: the step"
    )
    axes.spines[["top", "right"]].set_visible(False)
