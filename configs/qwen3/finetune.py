"""Fine-tuning of a pretrained Qwen3, as `llama/finetune`.

python -m maxlp.train --from=Qwen/Qwen3-0.6B --config=qwen3/finetune --workdir=/tmp/run \
    --config.data.source=jsonl:/data/mine.jsonl

The sizes below are those of Qwen3 0.6B; --from puts those of its weights in their place.
"""

from maxlp.families.llama.presets import FINE_TUNING
from maxlp.families.qwen3.presets import qwen3
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = qwen3(embed_dim=1024, num_layers=28, num_heads=16, mlp_dim=3072)
    c.update_from_flattened_dict(FINE_TUNING)
    return choose(arg, c)
