"""Sources: documents, or images with captions, by number and in the same order on every machine.

A source is named by a spec, a short string that is the same in a config file and on a command line.
Text:

    stdlib                                   the Python standard library itself; no download
    text:/data/books/**/*.txt                a folder, a glob or one file; one document per file
    jsonl:/data/c4/*.jsonl?text_key=content  one JSON object per line
    jsonl:/data/chat.jsonl?messages_key=messages  conversations, see `data.chat`; Parquet likewise
    parquet:/data/fineweb                    a folder, a glob or one file; one document per row

Images with captions or labels:

    glyphs                                   characters and their Unicode names; no download
    digits                                   scikit-learn's handwritten digits, if it is installed
    tar:/data/cc12m/{00000..01242}.tar       WebDataset tars

Both:

    array_record:/data/prepared              a folder written by `python -m maxlp.prepare`
    tfds:lm1b?data_dir=/data/tfds            a prepared TFDS dataset with random access

A path may be a URL (gs://, s3://, https://, hf://), with wildcards where the store has listings, and with
braces as in `jsonl:https://host/c4/{000..127}.jsonl.gz`. Files in .gz and .zst have no random access: they
are decompressed into the local cache (`data.local_cache`).

Options follow a `?` and are joined by `&`; they are the keyword-only parameters of the function that
opens the kind (see `KINDS`), a bool as `true` or `false`. Several text sources joined by `;`, each with
a `weight` (default 1), form a mixture: `stdlib?weight=1;jsonl:/data/c4/*.jsonl?weight=3`.

`split` is `train`, `validation` or `all`; an option `?split=` overrides the split that the caller
requests. The option `validation` is the fraction that is held out for validation (0.02 by default, of
digits 0.2): files (stdlib, text) are chosen by a hash of their relative paths, and of records every
1/`validation`-th is taken, so a split does not change when the data moves to another folder. `glyphs` has
options of its own (`data.glyphs`). TFDS datasets have splits of their own, and `?split=` takes any TFDS
expression, as in `?split=train[:99%]`.

JSONL and Parquet are read in place. Random access over many gigabytes of them is slow (Parquet
decodes a whole row group for one document): convert such a corpus to ArrayRecord once, with
`maxlp.prepare`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from types import NoneType
from typing import Any, NamedTuple, Protocol

from maxlp import schema
from maxlp.data.readers import BrokenExample, check_tokens, check_utf8
from maxlp.data.specs import split_options
from maxlp.runtime.messages import counted, one_line

VALIDATION = 0.02
TYPES: dict[type, tuple[Callable[[str], Any], str]] = {  # of options -> their parser, their description
    str: (str, "text"),
    int: (int, "an integer"),
    float: (float, "a number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
}
SPLITS = ("train", "validation", "all")
SINGLE_DOCUMENT = (
    "a single document cannot be divided into training and validation; cut it into several, or add "
    "?split=all to validate on the training data"
)


class Kind(NamedTuple):
    """A kind of source.

    Attributes:
      opener: "package.module:function", imported when a source names the kind. The function takes a
        `Spec` and options, and returns a `Source`.
      contents: what its records can be: "text", "image_text".
      takes_path: whether a path follows the name of the kind.
      own_splits: whether the data has splits of its own, so that `?split=` is passed on as it is.
      drawn: whether `maxlp.data.image_text` draws the examples, so that there are no records to read.
    """

    opener: str
    contents: tuple[str, ...]
    takes_path: bool = True
    own_splits: bool = False
    drawn: bool = False


KINDS = {
    "stdlib": Kind("maxlp.data.readers.files:open_stdlib", ("text",), takes_path=False),
    "text": Kind("maxlp.data.readers.files:open_files", ("text",)),
    "jsonl": Kind("maxlp.data.readers.jsonl:open_jsonl", ("text",)),
    "parquet": Kind("maxlp.data.readers.parquet:open_parquet", ("text",)),
    "glyphs": Kind("maxlp.data.glyphs:Glyphs", ("image_text",), takes_path=False, drawn=True),
    "digits": Kind("maxlp.data.readers.digits:open_digits", ("image_text",), takes_path=False),
    "tar": Kind("maxlp.data.readers.tars:open_tars", ("image_text",)),
    "array_record": Kind("maxlp.data.readers.array_record:open_array_record", ("text", "image_text")),
    "tfds": Kind("maxlp.data.readers.tfds:open_tfds", ("text", "image_text"), own_splits=True),
}


class Spec(NamedTuple):
    """A parsed spec: `kind:path?key=value&split=…`.

    Attributes:
      text: the spec as it was given.
      content: what the records are read as, "text" or "image_text".
      options: further keyword arguments of the kind's opener.
      any_bytes: whether texts may be any bytes; else one that is not UTF-8 cannot be used.
    """

    text: str
    kind: str
    path: str
    split: str
    content: str
    options: dict[str, Any]
    any_bytes: bool = False


class Reader(Protocol):
    """Records by number, in any order, from several threads at once, in this or another process.

    A record of content "text" is {"text": str or bytes} or {"tokens": uint16 or uint32 [T]}; of a
    conversation, {"messages": list of dicts} or {"tokens": int32 [T]}, see `data.chat`. A reader of tokens
    tells `Source` their tokenizer. A record of content "image_text" is {"image": bytes of a file or uint8
    [H, W, 3], "text": str or None, "label": int or -1}.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Record `row`.

        Raises:
          BrokenExample: this record cannot be used.
        """
        ...

    def where(self, row: int) -> str:
        """The location of record `row`, for messages."""
        ...

    def paths(self) -> list[str]:
        """All files that records are read from, in an order that does not depend on where they are."""
        ...


class Source:
    """The records of one spec and split; picklable, as readers are.

    `source[i]` is a record as `Reader` describes it; tokens have no beginning- or end-of-document
    ids. The repr names the data and its size, and nothing that differs between processes.

    Attributes:
      name: the spec, and the version of the data where it has one.
      tokenizer: for documents of tokens, the `spec` (for `make_tokenizer`), `fingerprint` and
        `vocab_size` of the tokenizer that made them; None for text and images.
      classes: names of the classes that labels are indices of.
      templates: sentences with `{}` for the name of a class, where the data comes with some.
    """

    def __init__(
        self,
        spec: Spec,
        reader: Reader,
        *,
        validation: float | None = None,
        version: str = "",
        tokenizer: dict[str, Any] | None = None,
        classes: Sequence[str] = (),
        templates: Sequence[str] = (),
    ):
        """Takes the records of the spec's split out of `reader`.

        Args:
          validation: fraction of the records that belongs to the validation split; None if `reader`
            holds the records of the spec's split alone.
        """
        self.name = f"{spec.text} ({version})" if version else spec.text
        self.split, self.reader, self.tokenizer = spec.split, reader, tokenizer
        self._any_bytes = spec.any_bytes
        self.classes, self.templates = classes, templates
        total = len(reader)
        self._every = round(1 / validation) if validation else 0  # spacing of validation records
        if validation and abs(validation * self._every - 1) > 0.06:
            below = int(1 / validation)
            near = f"{1 / below:.3g} or {1 / (below + 1):.3g}"
            raise ValueError(f"validation={validation} is not 1/N, and takes every N-th record; set {near}")
        chosen = total // self._every if self._every else 0
        sizes = {} if validation is None else {"train": total - chosen, "validation": chosen}
        self._len = sizes.get(spec.split, total)
        if not total and sizes:
            raise ValueError("its files hold no documents; check the path")
        if not self._len:
            raise ValueError(_empty_split(spec, total))

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row(index)
        try:
            record = self.reader[row]
            if not self._any_bytes:
                check_utf8(record.get("text"))
            if self.tokenizer is not None and "tokens" in record:
                check_tokens(record["tokens"], self.tokenizer["vocab_size"])
            return record
        except BrokenExample as error:
            raise BrokenExample(f"{self.reader.where(row)}: {error}") from None
        except Exception as error:  # libraries raise errors of any type on damaged files
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the file system failed: the record may be intact
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise BrokenExample(f"{self.reader.where(row)}: it cannot be read ({reason})") from error

    def row(self, index: int) -> int:
        """The reader's row of record `index`."""
        index = int(index)
        if not 0 <= index < self._len:
            raise IndexError(f"there is no document {index} in {self!r}")
        if self._every and self.split == "validation":
            index = index * self._every + self._every - 1
        elif self._every and self.split == "train":
            index += index // (self._every - 1)
        return index

    def where(self, index: int) -> str:
        """The location of record `index`, for messages."""
        return self.reader.where(self.row(index))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the files; see `data.fingerprint`. A ValueError if the reader does not name them."""
        from maxlp.data import fingerprint

        try:
            return fingerprint.of_files(self.reader.paths())
        except LookupError as error:  # of a custom reader; its text is only the key
            raise ValueError(f"source {self.name!r}: paths() fails with {error!r}") from error

    def __repr__(self) -> str:
        return f"Source({self.name!r}, split={self.split!r}, documents={self._len})"


def _empty_split(spec: Spec, total: int) -> str:
    """The message for a split without documents; ``total`` is the number in all splits, 0 if unknown."""
    if KINDS[spec.kind].own_splits:
        return f"split {spec.split!r} contains no documents; change ?split="
    if total == 1:
        return SINGLE_DOCUMENT
    documents = f"{total} documents" if total else "documents"
    fraction = 0.5 if 0 < total < 10 else 0.1
    return (
        f"split {spec.split!r} contains none of the {documents}; set ?validation={fraction}, or ?split=all "
        "to validate on the training data"
    )


class Mixture(NamedTuple):
    """Sources to be mixed, with weights that sum to 1."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]


def make_source(spec: str, split: str, any_bytes: bool = False) -> Source | Mixture:
    """Opens the documents that `spec` names.

    Args:
      spec: a source, or a mixture joined by `;` (see the module).
      split: `train`, `validation` or `all`; an option `?split=` in the spec overrides it.
      any_bytes: as in `Spec`, for a tokenizer with `any_bytes`.

    Returns:
      A `Source`, or a `Mixture` if there are several.

    Raises:
      ValueError: unknown kind or option, nothing found, no document that has text, or tokens of an
        unknown tokenizer. The first documents are read here, so that a wrong `text_key` is reported at
        once.
    """
    weighted = _parse_mixture(spec)
    specs = (parse_spec(part, split, "text")._replace(any_bytes=any_bytes) for part in weighted)
    sources = tuple(map(open_source, specs))
    for source in sources:
        first = next(filter(_has_text, map(source.__getitem__, range(len(source)))), None)
        if first is None:
            found = f"{counted(len(source), 'document')} of split {source.split!r}"
            remedy = "" if source.split == "all" else "; change ?split="
            raise ValueError(f"source {source.name!r}: no text in {found}{remedy}")
        if "tokens" in first and source.tokenizer is None:
            raise ValueError(
                f"source {source.name!r}: its records are tokens, but its reader does not say of which "
                "tokenizer; pass the argument tokenizer to Source"
            )
    if len(sources) == 1:
        return sources[0]
    total = sum(weighted.values())
    return Mixture(sources, tuple(weight / total for weight in weighted.values()))


def _has_text(document: dict[str, Any]) -> bool:
    """Whether there is anything to learn from in a document, as there is not in white space."""
    if "text" in document:
        return bool(document["text"].strip())
    return any(len(document[key]) > 0 for key in ("tokens", "messages") if key in document)


def open_source(spec: Spec) -> Source:
    """Opens the records that a parsed spec names.

    Raises:
      ValueError: nothing is found, an option has no valid value, the kind has no records, or its reader
        lacks a key.
      OSError: a file cannot be read; `filename` also names the source.
    """
    kind = KINDS[spec.kind]
    try:
        if kind.drawn:
            raise ValueError("its images are drawn when they are used; there are no records to read")
        return resolve_name(kind.opener)(spec, **spec.options)
    except ValueError as error:
        raise ValueError(f"source {spec.text!r}: {one_line(error)}") from None
    except LookupError as error:  # whose text is only the key
        reason = f"{type(error).__name__}: {one_line(error)} (MAXLP_TRACEBACK=1 shows where)"
        raise ValueError(f"source {spec.text!r}: {kind.opener} fails with {reason}") from error
    except OSError as error:
        if error.filename is not None:  # else its text is a sentence with the URL
            error.filename = f"source {spec.text!r}: {error.filename}"
        raise


def parse_spec(text: str, split: str, content: str) -> Spec:
    """Parses and checks a spec.

    Args:
      split: used unless the spec has one.
      content: what the records are read as, "text" or "image_text".

    Raises:
      ValueError: unknown kind, option or split; a missing or unexpected path; an invalid number.
    """
    head, options = split_options(text)
    name, colon, path = head.partition(":")
    kinds = {name: kind for name, kind in KINDS.items() if content in kind.contents}
    if name not in kinds:
        if name in KINDS:
            needed = {"text": "text", "image_text": "images with texts"}[content]
            raise ValueError(f"source {text!r} has no {needed}; kinds that do: {', '.join(sorted(kinds))}")
        likely = name if colon else name.rpartition(".")[2]  # a path alone may end in its kind
        unknown = schema.unknown_key(likely, kinds, "kinds")
        raise ValueError(f"source {text!r}: kind {name!r} {unknown}; write KIND:PATH")
    kind = kinds[name]
    if kind.takes_path and not path:
        raise ValueError(f"source {text!r} lacks a path; write '{name}:PATH'")
    if path and not kind.takes_path:
        others = ", ".join(each for each in kinds if kinds[each].takes_path)
        raise ValueError(f"source {text!r}: {name} takes no path; kinds that do: {others}")
    split = options.pop("split", split)
    try:
        check_split(split, (split,) if kind.own_splits else SPLITS)
        return Spec(text, name, path, split, content, _parse_options(kind, name, options))
    except ValueError as error:
        raise ValueError(f"source {text!r}: {error}") from None


def check_split(split: str, allowed: Sequence[str]) -> None:
    """Raises a `ValueError` if `split` is not allowed."""
    if split == "heldout":
        raise ValueError("split 'heldout' was renamed; write 'validation'")
    if split not in allowed:
        raise ValueError(f"split {split!r} is unknown; one of {', '.join(allowed)}")


def _parse_options(kind: Kind, name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    parameters = inspect.signature(resolve_name(kind.opener), eval_str=True).parameters.values()
    known = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    options: dict[str, Any] = {}
    for key, text in texts.items():
        if key.startswith("heldout"):
            raise ValueError(f"option {key!r} was renamed; write {key.replace('heldout', 'validation')!r}")
        if key not in known:
            also = ["split", "weight"] if "text" in kind.contents else ["split"]
            raise ValueError(f"unknown option {key!r}; {name} takes {', '.join([*known, *also])}")
        options[key] = _parsed(key, text, known[key])
    fraction = options.get("validation", 0.0)
    if isinstance(fraction, float) and fraction and not 1e-9 <= fraction <= 0.5:
        raise ValueError(f"validation={fraction} must be 0 or a fraction from 1e-9 to 0.5")
    return options


def _parse_mixture(spec: str) -> dict[str, float]:
    """The weight of each source; one that is named several times has their sum."""
    weighted: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in spec.split(";"))):
        head, options = split_options(part)
        weight = _parsed(f"source {part!r}: weight", options.pop("weight", "1"), float)
        if not 0 < weight <= 1e300:  # so that their sum is finite
            raise ValueError(f"source {part!r}: weight {weight} must be positive and at most 1e300")
        rest = "&".join(f"{key}={value}" for key, value in options.items())
        source = f"{head}?{rest}" if rest else head
        weighted[source] = weighted.get(source, 0.0) + weight
    if not weighted:
        raise ValueError(f"source {spec!r} is empty; try 'stdlib'")
    return weighted


def _parsed(key: str, text: str, hint: Any) -> Any:
    """The value of an option whose annotation is one of `TYPES`, with or without None."""
    kind, *others = [member for member in schema.options(hint) if member is not NoneType]
    if others or kind not in TYPES:
        types = ", ".join(known.__name__ for known in TYPES)
        raise ValueError(f"option {key!r} has the annotation {hint!r}; its reader must use one of {types}")
    parse, description = TYPES[kind]
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise ValueError(f"{key}={text!r} is not {description}") from None
