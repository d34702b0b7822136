"""CLIP ViT-L/14: 427,616,513 parameters, as open_clip trained it on LAION-400M (12.8 billion pairs).

open_clip's run: batch 38400, 50,800 hours of A100s, 72.77 % zero-shot on ImageNet.

python -m maxlp.train --config=configs/clip/l14.py --workdir=/tmp/run \
    --config.data.source='tar:/data/laion/*.tar' --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = clip(**CLIP_SIZES["l14"])
    c.train.total_steps = 390_000
    return choose(arg, c)
