"""Prepared TensorFlow Datasets, through their random-access data source; TensorFlow is not needed."""

import os
from typing import Any

from maxlp.data.readers import as_text, check_utf8, walk
from maxlp.data.sources import Source, Spec
from maxlp.runtime.extras import import_extra
from maxlp.runtime.files import is_url
from maxlp.runtime.messages import one_line

TEXT_KEYS = {"text_key": "text"}
IMAGE_TEXT_KEYS = {"image_key": "image", "text_key": "", "label_key": "label"}


class TfdsExamples:
    """Examples of one split; images stay encoded."""

    def __init__(self, name: str, split: str, data_dir: str | None, keys: dict[str, str]):
        """Opens the dataset.

        Args:
          keys: names of the features: "text_key", for images also "image_key" and "label_key". With
            an empty text key, images have labels only.
        """
        tfds = import_extra("tensorflow_datasets")
        self._name, self._keys = name, keys
        image_key = keys.get("image_key")
        decoders = {image_key: tfds.decode.SkipDecoding()} if image_key else None
        try:
            self._examples = tfds.data_source(
                name, split=split, data_dir=data_dir, download=False, decoders=decoders
            )
        except Exception as error:  # TFDS raises many types, some with pages of text
            where, reason = f" in data_dir {data_dir}" if data_dir else "", one_line(error)
            fix = "prepare it with `tfds build --file_format=array_record` and set ?data_dir= and ?split="
            if reason.startswith("Unknown split") and not image_key:  # ?split= would be for training, too
                fix = "convert one with `maxlp.prepare text --split=`, to be divided into both splits"
            raise ValueError(
                f"TFDS {name!r}, split {split!r}{where} cannot be opened ({reason}); {fix}"
            ) from None
        info = self._examples.dataset_info
        if info.file_format == tfds.core.FileFormat.ARRAY_RECORD:
            from maxlp.data.readers.array_record import Records

            files = info.splits[split].file_instructions
            self._examples.data_source = Records([(each.filename, each.skip, each.take) for each in files])
        features = info.features
        text_key, label_key = keys["text_key"], keys.get("label_key", "")
        for key in (image_key or text_key, text_key or label_key):
            if key not in features:
                options = ", ".join(f"?{option}=" for option in keys)
                raise ValueError(f"no feature {key!r}, found: {', '.join(features)}; set {options}")
        has_names = label_key in features and isinstance(features[label_key], tfds.features.ClassLabel)
        self.classes = features[label_key].names if has_names else ()

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        example, key = self._examples[row], self._keys["text_key"]
        text = as_text(example[key], key) if key else None
        if "image_key" not in self._keys:
            return {"text": text}
        check_utf8(text)
        if isinstance(text, bytes):
            text = text.decode()
        label = int(example.get(self._keys["label_key"], -1))
        return {"image": example[self._keys["image_key"]], "text": text, "label": label}

    def where(self, row: int) -> str:
        return f"TFDS {self._name!r}: example {row}"

    def paths(self) -> list[str]:
        return sorted(walk(str(self._examples.dataset_info.data_dir)))


def open_tfds(
    spec: Spec,
    *,
    image_key: str | None = None,
    text_key: str | None = None,
    label_key: str | None = None,
    data_dir: str = "",
) -> Source:
    """Opens a prepared dataset.

    Args:
      image_key, text_key, label_key: names of features. For text, `text_key` is "text" by default,
        and the others must not be given. For images they are "image", none and "label" by default.
      data_dir: where the dataset was prepared; TFDS's own default if empty.

    Raises:
      ValueError: an option for images, given for text.
    """
    given = {"image_key": image_key, "text_key": text_key, "label_key": label_key}
    keys = dict(TEXT_KEYS if spec.content == "text" else IMAGE_TEXT_KEYS)
    for option, key in given.items():
        if key is not None and option not in keys:
            raise ValueError(f"option {option!r} is for images; text takes {', '.join(keys)}")
        if key is not None:
            keys[option] = key
    if data_dir and not is_url(data_dir) and not os.path.isdir(os.path.expanduser(data_dir)):
        raise ValueError(f"data_dir={data_dir} is not a folder; give the one that `tfds build` wrote to")
    examples = TfdsExamples(spec.path, spec.split, data_dir or None, keys)
    return Source(spec, examples, classes=examples.classes)
