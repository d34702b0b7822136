"""Writes tests/goldens/qwen3.npz: outputs and gradients of Hugging Face's Qwen3, small and random.

    pip install torch transformers numpy
    python tools/make_qwen_goldens.py tests/goldens

The file has the arrays that `tools/make_llama_goldens.py` describes. The heads are together twice as wide
as the model, whose embeddings are tied, as in the small Qwen3.
"""

import numpy as np
import transformers
from goldens_folder import goldens_folder
from make_llama_goldens import golden

GRADS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.self_attn.k_norm.weight",
    "model.layers.1.self_attn.k_norm.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
)


if __name__ == "__main__":
    folder = goldens_folder()
    config = transformers.Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    arrays = golden(transformers.Qwen3ForCausalLM, config, seed=0, seq_len=48, grads=GRADS)
    np.savez_compressed(f"{folder}/qwen3.npz", **arrays)
