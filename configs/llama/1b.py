"""Llama 1B on C4 as in GaLore's table 2 (arXiv:2403.03507): full rank, or with `1b.py:galore` GaLore.

python -m maxlp.train --config=configs/llama/1b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/c4 --config.data.tokenizer=/data/tokenizer.json

The paper's validation perplexity: 15.56, with GaLore 15.64.
"""

from maxlp.families.llama.presets import llama_c4
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama_c4(
        steps=100_000,
        learning_rate=0.0005,
        embed_dim=2048,
        num_layers=24,
        num_heads=32,
        num_kv_heads=32,
        head_dim=64,
        mlp_dim=5461,
    )
    return choose(arg, c, galore=(512, 0.01))  # table 2, section 4.1
