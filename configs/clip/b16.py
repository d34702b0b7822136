"""CLIP ViT-B/16: 149,620,737 parameters, as open_clip trained it on LAION-400M (12.8 billion pairs).

open_clip's run: batch 33792, 176 A100 for 61 hours, 67.05 % zero-shot on ImageNet.

python -m maxlp.train --config=configs/clip/b16.py --workdir=/tmp/run \
    --config.data.source='tar:/data/laion/*.tar' --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = clip(**CLIP_SIZES["b16"])
    c.train.total_steps = 390_000
    return choose(arg, c)
