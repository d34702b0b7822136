"""A small Llama that learns Python from the standard library's own source, on two CPU cores.

python -m maxlp.train --config=configs/llama/debug.py --workdir=/tmp/run
"""

from configs.common import llama, parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = llama(
        vocab_size=4096,
        embed_dim=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        mlp_dim=704,
        max_seq_len=1024,
        rope_theta=10000.0,
        tie_embeddings=True,
        dtype="float32",
        remat="none",
    )
    c.data.source = "stdlib"
    c.data.tokenizer = "bpe:4096"
    c.data.seq_len = 256
    c.data.batch_size = 16
    c.loss.num_chunks = 1
    c.optimizer.learning_rate = 3e-3
    c.optimizer.warmup_steps = 50
    c.train.total_steps = 300
    c.train.log_every = 5
    c.train.eval_every = 100
    c.train.eval_batches = 5
    c.checkpoint.every_steps = 100
    return c
