"""Llama 130M on C4 as in GaLore's table 2 (arXiv:2403.03507): full rank, or with `130m.py:galore` GaLore.

python -m maxlp.train --config=configs/llama/130m.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/c4 --config.data.tokenizer=/data/tokenizer.json

The paper's validation perplexity: 25.08, with GaLore 25.36.
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
    return choose(arg, c, galore=(256, 0.01))  # table 2, section 4.1
