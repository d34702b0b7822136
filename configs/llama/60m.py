"""Llama 60M on C4 as in GaLore's table 2 (arXiv:2403.03507): full rank, or with `60m.py:galore` GaLore.

python -m maxlp.train --config=configs/llama/60m.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/c4 --config.data.tokenizer=/data/tokenizer.json

The paper's validation perplexity: 34.06, with GaLore 34.88.
"""

from maxlp.families.llama.presets import llama_c4
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama_c4(
        steps=10_000,
        learning_rate=0.0025,
        embed_dim=512,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        mlp_dim=1376,
    )
    return choose(arg, c, galore=(128, 0.01))  # table 2, section 4.1
