"""The training step of Hugging Face's `LlamaForCausalLM` on PyTorch: the outside yardstick.

    pip install torch transformers
    python benchmarks/torch_llama.py --embed_dim=256 --num_layers=6 --dtype=bfloat16 --steps=20

Same sizes, same flags and same line of JSON as `bare_llama.py`: random weights, random tokens,
AdamW and a global-norm clip. bfloat16 is autocast over float32 weights, the usual PyTorch recipe.
`--compile` puts `torch.compile` around the forward pass.
"""

import argparse
import contextlib
import json
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A randomly initialised Llama in float32, attention through PyTorch's fused kernel."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.embed_dim,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.mlp_dim,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=args.tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(args.device).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward pass")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = make_model(args)
    num_params = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    forward = torch.compile(model) if args.compile else model
    shape = (args.batch_size, args.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, args.vocab_size, shape, np.int64)
    tokens = torch.from_numpy(tokens).to(args.device)
    # The model shifts labels by itself only if they are as long as the input; here both are cut.
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    autocast = (
        torch.autocast(args.device, torch.bfloat16)
        if args.dtype == "bfloat16"
        else contextlib.nullcontext()
    )

    def train_step() -> float:
        with autocast:
            logits = forward(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    start = time.perf_counter()
    train_step()
    compile_seconds = time.perf_counter() - start
    train_step()
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        loss = train_step()
        seconds.append(time.perf_counter() - start)
    tokens_per_step = args.batch_size * args.seq_len
    result = {
        "name": "torch_hf",
        **vars(args),
        "num_params": num_params,
        "compile_seconds": round(compile_seconds, 2),
        "step_seconds_min": min(seconds),
        "step_seconds_median": float(np.median(seconds)),
        "tokens_per_sec_max": tokens_per_step / min(seconds),
        "tokens_per_sec_median": tokens_per_step / float(np.median(seconds)),
        "loss": loss,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
