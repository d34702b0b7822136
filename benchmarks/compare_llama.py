"""Compares maxlp with a bare JAX step and with Hugging Face's Llama in PyTorch: tokens per second.

    python benchmarks/compare_llama.py --torch_python=/path/to/venv/with/torch/bin/python

The three scripts take turns, each in its own process, so that a machine that slows down slows all of them.
Other flags (`--embed_dim=192`) are passed on to every script. Prints medians over the rounds, and maxlp's
speed relative to each script within a round. Without --torch_python, PyTorch is left out; with it, PyTorch
runs twice: as it is, and with the allocator keeping freed memory, as maxlp makes it do on CPUs. With the
default sizes a round takes 35 seconds of CPU time, and 230 with PyTorch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from llama_args import make_parser

HERE = Path(__file__).parent
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}  # `maxlp.runtime.cpu`


def measure(python: str, script: str, variables: dict[str, str], flags: list[str]) -> float:
    """Tokens per second of the median step of one process."""
    done = subprocess.run(
        [python, str(HERE / script), *flags],
        stdout=subprocess.PIPE,  # its errors are printed here
        text=True,
        check=True,
        cwd=HERE.parent,
        env=os.environ | variables,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_sec_median"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch_python", default="", help="a Python with torch and transformers")
    parser.add_argument("--rounds", type=int, default=5)
    args, sizes = parser.parse_known_args()
    make_parser("").parse_args(sizes)  # the scripts' own output is captured
    scripts: dict[str, tuple[str, str, dict[str, str]]] = {
        "maxlp": (sys.executable, "maxlp_llama.py", {}),
        "bare JAX": (sys.executable, "bare_llama.py", {}),
    }
    if args.torch_python:
        scripts["PyTorch"] = (args.torch_python, "torch_llama.py", {})
        scripts["PyTorch, memory kept"] = (args.torch_python, "torch_llama.py", KEEP_FREED_MEMORY)
    speeds: dict[str, list[float]] = {name: [] for name in scripts}
    for _ in range(args.rounds):
        for name, (python, script, variables) in scripts.items():
            speeds[name].append(measure(python, script, variables, sizes))
    print(f"{'':20}  tokens/s  maxlp relative to it: median (min to max)   flags: {' '.join(sizes)}")
    for name, values in speeds.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(speeds["maxlp"], values, strict=True))
        print(
            f"{name:20}  {statistics.median(values):8,.0f}  {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
