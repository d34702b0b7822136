"""Qwen3 8B (arXiv:2505.09388, table 1): 8,190,735,360 parameters.

One mesh axis, fsdp, over all devices.

python -m maxlp.train --config=configs/qwen3/8b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.qwen3.presets import qwen3
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = qwen3(
        embed_dim=4096,
        num_layers=36,
        num_heads=32,
        mlp_dim=12288,
        tie_embeddings=False,
    )
    return choose(arg, c)
