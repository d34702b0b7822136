"""Llama 2 7B (arXiv:2307.09288): 6,738,415,616 parameters.

One mesh axis, fsdp, over all devices.

python -m maxlp.train --config=configs/llama/llama2_7b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json

Memory on GPUs and TPUs, compiled and not run: docs/plans/README.md.
"""

from maxlp.families.llama.presets import llama
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama(
        embed_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        mlp_dim=11008,
        vocab_size=32000,
        rope_theta=10000.0,
        max_seq_len=4096,
    )
    c.data.seq_len = 4096
    c.data.batch_size = 1024
    return choose(arg, c, galore=(1024, 0.005))  # of the 7B in arXiv:2403.03507
