"""The closed form of a Qwen3's train step: Llama's, which counts ``qk_norm``."""

from maxlp.families.llama import cost

COST = cost.COST
