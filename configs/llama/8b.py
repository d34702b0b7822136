"""Llama 3.1 8B (arXiv:2407.21783, table 3): 8,030,261,248 parameters.

One mesh axis, fsdp, over all devices.

python -m maxlp.train --config=configs/llama/8b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json

Memory on GPUs and TPUs, compiled and not run: docs/plans/README.md.
"""

from maxlp.families.llama.presets import LLAMA_3_1_ROPE, llama
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama(
        embed_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14336,
        rope_scaling=LLAMA_3_1_ROPE,
        max_seq_len=131072,
    )
    return choose(arg, c, galore=(1024, 0.005))  # of the 7B in arXiv:2403.03507
