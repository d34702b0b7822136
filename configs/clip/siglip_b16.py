"""SigLIP ViT-B/16 (Zhai et al. 2023, arXiv:2303.15343): 203,155,970 parameters.

The published model: WebLI, 40 billion pairs, 76.04 % zero-shot on ImageNet.

python -m maxlp.train --config=configs/clip/siglip_b16.py --workdir=/tmp/run \
    --config.data.source='tar:/data/pairs/*.tar' --config.data.tokenizer=hf:google/siglip-base-patch16-224
"""

from maxlp.families.clip.presets import siglip
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = siglip(
        embed_dim=768,
        visual=dict(patch_size=16, width=768, num_layers=12, num_heads=12, mlp_dim=3072),
        text=dict(width=768, num_layers=12, num_heads=12, mlp_dim=3072),
    )
    return choose(arg, c)
