"""Small corpora on disk, and comparison of batches."""

import contextlib
import io
import json
import os
import resource
import tarfile

import numpy as np
import pytest
from PIL import Image

from maxlp.data.sources import make_source

TEXTS = ["first\nline", "", "zweite Zeile: äöü 漢字 🎉", 'tab\tand \\ and "quotes"', "x" * 3000] * 9


@contextlib.contextmanager
def few_open_files():
    """Lets this process open 40 more files; as is usual, it may raise the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 40, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def texts_of(source):
    return [source[i]["text"] for i in range(len(source))]


def as_str(texts):
    return [text.decode() if isinstance(text, bytes) else text for text in texts]


def error_of(spec, split="train", index=None):
    """The message of the error that a source raises when it is opened or when a document is read."""
    with pytest.raises(ValueError) as caught:
        source = make_source(spec, split)
        if index is not None:
            source[index]
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts))
    return path


def write_parquet(path, texts, key="text", rows=4):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": list(range(len(texts))), key: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def write_tfds(folder, texts):
    """A TFDS dataset `toy_text` with the feature `body`, the same texts in each split."""
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():  # found by its files, as in another process

        class ToyText(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                features = tfds.features.FeaturesDict({"body": tfds.features.Text()})
                return tfds.core.DatasetInfo(builder=self, features=features)

            def _split_generators(self, dl_manager):
                return {"train": self._generate_examples(), "validation": self._generate_examples()}

            def _generate_examples(self):
                for i, text in enumerate(texts):
                    yield i, {"body": text}

    ToyText(data_dir=str(folder), file_format="array_record").download_and_prepare()


def picture(color, size=(20, 16), mode="RGB"):
    """A PNG file of one colour."""
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, "PNG")
    return file.getvalue()


def write_files(path, files, format=tarfile.GNU_FORMAT):
    """A tar of (name, data) pairs; None as data makes a folder."""
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            if data is None:
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def write_pictures(path, count, broken=()):
    """A tar source of pictures whose colour is their number; `broken` ones are truncated or no images."""
    files = []
    for number in range(count):
        data = picture((number, 0, 0))
        if number in broken:
            data = data[:50] if number % 2 else b"not a picture"
        files += [(f"{number:03d}.png", data), (f"{number:03d}.txt", f"number {number}".encode())]
    return f"tar:{write_files(path, files)}?split=all"


def assert_same_batches(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            np.testing.assert_array_equal(ours[key], value, err_msg=key)
            assert ours[key].dtype == value.dtype
