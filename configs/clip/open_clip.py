"""A size of open_clip: s32, b32, b16, l14, h14, g14 or bigG14, b32 by default.

python -m maxlp.train --config=configs/clip/open_clip.py:size=g14 --workdir=/tmp/run \
    --config.data.source='tar:/data/laion/*.tar' --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.run.presets import choose, own_choice


def get_config(arg: str = ""):
    size, arg = own_choice(arg, "size", CLIP_SIZES, "b32")
    return choose(arg, clip(**size))
