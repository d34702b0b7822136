"""Llama 3.1 70B (arXiv:2407.21783, table 3): 70,553,706,496 parameters.

Tensor parallelism inside a host, fsdp over the rest.

python -m maxlp.train --config=configs/llama/70b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json

Memory on GPUs and TPUs, compiled and not run: docs/plans/README.md.
"""

from maxlp.families.llama.presets import LLAMA_3_1_ROPE, llama
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama(
        embed_dim=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=28672,
        rope_scaling=LLAMA_3_1_ROPE,
        max_seq_len=131072,
    )
    c.mesh.tensor = 8
    c.optimizer.learning_rate = 1.5e-4
    return choose(arg, c)
