"""Qwen3 0.6B (arXiv:2505.09388, table 1), tied embeddings: 596,049,920 parameters.

One mesh axis, fsdp, over all devices.

python -m maxlp.train --config=configs/qwen3/0.6b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.qwen3.presets import qwen3
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = qwen3(
        embed_dim=1024,
        num_layers=28,
        num_heads=16,
        mlp_dim=3072,
    )
    return choose(arg, c)
