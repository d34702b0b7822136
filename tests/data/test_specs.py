import sys

import pytest

from maxlp.data.specs import import_extra, one_line, split_options


def test_split_options_keeps_wildcards():
    assert split_options("text:/a/?.txt") == ("text:/a/?.txt", {})
    assert split_options("a/?b/*?x=1&y=a=b") == ("a/?b/*", {"x": "1", "y": "a=b"})
    assert split_options("tfds:c4?split=train[:9%]+test") == ("tfds:c4", {"split": "train[:9%]+test"})


def test_an_option_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"'a\?x=1&x=2' gives an option twice"):
        split_options("a?x=1&x=2")


def test_a_missing_library_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pyarrow.* is not installed; run pip install 'maxlp\[data\]'"):
        import_extra("pyarrow.parquet")


def test_one_line_of_an_error():
    assert one_line(ValueError("\n first\nsecond")) == "first"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
