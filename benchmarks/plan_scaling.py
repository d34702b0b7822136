"""Weak scaling as the compiler sees it: memory and collectives of one device as devices grow.

    python benchmarks/plan_scaling.py --config=configs/llama/8b.py --config.model.attention=cudnn \
        --topologies=h100:1x8,h100:8x8,h100:64x8,h100:512x8 --json=scaling.json

Each device keeps ``--rows`` sequences of a batch that grows with the machine. Needs no device, but
pip install 'maxlp[aot]' (or --estimate_only).
"""

import json
from pathlib import Path

from absl import flags

from maxlp import plan
from maxlp.planning import search, topologies
from maxlp.planning.topologies import GIB
from maxlp.run import config

HEADER = (
    "| topology | devices | estimated peak, GiB | compiled peak, GiB | gathered, GiB | others sent, GiB | "
    "network, s | compute, s | compile, s | host, GiB |\n|---|---|---|---|---|---|---|---|---|---|"
)


def define_flags() -> None:
    plan.define_flags()
    flags.DEFINE_list("topologies", [], "Topologies, smallest first.")
    flags.DEFINE_integer("rows", 1, "Sequences of a device.")


def main() -> int:
    topologies.compile_without_devices()
    print(HEADER)
    plans = []
    for name in flags.FLAGS.topologies:
        topology = topologies.parse(name)
        c = plan.readable(flags.FLAGS.config)
        c = search.changed(
            c, {"data.batch_size": flags.FLAGS.rows * topology.size, "train.microbatches": 1}
        )
        plans.append(plan.make_plan(c, topology, compiles=not flags.FLAGS.estimate_only))
        print(row(plans[-1]), flush=True)
        if flags.FLAGS.json:
            Path(flags.FLAGS.json).write_text(json.dumps(plans, indent=1) + "\n")
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
    config.run(main)
