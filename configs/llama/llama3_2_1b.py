"""Llama 3.2 1B, tied embeddings: 1,235,814,400 parameters.

One mesh axis, fsdp, over all devices.

python -m maxlp.train --config=configs/llama/llama3_2_1b.py --workdir=/tmp/run \
    --config.data.source=array_record:/data/corpus --config.data.tokenizer=/data/tokenizer.json
"""

from maxlp.families.llama.presets import LLAMA_3_2_1B, llama
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    return choose(arg, llama(**LLAMA_3_2_1B))
