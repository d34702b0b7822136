"""Llama 3.1 405B (arXiv:2407.21783, table 3): 405,853,388,800 parameters.

Tensor parallelism inside a host, fsdp over the rest.

python -m maxlp.train --config=configs/llama/405b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json

Memory on GPUs and TPUs, compiled and not run: docs/plans/README.md.
"""

from maxlp.families.llama.presets import LLAMA_3_1_ROPE, llama
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama(
        embed_dim=16384,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=53248,
        rope_scaling=LLAMA_3_1_ROPE,
        max_seq_len=131072,
    )
    c.mesh.tensor = 8
    c.optimizer.learning_rate = 8e-5
    return choose(arg, c)
