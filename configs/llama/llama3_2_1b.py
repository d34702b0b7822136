"""Llama 3.2 1B, tied embeddings: 1,235,814,400 parameters.

One mesh axis, fsdp, over all devices.

python -m maxlp.train --config=configs/llama/llama3_2_1b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.llama.presets import LLAMA_3_2_ROPE, llama
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
    return choose(arg, c)
