"""The flags and the line of JSON that bare_llama.py, maxlp_llama.py and torch_llama.py have in common.

Imports nothing but the standard library and NumPy, because torch_llama.py runs without JAX.
"""

import argparse
import json
import statistics

import numpy as np


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the sizes of a Llama and of its batch."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--embed_dim", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--num_kv_heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--mlp_dim", type=int, default=768)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=20)
    return parser


def random_tokens(args: argparse.Namespace) -> np.ndarray:
    """int32 tokens (B, S + 1)."""
    shape = (args.batch_size, args.seq_len + 1)
    return np.random.default_rng(0).integers(0, args.vocab_size, shape, np.int32)


def print_result(
    name: str,
    args: argparse.Namespace,
    *,
    num_params: int,
    compile_seconds: float,
    step_seconds: list[float],
    loss: float,
    **more: float,
) -> None:
    """Prints one line of JSON: the flags, the number of parameters, times, speeds, the loss and more."""
    tokens = args.batch_size * args.seq_len
    fastest, median = min(step_seconds), statistics.median(step_seconds)
    result = {
        "name": name,
        **vars(args),
        "num_params": num_params,
        "compile_seconds": round(compile_seconds, 2),
        "step_seconds_min": fastest,
        "step_seconds_median": median,
        "tokens_per_sec_max": tokens / fastest,
        "tokens_per_sec_median": tokens / median,
        "loss": loss,
        **more,
    }
    print(json.dumps(result))
