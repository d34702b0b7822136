"""Weight formats of Llama: Hugging Face's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maxlp.data.tokenizers import Tokenizer
from maxlp.families.llama import hf
from maxlp.families.llama.model import LlamaConfig
from maxlp.families.weights import WeightFormat, read_config
from maxlp.runtime import safetensors


def read_model(source: Path, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """See `WeightFormat`."""
    config = read_config(source / "config.json")
    return hf.config_from_hf(config), hf.dtype_from_hf(config)


def config_files(
    model: LlamaConfig, make_tokenizer: Callable[[], Tokenizer | None]
) -> dict[str, dict[str, Any]]:
    """See `WeightFormat`; transformers needs a ``tokenizer_config.json`` to load a ``tokenizer.json``."""
    config = hf.config_to_hf(model)
    if (tokenizer := make_tokenizer()) is None:
        return {"config.json": config}
    config |= dict(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    files = {"config.json": config}
    if "tokenizer.json" in tokenizer.files:
        files["tokenizer_config.json"] = _tokenizer_config(tokenizer)
    return files


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, str | None]:
    import tokenizers  # heavy

    name_of = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode()).id_to_token
    special = dict(bos_token=tokenizer.bos_id, eos_token=tokenizer.eos_id, pad_token=tokenizer.pad_id)
    return dict(tokenizer_class="PreTrainedTokenizerFast") | {k: name_of(i) for k, i in special.items()}


FORMATS = {
    "hf_llama": WeightFormat(
        config_file="config.json",
        model_types=("llama",),
        read_model=read_model,
        layout=lambda model: hf.LAYOUT,
        config_files=config_files,
        weights_file=safetensors.WEIGHTS,
        max_shard_bytes=safetensors.SHARD_BYTES,
    )
}
