"""The campaign's training steps, compiled for one GPU that need not exist: does the planner's memory hold?

    pip install 'maxlp[aot]'
    python -m benchmarks.accelerator.compiled                       # 14 runs; half an hour on 2 cores
    python -m benchmarks.accelerator.compiled --topology=b200:1x1 --only=8b_fp8,1b_fp8

For each run the planner chooses settings by its closed form, as in the campaign, and then the compiler
reports the peak memory of the step. Without the device XLA cannot time kernels, and may choose others.
"""

import argparse
import sys
from pathlib import Path

from maxlp.plan import compile_for
from maxlp.planning import compiled, search
from maxlp.planning.topologies import GIB
from maxlp.run.settings import read

HEADER = "| run | predicted, GiB | compiled, GiB | difference |\n" + "|---" * 4 + "|"


def main() -> None:
    sys.path.append(str(Path(__file__).parents[1]))  # for `training`
    from training import topology

    from benchmarks.accelerator import training_runs

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator.compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--topology", type=topology, default="h200:1x1", help="one device; default h200:1x1"
    )
    parser.add_argument("--only", default=",".join(training_runs.RUNS), help="runs, separated by commas")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in training_runs.RUNS]:
        parser.exit(2, f"--only={unknown[0]} is unknown; the runs: {', '.join(training_runs.RUNS)}\n")
    one = args.topology
    if one.size != 1:
        parser.exit(2, f"--topology={one.name} has {one.size} devices; the runs use one\n")
    print(compiled.versions(one.chip.platform), HEADER, sep="\n\n", flush=True)
    device = {"kind": one.chip.kind, "memory": one.chip.memory}
    for name in names:
        choice = next(training_runs.candidates(name, device, tiny=False), None)
        if choice is None:
            print(f"| `{name}` | does not fit | | |", flush=True)
            continue
        c = training_runs.make_config(training_runs.RUNS[name], tiny=False)
        s = search.changed(read(c), choice["changes"])
        peak = compile_for(s, one.machine(s), one).peak
        sizes = f"{choice['peak'] / GIB:.1f} | {peak / GIB:.1f} | {choice['peak'] / peak - 1:+.1%}"
        print(f"| `{name}` | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
