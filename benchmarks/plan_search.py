"""The planner's search for presets of Llama and CLIP on many machines: what fits, and how long it takes.

python benchmarks/plan_search.py                              # twenty minutes on 2 cores
python benchmarks/plan_search.py --presets llama/8b --machines h100:1x8 v5p:2x4x4
"""

import argparse
import time
from pathlib import Path

from training import topology

from maxlp.plan import describe_layout, with_placeholder_data
from maxlp.planning import search, topologies
from maxlp.planning.topologies import GIB
from maxlp.run.config import load_file
from maxlp.run.settings import read

CONFIGS = Path(__file__).parent.parent / "configs"
KNOWN = [f"{path.parent.name}/{path.stem}" for path in sorted(CONFIGS.glob("*/[!_]*.py"))]
PRESETS = [name for name in KNOWN if name.startswith(("clip/", "llama/"))]
GPUS = ("rtx4090", "rtx5090", "a100_40gb", "h100", "h200", "b200")  # 24, 32, 40, 80, 141 and 180 GB
MACHINES = [f"{gpu}:1x{n}" for gpu in GPUS for n in (1, 2, 4, 8)]
MACHINES += ["v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8"]
MACHINES += ["v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4"]  # v5p-8 to v5p-64, named by their cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="*", default=PRESETS, choices=KNOWN, metavar="PRESET")
    machines = [topology(name) for name in MACHINES]
    parser.add_argument("--machines", nargs="*", default=machines, type=topology, metavar="CHIP:SHAPE")
    args = parser.parse_args()
    topologies.compile_without_devices()
    print("| preset | machine | | per second | GiB | settings | s | CPU s |\n" + "|---" * 8 + "|")
    slowest, slowest_cpu = 0.0, 0.0
    for preset in args.presets:
        s = read(with_placeholder_data(load_file(preset)))
        for machine in args.machines:
            start, cpu_start = time.perf_counter(), time.process_time()
            found = search.find(s, machine)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            slowest, slowest_cpu = max(slowest, seconds), max(slowest_cpu, cpu)
            print(f"| {preset} | {machine.name} | {row(found)} | {seconds:.1f} | {cpu:.1f} |", flush=True)
    # On a machine that does other work too, the CPU time is what the search takes alone: it is one thread.
    print(f"\nslowest search: {slowest:.1f} s, {slowest_cpu:.1f} s of CPU time")


def row(found: search.Found) -> str:
    """Whether any settings fit, or only with other numerics; then the rate, peak and flags of the best."""
    outcome = "fits" if found.layouts else "fits only with" if found.numerics else "nothing fits"
    one = (found.layouts or found.numerics or [found.smallest])[0]
    if one is None:
        return "refused | | | "
    settings = ", ".join([*one.numerics, describe_layout(one)])
    return f"{outcome} | {one.rate:,.0f} | {one.peak / GIB:.1f} | {settings}"


if __name__ == "__main__":
    main()
