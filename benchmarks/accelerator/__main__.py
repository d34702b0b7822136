r"""Measures maxlp on the accelerator at hand, the most valuable numbers first.

    python -m benchmarks.accelerator --list
    python -m benchmarks.accelerator --minutes=10   # what fits in 10 minutes: checks, 8B
    python -m benchmarks.accelerator                # the rest: about 50 minutes in all
    python -m benchmarks.accelerator --report       # the tables of what has been measured

Each piece runs in a process of its own with a time limit, and writes PIECE.json to the folder --out
("results" by default) with its rows, the versions, the device, its clocks, XLA_FLAGS, the command and the
commit (without git: $GIT_COMMIT). A piece whose file exists is not repeated, even if it failed, unless
--again is given; one that was interrupted continues after its last row. What the pieces print is in
PIECE.log. Compiled programs are kept in JAX_COMPILATION_CACHE_DIR (~/.cache/maxlp/xla).

Uses one GPU or TPU, and compares with PyTorch on it if that can be imported. On a CPU, or with --tiny, the
sizes are tiny and only show that every piece runs: 4 minutes of CPU time.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accelerator import report
from benchmarks.accelerator.results import (
    FAILED,
    INTERRUPTED,
    NO_TIME,
    RUNNING,
    is_of,
    is_unfinished,
    load,
    path,
)
from maxlp.runtime.files import write_json

ROOT = Path(__file__).parents[2]
PACKAGE = "benchmarks.accelerator"


class Piece(NamedTuple):
    """A part of the campaign.

    Attributes:
      function: "module:function" in `PACKAGE`, which takes a `results.Result`.
      minutes: expected on an H200; not yet measured.
      limit: minutes after which it is stopped.
      shares: whether it starts processes that use the device, to which it must leave the memory.
    """

    name: str
    function: str
    minutes: float
    limit: float
    what: str
    shares: bool = False


PIECES = [
    Piece("kernels", "checks:kernels", 1, 2.5, "attention kernels and every recipe against the CPU"),
    Piece("predict", "training_runs:predict", 0.5, 4, "what the planner chooses and predicts for all runs"),
    Piece("8b_fp8", "training_runs:train", 2.5, 6, "Llama 8B, 8,192 tokens: train steps in FP8"),
    Piece("8b_bf16", "training_runs:train", 2, 6, "the same in bfloat16"),
    Piece(
        "smoke", "checks:smoke", 1, 4, "debug Llama and CLIP train, are killed, resume bit-exactly", True
    ),
    Piece("torch_8b_bf16", "training_runs:torch", 2, 6, "the same in PyTorch, bfloat16", True),
    Piece("quantizers", "tables:quantizers", 0.5, 4, "bandwidth of the quantizers relative to a copy"),
    Piece("attention", "tables:time_attention", 1.5, 8, "attention kernels, forward and backward"),
    Piece("8b_int8", "training_runs:train", 2, 8, "Llama 8B in int8 (SwitchBack)"),
    Piece("matmuls", "tables:matmuls", 4, 8, "matmuls, layers and SwiGLU blocks, by recipe"),
    Piece("8b_fp8_light", "training_runs:train", 2.5, 8, "8B in FP8, weights in bfloat16, 8-bit moments"),
    Piece("torch_8b_fp8", "training_runs:torch", 2.5, 8, "8B in PyTorch, FP8 of torchao", True),
    Piece("1.5b_fp8", "training_runs:train", 2, 8, "Llama of 1.5B parameters, 1,024 tokens, FP8"),
    Piece("1.5b_bf16", "training_runs:train", 1.5, 8, "the same in bfloat16"),
    Piece("1b_fp8", "training_runs:train", 2, 8, "Llama 3.2 1B, 8,192 tokens, FP8"),
    Piece("1b_bf16", "training_runs:train", 1.5, 8, "the same in bfloat16"),
    Piece("3b_fp8", "training_runs:train", 2, 8, "Llama 3.2 3B, 8,192 tokens, FP8"),
    Piece("3b_bf16", "training_runs:train", 1.5, 8, "the same in bfloat16"),
    Piece("clip_b16", "training_runs:train", 1.5, 8, "CLIP ViT-B/16, 1,024 pairs, bfloat16"),
    Piece("clip_h14", "training_runs:train", 1.5, 8, "CLIP ViT-H/14, 256 pairs, bfloat16"),
    Piece("clip_h14_fp8", "training_runs:train", 1.5, 8, "the same with FP8 (SwitchBack)"),
    Piece("contrastive", "tables:contrastive", 1, 6, "the tiled loss alone, up to 131,072 pairs"),
    Piece("clip_b16_131072", "training_runs:train", 4, 8, "CLIP ViT-B/16, 131,072 pairs, tiled loss"),
    Piece("fidelity_60m", "learning:fidelity", 5, 8, "Llama 60M on real text: recipes, optimizers"),
    Piece("fidelity_130m", "learning:fidelity", 6, 8, "the same with 130M parameters"),
]


def main() -> int:
    args = parse_args()
    if args.list:
        for piece in PIECES:
            print(f"{piece.name:16} {piece.minutes:4.1f} min  {piece.what}")
        return 0
    if args.report:
        results = {piece.name: load(path(args.out, piece.name)) for piece in PIECES}
        print(report.render({name: result for name, result in results.items() if result}))
        return 0
    return run(args)


def parse_args() -> argparse.Namespace:
    names = [piece.name for piece in PIECES]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument("--list", action="store_true", help="print the pieces and stop")
    parser.add_argument("--report", action="store_true", help="print the tables of the results and stop")
    parser.add_argument("--only", default="", help="pieces, separated by commas")
    parser.add_argument("--again", action="store_true", help="repeat pieces whose file exists")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="time limit of all pieces together"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as on a CPU")
    args = parser.parse_args()
    args.only = args.only.split(",") if args.only else names
    if unknown := [name for name in args.only if name not in names]:
        parser.exit(2, f"--only={unknown[0]} is unknown; the pieces: {', '.join(names)}\n")
    if not args.minutes > 0:
        parser.exit(2, f"--minutes={args.minutes:g} is not positive\n")
    if args.out.exists() and not args.out.is_dir():
        parser.exit(2, f"--out={args.out} is a file; give a folder\n")
    return args


def run(args: argparse.Namespace) -> int:
    """Runs the pieces that are not done; returns the exit code."""
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    pieces = [piece for piece in PIECES if piece.name in args.only]
    results = {piece.name: load(path(args.out, piece.name)) for piece in pieces}  # before any time is spent
    device = find_device(args.tiny)
    write_json(args.out / "device.json", device)
    print(f"{device['count']} × {device['kind']}, {'tiny' if device['tiny'] else 'full'} sizes", flush=True)
    failed, later = [], []
    for piece in pieces:
        left, result = end - time.monotonic(), results[piece.name]
        if is_finished(result, device) and not args.again:
            print(f"{piece.name}: {result['status']} already")
        elif left < (0 if device["tiny"] else 60 * piece.minutes):
            later.append(piece.name)
        else:
            print(f"\n{piece.name}: {piece.what}", flush=True)
            if args.again or not (is_unfinished(result) and is_of(result, device)):
                path(args.out, piece.name).unlink(missing_ok=True)
            result = run_piece(piece, args.out, min(left, 60 * piece.limit))
            outcome = f"{result['status']} after {result['seconds']:.0f} s"
            print(": ".join(filter(None, [outcome, result.get("error")])))
            print(table_of(piece.name, result), flush=True)
            later += [piece.name] * (result["status"] == INTERRUPTED)
        failed += [piece.name] * (result.get("status") == FAILED)
    if later:
        print(f"\nleft for another call, for lack of time: {', '.join(later)}")
    if failed:
        print(f"\nfailed: {', '.join(failed)}; see their logs; repeat with --again --only=NAME")
    return 1 if failed else 0


def table_of(name: str, result: dict[str, Any]) -> str:
    """The table of a piece, or why there is none: an error in it must not stop the next pieces."""
    try:
        return report.section(name, {name: result})
    except Exception as error:
        return f"no table: {error!r}"


def is_finished(result: dict[str, Any], device: dict[str, Any]) -> bool:
    """Whether a piece need not run: its file is complete, and of this device and these sizes."""
    return bool(result) and not is_unfinished(result) and is_of(result, device)


def find_device(tiny: bool) -> dict[str, Any]:
    """The device that the pieces will use, and whether their sizes are tiny."""
    command = [sys.executable, "-m", "benchmarks.accelerator.device"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(shares=True), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit("JAX finds no device; its error is above")
    device = json.loads(done.stdout.splitlines()[-1])
    on_cpu = device["platform"] == "cpu"
    if on_cpu and not tiny and not os.environ.get("JAX_PLATFORMS") and shutil.which("nvidia-smi"):
        sys.exit(
            "nvidia-smi is installed, but JAX finds no GPU; its warning is above (--tiny uses the CPU)"
        )
    return device | {"tiny": tiny or on_cpu}


def environment(shares: bool) -> dict[str, str]:
    """The environment of a piece, in which variables that the user has set keep their values."""
    own = os.environ
    paths = [
        ROOT,
        ROOT / "benchmarks",  # whose files import each other by file name
        *filter(None, [own.get("PYTHONPATH")]),
    ]
    older = "XLA_PYTHON_CLIENT_MEM_FRACTION" in own  # the deprecated name; JAX refuses both together
    return {
        "JAX_COMPILATION_CACHE_DIR": str(Path.home() / ".cache" / "maxlp" / "xla"),
        **({} if older else {"XLA_CLIENT_MEM_FRACTION": "0.95"}),
        **({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if shares else {}),
        **own,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
    }


def run_piece(piece: Piece, folder: Path, seconds: float) -> dict[str, Any]:
    """Runs a piece, kills it at its time limit, and adds status, duration and clocks to its file."""
    arguments = [piece.name, f"{PACKAGE}.{piece.function}", str(folder.absolute()), f"{seconds:.0f}"]
    command = [sys.executable, "-m", "benchmarks.accelerator.piece", *arguments]
    file, log = path(folder, piece.name), folder / f"{piece.name}.log"
    start, clocks = time.monotonic(), []
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(piece.shares), stdout=output, stderr=output, process_group=0
        )
        try:
            while process.poll() is None and time.monotonic() - start < seconds:
                clocks += read_clocks()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(5.0, max(0.0, start + seconds - time.monotonic())))
            stopped = process.poll() is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    no_result = {"status": RUNNING, "piece": piece.name, "device": load(folder / "device.json"), "rows": []}
    result = load(file) or no_result
    if stopped and seconds < 60 * piece.limit:
        result |= {"status": INTERRUPTED, "error": NO_TIME}
    elif stopped or process.returncode < 0 or result["status"] == RUNNING:
        error = f"stopped after {seconds:.0f} s" if stopped else f"exit code {process.returncode}"
        result |= {"status": FAILED, "error": error}
    if result["status"] == FAILED:
        result |= {"log": log.read_text(errors="replace").splitlines()[-30:]}
    result |= {"seconds": round(time.monotonic() - start, 1), "clocks": clocks}
    write_json(file, result)
    return result


def read_clocks() -> Iterator[list[float]]:
    """MHz of the multiprocessors and of the memory, watts and °C of the first NVIDIA GPU, if any."""
    if shutil.which("nvidia-smi") is None:
        return
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"]
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        yield [float(value) for value in done.stdout.split(",")]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:  # a damaged result, a folder that cannot be written
        print(error, file=sys.stderr)
        sys.exit(2)
