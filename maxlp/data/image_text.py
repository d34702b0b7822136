"""Image-text batches on Grain: examples → pixels and tokens → global batches.

An epoch is a permutation of the examples that depends only on the seed and the epoch, cut into whole
batches. The few examples that remain are left out of that epoch. No batch spans two epochs, so no
example occurs twice in a batch. How an example is cropped or drawn depends on the seed, the epoch and
the example. So the state is just the step, and any number of processes and workers can restore it.

A broken example is replaced by the one that has its row in the next batch of the epoch; after the last
batch by one from the beginning of the epoch, which with a single batch may be in it already.

Letters: B batch, H and W height and width, S text length, N number of texts.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import string
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import grain
import numpy as np
from absl import logging

from maxlp import schema
from maxlp.data import common, fingerprint, images
from maxlp.data.common import Batch
from maxlp.data.images import Example
from maxlp.data.readers import BrokenExample
from maxlp.data.sources import Source, Spec, check_split, open_source, parse_spec
from maxlp.data.specs import naming_key
from maxlp.data.tokenizers import Tokenizer, make_tokenizer
from maxlp.runtime.messages import counted, rounded
from maxlp.schema import INT32, Count, CountOrZero, PositiveFraction, Range

TEMPLATES = ("a photo of a {}.",)
CHUNK_ROWS = 32  # rows that one thread makes at a time
LABELS_READ = 1024  # the first validation images, one of which must have a label
EXAMPLES_READ = 64  # the first examples, one of which must be usable
ROWS_PER_WORKER = 256  # a running process makes about this many in the time that another takes to start
ORDER, AUGMENT = 0, 1  # part of the seeds, so that the two uses of random numbers are independent


class HasPlaceholder(NamedTuple):
    """A sentence with a place for the name of a class."""

    def error(self, value: str) -> str | None:
        """See `schema.Rule`."""
        try:
            places = [place for _, *place in string.Formatter().parse(value) if place[0] is not None]
        except ValueError:  # a brace alone
            places = []
        return None if places == [["", "", None]] else "must have one {} for the class, and no other braces"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTextDataConfig:
    """The `data` section of a config that trains on images with texts.

    Attributes:
      source: examples, see `sources`.
      validation_source: examples for validation; empty for the validation split of `source`.
      tokenizer: as in `tokenizers.make_tokenizer`.
      text_len: S, including bos and eos. Longer texts are cut, keep their eos, and are counted in the
        metric `data/texts_cut`.
      lowercase: whether texts become lower case, for a tokenizer that does not do it itself, as that of
        SigLIP 2.
      image_size: H and W, in pixels.
      batch_size: B, rows of the global batch.
      crop_scale: smallest and largest fraction of an image's area that a training crop covers.
      classes: a file with the name of one class per line, for data whose labels have no names.
      templates: sentences with `{}` for the name of a class: captions of images that have only a
        label (a random one in training, else the first), and prompts for classification. Empty for
        those of the source.
      templates_file: a file with one template per line, in place of `templates`.
      max_pixels: larger images count as broken.
      max_broken: number of different broken examples that each process skips before it stops.
      num_epochs: None repeats forever.
      num_threads: threads that read and decode, in each worker process or in this one.
      num_workers: processes that read and decode; 0 uses threads of this process, as do short passes over
        validation data.
    """

    source: str
    validation_source: str = ""
    tokenizer: str
    text_len: Annotated[int, Range(at_least=3), INT32]
    lowercase: bool = False
    image_size: Count
    batch_size: Count
    crop_scale: tuple[PositiveFraction, PositiveFraction] = images.CROP_SCALE
    classes: str = ""
    templates: tuple[Annotated[str, HasPlaceholder()], ...] = ()
    templates_file: str = ""
    max_pixels: Annotated[int, Range(at_least=1)] = images.MAX_PIXELS
    max_broken: CountOrZero = 100
    num_epochs: Count | None = None
    num_threads: Annotated[int, Range(at_least=1, at_most=1024)] = 4
    num_workers: common.Workers = 0

    def __post_init__(self):
        schema.check(self)
        if self.crop_scale[0] > self.crop_scale[1]:
            raise ValueError(
                f"crop_scale={self.crop_scale} must be ascending: the smallest fraction, then the largest"
            )
        if self.templates and self.templates_file:
            raise ValueError(
                f"templates_file={self.templates_file!r} takes the place of templates; unset one"
            )


def make_data(
    config: ImageTextDataConfig,
    *,
    split: str,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    preprocessing: images.Preprocessing = images.AS_OPEN_CLIP,
) -> ImageTextDataset:
    """Opens the source and the tokenizer of `config`, and makes batches of one split.

    An iterator yields this process's rows of the global batch: `image` uint8 [B, H, W, 3] and `text`
    int32 [B, S]. Validation yields each example once, in order and without augmentation, and adds its
    `label` int32 [B], -1 without one, and `mask` bool [B], which is false for the padding of the last
    batch and for broken examples.

    Args:
      split: "train" or "validation".
      seed: determines the order and the augmentation.
      process_index: index of this process among those that share the global batch.
      process_count: number of these processes.
      preprocessing: of images that are not drawn.

    Raises:
      ValueError: a value out of range, or a source or tokenizer that cannot be read.
    """
    check_split(split, ("train", "validation"))
    common.check_process(config.batch_size, seed, process_index, process_count)
    key = "validation_source" if split == "validation" and config.validation_source else "source"
    spec = getattr(config, key)
    with naming_key(f"data.{key}"):
        parsed = parse_spec(spec, split, "image_text")
        opened = _open(parsed, config.image_size, each_face=split == "validation")
    examples = EncodedExamples(opened, config, preprocessing) if isinstance(opened, Source) else opened
    if split == "validation" and config.classes and isinstance(opened, Source):
        _check_labels(opened, config.classes, examples.classes)
    with naming_key(f"data.{key}"):
        _check_usable(examples, spec)
    if split == "train" and len(examples) < config.batch_size:
        raise ValueError(
            f"data.batch_size={config.batch_size} is more than the {counted(len(examples), 'example')} of "
            f"data.source={spec!r}; use at most {len(examples)}"
        )
    with naming_key("data.tokenizer"):
        tokenizer = make_tokenizer(config.tokenizer)
    settings: dict[str, Any] = dict(
        seed=seed,
        batch_size=config.batch_size,
        examples=len(examples),
        num_epochs=config.num_epochs,
        tokenizer=tokenizer.fingerprint,
    )
    if split == "train":
        settings[common.FINGERPRINTS] = [examples.fingerprint]
        settings |= common.shuffle_settings([len(examples)])
    return ImageTextDataset(
        config, examples, tokenizer, settings, split == "train", process_index, process_count
    )


def _check_labels(source: Source, path: str, classes: Sequence[str]) -> None:
    """Raises a ValueError if zero-shot classification, hours later, would find no labelled image."""
    num_classes = len(classes)
    if twice := [name for name, count in collections.Counter(classes).items() if count > 1]:
        message = "data.classes=%r has %s more than once, such as %r; images of these count as wrong"
        logging.warning(message, path, counted(len(twice), "name"), twice[0])
    first = range(min(len(source), LABELS_READ))
    for index in first:
        with contextlib.suppress(BrokenExample):
            if 0 <= source[index]["label"] < num_classes:
                return
    raise ValueError(
        f"data.classes={path!r}: none of the first {len(first)} validation images of {source.name!r} has a "
        f"label among these {num_classes} classes; unset data.classes, or validate on images with labels"
    )


def _check_usable(examples: Examples, spec: str) -> None:
    """Raises a ValueError now, not after compilation, for a source without usable examples."""
    errors: list[BrokenExample] = []
    for index in range(min(len(examples), EXAMPLES_READ)):
        try:
            examples.example(index, None)
            return
        except BrokenExample as error:
            errors.append(error)
    tried = counted(len(errors), "example")
    raise ValueError(f"no usable image in the first {tried} of {spec!r}: {errors[0]}")


def captions(config: ImageTextDataConfig) -> Iterator[str]:
    """The training captions of a config's source, each once and in order, to train a tokenizer on.

    For a source with classes these are the templates, filled with the names of all classes; for an image
    that has only a label, one of them. Broken examples are left out here; training counts them.

    Raises:
      ValueError: all examples are broken.
    """
    opened = _open(parse_spec(config.source, "train", "image_text"), config.image_size)
    if not isinstance(opened, Source):
        return iter(opened.classes)
    examples = EncodedExamples(opened, config, images.AS_OPEN_CLIP)
    labels = (template.format(name) for name in examples.classes for template in examples.templates)
    return labels if opened.classes else _own_captions(opened, examples)


def _own_captions(source: Source, examples: EncodedExamples) -> Iterator[str]:
    num_broken, last, rng = 0, "", np.random.Generator(np.random.PCG64(0))
    for index in range(len(source)):
        try:
            yield examples.caption(source[index], rng)
        except BrokenExample as error:
            num_broken, last = num_broken + 1, str(error)
    if num_broken == len(source):
        found = counted(num_broken, "example")
        raise ValueError(f"no usable caption in {found} of {source.name!r}, the last of them {last}")
    if num_broken:
        logging.warning("%d of %d captions are broken, the last of them %s", num_broken, len(source), last)


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], text_len: int, lowercase: bool = False
) -> tuple[np.ndarray, int]:
    """Encodes N texts as rows of bos, text, eos and padding; texts that are too long are cut.

    If the bos of the tokenizer is its eos, rows have no bos: a text tower would take it for the end.

    Returns:
      Tokens, int32 [N, text_len], and the number of texts that are cut.
    """
    bos = [] if tokenizer.bos_id == tokenizer.eos_id else [tokenizer.bos_id]
    ids_NS, room = np.full((len(texts), text_len), tokenizer.pad_id, np.int32), text_len - len(bos) - 1
    num_cut = 0
    for row_S, text in zip(ids_NS, texts, strict=True):
        ids = tokenizer.encode(text.lower() if lowercase else text)
        num_cut += len(ids) > room
        whole = [*bos, *ids[:room], tokenizer.eos_id]
        row_S[: len(whole)] = whole
    return ids_NS, num_cut


@dataclasses.dataclass(frozen=True)
class ImageTextDataset:
    """Batches of images and texts: `iter(dataset)` gives an `ImageTextIterator`. See `make_data`.

    Attributes:
      settings: what the order of examples depends on.
    """

    config: ImageTextDataConfig
    examples: Examples
    tokenizer: Tokenizer
    settings: dict[str, Any]
    is_train: bool
    process_index: int
    process_count: int

    def __iter__(self) -> ImageTextIterator:
        return ImageTextIterator(self)

    def describe(self, steps: int = 0) -> str:
        """How many examples there are, and how many epochs that many steps of training read."""
        examples = counted(len(self.examples), "example")
        if not steps:
            return examples
        from maxlp.data import estimates  # only a launch needs them

        epochs = steps * self.config.batch_size / len(self.examples)
        ends = estimates.early_end(self.config.num_epochs, self.steps_per_epoch, steps)
        return f"{examples}; {counted(steps, 'step reads', 'steps read')} {rounded(epochs, 2)} epochs{ends}"

    @property
    def classes(self) -> list[str]:
        """Names of the classes that labels are indices of; empty for data without classes."""
        return list(self.examples.classes)

    @property
    def templates(self) -> list[str]:
        """Sentences with `{}` for the name of a class."""
        return list(self.examples.templates)

    @property
    def steps_per_epoch(self) -> int:
        examples, batch_size = len(self.examples), self.config.batch_size
        return examples // batch_size if self.is_train else -(-examples // batch_size)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Tokens, int32 [N, S], of N prompts, see `encode_texts`; warns once if any are cut."""
        ids_NS, num_cut = self.encode_and_count(texts)
        if num_cut:
            message = "prompts are longer than text_len=%d tokens and are cut; shorten data.templates"
            logging.log_first_n(logging.WARNING, message, 1, self.config.text_len)
        return ids_NS

    def encode_and_count(self, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """See `encode_texts`."""
        return encode_texts(self.tokenizer, texts, self.config.text_len, self.config.lowercase)


class ImageTextIterator(common.PrefetchingIterator):
    """Yields batches; `get_state` and `set_state` save and restore the position exactly.

    The "streams" of a state map processes to the numbers of the broken examples that they have found. To
    resume with another number of processes, give each the `merge_states` of all.
    """

    def __init__(self, dataset: ImageTextDataset):
        self._dataset, self._step = dataset, 0
        self._broken: set[int] = set()  # found by this process
        self._broken_elsewhere: dict[int, set[int]] = {}  # by other processes, before the last resume
        self._num_texts = self._num_cut = 0  # since this launch
        rows = dataset.config.batch_size // dataset.process_count
        self._chunk_rows = common.largest_divisor(rows, CHUNK_ROWS)
        self._chunks_per_step = rows // self._chunk_rows

    def metrics(self) -> dict[str, float]:
        """`data/skipped` and `data/texts_cut`, where they are not zero.

        `data/skipped` counts the different broken examples since the run began: those that this
        process has found, and those that all processes had found before the last resume.
        `data/texts_cut` is the fraction of this process's texts since its launch that have more tokens
        than `text_len`.
        """
        values = {
            "data/skipped": len(self._broken.union(*self._broken_elsewhere.values())),
            "data/texts_cut": self._num_cut / max(self._num_texts, 1),
        }
        return {name: value for name, value in values.items() if value}

    def __next__(self) -> Batch:
        chunks = self.start_prefetch()
        parts = [next(chunks) for _ in range(self._chunks_per_step)]
        for part in parts:
            self._note_broken(part.pop("broken"))
        self._count_cut(sum(part.pop("cut") for part in parts), sum(len(part["text"]) for part in parts))
        self._step += 1
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def get_state(self) -> dict[str, Any]:
        # Each process writes its own; all of them keep those of processes that no longer take part.
        found = {i: each for i, each in self._broken_elsewhere.items() if i >= self._dataset.process_count}
        found[self._dataset.process_index] = self._broken
        streams = {str(i): sorted(each) for i, each in found.items()}
        return {"step": self._step, "streams": streams, "settings": dict(self._dataset.settings)}

    def set_state(self, state: dict[str, Any], allow_change: bool = False) -> None:
        """Moves to the position at which `state` was taken, by this process or merged from several.

        Args:
          allow_change: whether the state may come from other data; the number of batches stays the same,
            so that with another batch size examples are skipped or come again.

        Raises:
          ValueError: the state has other data settings.
        """
        changed = common.check_settings(state["settings"], self._dataset.settings, allow_change)
        self.close()
        self._step = state["step"]
        if "batch_size" in changed:
            before, now = state["settings"]["batch_size"], self._dataset.settings["batch_size"]
            what = "%d examples were read; the data continues after the first %d in their order"
            logging.warning(what, self._step * before, self._step * now)
        broken = {} if changed else {int(name): set(found) for name, found in state["streams"].items()}
        self._broken = broken.pop(self._dataset.process_index, set())
        self._broken_elsewhere = broken

    def _note_broken(self, broken: list[tuple[int, str]]) -> None:
        for index, message in broken:
            is_new = index not in self._broken
            self._broken.add(index)
            if len(self._broken) > self._dataset.config.max_broken:
                raise _too_many_broken(self._dataset.config.max_broken, message)
            if is_new:
                logging.warning("skipped a broken example: %s", message)

    def _count_cut(self, num_cut: int, num_texts: int) -> None:
        if num_cut and not self._num_cut and self._dataset.is_train:
            logging.warning(
                "%d of %d texts are longer than text_len=%d tokens and are cut; the metric data/texts_cut"
                " is the fraction so far",
                *(num_cut, num_texts, self._dataset.config.text_len),
            )
        self._num_cut, self._num_texts = self._num_cut + num_cut, self._num_texts + num_texts

    def _open(self) -> grain.DatasetIterator:
        config, per_step = self._dataset.config, self._chunks_per_step
        ahead = max(config.num_threads, 2 * per_step)
        chunks = grain.MapDataset.source(_Chunks(self._dataset, per_step))[self._step * per_step :]
        options = grain.ReadOptions(config.num_threads, ahead)
        count = min(config.num_workers, len(chunks) * self._chunk_rows // ROWS_PER_WORKER)
        if not count:
            return iter(chunks.to_iter_dataset(options))
        from maxlp.data.in_workers import InWorkers

        made = InWorkers([chunks[i::count].to_iter_dataset(options) for i in range(count)])
        return iter(grain.experimental.ThreadPrefetchIterDataset(made, prefetch_buffer_size=per_step))


class _Chunks:
    """The batches of one process in chunks of equal size: a random-access source for Grain."""

    def __init__(self, dataset: ImageTextDataset, chunks_per_step: int):
        self._dataset, self._chunks_per_step = dataset, chunks_per_step
        self._size = dataset.config.batch_size // dataset.process_count // chunks_per_step

    def __len__(self) -> int:
        epochs = (self._dataset.config.num_epochs or 2**31) if self._dataset.is_train else 1
        return min(epochs * self._dataset.steps_per_epoch * self._chunks_per_step, sys.maxsize)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        data = self._dataset
        step, part = divmod(int(index), self._chunks_per_step)
        epoch, step = divmod(step, data.steps_per_epoch)
        part += data.process_index * self._chunks_per_step
        first = step * data.config.batch_size + part * self._size
        make = self._train_example if data.is_train else self._validation_example
        broken: list[tuple[int, str]] = []
        rows = [make(epoch, place, broken) for place in range(first, first + self._size)]
        size = data.config.image_size
        blank = Example(np.zeros((size, size, 3), np.uint8), "", -1)
        chosen = [row or blank for row in rows]
        text_NS, num_cut = data.encode_and_count([row.text for row in chosen])
        chunk = {
            "image": np.stack([row.image for row in chosen]),
            "text": text_NS,
            "broken": broken,
            "cut": num_cut,
        }
        if not data.is_train:
            chunk["label"] = np.array([row.label for row in chosen], np.int32)
            chunk["mask"] = np.array([row is not None for row in rows])
        return chunk

    def _train_example(self, epoch: int, place: int, broken: list[tuple[int, str]]) -> Example:
        examples, config = self._dataset.examples, self._dataset.config
        seed = self._dataset.settings["seed"]
        # Batches until a row comes to the same place again.
        cycle = len(examples) // math.gcd(len(examples), config.batch_size)
        for number in range(config.max_broken + 1):
            other = (place + number * config.batch_size + number // cycle) % len(examples)
            index = common.shuffled(other, len(examples), (seed, ORDER, epoch))
            rng = np.random.Generator(np.random.PCG64((seed, AUGMENT, epoch, index)))
            try:
                return examples.example(index, rng)
            except BrokenExample as error:
                broken.append((index, str(error)))
        raise _too_many_broken(config.max_broken, broken[-1][1])

    def _validation_example(self, _: int, place: int, broken: list[tuple[int, str]]) -> Example | None:
        if place >= len(self._dataset.examples):
            return None
        try:
            return self._dataset.examples.example(place, None)
        except BrokenExample as error:
            broken.append((place, str(error)))
            return None


def _too_many_broken(max_broken: int, last: str) -> BrokenExample:
    return BrokenExample(
        f"more than max_broken={max_broken} examples are broken, the last of them {last}; repair them or "
        "raise max_broken"
    )


# --- examples -------------------------------------------------------------------------------------


class Examples(Protocol):
    """The examples of one source and split, by number."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes that labels are indices of."""
        ...

    @property
    def templates(self) -> Sequence[str]:
        """Sentences with `{}` for the name of a class."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes with the examples; see `data.fingerprint`."""
        ...

    def __len__(self) -> int: ...

    def example(self, index: int, rng: np.random.Generator | None) -> Example:
        """Example `index`, augmented if there is an `rng`.

        Raises:
          BrokenExample: it cannot be used; the message begins with its location.
        """
        ...


def _open(spec: Spec, image_size: int, each_face: bool = False) -> Examples | Source:
    if spec.kind != "glyphs":
        return open_source(spec)
    from maxlp.data.glyphs import Glyphs

    try:
        return Glyphs(spec.split, image_size, each_face, **spec.options)
    except ValueError as error:
        raise ValueError(f"source {spec.text!r}: {error}") from None


class EncodedExamples:
    """The examples of a source, decoded and cropped to the size of `config`."""

    def __init__(self, source: Source, config: ImageTextDataConfig, preprocessing: images.Preprocessing):
        self._source, self._config, self._preprocessing = source, config, preprocessing
        self.classes = source.classes
        if config.classes:
            self.classes = _lines("classes", config.classes, "class name")
        self.templates: Sequence[str] = tuple(config.templates) or source.templates or TEMPLATES
        if path := config.templates_file:
            self.templates = _lines("templates_file", path, "template")
            for template in self.templates:
                if error := HasPlaceholder().error(template):
                    raise ValueError(f"templates_file={path!r}: {template!r} {error}")

    @property
    def fingerprint(self) -> str:
        """That of the source, its classes and templates."""
        return fingerprint.of_json(self._source.fingerprint, list(self.classes), self.templates)

    def __len__(self) -> int:
        return len(self._source)

    def example(self, index: int, rng: np.random.Generator | None) -> Example:
        record = self._source[index]
        try:
            return Example(self._pixels(record["image"], rng), self.caption(record, rng), record["label"])
        except BrokenExample as error:
            raise BrokenExample(f"{self._source.where(index)}: {error}") from None

    def _pixels(self, data: bytes | np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        size, config = self._config.image_size, self._config
        if isinstance(data, np.ndarray):
            image = images.Image.fromarray(data)
        else:
            image = images.open_image(data, config.max_pixels)
        if rng is None:
            return images.eval_crop(image, size, self._preprocessing)
        return images.random_crop(image, size, rng, config.crop_scale, how=self._preprocessing)

    def caption(self, record: dict[str, Any], rng: np.random.Generator | None) -> str:
        """The caption of a record, or a template with its class: a random one if there is an `rng`.

        Raises:
          BrokenExample: it has neither a caption nor the label of a class.
        """
        label = record["label"]
        if record["text"] is not None:
            return record["text"]
        if label < 0:
            raise BrokenExample("it has neither a caption nor a label")
        if label >= len(self.classes):
            raise BrokenExample(
                f"no caption, and its label {label} is not one of the {len(self.classes)} classes; list all"
                " classes in the file data.classes"
            )
        choice = 0 if rng is None else int(rng.integers(len(self.templates)))
        return self.templates[choice].format(self.classes[label])


def _lines(key: str, path: str, what: str) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8-sig") as file:  # drops a byte order mark
            names = [line.strip() for line in file if line.strip()]
    except (OSError, ValueError) as error:  # not text, or not a path
        raise ValueError(
            f"{key}={path!r} cannot be read ({error}); give a text file with one {what} per line"
        ) from None
    if not names:
        raise ValueError(f"{key}={path!r} is empty; give a text file with one {what} per line")
    return names
