"""CLIP ViT-H/14: 986,109,441 parameters, on 32 billion pairs as open_clip trained it on LAION-2B.

open_clip's run: 77.96 % zero-shot on ImageNet.

python -m maxlp.train --config=configs/clip/h14.py --workdir=/tmp/run \
    --config.data.source='tar:/data/laion/*.tar' --config.data.tokenizer=/data/tokenizer.json

Memory on GPUs and TPUs, compiled and not run: docs/plans/README.md.
"""

from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = clip(**CLIP_SIZES["h14"])
    c.optimizer.b2 = 0.95
    c.train.total_steps = 980_000
    return choose(arg, c)
