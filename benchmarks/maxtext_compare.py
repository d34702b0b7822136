"""Compares the compiled train steps of maxlp and MaxText for the same Llama 3.1 8B, without TPUs.

    python3.12 -m venv maxtext
    maxtext/bin/pip install 'maxtext[tpu]'    # 3 GB; Linux, no TPU
    maxtext/bin/pip install -e . --no-deps    # MaxText has installed maxlp's dependencies
    maxtext/bin/python benchmarks/maxtext_compare.py --topology=v5p:2x2x4 --rows=1 --seq_len=8192 \
        --remat=block --dump=compared

Both compile ahead of time in one environment, with one JAX and one libtpu: maxlp through `maxlp.plan`,
MaxText through its own `train_compile` and `base.yml`. Both have parameters and AdamW's moments in float32,
matmuls in bfloat16, packed sequences with segment ids, the splash kernel, fsdp over all chips, and clipping
by the global norm. Each side writes its program (NAME.hlo) and the compiler's report of its memory
(NAME.json) to --dump; a side whose files exist is not compiled again. The same parsers read both programs.
``--maxlp=--config.loss.num_chunks=1`` and ``--maxtext=num_vocab_tiling=8`` pass settings on.
The table says how long each side compiled: maxlp for 64 chips two minutes on two cores (docs/plans).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from training import topology

from maxlp.planning import compiled, hlo, topologies
from maxlp.planning.topologies import GIB, Topology
from tests.planning import hlo_flops

REMAT = {"block": "full", "dots": "minimal"}  # remat policy of maxlp -> the nearest one of MaxText
HEADER = (
    "| program | peak, GiB | arguments | temporaries | sent, GiB | overlapped | matmul FLOPs | "
    "kernel calls | compiled in, s |\n|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--topology", type=topology, default="v5p:2x2x4", help="as in maxlp.plan; v5p, v5e or v6e"
    )
    parser.add_argument("--rows", type=int, default=1, help="sequences per chip")
    parser.add_argument("--seq_len", type=int, default=8192)
    parser.add_argument("--remat", default="block", choices=REMAT)
    parser.add_argument("--dump", type=Path, default=Path("compared"))
    parser.add_argument("--name", default="", help="suffix of the files' names")
    parser.add_argument("--only", choices=("maxlp", "maxtext"))
    parser.add_argument("--maxlp", action="append", default=[], help="a flag for maxlp.plan")
    parser.add_argument("--maxtext", action="append", default=[], help="a setting for MaxText, KEY=VALUE")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.topology.chip.torus:
        parser.error(f"--topology={args.topology.name} has no TPUs, whose splash kernel both sides use")
    topologies.compile_without_devices()
    if args.child:
        compile_maxtext(maxtext_settings(args), args.child)
        return

    args.dump.mkdir(parents=True, exist_ok=True)
    setting = f"{args.topology.name.replace(':', '_')}_{args.seq_len}x{args.rows}_{args.remat}"
    print(HEADER)
    for side in (args.only,) if args.only else ("maxlp", "maxtext"):
        target = args.dump / "_".join(filter(None, (side, setting, args.name)))
        if not target.with_suffix(".json").exists():
            run = compile_maxlp if side == "maxlp" else start_maxtext
            run(args, target)
        print(row(target, args.topology), flush=True)


def compile_maxlp(args: argparse.Namespace, target: Path) -> None:
    plan = target.with_suffix(".plan")
    settings = {
        "data.batch_size": args.rows * args.topology.size,
        "data.seq_len": args.seq_len,
        "model.remat": args.remat,
        "model.attention": "splash",
    }
    command = [sys.executable, "-m", "maxlp.plan", "--config=configs/llama/8b.py", "--nosearch"]
    command += [f"--topology={args.topology.name}", f"--json={plan}", f"--hlo={target.with_suffix('.hlo')}"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    subprocess.run(command + args.maxlp, check=True, stdout=subprocess.DEVNULL)
    done = json.loads(plan.read_text())["compiled"]
    m = done["memory"]
    report = {
        "peak": done["peak"],
        "arguments": m["arguments"],
        "temporaries": m["temporaries"],
        "seconds": done["compile_seconds"],
        "compiler": done["compiler"],
    }
    target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    plan.unlink()


def start_maxtext(args: argparse.Namespace, target: Path) -> None:
    """Compiles in a separate process, because MaxText changes JAX's global settings."""
    subprocess.run(
        [sys.executable, *sys.argv, f"--child={target}"],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def maxtext_settings(args: argparse.Namespace) -> list[str]:
    """The settings that differ from MaxText's base.yml."""
    chip, chips = args.topology.chip_name, args.topology.size
    cores = 2 if chip in ("v4", "v5p") else 1  # names of these topologies count cores
    return [
        "run_name=compared",
        "model_name=llama3.1-8b",
        f"compile_topology={chip}-{chips * cores}",
        "compile_topology_num_slices=1",
        f"per_device_batch_size={args.rows}",
        f"max_target_length={args.seq_len}",
        f"remat_policy={REMAT[args.remat]}",
        "attention=flash",
        "dataset_type=synthetic",
        "enable_checkpointing=false",
        *args.maxtext,
    ]


def compile_maxtext(settings: list[str], target: Path) -> None:
    """Runs MaxText's own command and writes the program that it compiles."""
    import maxtext  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train_compile  # pyright: ignore[reportMissingImports]

    jit_and_compile = train_compile.jit_and_compile

    def compile_and_write(*args, **kwargs):
        start = time.perf_counter()
        done = jit_and_compile(*args, **kwargs)
        seconds = time.perf_counter() - start
        memory = compiled.read_memory(done, "tpu")
        target.with_suffix(".hlo").write_text(done.as_text())
        report = {
            "peak": memory.peak,
            "arguments": memory.arguments,
            "temporaries": memory.temporaries,
            "seconds": seconds,
            "compiler": compiled.versions("tpu"),
        }
        target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        return done

    train_compile.jit_and_compile = compile_and_write
    base = Path(str(maxtext.__file__)).parent / "configs" / "base.yml"
    train_compile.main(["train_compile", str(base), *settings])


def row(target: Path, topology: Topology) -> str:
    """A line of the table, from the files that a side has written."""
    report, text = (
        json.loads(target.with_suffix(".json").read_text()),
        target.with_suffix(".hlo").read_text(),
    )
    found = hlo.collectives(text, {"fsdp": topology.size})
    sent = sum(one.sent for one in found)
    overlapped = sum(one.sent for one in found if one.overlapped)
    kernels = sum(hlo_flops.kernel_calls(text).values())
    name = re.sub(r"^(maxlp|maxtext)_", lambda side: f"{side[1]} ", target.name)
    return (
        f"| {name} | {report['peak'] / GIB:.2f} | {report['arguments'] / GIB:.2f} "
        f"| {report['temporaries'] / GIB:.2f} | {sent / GIB:.1f} | {overlapped / max(sent, 1):.0%} "
        f"| {hlo_flops.matmul_flops(text):.4g} | {kernels} | {report['seconds']:.0f} |"
    )


if __name__ == "__main__":
    main()
