"""Qwen3 4B (arXiv:2505.09388, table 1), tied embeddings: 4,022,468,096 parameters.

One mesh axis, fsdp, over all devices.

python -m maxlp.train --config=configs/qwen3/4b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.qwen3.presets import qwen3
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = qwen3(
        embed_dim=2560,
        num_layers=36,
        num_heads=32,
        mlp_dim=9728,
    )
    return choose(arg, c)
