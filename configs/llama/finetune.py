"""Fine-tuning of a pretrained Llama: the config of `train --from` if it names no other.

python -m maxlp.train --from=meta-llama/Llama-3.2-1B --workdir=/tmp/run \
    --config.data.source=jsonl:/data/mine.jsonl

1,000 steps of 16,384 tokens. The sizes are those of Llama 3.2 1B; --from puts those of its weights in
their place.
"""

from maxlp.families.llama.presets import FINE_TUNING, LLAMA_3_2_1B, llama
from maxlp.run.presets import choose


def get_config(arg: str = ""):
    c = llama(**LLAMA_3_2_1B)
    c.update_from_flattened_dict(FINE_TUNING)
    return choose(arg, c)
