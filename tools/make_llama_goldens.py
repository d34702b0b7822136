"""Writes tests/goldens/llama_*.npz: outputs and gradients of Hugging Face's Llama, small and random.

    pip install torch transformers numpy
    python tools/make_llama_goldens.py tests/goldens

Each file holds

* ``config``: the model's config.json, as text;
* ``weights/NAME``: every tensor of the state dict. They are stored as float16 to keep the file small; the
  model's float32 weights have exactly these values;
* ``tokens``, ``positions``: int32 (B, S);
* ``logits``: float32 (B, S, V);
* ``loss``: mean cross-entropy of the next token, float32;
* ``grads/NAME``: d loss / d weight for some weights, float32.
"""

import numpy as np
import torch
import transformers
from goldens_folder import goldens_folder

# H = 16, so the rotary wavelengths are 6, 32, 167, 861, … for theta = 5e5. With an original context of
# 64 tokens, llama3 scaling keeps the first, interpolates the second and stretches the others by 8, which
# only sequences of more than 64 tokens can show.
LLAMA_3 = dict(
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_parameters=dict(
        rope_type="llama3",
        rope_theta=500_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
)
LLAMA_2 = dict(
    num_key_value_heads=4,
    max_position_embeddings=64,
    rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
)
CASES = {  # name -> length, config
    "llama_3_1": (144, dict(tie_word_embeddings=False, **LLAMA_3)),
    "llama_3_2_tied": (144, dict(tie_word_embeddings=True, **LLAMA_3)),
    "llama_2": (48, dict(tie_word_embeddings=False, **LLAMA_2)),
}
GRADS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.input_layernorm.weight",
    "model.norm.weight",
)


def llama_config(**config) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        intermediate_size=48,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
        **config,
    )


def golden(
    kind: type,
    config: transformers.PreTrainedConfig,
    seed: int,
    seq_len: int,
    grads: tuple[str, ...] = GRADS,
) -> dict[str, np.ndarray]:
    """The arrays of a golden.

    Args:
      kind: class of the model.
      grads: the weights whose gradients it holds.
    """
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        # Large enough that attention is far from uniform, so that small errors are visible in the logits.
        for weight in model.parameters():
            mean = 1.0 if weight.ndim == 1 else 0.0
            weight.copy_((mean + 0.2 * torch.randn_like(weight)).half().float())

    tokens = torch.randint(config.vocab_size, (1, seq_len))
    positions = torch.arange(seq_len)[None]
    logits = model(input_ids=tokens, position_ids=positions).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    weights = dict(model.named_parameters())
    return {
        "config": np.array(config.to_json_string(use_diff=False)),
        "tokens": tokens.numpy().astype(np.int32),
        "positions": positions.numpy().astype(np.int32),
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        **{f"weights/{k}": w.detach().numpy().astype(np.float16) for k, w in weights.items()},
        **{f"grads/{k}": weights[k].grad.numpy() for k in grads},
    }


if __name__ == "__main__":
    folder = goldens_folder()
    for seed, (name, (seq_len, config)) in enumerate(CASES.items()):
        arrays = golden(transformers.LlamaForCausalLM, llama_config(**config), seed, seq_len)
        np.savez_compressed(f"{folder}/{name}.npz", **arrays)
