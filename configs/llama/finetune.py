"""Fine-tuning of a pretrained Llama: the config of `train --from` if it names no other.

python -m maxlp.train --from=meta-llama/Llama-3.2-1B --workdir=/tmp/run \
    --config.data.source=jsonl:/data/mine.jsonl

1,000 steps of 16,384 tokens. The sizes below are those of Llama 3.2 1B; --from puts those of its weights in
their place.
"""

from maxlp.families.llama.presets import FINE_TUNING, LLAMA_3_2_ROPE, llama
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama(
        embed_dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_dim=8192,
        rope_scaling=LLAMA_3_2_ROPE,
        max_seq_len=131072,
        tie_embeddings=True,
    )
    c.update_from_flattened_dict(FINE_TUNING)
    return choose(arg, c)
