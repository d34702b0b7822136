"""Converts texts, or images with texts, to ArrayRecord shards.

    python -m maxlp.prepare text --source='jsonl:/data/c4/*.jsonl' \\
        --output=/data/c4_text
    python -m maxlp.prepare text --source=parquet:/data/fineweb \\
        --output=/data/fineweb_llama3 --shards=64 --num_workers=16 \\
        --tokenizer=/models/llama3/tokenizer.json
    python -m maxlp.prepare text --source=stdlib --split=train \\
        --output=/data/stdlib --train_tokenizer=4096
    python -m maxlp.prepare image_text \\
        --source='tar:/data/cc12m/{00000..01242}.tar' --output=/data/cc12m_ar

The output serves as `array_record:/data/c4_text` wherever a source is named.
Sources and tokenizers are named as in a training config; see
maxlp/data/sources.py and maxlp/data/tokenizers/__init__.py.

Shards hold UTF-8 text, or with a tokenizer its ids (uint16, or uint32 for
vocabularies above 65,536) without beginning- and end-of-document ids, which
training adds. Empty documents are left out. Conversations (`?messages_key=`)
need the tokenizer with its chat template, and are written as int32. Encoded
images are copied as they are, even broken ones, each with its caption, label
and origin. Examples that cannot be read, such as those whose caption is not
UTF-8, are left out.

Beside the shards are the tokenizer and `dataset.json`, which is written last. A
run that is killed leaves no `dataset.json`, and a folder without one is refused
as a source.

The output may be in a bucket, as in --output=gs://bucket/c4_text or
s3://bucket/c4_text. It is written to a temporary folder ($TMPDIR) and then
uploaded.
"""

import functools
import os
from collections.abc import Collection
from typing import Any

import numpy as np
from absl import flags, logging

from maxlp import schema
from maxlp.data import shards as shards_lib
from maxlp.data.chat import Chat, Conversations, make_chat
from maxlp.data.readers import BrokenExample
from maxlp.data.readers.array_record import FORMATS, MANIFEST, pack_example
from maxlp.data.sources import Mixture, Source, make_source, open_source, parse_spec
from maxlp.data.specs import split_options
from maxlp.data.tokenizers import COMPANIONS, FILES, Tokenizer, as_bytes, make_tokenizer
from maxlp.run import cli
from maxlp.runtime import storage
from maxlp.runtime.files import is_url, local_path
from maxlp.runtime.messages import counted
from maxlp.runtime.new_folder import clean_up_on_sigterm
from maxlp.schema import Count

TOKENIZER_SAMPLE_BYTES = 64_000_000
CONVERSATION_DTYPE = np.dtype("<i4")  # signed, see `data.chat`


def prepare_text(
    source: str,
    output: str,
    split: str = "all",
    tokenizer: str = "",
    train_tokenizer: int = 0,
    shards: int = 16,
    num_workers: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the documents of `source` to the folder `output`.

    The files hold the documents in the order of the source and do not depend on `num_workers`.

    Args:
      source: as in `maxlp.data.sources.make_source`, but no mixture.
      output: the folder, created if missing, or its URL in a bucket.
      split: `train`, `validation` or `all`.
      tokenizer: as in `maxlp.data.tokenizers.make_tokenizer`; empty to write text.
      train_tokenizer: number of ids of a byte-level BPE to train on the source and to use; 0 trains
        none.
      shards: number of files; at most one per document is written.
      num_workers: number of processes; 1 uses only this one.
      overwrite: whether an existing dataset, or other files of the names that are written, are replaced,
        once the new one is complete.

    Returns:
      The contents of `dataset.json`.

    Raises:
      ValueError: `output` already holds a dataset or such files, or a run, or an argument is wrong.
    """
    if tokenizer and train_tokenizer:
        raise ValueError(f"give tokenizer={tokenizer!r} or train_tokenizer={train_tokenizer}, not both")
    names = (*FILES, *COMPANIONS) if tokenizer or train_tokenizer else ()
    output = _check_output(output, names, shards, num_workers, overwrite)
    encoder = make_tokenizer(tokenizer) if tokenizer else None
    documents = make_source(source, split, any_bytes=encoder is not None and encoder.any_bytes)
    if isinstance(documents, Mixture):
        raise ValueError(f"source {source!r} is a mixture; prepare each part, and mix them in training")
    if documents.tokenizer:
        raise ValueError(f"source {source!r} holds tokens already; give the text they were made from")
    if train_tokenizer:
        from maxlp.data.tokenizers.training import sample_texts, train_bpe

        texts = sample_texts(documents, TOKENIZER_SAMPLE_BYTES, seed=0)
        encoder = train_bpe(texts, train_tokenizer, setting="--train_tokenizer=")
    make_record: Any = functools.partial(_text_record, encoder=encoder)
    dtype = encoder and _token_dtype(encoder)
    if "messages" in documents[0]:
        if encoder is None:
            raise ValueError(f"source {source!r} holds conversations; give the --tokenizer of their model")
        make_record = functools.partial(_conversation_record, chat=make_chat(encoder, tokenizer))
        dtype = CONVERSATION_DTYPE
    with shards_lib.destination(output, names) as folder, shards_lib.no_partial_files(folder, names):
        written = shards_lib.write_shards(folder, documents, make_record, shards, num_workers)
        manifest = _text_manifest(documents, written, encoder, dtype, split_options(tokenizer)[1])
        shards_lib.commit(folder, manifest, encoder.files if encoder else {}, names)
    return manifest


def prepare_image_text(
    source: str,
    output: str,
    split: str = "all",
    shards: int = 16,
    num_workers: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the images of `source` with their captions and labels to the folder `output`.

    Args:
      source: a source of images in `maxlp.data.sources`, except `glyphs`, which are drawn when they
        are used.
      split, shards, num_workers, overwrite: as in `prepare_text`.

    Returns:
      The contents of `dataset.json`.

    Raises:
      ValueError: `output` already holds a dataset or such files, or an argument is wrong.
    """
    output = _check_output(output, (), shards, num_workers, overwrite)
    examples = open_source(parse_spec(source, split, "image_text"))
    with shards_lib.destination(output) as folder, shards_lib.no_partial_files(folder):
        written = shards_lib.write_shards(folder, examples, _image_text_record, shards, num_workers)
        totals = shards_lib.totals(written)
        if not totals["documents"]:
            found = counted(len(examples), "example")
            raise ValueError(f"source {examples.name!r}: no readable image in {found}")
        manifest = {
            "format": FORMATS["image_text"],
            "source": source,
            "split": examples.split,
            "classes": list(examples.classes),
            "templates": list(examples.templates),
            "broken_examples": len(examples) - totals["documents"],
            **totals,
            "shards": written,
        }
        shards_lib.commit(folder, manifest, {})
    return manifest


def _check_output(
    output: str, names: Collection[str], shards: int, num_workers: int, overwrite: bool
) -> str:
    """Checks that writing would lose nothing; returns the folder, with `~` expanded, or the URL.

    Args:
      names: of files that are written besides shards and manifest.

    Raises:
      ValueError: the output cannot be written to, or holds a run or files that would be replaced.
    """
    schema.check_value("--shards", shards, Count)
    schema.check_value("--num_workers", num_workers, Count)
    if is_url(output):
        output = output.rstrip("/")
        found = _check_bucket(output)
    else:
        output = str(local_path(output, "--output"))
        if os.path.lexists(output) and not os.path.isdir(output):  # found before a tokenizer is trained
            raise ValueError(f"--output={output} is not a directory; choose another name")
        found = os.listdir(output) if os.path.isdir(output) else []
    if "run.json" in found:  # a run's own tokenizer would be replaced, even if --overwrite means the shards
        raise ValueError(f"--output={output} is the workdir of a run; choose another folder")
    if overwrite:
        return output
    if MANIFEST in found:
        raise ValueError(f"{output} holds a dataset already; pass --overwrite to replace it")
    if lost := sorted(name for name in found if name in names or name.endswith(shards_lib.SUFFIX)):
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise ValueError(
            f"--output={output} holds {', '.join(lost[:3])}{more}, and no {MANIFEST} of a dataset; choose "
            "another folder, or pass --overwrite to replace them"
        )
    return output


def _check_bucket(output: str) -> list[str]:
    """Checks that a URL can be written to; returns the names of the files there."""
    if not output.startswith(tuple(f"{store}://" for store in storage.BUCKETS)):
        raise ValueError(f"--output={output} cannot be written to; give a folder, gs:// or s3://")
    try:
        storage.check(output)
    except OSError as error:
        raise ValueError(f"--output={output}: {error}") from error
    storage.write(f"{output}/.writable", b"")
    storage.remove(f"{output}/.writable")
    return shards_lib.names_in(output)


# --- records --------------------------------------------------------------------------------------


def _text_record(documents: Source, index: int, encoder: Tokenizer | None) -> tuple[bytes, dict[str, int]]:
    data = as_bytes(documents[index]["text"])
    size, tokens = len(data), 0
    if encoder and data:
        ids = encoder.encode(data)
        data, tokens = ids.astype(_token_dtype(encoder)).tobytes(), len(ids)
    return data, {"bytes": size, "tokens": tokens}


def _conversation_record(documents: Source, index: int, chat: Chat) -> tuple[bytes, dict[str, int]]:
    size = sum(len(as_bytes(message["content"] or "")) for message in documents[index]["messages"])
    tokens = Conversations(documents, chat, seq_len=0).tokens(index)
    if not (tokens >= 0).any():
        return b"", {"bytes": size, "tokens": 0}
    return tokens.astype(CONVERSATION_DTYPE).tobytes(), {"bytes": size, "tokens": len(tokens)}


def _image_text_record(examples: Source, index: int) -> tuple[bytes, dict[str, int]]:
    try:
        example = examples[index]
    except BrokenExample as error:
        logging.warning("left out a broken example: %s", error)
        return b"", {"bytes": 0}
    image = example["image"]
    if isinstance(image, np.ndarray):
        from maxlp.data.images import encode_png

        image = encode_png(image)
    data = pack_example(image, example["text"], example["label"], examples.where(index))
    return data, {"bytes": len(data)}


def _token_dtype(encoder: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if encoder.vocab_size <= 2**16 else "<u4")


def _text_manifest(
    documents: Source,
    written: list[dict[str, Any]],
    encoder: Tokenizer | None,
    dtype: np.dtype | None,
    options: dict[str, str],
) -> dict[str, Any]:
    totals = shards_lib.totals(written)
    if not totals["documents"]:
        raise ValueError(f"source {documents.name!r}: all of its documents are empty")
    return {
        "format": FORMATS["text"],
        "kind": "tokens" if encoder else "text",
        "dtype": dtype and dtype.name,
        "source": documents.name,
        "split": documents.split,
        "empty_documents": len(documents) - totals["documents"],
        **totals,
        "tokenizer": encoder
        and {
            "fingerprint": encoder.fingerprint,
            "file": next(iter(encoder.files), None),
            "options": {key: value for key, value in options.items() if key != "chat_template"},
            "vocab_size": encoder.vocab_size,
        },
        "shards": written,
    }


# --- the command ----------------------------------------------------------------------------------


def define_flags() -> None:
    """Defines the flags of the command; not on import, because other commands use the same names."""
    flags.DEFINE_string("source", None, "What to read, as kind:path; see above.")
    flags.DEFINE_string("output", None, "Folder to write to, or its gs:// or s3:// URL.")
    flags.DEFINE_string("split", "all", "Documents to take: train, validation or all.")
    flags.DEFINE_string("tokenizer", "", "Write the ids of this tokenizer; empty writes text.")
    flags.DEFINE_integer("train_tokenizer", 0, "Train a BPE of this many ids and write its ids.")
    flags.DEFINE_integer("shards", 16, "Number of files.")
    flags.DEFINE_integer("num_workers", 1, "Number of processes.")
    flags.DEFINE_bool("overwrite", False, "Replace an existing dataset, or files of the same kind.")


def text_command() -> str:
    """Runs `prepare text`; returns a line on what was written."""
    text_flags = ("source", "output", "split", "tokenizer", "train_tokenizer", "shards", "num_workers")
    made = prepare_text(**_flag_values(*text_flags, "overwrite"))
    tokens = f", {counted(made['tokens'], 'token')}" if made["kind"] == "tokens" else ""
    return f"{counted(made['documents'], 'document')}, {_size(made, tokens)}"


def image_text_command() -> str:
    """Runs `prepare image_text`; returns a line on what was written."""
    for name in ("tokenizer", "train_tokenizer"):
        if flags.FLAGS[name].value:
            raise ValueError(f"--{name} is for text; captions are stored as they are, so remove it")
    image_flags = ("source", "output", "split", "shards", "num_workers")
    made = prepare_image_text(**_flag_values(*image_flags, "overwrite"))
    broken = f", {made['broken_examples']:,} left out" if made["broken_examples"] else ""
    return f"{counted(made['documents'], 'image')}{broken}, {_size(made)}"


def _size(made: dict[str, Any], tokens: str = "") -> str:
    return f"{counted(made['bytes'], 'byte')}{tokens} in {counted(len(made['shards']), 'shard')}"


def _flag_values(*names: str) -> dict[str, Any]:
    for name in ("source", "output"):
        if not flags.FLAGS[name].value:
            raise ValueError(f"--{name} is missing; see --help")
    return {name: flags.FLAGS[name].value for name in names}


COMMANDS = {"text": text_command, "image_text": image_text_command}


def main(command: str = "") -> None:
    """Runs a subcommand and prints what it wrote."""
    cli.check_first_argument(command, COMMANDS)
    clean_up_on_sigterm()
    written = COMMANDS[command]()
    print(f"wrote {written}; use them as array_record:{flags.FLAGS.output}")


if __name__ == "__main__":
    define_flags()
    cli.run(main, num_arguments=1)
