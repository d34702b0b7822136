"""Text to token ids and back: bytes, Hugging Face `tokenizer.json`, SentencePiece, CLIP; byte-level BPE.

    bytes                             the 256 bytes and three specials, no file
    /models/llama3/tokenizer.json     a Hugging Face tokenizer
    /models/llama2/tokenizer.model    a SentencePiece model
    /models/clip/tokenizer.json       that of a CLIP, of Hugging Face
    /models/bpe_simple_vocab_16e6.txt.gz   the same vocabulary as OpenAI and open_clip have it
    /models/llama3                    the folder of either tokenizer.json or tokenizer.model

Beginning-of-document, end-of-document and padding ids are found by their usual names; other names
are given as `tokenizer.json?bos=<start>&eos=<stop>&pad=<pad>`.

`encode` adds no specials and reads none out of the text: the characters `<|end_of_text|>` in a
document are ordinary tokens. Bytes that are not UTF-8 become U+FFFD, save for the byte tokenizer,
which keeps every byte.

CLIP's vocabulary is of lower-case words without the white space between them, so its `decode` does not
give back a text as it was. `?pad=!` pads as OpenAI and open_clip do, with id 0.
"""

import contextlib
import gzip
import hashlib
import html
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from maxlp.data.sources import (
    as_bytes,
    import_extra,
    one_line,
    split_options,
)

SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")  # of the tokenizers trained here
BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>")
EOS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")
PAD = ("<|pad|>", "<pad>", "<|finetune_right_pad_id|>")

# What BPE may merge: a word with the one sign or space before it, up to three digits, a run of
# signs, a run of white space. Unlike the patterns of Llama 3 and GPT-4, which it otherwise follows,
# a line break takes the indentation after it along, and a run of signs takes both: 5 % fewer tokens
# on Python source.
SPLIT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?"
    r"|[\r\n]+[ \t]*"
    r"|\s+(?!\S)|\s"
)

# What CLIP's BPE may merge: a contraction's end, a run of letters, a digit, a run of signs.
CLIP_WORD = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
CLIP_SPECIALS = ("<|startoftext|>", "<|endoftext|>")
CLIP_MERGES = 49_408 - 2 * 256 - len(CLIP_SPECIALS)
WORD_END_SUFFIX = b'"</w>"'  # in a tokenizer.json only as the setting of that name
GZIP_MAGIC = b"\x1f\x8b"


class Tokenizer:
    """What every tokenizer offers. All are picklable.

    Attributes:
      vocab_size: the number V of ids.
      bos_id, eos_id, pad_id: specials. A vocabulary without bos or pad uses `eos_id` for them.
      fingerprint: tells tokenizers apart: the SHA-256 of the file, or "bytes".
      files: file name to contents, all that is needed to make it again.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    fingerprint: str
    files: dict[str, bytes]

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids [T] int32 of a text, without specials."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; specials and ids that do not exist are left out."""
        raise NotImplementedError

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for, [V] int32; 0 for specials.

        Summed over `encode(text)` they are the length of `text` in bytes, plus `prefix_bytes`, as
        long as nothing in it is outside the vocabulary or changed by a normalizer.

        Raises:
          ValueError: the tokens do not map to bytes (WordPiece, for one).
        """
        return self._byte_lengths()

    @cached_property
    def prefix_bytes(self) -> int:
        """1 where `encode` puts a space before any text (SentencePiece's dummy prefix), else 0."""
        return max(0, int(self.byte_lengths[self.encode("a")].sum()) - 1)

    def _byte_lengths(self) -> np.ndarray:
        raise NotImplementedError


def make_tokenizer(spec: str) -> Tokenizer:
    """Makes the tokenizer that `spec` names (see the module).

    Raises:
      ValueError: no such file, not a tokenizer, or no special token of the given or usual names.
    """
    path, options = split_options(spec)
    for key in options:
        if key not in ("bos", "eos", "pad"):
            raise ValueError(f"tokenizer {spec!r}: unknown option {key!r}; known: bos, eos, pad")
    if path == "bytes" and not options:
        return ByteTokenizer()
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        found = [name for name in ("tokenizer.json", "tokenizer.model") if _is_file(path, name)]
        path = os.path.join(path, found[0] if found else "tokenizer.json")
    if not os.path.isfile(path):
        hint = "'bytes', a tokenizer.json, a SentencePiece .model or CLIP's bpe_simple_vocab_16e6.txt.gz"
        if re.fullmatch(r"bpe:\d+", path):
            hint += "; train a BPE with `python -m maxlp.prepare text --train_tokenizer=VOCAB`"
        raise ValueError(f"tokenizer {spec!r}: no such file; give {hint}")
    with open(path, "rb") as file:
        data = file.read()
    try:
        if path.endswith((".txt.gz", ".txt")):
            data = clip_bpe(data)
        if path.endswith(".model"):
            return SentencePieceTokenizer(data, **options)
        kind = ClipTokenizer if WORD_END_SUFFIX in data else HuggingFaceTokenizer
        return kind(data, **options)
    except ValueError as error:
        raise ValueError(f"tokenizer {path}: {one_line(error)}") from None


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, 256 bos, 257 eos, 258 pad: `vocab_size` is exactly 259."""

    vocab_size = 259
    bos_id, eos_id, pad_id = 256, 257, 258
    fingerprint = "bytes"

    def __init__(self) -> None:
        self.files = {}

    def _byte_lengths(self) -> np.ndarray:
        return np.array([1] * 256 + [0] * 3, np.int32)

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(as_bytes(text), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = _ids_below(ids, 256)
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. It has `byte_lengths` if it is byte-level or made of `▁` pieces."""

    def __init__(self, data: bytes, bos: str | None = None, eos: str | None = None, pad: str | None = None):
        """Reads the bytes of a `tokenizer.json`; `bos`, `eos`, `pad` name specials if unusual."""
        import tokenizers

        try:
            tok = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"not a tokenizer.json ({one_line(error)})") from None
        tok.no_truncation()
        tok.no_padding()
        tok.encode_special_tokens = True  # the names of specials in a text are text
        self._tok = tok
        self._args = (data, bos, eos, pad)
        self._added = tok.get_added_tokens_decoder()
        self.vocab_size = max(tok.get_vocab(with_added_tokens=True).values()) + 1
        specials = {tok.content: i for i, tok in self._added.items() if tok.special}
        self.bos_id, self.eos_id, self.pad_id = _special_ids(specials, tok.token_to_id, bos, eos, pad)
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.files = {"tokenizer.json": data}

    def __reduce__(self) -> tuple[Any, ...]:
        # Not the library's own pickle: it forgets `encode_special_tokens`.
        return type(self), self._args

    def _byte_lengths(self) -> np.ndarray:
        config = json.loads(self._args[0])
        if '"ByteLevel"' in json.dumps(config["decoder"]):
            length = len  # each character of a byte-level token is one byte
        elif "▁" in json.dumps(config["decoder"], ensure_ascii=False):
            length = _piece_bytes
        else:
            raise ValueError(
                "bits per byte need a byte-level or SentencePiece-like tokenizer.json;"
                f" the decoder of this one is {(config['decoder'] or {}).get('type')}"
            )
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, i in self._tok.get_vocab(with_added_tokens=False).items():
            lengths[i] = length(token)
        for i, token in self._added.items():
            lengths[i] = 0 if token.special else len(token.content.encode())
        return lengths

    def encode(self, text: str | bytes) -> np.ndarray:
        # The batch call of one is twice as fast as `encode`: it keeps no character offsets.
        (encoding,) = self._tok.encode_batch_fast([_as_str(text)], add_special_tokens=False)
        ids = encoding.ids
        return np.fromiter(ids, np.int32, len(ids))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tok.decode(_ids_below(ids, self.vocab_size).tolist())


class ClipTokenizer(HuggingFaceTokenizer):
    """CLIP's byte-level BPE, words ending in `</w>`: lower case, no HTML entities, no white space."""

    def encode(self, text: str | bytes) -> np.ndarray:
        # Twice, as OpenAI's does: alt-texts are often escaped twice. The rest is in the tokenizer.json.
        return super().encode(html.unescape(html.unescape(_as_str(text))))

    def _byte_lengths(self) -> np.ndarray:
        raise ValueError(
            "bits per byte need a tokenizer that keeps white space and case; CLIP's drops them"
        )


def clip_bpe(data: bytes) -> bytes:
    """The `tokenizer.json` of OpenAI's list of merges, `bpe_simple_vocab_16e6.txt.gz` or unpacked.

    Ids are those of OpenAI's CLIP: the 256 bytes, the same at the end of a word, the merges in order, and
    the beginning and the end of a text. The list has more merges than CLIP uses: the first 48,894 count.

    Raises:
      ValueError: not such a list.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    try:
        text = (gzip.decompress(data) if data[:2] == GZIP_MAGIC else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"not a list of merges ({one_line(error)})") from None
    lines = [line.split() for line in text.split("\n")[1 : CLIP_MERGES + 1]]
    merges = [(line[0], line[1]) for line in lines if len(line) == 2]
    # The bytes that are printable come first, then the others, each as the character that stands for it.
    stand_ins = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) >= 256, ord(c)))
    tokens = [*stand_ins, *(c + "</w>" for c in stand_ins), *(first + second for first, second in merges)]
    tokens += CLIP_SPECIALS
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        tok = tokenizers.Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"not a list of merges ({one_line(error)})") from None
    white = tokenizers.Regex(r"\s+")
    tok.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(white, " "), normalizers.Lowercase()]
    )
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(CLIP_WORD), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([*CLIP_SPECIALS])
    return tok.to_str().encode()


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`. The character `▁` (U+2581) is a space to it."""

    def __init__(self, data: bytes, bos: str | None = None, eos: str | None = None, pad: str | None = None):
        """Reads the bytes of a model; `bos`, `eos`, `pad` name its specials if unusual."""
        sentencepiece = import_extra("sentencepiece")
        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ValueError(f"not a SentencePiece model ({one_line(error)})") from None
        self._args = (data, bos, eos, pad)
        self.vocab_size = self._sp.get_piece_size()
        pieces = {self._sp.id_to_piece(i): i for i in range(self.vocab_size)}
        specials = {piece: i for piece, i in pieces.items() if self._sp.is_control(i)}
        self.bos_id, self.eos_id, self.pad_id = _special_ids(specials, pieces.get, bos, eos, pad)
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.files = {"tokenizer.model": data}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._args

    def _byte_lengths(self) -> np.ndarray:
        sp, lengths = self._sp, np.zeros(self.vocab_size, np.int32)
        for i in range(self.vocab_size):
            if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_unused(i)):
                lengths[i] = _piece_bytes(sp.id_to_piece(i))
        return lengths

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.asarray(self._sp.encode(_as_str(text)), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._sp.decode(_ids_below(ids, self.vocab_size).tolist())


def train_bpe(texts: Iterable[str | bytes], vocab_size: int, path: str) -> Tokenizer:
    """Trains a lossless byte-level BPE and writes it as a `tokenizer.json`.

    The three `SPECIALS` have ids 0, 1, 2 and the bytes the next 256. The same texts in the same
    order give the same file. The file appears complete or not at all.

    Args:
      texts: documents.
      vocab_size: ids in all, specials and bytes included.
      path: the file to write.

    Raises:
      ValueError: `vocab_size` is too small, or the texts too few to learn that many.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(SPECIALS)
    if vocab_size < least:
        raise ValueError(f"vocab_size {vocab_size} is below {least}, the bytes and the specials")
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    with _parallel_tokenizers():
        tok.train_from_iterator(map(_as_str, texts), trainer)
    if tok.get_vocab_size() != vocab_size:
        learned = tok.get_vocab_size()
        raise ValueError(
            f"a BPE of {vocab_size} tokens was asked for, the texts gave only {learned} tokens;"
            f" write bpe:{learned} (--train_tokenizer={learned}) or train on more"
        )
    data = tok.to_str().encode()
    _write_atomically(path, data)
    return HuggingFaceTokenizer(data)


def train_or_load(path: str, texts: Iterable[str | bytes], vocab_size: int) -> Tokenizer:
    """Loads the tokenizer at `path`, or trains it there on `texts`, which are read only then.

    A file that is there already is used as it is, whatever it was trained on.

    Raises:
      ValueError: the file at `path` has another vocabulary size; and those of `train_bpe`.
    """
    if not os.path.exists(path):
        return train_bpe(texts, vocab_size, path)
    tokenizer = make_tokenizer(path)
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"tokenizer {path} has vocab_size {tokenizer.vocab_size}, not {vocab_size}: use that,"
            " or remove the file to train anew"
        )
    return tokenizer


def _as_str(text: str | bytes) -> str:
    # A str passes through bytes too: lone surrogates are not text to the libraries.
    return as_bytes(text).decode("utf-8", errors="replace")


def _is_file(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, name))


def _ids_below(ids: Sequence[int] | np.ndarray, limit: int) -> np.ndarray:
    """Generated ids may lie in the padding of a model's vocabulary: they stand for no text."""
    ids = np.asarray(ids, np.int64)
    return ids[(ids >= 0) & (ids < limit)]


def _special_ids(
    specials: dict[str, int],
    token_to_id: Callable[[str], int | None],
    bos: str | None,
    eos: str | None,
    pad: str | None,
) -> tuple[int, int, int]:
    def find(key: str, asked: str | None, usual: Sequence[str], default: int | None) -> int:
        if asked is not None:
            i = token_to_id(asked)
        else:
            i = next((specials[name] for name in usual if name in specials), default)
        if i is None:
            named = f"no token {asked!r} for {key}" if asked else f"no {key} of a usual name"
            found = ", ".join(list(specials)[:8]) or "none"
            raise ValueError(f"{named}; specials in the file: {found}; set ?{key}=TOKEN")
        return i

    eos_id = find("eos", eos, EOS, None)
    return find("bos", bos, BOS, eos_id), eos_id, find("pad", pad, PAD, eos_id)


def _piece_bytes(piece: str) -> int:
    """Bytes of a SentencePiece piece: `▁` is a space, `<0x0A>` one byte."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return 1
    return len(piece.replace("▁", " ").encode())


@contextlib.contextmanager
def _parallel_tokenizers() -> Iterator[None]:
    """All cores for training; then none, for a process forked after it would hang or warn."""
    key = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(key)
    os.environ.setdefault(key, "true")
    try:
        yield
    finally:
        os.environ[key] = before or "false"


def _write_atomically(path: str, data: bytes) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".tokenizer-", delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)  # temporary files are private by default
    os.replace(file.name, path)
