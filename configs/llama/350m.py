"""Llama 350M on C4 as in GaLore's table 2 (arXiv:2403.03507): full rank, or with `350m.py:galore` GaLore.

python -m maxlp.train --config=configs/llama/350m.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/c4 --config.data.tokenizer=/data/tokenizer.json

The paper's validation perplexity: 18.80, with GaLore 18.95.
"""

from maxlp.families.llama.presets import llama_c4
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama_c4(
        steps=60_000,
        learning_rate=0.0005,
        embed_dim=1024,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        mlp_dim=2736,
    )
    return choose(arg, c, galore=(256, 0.01))  # table 2, section 4.1
