import pickle

import numpy as np
import pytest

from maxlp.data.sources import make_source, open_source, parse_spec
from tests.data.corpora import TEXTS, as_str, error_of, picture, texts_of, write_tfds


@pytest.fixture(scope="module")
def toy_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    write_tfds(folder, TEXTS)
    return f"tfds:toy_text?data_dir={folder}"


def test_text_round_trip(toy_text):
    spec, expected = f"{toy_text}&text_key=body", sorted(TEXTS)  # TFDS shuffles when it writes
    for split in ("train", "validation"):
        assert sorted(as_str(texts_of(make_source(spec, split)))) == expected
    parts = make_source(spec + "&split=train[20%:40%]+validation[40%:]", "train")
    parts = pickle.loads(pickle.dumps(parts))  # as for a worker
    train, validation = (as_str(texts_of(make_source(spec, split))) for split in ("train", "validation"))
    assert as_str(texts_of(parts)) == train[9:18] + validation[18:]


def test_errors(toy_text):
    assert "no feature 'text', found: body; set ?text_key=" in error_of(toy_text)
    message = error_of(f"{toy_text}&split=test")
    assert "'test'" in message and "convert one with `maxlp.prepare text --split=`" in message
    assert "option 'image_key' is for images" in error_of(f"{toy_text}&image_key=body")
    message = error_of("tfds:no_such_dataset")
    assert "no_such_dataset" in message and "tfds build" in message
    assert "data_dir=/nowhere is not a folder; give" in error_of("tfds:lm1b?data_dir=/nowhere")


def test_images_stay_encoded(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(),
            "label": tfds.features.ClassLabel(names=["zero", "one"]),
            "alt": tfds.features.Text(),
        }
    )

    class Examples(list):
        dataset_info = type("Info", (), {"features": features, "file_format": None})

    def data_source(name, split, decoders, **_):
        assert (name, split) == ("mnist", "validation") and "image" in decoders
        return Examples(
            {"image": picture(i), "label": np.int64(i % 2), "alt": "café".encode()} for i in range(3)
        )

    monkeypatch.setattr(tfds, "data_source", data_source)

    def records(spec):
        source = open_source(parse_spec(spec, "validation", "image_text"))
        return source, [source[i] for i in range(3)]

    source, found = records("tfds:mnist")
    assert source.classes == ["zero", "one"] and source.where(2) == "TFDS 'mnist': example 2"
    assert found == [{"image": picture(i), "text": None, "label": i % 2} for i in range(3)]
    assert records("tfds:mnist?text_key=alt&label_key=none")[1][0] == {
        "image": picture(0),
        "text": "café",
        "label": -1,
    }
    with pytest.raises(ValueError, match=r"no feature 'caption', found: .*; set \?image_key="):
        records("tfds:mnist?text_key=caption")
