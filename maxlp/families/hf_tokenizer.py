"""``tokenizer_config.json``, which tells transformers how to load a ``tokenizer.json``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxlp.data.tokenizers import Tokenizer


def config_files(tokenizer: "Tokenizer", **settings: Any) -> dict[str, dict[str, Any]]:
    """The file by its name, with further settings; none for a tokenizer that has no ``tokenizer.json``."""
    if "tokenizer.json" not in tokenizer.files:
        return {}
    import tokenizers  # heavy

    name_of = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode()).id_to_token
    special = dict(bos_token=tokenizer.bos_id, eos_token=tokenizer.eos_id, pad_token=tokenizer.pad_id)
    names = {key: name_of(i) for key, i in special.items()}
    return {"tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast") | names | settings}
