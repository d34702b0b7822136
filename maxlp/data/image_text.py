"""Image-text batches on Grain: examples → pixels and tokens → global batches.

    glyphs                                   characters and their Unicode names, no download; data/glyphs.py
    digits                                   scikit-learn's handwritten digits, if it is installed
    tar:/data/cc12m/{00000..01242}.tar       WebDataset tars; data/tars.py
    array_record:/data/cc12m_prepared        a folder written by `python -m maxlp.prepare image_text`
    tfds:imagenet2012?data_dir=/data/tfds    a prepared TFDS dataset with random access

Options follow a `?` and are joined by `&`: those of `Glyphs`, `text=` of tars (the type of the captions'
files), `image_key=`, `text_key=` and `label_key=` of TFDS. `heldout=` is for records what part of them is
held out of training, and `split=` overrides the split asked for.

How a batch comes about: an epoch is a permutation of the examples that depends on the seed and the epoch
alone, cut into whole batches; the few examples that are left go by until the next epoch, which has another
order. So no example is twice in a batch. How one is cropped or drawn depends on the seed, the epoch and
the example. The state therefore is the step, and any number of processes and workers restores it.

In place of a broken example comes the one that has its row in the next batch of the epoch.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np
from absl import logging

from maxlp.data import images, tars
from maxlp.data import sources as sources_lib
from maxlp.data import tokenizer as tokenizer_lib
from maxlp.data.common import Batch, check, check_settings, claims, in_workers, largest_divisor, shuffled
from maxlp.data.glyphs import Glyphs
from maxlp.data.images import BrokenExample, Example

MANIFEST_FORMAT = "maxlp-image-text-1"
TEMPLATES = ("a photo of a {}.",)
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGIT_TEMPLATES = ("a photo of the digit {}", "the number {} in handwriting", "a handwritten {}", "{}")
CHUNK_ROWS = 32  # that one thread makes at a time
ORDER, AUGMENT = 0, 1  # what a random number is of, so that no two have the same seeds


def make_data(
    *,
    split: str = "train",
    source: str = "glyphs",
    heldout_source: str = "",
    tokenizer: str = "bytes",
    text_len: int,
    image_size: int,
    batch_size: int,
    crop_scale: tuple[float, float] = images.CROP_SCALE,
    classes: str = "",
    templates: Sequence[str] = (),
    max_pixels: int = images.MAX_PIXELS,
    max_broken: int = 100,
    num_epochs: int | None = None,
    num_threads: int = 4,
    num_workers: int = 0,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> ImageTextDataset:
    """Makes the training or the held-out batches of one data section of a config.

    An iterator yields this process's rows of the global batch: `image` uint8 (B, H, W, 3) and `text` int32
    (B, S). Held-out data has each example once, in order, with its `label` int32 (B,), -1 without one, and
    `mask` bool (B,), which is false in the padding of the last batch and where an example is broken.

    Args:
      split: "train", or "heldout": one pass without augmentation.
      source: see the module.
      heldout_source: what is read for the split "heldout"; empty for the held-out part of `source`.
      tokenizer: as in `tokenizer.make_tokenizer`.
      text_len: S, the beginning and the end of a text included; longer texts are cut before their end, and
        counted (`data/texts_cut`).
      image_size: H and W in pixels.
      batch_size: B of the global batch, a multiple of `process_count`.
      crop_scale: least and greatest part of an image's area that a training crop has.
      classes: a file with the name of a class a line, for data whose labels have no names.
      templates: sentences with `{}` for the name of a class: captions of images that have only a label
        (in training one at random, else the first), and prompts for classification. Empty for those of
        the source.
      max_pixels: images of more are taken for broken.
      max_broken: how many different broken examples each process passes over before it stops.
      num_epochs: None repeats without end.
      num_threads: that read and decode, in each worker.
      num_workers: processes that read and decode, 0 for this one.
      seed: of the order and the augmentation.
      process_index, process_count: of this process among those that share the global batch.

    Raises:
      ValueError: a value out of range, a source or tokenizer that cannot be read.
    """
    wanted = claims(batch_size, num_epochs, num_workers, seed, process_index, process_count) | {
        f"split={split!r} is unknown; choose 'train' or 'heldout'": split in ("train", "heldout"),
        f"text_len={text_len} must be at least 3: beginning, text and end": text_len >= 3,
        f"image_size={image_size} must be positive": image_size > 0,
        f"crop_scale={tuple(crop_scale)} must be two ascending fractions above 0, up to 1": (
            len(crop_scale) == 2 and 0 < crop_scale[0] <= crop_scale[1] <= 1
        ),
        f"templates={templates!r} must each have a {{}} for the class": (
            not isinstance(templates, str) and all("{}" in each for each in templates)
        ),
        f"num_threads={num_threads} must be positive": num_threads > 0,
        f"max_broken={max_broken} must not be negative": max_broken >= 0,
    }
    check(wanted)
    spec = heldout_source if split == "heldout" and heldout_source else source
    examples = _open(
        spec, split, image_size, (crop_scale[0], crop_scale[1]), classes, tuple(templates), max_pixels
    )
    if split == "train" and len(examples) < batch_size:
        raise ValueError(
            f"batch_size={batch_size} is more than the {len(examples)} examples of source={spec!r};"
            f" use at most {len(examples)}"
        )
    encoder = tokenizer_lib.make_tokenizer(tokenizer)
    return ImageTextDataset(
        examples=examples,
        tokenizer=encoder,
        text_len=text_len,
        settings=dict(
            seed=seed,
            batch_size=batch_size,
            examples=len(examples),
            num_epochs=num_epochs,
            tokenizer=encoder.fingerprint,
        ),
        is_train=split == "train",
        max_broken=max_broken,
        num_threads=num_threads,
        num_workers=num_workers,
        process_index=process_index,
        process_count=process_count,
    )


def captions(spec: str) -> Iterator[str]:
    """The training captions of a source, each once and in order; for one, to train a tokenizer on them.

    For a source of labelled images they are the names of its classes in its templates.
    """
    if spec.partition("?")[0] == "glyphs":
        yield from _open(spec, "train", 32, images.CROP_SCALE, "", (), images.MAX_PIXELS).classes
        return
    records = open_records(spec, "train")
    yield from (template.format(name) for name in records.classes for template in records.templates)
    if not records.classes:
        yield from (records.source[index]["text"] or "" for index in range(len(records)))


def open_records(spec: str, split: str) -> Records:
    """The records of a source as they are read: encoded images with captions or labels.

    Raises:
      ValueError: there is no such source, or its images are drawn.
    """
    if spec.partition("?")[0] == "glyphs":
        raise ValueError(f"source {spec!r} is drawn when it is used; there are no files to read")
    return _open(spec, split, 1, images.CROP_SCALE, "", (), images.MAX_PIXELS)


def encode_texts(tokenizer: Any, texts: Sequence[str], text_len: int) -> tuple[np.ndarray, int]:
    """Tokens int32 (N, text_len), and how many texts are cut because they are longer.

    A row is beginning, text, end and padding; of a long text the end is kept.
    """
    ids_NS, room, cut = np.full((len(texts), text_len), tokenizer.pad_id, np.int32), text_len - 2, 0
    for row_S, text in zip(ids_NS, texts, strict=True):
        ids = tokenizer.encode(text)
        cut += len(ids) > room
        ids = ids[:room]
        row_S[0], row_S[1 : len(ids) + 1], row_S[len(ids) + 1] = tokenizer.bos_id, ids, tokenizer.eos_id
    return ids_NS, cut


@dataclasses.dataclass(frozen=True)
class ImageTextDataset:
    """Batches of images and texts: `iter(dataset)` gives an `ImageTextIterator`. See `make_data`.

    Attributes:
      tokenizer, text_len: what `encode` uses.
      settings: what the order of examples depends on.
    """

    examples: Examples
    tokenizer: Any
    text_len: int
    settings: dict[str, Any]
    is_train: bool
    max_broken: int
    num_threads: int
    num_workers: int
    process_index: int
    process_count: int

    def __iter__(self) -> ImageTextIterator:
        return ImageTextIterator(self)

    @property
    def classes(self) -> list[str]:
        """Names of the classes that labels are indices of; empty for data without."""
        return list(self.examples.classes)

    @property
    def templates(self) -> list[str]:
        """Sentences with `{}` for the name of a class."""
        return list(self.examples.templates)

    @property
    def steps_per_epoch(self) -> int:
        examples, batch_size = len(self.examples), self.settings["batch_size"]
        return examples // batch_size if self.is_train else -(-examples // batch_size)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Tokens int32 (N, text_len) of N texts; see `encode_texts`."""
        return encode_texts(self.tokenizer, texts, self.text_len)[0]


class ImageTextIterator:
    """Yields batches; `get_state` and `set_state` stop and resume exactly.

    The state is a dict that JSON can hold:

      {"step": batches yielded so far,
       "streams": {process: numbers of the broken examples that it knows},
       "settings": what the order depends on}

    To resume with another number of processes, give each the `merge_states` of all.
    """

    def __init__(self, dataset: ImageTextDataset):
        self._dataset, self._step = dataset, 0
        self._broken: set[int] = set()
        self._texts = self._cut = 0  # since this start
        self._chunks: grain.DatasetIterator | None = None  # made ahead
        rows = dataset.settings["batch_size"] // dataset.process_count
        self._parts = rows // largest_divisor(rows, CHUNK_ROWS)

    def __iter__(self) -> ImageTextIterator:
        return self

    def metrics(self) -> dict[str, float]:
        """`data/skipped` and `data/texts_cut`, where they are not zero.

        Skipped are the different broken examples met since the run began: those that this process met, and
        before a resume all processes; the state has their numbers. Cut is the fraction of this process's
        texts since the start that have more tokens than `text_len`.
        """
        found = {"data/skipped": len(self._broken), "data/texts_cut": self._cut / max(self._texts, 1)}
        return {name: value for name, value in found.items() if value}

    def __next__(self) -> Batch:
        chunks = self.start_prefetch()
        parts = [next(chunks) for _ in range(self._parts)]
        for part in parts:
            self._note(part.pop("broken"))
        self._count_cut(sum(part.pop("cut") for part in parts), sum(len(part["text"]) for part in parts))
        self._step += 1
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def start_prefetch(self) -> grain.DatasetIterator:
        """Begins to make the first batches; `next` does so too, but by then they are waited for."""
        if self._chunks is None:
            self._chunks = self._open_chunks()
            self._chunks.start_prefetch()
        return self._chunks

    def get_state(self) -> dict[str, Any]:
        streams = {str(self._dataset.process_index): sorted(self._broken)}
        return {"step": self._step, "streams": streams, "settings": dict(self._dataset.settings)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken, by this process or, merged, by any number of them.

        Raises:
          ValueError: the state is of other data settings.
        """
        check_settings(state["settings"], self._dataset.settings)
        self.close()
        self._step = state["step"]
        self._broken = {index for broken in state["streams"].values() for index in broken}

    def close(self) -> None:
        """Ends threads and worker processes; the iterator can still be used, from where it is."""
        if self._chunks is not None:
            self._chunks.close()
        self._chunks = None

    def _note(self, broken: list[tuple[int, str]]) -> None:
        for index, message in broken:
            if index not in self._broken:
                self._broken.add(index)
                logging.warning("skipped a broken example: %s", message)
            if len(self._broken) > self._dataset.max_broken:
                raise ValueError(
                    f"more than max_broken={self._dataset.max_broken} examples are broken, the last of"
                    f" them {message}; mend the data or raise max_broken"
                )

    def _count_cut(self, cut: int, texts: int) -> None:
        if cut and not self._cut and self._dataset.is_train:
            logging.warning(
                "%d of %d texts are longer than text_len=%d tokens and are cut; data/texts_cut is the share"
                " of such texts from here on",
                *(cut, texts, self._dataset.text_len),
            )
        self._cut, self._texts = self._cut + cut, self._texts + texts

    def _open_chunks(self) -> grain.DatasetIterator:
        dataset = self._dataset
        chunks = _Chunks(dataset, self._parts)
        ahead = max(dataset.num_threads, 2 * self._parts)
        todo = grain.MapDataset.source(chunks)[self._step * self._parts :]
        found = todo.to_iter_dataset(grain.ReadOptions(dataset.num_threads, ahead))
        if dataset.num_workers:
            found = in_workers(found, grain.MultiprocessingOptions(dataset.num_workers))
        return iter(found)


class _Chunks:
    """The batches of one process in parts of equal size, by number: a random-access source of Grain."""

    def __init__(self, dataset: ImageTextDataset, parts: int):
        self._dataset, self._parts = dataset, parts
        self._size = dataset.settings["batch_size"] // dataset.process_count // parts

    def __len__(self) -> int:
        epochs = (self._dataset.settings["num_epochs"] or 2**31) if self._dataset.is_train else 1
        return epochs * self._dataset.steps_per_epoch * self._parts

    def __getitem__(self, index: Any) -> dict[str, Any]:
        data = self._dataset
        step, part = divmod(int(index), self._parts)
        epoch, step = divmod(step, data.steps_per_epoch)
        first = step * data.settings["batch_size"] + (data.process_index * self._parts + part) * self._size
        make = self._train_example if data.is_train else self._heldout_example
        broken: list[tuple[int, str]] = []
        rows = [make(epoch, place, broken) for place in range(first, first + self._size)]
        size = data.examples.image_size
        blank = Example(np.zeros((size, size, 3), np.uint8), "", -1)
        chosen = [row or blank for row in rows]
        text_NS, cut = encode_texts(data.tokenizer, [row.text for row in chosen], data.text_len)
        chunk = {
            "image": np.stack([row.image for row in chosen]),
            "text": text_NS,
            "broken": broken,
            "cut": cut,
        }
        if not data.is_train:
            chunk["label"] = np.array([row.label for row in chosen], np.int32)
            chunk["mask"] = np.array([row is not None for row in rows])
        return chunk

    def _train_example(self, epoch: int, place: int, broken: list[tuple[int, str]]) -> Example:
        data, (seed, batch_size) = self._dataset, self._seed_and_batch_size
        for _ in range(data.max_broken + 1):
            order = (seed, ORDER, epoch)
            index = shuffled(place % len(data.examples), len(data.examples), order)
            rng = np.random.Generator(np.random.PCG64((seed, AUGMENT, epoch, index)))
            try:
                return data.examples.example(index, rng)
            except BrokenExample as error:
                broken.append((index, f"{data.examples.where(index)}: {error}"))
                place += batch_size
        raise ValueError(
            f"more than max_broken={data.max_broken} broken examples, the last {broken[-1][1]}; mend the"
            " data or raise max_broken"
        )

    def _heldout_example(self, epoch: int, place: int, broken: list[tuple[int, str]]) -> Example | None:
        examples = self._dataset.examples
        if place >= len(examples):
            return None
        try:
            return examples.example(place, None)
        except BrokenExample as error:
            broken.append((place, f"{examples.where(place)}: {error}"))
            return None

    @property
    def _seed_and_batch_size(self) -> tuple[int, int]:
        return self._dataset.settings["seed"], self._dataset.settings["batch_size"]


# --- examples -------------------------------------------------------------------------------------


class Examples(Protocol):
    """The examples of one source and split, by number."""

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def templates(self) -> Sequence[str]: ...

    @property
    def image_size(self) -> int: ...

    def __len__(self) -> int: ...

    def example(self, index: int, rng: np.random.Generator | None) -> Example:
        """Example `index`, with `rng` augmented.

        Raises:
          BrokenExample: it cannot be used.
        """
        ...

    def where(self, index: int) -> str:
        """Names an example, for a warning."""
        ...


@dataclasses.dataclass(frozen=True)
class Records:
    """Encoded images with captions or labels: `source[i]` is {"image", "text", "label"}.

    An image is the bytes of a file, or uint8 (h, w, 3); a text is None where there is only a label.
    """

    source: sources_lib.Source
    classes: Sequence[str]
    templates: Sequence[str]
    image_size: int
    crop_scale: tuple[float, float]
    max_pixels: int

    def __len__(self) -> int:
        return len(self.source)

    def example(self, index: int, rng: np.random.Generator | None) -> Example:
        record = self.source[index]
        data, text, label = record["image"], record["text"], record["label"]
        if isinstance(data, np.ndarray):
            image = images.Image.fromarray(data)
        else:
            image = images.open_image(data, self.max_pixels)
        if rng is None:
            pixels = images.eval_crop(image, self.image_size)
        else:
            pixels = images.random_crop(image, self.image_size, rng, self.crop_scale)
        if text is None:
            if not 0 <= label < len(self.classes):
                raise BrokenExample(
                    f"no caption, and its label {label} is none of {len(self.classes)} classes, whose names"
                    " the file of data.classes gives"
                )
            choice = 0 if rng is None else int(rng.integers(len(self.templates)))
            text = self.templates[choice].format(self.classes[label])
        return Example(pixels, text, label)

    def where(self, index: int) -> str:
        return self.source.records.where(self.source.row(index))


def _open(
    spec: str,
    split: str,
    image_size: int,
    crop_scale: tuple[float, float],
    class_file: str,
    templates: tuple[str, ...],
    max_pixels: int,
) -> Any:
    kind, path, split, options = sources_lib.parse_spec(spec, split, KINDS, pathless=("glyphs", "digits"))
    try:
        if kind == "glyphs":
            return Glyphs(split, image_size, **options)
        records, names, own_templates, part = KINDS[kind](path, split, **options)
    except ValueError as error:
        raise ValueError(f"source {spec!r}: {sources_lib.one_line(error)}") from None
    if class_file:
        names = _class_names(class_file)
    every = None if kind == "tfds" else sources_lib.every(part)
    source = sources_lib.Source(spec, split, records, every)
    return Records(source, names, templates or own_templates, image_size, crop_scale, max_pixels)


def _class_names(path: str) -> list[str]:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"classes={path!r} cannot be read ({error}); give a text file with the name of a class a line"
        ) from None


# What a kind makes of its options: records, names of classes, templates, part that is held out.
_Opened = tuple[Any, Sequence[str], Sequence[str], float]


def _tars(path: str, split: str, *, text: str = "txt", heldout: float = sources_lib.HELDOUT) -> _Opened:
    return tars.Tars(path, text), (), TEMPLATES, heldout


def _array_record(path: str, split: str, *, heldout: float = sources_lib.HELDOUT) -> _Opened:
    records = _ArrayRecord(os.path.expanduser(path))
    return records, records.classes, TEMPLATES, heldout


def _tfds(
    path: str,
    split: str,
    *,
    image_key: str = "image",
    text_key: str = "",
    label_key: str = "label",
    data_dir: str = "",
) -> _Opened:
    records = _Tfds(path, split, image_key, text_key, label_key, data_dir or None)
    return records, records.classes, TEMPLATES, 0.0


def _digits(path: str, split: str, *, heldout: float = 0.2) -> _Opened:
    return _Digits(), DIGITS, DIGIT_TEMPLATES, heldout


KINDS: dict[str, Callable[..., Any]] = {
    "glyphs": Glyphs,
    "digits": _digits,
    "tar": _tars,
    "array_record": _array_record,
    "tfds": _tfds,
}


class _Digits:
    """Handwritten digits of 8 × 8 pixels, from the file that scikit-learn brings along."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("sklearn")
        folders = list(found.submodule_search_locations or []) if found else []
        paths = [os.path.join(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
        if not paths or not os.path.isfile(paths[0]):
            raise ValueError("the digits come with scikit-learn; pip install scikit-learn")
        with gzip.open(paths[0], "rt", encoding="ascii") as file:
            rows = np.array([[int(float(value)) for value in row] for row in csv.reader(file)])
        self.pixels_NHW = (255 - rows[:, :-1] * 255 // 16).astype(np.uint8).reshape(-1, 8, 8)
        self.labels_N = rows[:, -1]

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, row: int) -> dict[str, Any]:
        image = np.repeat(self.pixels_NHW[row][..., None], 3, axis=-1)
        return {"image": image, "text": None, "label": int(self.labels_N[row])}

    def where(self, row: int) -> str:
        return f"digit {row}"


class _ArrayRecord:
    """What `maxlp.prepare image_text` wrote; see `pack_record`."""

    def __init__(self, folder: str):
        manifest = sources_lib.read_manifest(folder, MANIFEST_FORMAT)
        self.folder, self.classes = folder, manifest["classes"]
        self.reader = sources_lib.open_shards(folder, manifest)

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            return unpack_record(self.reader[row])
        except RuntimeError as error:  # its checksum is wrong
            raise BrokenExample(f"it cannot be read ({sources_lib.one_line(error)})") from None

    def where(self, row: int) -> str:
        try:
            return f"{self.folder}: record {row}, from {self[row]['where']}"
        except BrokenExample:
            return f"{self.folder}: record {row}"


class _Tfds:
    """A prepared TFDS dataset; its images stay encoded until they are used."""

    def __init__(
        self, name: str, split: str, image_key: str, text_key: str, label_key: str, data_dir: str | None
    ):
        tfds = sources_lib.import_extra("tensorflow_datasets")
        self.name, self.keys = name, (image_key, text_key, label_key)
        decoders = {image_key: tfds.decode.SkipDecoding()}
        self.examples = sources_lib.open_tfds(name, split, data_dir, decoders)
        features = self.examples.dataset_info.features
        for key in filter(None, (image_key, text_key or label_key)):
            if key not in features:
                found = ", ".join(features)
                raise ValueError(f"no feature {key!r}, found: {found}; set image_key, text_key, label_key")
        self.classes = getattr(features.get(label_key), "names", None) or ()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        image_key, text_key, label_key = self.keys
        example = self.examples[row]
        text = sources_lib.as_bytes(example[text_key]).decode(errors="replace") if text_key else None
        return {"image": example[image_key], "text": text, "label": int(example.get(label_key, -1))}

    def where(self, row: int) -> str:
        return f"TFDS {self.name!r}: example {row}"


def pack_record(record: dict[str, Any], where: str) -> bytes:
    """One example as bytes: length of the header as uint32, header as JSON, encoded image."""
    image = record["image"]
    if isinstance(image, np.ndarray):
        image = images.encode_png(image)
    header = json.dumps({"text": record["text"], "label": record["label"], "where": where}).encode()
    return len(header).to_bytes(4, "little") + header + image


def unpack_record(data: bytes) -> dict[str, Any]:
    """What `pack_record` was given."""
    end = 4 + int.from_bytes(data[:4], "little")
    return {**json.loads(data[4:end]), "image": data[end:]}
