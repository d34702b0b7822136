"""Weak scaling by the compiler: memory and collectives of one device as the number of devices grows.

    python benchmarks/plan_scaling.py --config=configs/llama/8b.py --config.model.attention=flash \
        --topologies=h100:1x8,h100:8x8,h100:64x8,h100:512x8 --json=scaling.json

The batch grows with the machine: every device has ``--rows`` sequences. Needs no device, but
pip install 'maxlp[aot]' (or --estimate_only). 17 to 33 seconds a topology on two cores
(docs/plans/scaling.json).
"""

import json
from pathlib import Path

from absl import flags

from maxlp import plan
from maxlp.planning import search, topologies
from maxlp.planning.topologies import GIB
from maxlp.run import cli
from maxlp.run.settings import read

HEADER = (
    "| topology | devices | estimated peak, GiB | compiled peak, GiB | gathered, GiB | others sent, GiB | "
    "network, s | compute, s | compile, s | host, GiB |\n|---|---|---|---|---|---|---|---|---|---|"
)


def define_flags() -> None:
    cli.define_config()
    flags.DEFINE_list("topologies", None, "Topologies, smallest first.")
    flags.DEFINE_integer("rows", 1, "Sequences per device.", lower_bound=1)
    flags.DEFINE_bool("estimate_only", False, "Print only the estimates, without compiling.")
    flags.DEFINE_string("json", None, "Write the plans to this file as JSON, after each topology.")
    flags.mark_flags_as_required(["config", "topologies"])


def main() -> int:
    topologies.compile_without_devices()
    machines = [topologies.parse(name) for name in flags.FLAGS.topologies]
    s = read(plan.with_placeholder_data(flags.FLAGS.config))
    print(HEADER)
    plans = []
    for topology in machines:
        rows = flags.FLAGS.rows * topology.size
        scaled = search.changed(s, {"data.batch_size": rows, "train.microbatches": 1})
        plans.append(plan.make_plan(scaled, topology, compiles=not flags.FLAGS.estimate_only))
        print(row(plans[-1]), flush=True)
        if flags.FLAGS.json:
            Path(flags.FLAGS.json).write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
    return 0


def row(p: dict) -> str:
    source = p.get("compiled") or p["estimate"]
    sent = {"all-gather": 0.0, "others": 0.0}
    for one in source["collectives"]:
        sent["all-gather" if one["kind"] == "all-gather" else "others"] += one["sent"] / GIB
    compiled = p.get("compiled", {})
    cells = [
        p["topology"],
        f"{p['devices']:,}",
        f"{p['estimate']['peak'] / GIB:.2f}",
        f"{compiled['peak'] / GIB:.2f}" if compiled else "",
        f"{sent['all-gather']:.3g}",
        f"{sent['others']:.3g}",
        f"{source['time']['network']:.3g}",
        f"{source['time']['compute']:.3g}",
        f"{compiled['compile_seconds']:.0f}" if compiled else "",
        f"{compiled['host_memory'] / GIB:.1f}" if compiled else "",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    define_flags()
    cli.run(main)
