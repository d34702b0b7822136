import pytest

from maxlp.data.specs import split_options


def test_split_options_keeps_wildcards():
    assert split_options("text:/a/?.txt") == ("text:/a/?.txt", {})
    assert split_options("a/?b/*?x=1&y=a=b") == ("a/?b/*", {"x": "1", "y": "a=b"})
    assert split_options("tfds:c4?split=train[:9%]+test") == ("tfds:c4", {"split": "train[:9%]+test"})


def test_an_option_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"'a\?x=1&x=2' gives an option twice"):
        split_options("a?x=1&x=2")
