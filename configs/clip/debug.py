"""A small CLIP that learns the names of characters on two CPU cores, from files that are installed already.

python -m maxlp.train --config=configs/clip/debug.py --workdir=/tmp/clip

Two CPU cores: 4 minutes. Validation, on a font face that is not in the training data: top-1 accuracy
among 692 names 77.5 % (chance 0.14 %; 76.6, 81.8 and 74.1 % with seeds 0, 1 and 2), top-5 97.5 % (Python
3.11.7, matplotlib 3.11). In other precisions: docs/fidelity.md.

The images are characters drawn with the fonts that come with matplotlib, the texts their names in Unicode
("latin small letter a with diaeresis").
"""

from maxlp.families.clip.presets import clip
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = clip(
        embed_dim=96,
        visual=dict(
            image_size=32, patch_size=8, width=96, num_layers=3, num_heads=3, mlp_dim=384, pool="gap"
        ),
        text=dict(
            vocab_size=512,
            max_len=20,
            width=64,
            num_layers=2,
            num_heads=2,
            mlp_dim=256,
            pool="eos",
            eos_id=1,
        ),
        dtype="float32",
        remat="none",
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )
    c.precision.first_blocks = c.precision.last_blocks = 0  # few blocks: a recipe applies to all of them
    c.data.source = "glyphs?augment=0.4"
    c.data.tokenizer = "bpe:512"  # learned from the captions when the run begins
    c.data.image_size = 32
    c.data.text_len = 20
    c.data.batch_size = 128
    c.loss.method = "plain"
    c.optimizer.learning_rate = 3e-3
    c.optimizer.warmup_steps = 50
    c.optimizer.clip_norm = 1.0
    c.optimizer.weight_decay = 0.05
    c.train.total_steps = 1200
    c.train.log_every = 20
    c.train.eval_every = 400
    c.train.eval_batches = 0
    c.checkpoint.every_steps = 400
    return choose(arg, c)
