"""Weight formats of Llama: Hugging Face's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maxlp.data.tokenizers import Tokenizer
from maxlp.families import hf_tokenizer
from maxlp.families.llama import hf
from maxlp.families.llama.model import LlamaConfig
from maxlp.families.weights import Layout, WeightFormat, read_config
from maxlp.runtime import safetensors


def decoder_format(
    model_type: str,
    config_from_hf: Callable[[Mapping[str, Any]], dict[str, Any]],
    config_to_hf: Callable[[LlamaConfig], dict[str, Any]],
    layout: Layout,
) -> WeightFormat:
    """Hugging Face's format of a model whose class here is `Llama`.

    Args:
      config_from_hf, config_to_hf: as in `families.llama.hf`.
    """

    def read_model(source: Path, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        config = read_config(source / "config.json")
        return config_from_hf(config), hf.dtype_from_hf(config)

    return WeightFormat(
        config_file="config.json",
        model_types=(model_type,),
        read_model=read_model,
        layout=lambda model: layout,
        config_files=lambda model, make_tokenizer: config_files(config_to_hf(model), make_tokenizer),
        weights_file=safetensors.WEIGHTS,
        max_shard_bytes=safetensors.SHARD_BYTES,
        quantizable=("model.layers.*_proj.weight",),
    )


def config_files(
    config: dict[str, Any], make_tokenizer: Callable[[], Tokenizer | None]
) -> dict[str, dict[str, Any]]:
    """See `WeightFormat`."""
    if (tokenizer := make_tokenizer()) is None:
        return {"config.json": config}
    config |= dict(bos_token_id=tokenizer.bos_id, eos_token_id=_end_ids(tokenizer))
    return {"config.json": config} | hf_tokenizer.config_files(tokenizer)


def _end_ids(tokenizer: Tokenizer) -> int | list[int]:
    """The ids at which transformers stops: the end of a document, and that of a turn in chats."""
    from maxlp.data.chat import Chat  # few formats need it

    try:
        end_of_turn = Chat(tokenizer).end_id
    except ValueError:  # no chat template, or none that works
        return tokenizer.eos_id
    return tokenizer.eos_id if end_of_turn == tokenizer.eos_id else [tokenizer.eos_id, end_of_turn]


FORMATS = {
    "hf_llama": decoder_format("llama", hf.config_from_hf, hf.config_to_hf, hf.LAYOUT),
}
