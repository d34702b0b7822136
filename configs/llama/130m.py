"""Llama 130M on C4, the full-rank setting of GaLore's table 2 (arXiv:2403.03507).

python -m maxlp.train --config=configs/llama/130m.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/c4 --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.llama.presets import llama_c4
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama_c4(
        steps=20_000,
        learning_rate=0.001,
        embed_dim=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        mlp_dim=2048,
    )
    return choose(arg, c)
