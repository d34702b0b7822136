"""The train step of maxlp, with the flags and the line of JSON of `bare_llama.py`.

    python benchmarks/maxlp_llama.py --embed_dim=256 --num_layers=6 --dtype=bfloat16 --steps=20

20 seconds of CPU time, most of it to compile.

The step is the one that `maxlp.train` runs: same model, optimizer, loss and compilation, on a mesh of all
devices, a batch with segment ids, positions and a mask, and the same settings of the process. Only the
statistics of each tensor are switched off.
"""

import argparse

import jax
import llama_args
from ml_collections import ConfigDict
from training import CompiledRun, llama_config, random_text

from maxlp.core.train_state import num_params
from maxlp.run.experiment import resolve
from maxlp.runtime import cpu, distributed


def make_config(args: argparse.Namespace) -> ConfigDict:
    names = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
    model = {
        **{name: getattr(args, name) for name in names},
        "max_seq_len": args.seq_len,
        "rope_theta": 10_000.0,
        "dtype": args.dtype,
        "attention": "xla",
        "scan_layers": args.scan,
        "remat": "none",
    }
    changes = {
        "model.init_std": None,
        "data.batch_size": args.batch_size,
        "data.seq_len": args.seq_len,
    }
    return llama_config(model, changes)


def main() -> None:
    parser = llama_args.make_parser(__doc__.splitlines()[0])
    parser.add_argument("--scan", action="store_true", help="scan over the layers, as deep models do")
    args = parser.parse_args()

    distributed.initialize()
    if jax.default_backend() == "cpu":
        cpu.keep_freed_memory()
    compiled = CompiledRun(resolve(make_config(args)))
    seconds, metrics = compiled.time_steps(random_text(compiled.run), args.steps)
    llama_args.print_result(
        "maxlp",
        args,
        num_params=num_params(compiled.abstract["params"]),
        compile_seconds=compiled.compile_seconds,
        step_seconds=seconds,
        loss=float(metrics["loss"]),
    )


if __name__ == "__main__":
    main()
