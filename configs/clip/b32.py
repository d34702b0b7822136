"""CLIP ViT-B/32: 151,277,313 parameters, as open_clip trained it on LAION-400M (12.8 billion pairs).

open_clip's run: batch 32768, 128 A100 for 36 hours, 62.96 % zero-shot on ImageNet (with QuickGELU:
--config.model.act=quick_gelu).

python -m maxlp.train --config=configs/clip/b32.py --workdir=/tmp/run \
    --config.data.source='tar:/data/laion/*.tar' --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = clip(**CLIP_SIZES["b32"])
    c.model.remat = "none"
    c.train.total_steps = 390_000
    return choose(arg, c)
