"""Tokenizers: text to token ids and back. Each kind has a module that is imported when it is used.

    bytes                                  the 256 bytes and three special tokens; no file
    /models/llama3/tokenizer.json          a Hugging Face tokenizer, CLIP's too
    /models/llama2/tokenizer.model         a SentencePiece model
    /models/bpe_simple_vocab_16e6.txt.gz   CLIP's vocabulary as OpenAI and open_clip distribute it
    /models/llama3                         a folder with a tokenizer.json or a tokenizer.model
    gs://bucket/c4_ids/tokenizer.json      any of these files at a URL, see maxlp/data/sources.py
    hf:ORG/NAME, hf:ORG/NAME@REVISION      the same files of a repository of the Hugging Face Hub

The ids of the beginning-of-document, end-of-document and padding tokens are found by their usual
names, or else by those in the `tokenizer_config.json` beside the file; others are given as
`tokenizer.json?bos=<start>&eos=<stop>&pad=<pad>`.

What is beside a file, `tokenizer_config.json` and `chat_template.jinja`, belongs to the tokenizer;
`tokenizer.json?chat_template=FILE` names another chat template, and `?chat_template=plain` a simple one.

`encode` adds no special tokens and recognizes none: the characters `<|end_of_text|>` in a document
become ordinary tokens. Bytes that are not UTF-8 become U+FFFD, except in the byte tokenizer, which
keeps every byte; so that nothing is lost silently, `data.sources` refuses such texts for the others.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

import numpy as np

from maxlp.data.readers import read_if_there
from maxlp.data.specs import split_options
from maxlp.runtime.messages import one_line

KINDS = {
    "bytes": "maxlp.data.tokenizers.byte:ByteTokenizer",
    "hugging_face": "maxlp.data.tokenizers.hugging_face:HuggingFaceTokenizer",
    "sentence_piece": "maxlp.data.tokenizers.sentence_piece:SentencePieceTokenizer",
    "clip": "maxlp.data.tokenizers.clip:ClipTokenizer",
    "clip_merges": "maxlp.data.tokenizers.clip:from_merges",
}
BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>")
EOS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")
PAD = ("<|pad|>", "<pad>", "<|finetune_right_pad_id|>")
FILES = ("tokenizer.json", "tokenizer.model")  # either is a whole tokenizer
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# What other libraries keep beside it: names of special tokens, the chat template. Written by export.
COMPANIONS = (TOKENIZER_CONFIG, "special_tokens_map.json", CHAT_TEMPLATE)
CLIP_SETTING = b'"</w>"'  # occurs in a tokenizer.json only as CLIP's `end_of_word_suffix`


@dataclasses.dataclass(frozen=True)
class SpecialNames:
    """Names of the special tokens of a file, beside the usual ones.

    Attributes:
      given: those that the user gives for `bos`, `eos` and `pad`.
      saved: the `special_names` that are used where there is no token of a usual name.
    """

    given: Mapping[str, str] = dataclasses.field(default_factory=dict)
    saved: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def find(
        self, specials: Mapping[str, int], token_to_id: Callable[[str], int | None]
    ) -> tuple[int, int, int]:
        """The ids of bos, eos and pad.

        Raises:
          ValueError: there is no token of a given name, or no eos.
        """

        def find(key: str, usual: Sequence[str], default: int | None) -> int:
            given = self.given.get(key)
            if given is not None:
                found = token_to_id(given)
            else:
                found = next((specials[name] for name in usual if name in specials), None)
                if found is None and (saved := self.saved.get(f"{key}_token")):
                    found = token_to_id(saved)
                found = default if found is None else found
            if found is None:
                missing = f"no token {given!r} for {key}" if given else f"no {key} token of a usual name"
                names = ", ".join(list(specials)[:8]) or "none"
                raise ValueError(f"{missing}; special tokens in the file: {names}; set ?{key}=TOKEN")
            return found

        eos_id = find("eos", EOS, None)
        return find("bos", BOS, eos_id), eos_id, find("pad", PAD, eos_id)


class Tokenizer:
    """The interface of all tokenizers; all are picklable.

    Attributes:
      vocab_size: the number V of ids.
      bos_id, eos_id, pad_id: special tokens; a vocabulary without bos or pad uses `eos_id` for them.
      fingerprint: identifies the tokenizer: the SHA-256 of its file, or "bytes".
      any_bytes: whether `encode` keeps bytes that are not UTF-8.
      specials: name of each special token -> its id.
      files: file name to contents; enough to make the tokenizer again. Its own file comes first, then the
        `COMPANIONS` that lie beside it.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    fingerprint: str
    any_bytes: bool = False
    specials: Mapping[str, int]
    files: dict[str, bytes]

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids, int32 [T], of a text, without special tokens."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special tokens and ids outside the vocabulary are left out."""
        raise NotImplementedError

    @cached_property
    def tokens(self) -> list[bytes]:
        """The text that each id stands for, [V]; b"" for special tokens and unused ids."""
        raise NotImplementedError

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for, int32 [V]; 0 for special tokens.

        Summed over `encode(text)`, they give the length of `text` in bytes plus `prefix_bytes`,
        unless parts of the text are outside the vocabulary or changed by a normalizer.

        Raises:
          ValueError: the tokens do not map to bytes, for example those of WordPiece.
        """
        return np.array([len(token) for token in self.tokens], np.int32)

    @cached_property
    def prefix_bytes(self) -> int:
        """1 if `encode` puts a space before every text (SentencePiece's dummy prefix), else 0."""
        return max(0, int(self.byte_lengths[self.encode("a")].sum()) - 1)


def make_tokenizer(spec: str) -> Tokenizer:
    """Makes the tokenizer that `spec` names; see the module.

    Raises:
      ValueError: the file is missing or not a tokenizer, or it has no special token of the given or
        usual name.
    """
    path, options = split_options(spec)
    for key in options:
        if key not in ("bos", "eos", "pad", "chat_template"):
            raise ValueError(
                f"tokenizer {spec!r}: unknown option {key!r}; known: bos, eos, pad, chat_template"
            )
    template = options.pop("chat_template", None)
    if path == "bytes" and not options:
        return resolve_name(KINDS["bytes"])()
    if path.startswith("hf:"):
        from maxlp.runtime import hub  # few runs need it

        path = str(hub.fetch(path, (*FILES, *COMPANIONS)))
    path = os.path.expanduser(path)
    if is_folder := os.path.isdir(path):
        whole, model = (os.path.join(path, name) for name in FILES)
        path = model if os.path.isfile(model) and not os.path.isfile(whole) else whole
    data = read_if_there(path)
    if data is None:
        hint = (
            "'bytes', hf:ORG/NAME, or the path of a tokenizer.json, of a SentencePiece .model or of CLIP's "
            "bpe_simple_vocab_16e6.txt.gz"
        )
        if path.startswith("bpe:"):
            hint += "; train a BPE with `python -m maxlp.prepare text --train_tokenizer=VOCAB`"
        missing = f"no {' or '.join(FILES)} in this folder" if is_folder else "no such file"
        raise ValueError(f"tokenizer {spec!r}: {missing}; give {hint}")
    beside = _files_beside(path, template)
    try:
        names = SpecialNames(options, special_names(read_config(beside)))
        made: Tokenizer = resolve_name(KINDS[_kind(path, data)])(data, names)
    except ValueError as error:
        raise ValueError(f"tokenizer {path}: {one_line(error)}") from None
    made.files |= beside
    return made


def _files_beside(path: str, template: str | None) -> dict[str, bytes]:
    """The `COMPANIONS` of a tokenizer; `template` replaces the chat template that is there."""
    beside = {name: read_if_there(os.path.join(os.path.dirname(path), name)) for name in COMPANIONS}
    if template == "plain":
        from maxlp.data.chat import PLAIN

        beside[CHAT_TEMPLATE] = PLAIN.encode()
    elif template is not None:
        with open(os.path.expanduser(template), "rb") as file:
            beside[CHAT_TEMPLATE] = file.read()
    return {name: data for name, data in beside.items() if data is not None}


def read_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The `tokenizer_config.json` among the files of a tokenizer; {} if there is none.

    Raises:
      ValueError: it is damaged.
    """
    try:
        return dict(json.loads(files.get(TOKENIZER_CONFIG, b"{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"its {TOKENIZER_CONFIG} is damaged ({one_line(error)})") from None


def special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a `tokenizer_config.json` names, as in `bos_token` -> `<s>`."""
    values = {key: value for key, value in config.items() if key.endswith("_token")}
    names = {key: v.get("content") if isinstance(v, dict) else v for key, v in values.items()}
    return {key: name for key, name in names.items() if isinstance(name, str)}


def _kind(path: str, data: bytes) -> str:
    if path.endswith((".txt.gz", ".txt")):
        return "clip_merges"
    if path.endswith(".model"):
        return "sentence_piece"
    return "clip" if CLIP_SETTING in data else "hugging_face"


def as_bytes(text: str | bytes) -> bytes:
    """UTF-8 bytes of `text`. Bytes pass unchanged; lone surrogates, as in some JSON, become `?`."""
    return text.encode("utf-8", errors="replace") if isinstance(text, str) else bytes(text)


def as_str(text: str | bytes) -> str:
    """`text` as valid Unicode; bytes that are not UTF-8 become U+FFFD, lone surrogates `?`."""
    return as_bytes(text).decode("utf-8", errors="replace")


def ids_below(ids: Sequence[int] | np.ndarray, limit: int) -> np.ndarray:
    """The ids in 0 … limit-1; generated ids may be in the padding of a model's vocabulary."""
    ids = np.asarray(ids, np.int64)
    return ids[(ids >= 0) & (ids < limit)]


def piece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: `▁` is a space, `<0x0A>` a single byte."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[1:-1], 16)])
    return piece.replace("▁", " ").encode()
