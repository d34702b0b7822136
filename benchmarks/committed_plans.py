"""Prints the table of docs/plans from its JSON files.

With --estimate it first updates the estimate in each plan (seconds), but not its times of the compiled
step, which follow from the same closed form; with --compile it makes the plans again.

pip install 'maxlp[aot]'
python benchmarks/committed_plans.py --estimate
python benchmarks/committed_plans.py --compile                # an hour on 2 cores
python benchmarks/committed_plans.py --compile --only 8b_h100_1x8
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from maxlp.parallel import sharding
from maxlp.planning.topologies import GIB

PLANS = Path(__file__).parent.parent / "docs" / "plans"
HEADER = (
    "| plan | chips | mesh | estimated, GiB | compiled, GiB | has, GiB | sent, GiB | step, s | "
    "MFU | bound by | compiled in | host memory |\n" + "|---" * 12 + "|"
)


def main() -> None:
    found = {path.stem: path for path in sorted(PLANS.glob("*.json")) if path.stem != "scaling"}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="make whole plans again")
    parser.add_argument("--estimate", action="store_true", help="update only the estimates in the plans")
    parser.add_argument("--only", nargs="*", choices=found, metavar="PLAN", help="names of plans")
    args = parser.parse_args()
    print(HEADER)
    for name in args.only or found:
        if args.compile:
            remake(found[name])
        elif args.estimate:
            update_estimate(found[name])
        print(row(name, json.loads(found[name].read_text())), flush=True)


def remake(path: Path) -> None:
    """Makes a plan again by the command that it records, with its picture if it has one."""
    plan(
        path, f"--json={path}", *[f"--plot={path.with_suffix('.png')}"] * path.with_suffix(".png").exists()
    )


def update_estimate(path: Path) -> None:
    """Replaces the estimate in a plan."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        plan(path, "--estimate_only", f"--json={file.name}")
        estimate = json.loads(Path(file.name).read_text(encoding="utf-8"))["estimate"]
    values = json.loads(path.read_text(encoding="utf-8")) | {"estimate": estimate}
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def plan(path: Path, *options: str) -> None:
    """Runs the command that a plan records, with these options added."""
    _, *rest = shlex.split(json.loads(path.read_text(encoding="utf-8"))["command"])
    subprocess.run([sys.executable, *rest, "--nosearch", *options], check=True, stdout=subprocess.DEVNULL)


def row(name: str, values: dict) -> str:
    done = values["compiled"]
    kind = values["chip"]["kind"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
    cells = [
        f"[{name}]({name}.json)",
        f"{values['devices']} × {kind}",
        sharding.describe(values["mesh"]),
        f"{values['estimate']['peak'] / GIB:.1f}",
        f"{done['peak'] / GIB:.1f}",
        f"{values['has'] / GIB:.1f}",
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
