"""Records the peak memory of small runs, as the compilers report it, in tests/planning/peaks.json.

    python -m tools.record_peaks h100:1x8 "twice the batch" "CLIP l14"

Takes a topology and names of runs in `tests/planning/peaks.py`; without names, all runs of Llama. Needs
pip install 'maxlp[aot]'. Each run takes 15 seconds (GPU) to a minute (TPU) on 2 cores.
"""

import argparse
import json

from benchmarks.training import topology
from maxlp.parallel import sharding
from maxlp.planning import compiled, topologies
from maxlp.run.experiment import assemble
from tests.planning import peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("topology", type=topology)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    known = [*peaks.LLAMA, *peaks.PRESETS, *peaks.CLIP]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"run {unknown[0]!r} is unknown; the names: {'; '.join(known)}")
    machine, platform = args.topology, args.topology.chip.platform
    found: dict = peaks.peaks()
    for name in args.names or peaks.LLAMA:
        s = peaks.recorded(name, platform)
        mesh = sharding.make_mesh(**s.mesh, devices=topologies.devices(machine))
        done = compiled.compile_step(assemble(s, machine.machine(s), mesh))
        found.setdefault(machine.name, {})[name] = done.peak
        found["compilers"][machine.name] = compiled.versions(platform)
        print(machine.name, name, f"{done.peak / 2**20:.0f} MiB", f"{done.seconds:.0f} s", flush=True)
        peaks.FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
