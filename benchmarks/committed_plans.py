"""Prints the table of docs/plans from its JSON files; --compile first makes each plan again.

pip install 'maxlp[aot]'
python benchmarks/committed_plans.py --compile                # an hour on 2 cores
python benchmarks/committed_plans.py --compile --only=8b_h100_1x8
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from maxlp.parallel import sharding
from maxlp.planning.topologies import GIB

PLANS = Path(__file__).parent.parent / "docs" / "plans"
HEADER = (
    "| plan | chips | mesh | estimated, GiB | compiled, GiB | has, GiB | sent, GiB | step at least, s | "
    "MFU at most | bound by | compiled in | host memory |\n" + "|---" * 12 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="make the plans again")
    parser.add_argument("--only", nargs="*", help="names of plans")
    args = parser.parse_args()
    found = {path.stem: path for path in sorted(PLANS.glob("*.json")) if path.stem != "scaling"}
    print(HEADER)
    for name in args.only or found:
        if args.compile:
            remake(found[name])
        print(row(name, json.loads(found[name].read_text())), flush=True)


def remake(path: Path) -> None:
    """Runs the command that a plan records, and replaces its files."""
    _, *rest = shlex.split(json.loads(path.read_text())["command"])
    figure = path.with_suffix(".png")
    rest += [f"--json={path}"] + [f"--plot={figure}"] * figure.exists()
    subprocess.run([sys.executable, *rest], check=True, stdout=subprocess.DEVNULL)


def row(name: str, plan: dict) -> str:
    done = plan["compiled"]
    kind = plan["chip"]["kind"].removeprefix("NVIDIA ")
    cells = [
        f"[{name}]({name}.json)",
        f"{plan['devices']} × {kind}",
        sharding.describe(plan["mesh"]),
        f"{plan['estimate']['peak'] / GIB:.1f}",
        f"{done['peak'] / GIB:.1f}",
        f"{plan['has'] / GIB:.1f}",
        f"{sum(one['sent'] for one in done['collectives']) / GIB:,.0f}",
        f"{done['time']['expected']:.3g}",
        f"{done['mfu']['full']:.0%}",
        done["time"]["limit"],
        f"{done['compile_seconds']:.0f} s",
        f"{done['host_memory'] / GIB:.1f} GiB",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
