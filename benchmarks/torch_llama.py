"""The train step of Hugging Face's `LlamaForCausalLM` in PyTorch: the baseline from another stack.

    pip install torch transformers
    python benchmarks/torch_llama.py --embed_dim=256 --num_layers=6 --dtype=bfloat16 --steps=20

Takes the flags of `bare_llama.py` and prints its line of JSON: random weights and tokens, AdamW, and a
global-norm clip. bfloat16 means autocast over float32 weights, the usual recipe in PyTorch; with
`--param_dtype=bfloat16`, weights and moments are in bfloat16 too, for models that do not fit otherwise.
`--compile` compiles each block and the loss with `torch.compile`; `--fp8` takes torchao's FP8 in the blocks
(dynamic tensor-wise scales). The default sizes take 100 seconds of CPU time.
"""

import argparse
import contextlib
import time

import llama_args
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A randomly initialized Llama in float32; attention runs in PyTorch's fused kernel."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.embed_dim,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.mlp_dim,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device(args.device):
        model = LlamaForCausalLM(config).to(getattr(torch, args.param_dtype)).train()
    if args.fp8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda _, path: not path.endswith("lm_head"))
    if args.remat:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.compile:
        for block in model.model.layers:
            block.compile()
    return model


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = llama_args.make_parser(__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--param_dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks and the loss")
    parser.add_argument("--remat", action="store_true", help="recompute the blocks in the backward pass")
    parser.add_argument("--fp8", action="store_true", help="torchao's FP8 in the blocks")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = make_model(args)
    num_params = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    loss_of = torch.compile(next_token_loss) if args.compile else next_token_loss
    tokens = torch.from_numpy(llama_args.random_tokens(args)).long().to(args.device)
    # The model shifts the labels itself if it is given any; here inputs and targets are shifted already.
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    autocast = (
        torch.autocast(args.device, torch.bfloat16)
        if args.dtype == "bfloat16" and args.param_dtype == "float32"
        else contextlib.nullcontext()
    )

    def train_step() -> float:
        with autocast:
            logits = model(inputs).logits
        loss = loss_of(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    seconds = []
    for _ in range(2 + args.steps):
        start = time.perf_counter()
        loss = train_step()
        seconds.append(time.perf_counter() - start)
    llama_args.print_result(
        "torch_hf",
        args,
        num_params=num_params,
        compile_seconds=seconds[0],
        step_seconds=seconds[2:],  # the second step may still allocate
        loss=loss,
        **({"peak": torch.cuda.max_memory_allocated()} if args.device == "cuda" else {}),
    )


if __name__ == "__main__":
    main()
