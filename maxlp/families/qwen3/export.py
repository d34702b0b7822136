"""Weight formats of Qwen3: Hugging Face's."""

from maxlp.families.llama.export import decoder_format
from maxlp.families.qwen3 import hf

FORMATS = {"hf_qwen3": decoder_format("qwen3", hf.config_from_hf, hf.config_to_hf, hf.LAYOUT)}
