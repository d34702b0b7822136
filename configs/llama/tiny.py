"""The smallest Llama that still learns something: for comparing many runs on two CPU cores.

python -m maxlp.train --config=configs/llama/tiny.py --workdir=/tmp/run

344,000 parameters, 300 steps of 1,024 tokens: half a minute. `benchmarks/fidelity.py` runs its variants.
Validation bits per byte: 2.52 on all validation files (Python 3.11's library).
"""

from ml_collections import config_dict

from maxlp.families.llama.presets import llama
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama(
        vocab_size=1024,
        embed_dim=64,
        num_layers=4,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=192,  # blocks of 32 divide all sizes, for mxfp8
        max_seq_len=1024,
        rope_theta=10000.0,
        dtype="bfloat16",
        remat="none",
    )
    c.model.init_std = config_dict.placeholder(float)  # unset: depends on each layer's size
    c.precision.first_blocks = 0  # all blocks in the recipe: the harder test
    c.precision.last_blocks = 0
    c.data.source = "stdlib"
    c.data.tokenizer = "bpe:1024"
    c.data.seq_len = 128
    c.data.batch_size = 8
    c.data.shuffle_tokens = 2**20
    c.loss.num_chunks = 1
    c.optimizer.learning_rate = 4e-3
    c.optimizer.schedule = "linear"
    c.optimizer.final_lr_fraction = 0.0
    c.optimizer.warmup_steps = 30
    c.optimizer.b2 = 0.98
    c.train.total_steps = 300
    c.train.eval_every = 0
    c.checkpoint.every_steps = 300
    return choose(arg, c)
