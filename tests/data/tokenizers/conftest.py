"""Tokenizers that several tests use, trained once."""

import pytest

from maxlp.data.sources import make_source
from maxlp.data.tokenizers.training import sample_texts, train_bpe
from tests.data.tokenizers.texts import stdlib_texts


@pytest.fixture(scope="session")
def bpe_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    made = train_bpe(sample_texts(make_source("stdlib", "train"), 500_000, 0), 1024)
    path.write_bytes(made.files["tokenizer.json"])
    return str(path)


@pytest.fixture(scope="session")
def sentencepiece_paths(tmp_path_factory):
    """Models of Llama's settings, with and without its dummy prefix."""
    import sentencepiece

    paths = {}
    for prefix in (True, False):
        paths[prefix] = str(tmp_path_factory.mktemp("spm") / f"{prefix}.model")
        with open(paths[prefix], "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter("\n".join(stdlib_texts(12)).split("\n")),
                model_writer=file,
                model_type="bpe",
                vocab_size=600,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=prefix,
                minloglevel=2,
            )
    return paths
