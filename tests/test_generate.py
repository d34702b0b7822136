"""Prompts that end inside a token, and conversations on standard input."""

import io
import sys

import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

from maxlp import generate
from maxlp.data.tokenizers import make_tokenizer
from maxlp.generate import converse, heal
from maxlp.nn.decoding import Sampling
from tests.data.chats import write_tokenizer
from tests.fixtures import LLAMA, make_llama

V = LLAMA["vocab_size"]


class Letters:
    """A tokenizer whose tokens are short strings."""

    tokens = (b"", b"a", b"b", b"bc", b"c", b"bcd")


def test_a_prompt_that_ends_inside_a_token_is_healed():
    """ "ab" ends in the token "b", which "bc" and "bcd" may replace."""
    (prompt, allowed_V), (empty, all_V) = heal(Letters(), [[0, 1, 2], [0]], V)
    assert prompt == [0, 1] and np.flatnonzero(allowed_V).tolist() == [2, 3, 5]
    assert empty == [0] and all_V.all()
    [(_, fewer_V)] = heal(Letters(), [[0, 1, 2]], 5)  # a tokenizer with more ids than the model
    assert np.flatnonzero(fewer_V).tolist() == [2, 3]
    model = make_llama(init_std=0.3)(nnx.Rngs(0))
    how = dict(max_new_tokens=2, sampling=Sampling(10.0), allowed_first=np.stack([allowed_V, all_V]))
    rows = [generate.generate(model, [prompt, empty], seed=seed, **how) for seed in range(20)]
    assert {row[0][0] for row in rows} <= {2, 3, 5} and len({row[0][0] for row in rows}) > 1
    assert {row[1][0] for row in rows} - {2, 3, 5}


def test_healing_keeps_every_byte_of_a_prompt(tmp_path):
    """Alone, a byte of a longer character and a piece that begins with a space decode to something else."""
    vocabulary = ("<unk>", "<s>", "</s>", "d", "e", "▁", "▁d", "de", "▁de", "a", "▁da")
    merges = [("▁", "d"), ("d", "e"), ("▁d", "e"), ("▁d", "a")]
    library = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, merges))
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    library.save(str(tmp_path / "tokenizer.json"))
    pieces = make_tokenizer(str(tmp_path / "tokenizer.json"))
    for tokenizer, text, kept, allowed in (
        (make_tokenizer("bytes"), "é", [0xC3], [0xA9]),
        (pieces, "de d", [8], [6, 8, 10]),
        (pieces, "de ", [8], [5, 6, 8, 10]),
    ):
        [(prompt, allowed_V)] = heal(tokenizer, [[0, *tokenizer.encode(text)]], 300)
        assert (prompt, np.flatnonzero(allowed_V).tolist()) == ([0, *kept], allowed), text


def type_in(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def talk(monkeypatch, capsys, lines, answer):
    type_in(monkeypatch, "".join(f"{line}\n" for line in lines).encode())
    converse(answer)
    return capsys.readouterr()


def test_a_conversation_keeps_its_history_until_it_is_reset(monkeypatch, capsys):
    def answer(messages):
        if messages[-1]["content"] == "long":
            raise ValueError("too long")
        return "+".join(message["content"] for message in messages)

    lines = ["a", "", " b ", "long", "c", "/reset", "d", "/quit", "e"]
    shown = talk(monkeypatch, capsys, lines, answer)
    assert shown.out.splitlines() == ["a", "a+a+b", "a+a+b+a+a+b+c", "d"]
    assert shown.err == "error: too long\n"


def test_a_line_that_is_not_text_does_not_end_the_conversation(monkeypatch, capsys):
    type_in(monkeypatch, "a\nné\n".encode() + b"n\xe9\nb\n")
    converse(lambda messages: messages[-1]["content"] * 2)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["aa", "néné", "bb"]
    assert shown.err.startswith("error: character 2 of the message is not utf-8; convert")


class StubLanguage:
    """A language model of random weights."""

    def __init__(self, folder, max_seq_len=128):
        self.tokenizer_spec = write_tokenizer(folder)
        self.tokenizer = make_tokenizer(self.tokenizer_spec)
        size = self.tokenizer.vocab_size
        make = make_llama(init_std=0.3, vocab_size=size, max_seq_len=max_seq_len)
        self.network = make(nnx.Rngs(0))
        self.model = self.network.config

    def restore(self, step, mesh):
        return self.network


@pytest.fixture
def chat_flags(monkeypatch):
    class Flags:
        step, seed, max_new_tokens = None, 0, 12

    monkeypatch.setattr(generate.flags, "FLAGS", Flags)
    return Flags


def test_a_chat_continues_the_template_and_stops_at_the_end_of_the_turn(
    monkeypatch, capsys, tmp_path, chat_flags
):
    language = StubLanguage(tmp_path)
    prompts, real = [], generate.generate

    def watched(model, rows, **how):
        prompts.extend(rows)
        assert how["eos_id"] == language.tokenizer.specials["<|im_end|>"]
        return real(model, rows, **how)

    monkeypatch.setattr(generate, "generate", watched)
    type_in(monkeypatch, b"why\nbecause\n")
    generate.chat(language, None, Sampling(0.0))
    answers = capsys.readouterr().out
    tok = language.tokenizer
    assert tok.decode(prompts[0]) == "user\nwhy\nassistant\n"
    assert tok.decode(prompts[1]).startswith("user\nwhy\nassistant\n" + answers.split("\n")[0])
    assert tok.decode(prompts[1]).endswith("\nuser\nbecause\nassistant\n")


def test_a_chat_that_outgrows_the_model_is_told(monkeypatch, capsys, tmp_path, chat_flags):
    language = StubLanguage(tmp_path, max_seq_len=64)
    type_in(monkeypatch, b"why " * 40 + b"\nwhy\n")
    generate.chat(language, None, Sampling(0.0))
    shown = capsys.readouterr()
    assert (
        shown.err.startswith("error: the conversation has ") and "the model reads 64; /reset" in shown.err
    )
    assert shown.out
