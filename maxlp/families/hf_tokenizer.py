"""Tokenizers in Hugging Face's format: ``tokenizer.json``, and a ``tokenizer_config.json`` to load it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlp.runtime.files import write_text

if TYPE_CHECKING:
    from maxlp.data.tokenizers import Tokenizer


def config_files(tokenizer: "Tokenizer", **settings: Any) -> dict[str, dict[str, Any]]:
    """The content of ``tokenizer_config.json`` by its name; nothing without a ``tokenizer.json``.

    Args:
      settings: further keys of the file.
    """
    if "tokenizer.json" not in tokenizer.files:
        return {}
    import tokenizers  # heavy

    name_of = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode()).id_to_token
    special = dict(bos_token=tokenizer.bos_id, eos_token=tokenizer.eos_id, pad_token=tokenizer.pad_id)
    names = {key: name_of(i) for key, i in special.items()}
    return {"tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast") | names | settings}


def lowercase(file: Path) -> None:
    """Makes a ``tokenizer.json`` turn texts into lower case before all else."""
    content = json.loads(file.read_text(encoding="utf-8"))
    steps = [{"type": "Lowercase"}, content.get("normalizer")]
    content["normalizer"] = {"type": "Sequence", "normalizers": [step for step in steps if step]}
    write_text(file, json.dumps(content, ensure_ascii=False))


def add_specials(file: Path, tokenizer: "Tokenizer", ends: bool) -> None:
    """Makes a ``tokenizer.json`` that adds nothing to a text add the special tokens of training.

    A file with a post-processor stays as it is: its author has decided what is added.

    Args:
      tokenizer: that of the file.
      ends: whether texts end with the end token.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("post_processor"):
        return
    import tokenizers  # heavy

    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    bos, eos = made.id_to_token(tokenizer.bos_id), made.id_to_token(tokenizer.eos_id)
    ids = {bos: tokenizer.bos_id, eos: tokenizer.eos_id}
    # A bos that is the eos would end a text, see `image_text.encode_texts`.
    begins = not ends or bos != eos
    template = ([bos] if begins else []) + ["$A"] + ([eos] if ends else [])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        template, special_tokens=list(ids.items())
    )
    content["post_processor"] = json.loads(made.to_str())["post_processor"]
    write_text(file, json.dumps(content, ensure_ascii=False))
