import gzip
import sys

import numpy as np
import pytest

from maxlp.data import image_text
from maxlp.data.sources import open_source, parse_spec
from maxlp.prepare import prepare_image_text


def open_digits(split):
    return open_source(parse_spec("digits", split, "image_text"))


def test_digits(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        open_digits("train")
    folder = tmp_path / "sklearn" / "datasets" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    rows = np.random.default_rng(0).integers(0, 17, (50, 64))
    with gzip.open(folder / "digits.csv.gz", "wt") as file:
        file.writelines(",".join(f"{v}.0" for v in row) + f",{i % 10}.0\n" for i, row in enumerate(rows))
    monkeypatch.delitem(sys.modules, "sklearn")
    monkeypatch.syspath_prepend(tmp_path)
    source = open_digits("validation")
    assert len(source) == 10 and len(open_digits("train")) == 40
    assert [source[i]["label"] for i in range(10)] == [i % 10 for i in range(4, 54, 5)]
    for channel in range(3):
        np.testing.assert_array_equal(
            source[0]["image"][..., channel], (255 - rows[4] * 255 // 16).reshape(8, 8)
        )
    assert source[0]["text"] is None and source.classes[4] == "four"
    config = image_text.ImageTextDataConfig(
        source="digits", tokenizer="bytes", text_len=40, image_size=8, batch_size=10
    )
    data = image_text.make_data(config, split="validation")
    captions = [source.templates[0].format(source.classes[source[i]["label"]]) for i in range(10)]
    np.testing.assert_array_equal(next(iter(data))["text"], data.encode(captions))
    expected = [template.format(name) for name in source.classes for template in source.templates]
    assert list(image_text.captions(config)) == expected and len(expected) == 40
    prepare_image_text("digits", str(tmp_path / "prepared"))
    prepared = open_source(parse_spec(f"array_record:{tmp_path}/prepared", "all", "image_text"))
    assert list(prepared.templates) == list(source.templates)
    assert list(prepared.classes) == list(source.classes)
