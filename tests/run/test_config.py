"""Binding a section of a config to the function or dataclass that it configures."""

import dataclasses
import functools
import os
import sys

import pytest
from ml_collections import ConfigDict

from maxlp.run.config import ConfigError, bind, call, load_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float
    steps: int = 3

    def __post_init__(self):
        if self.rate < 0:
            raise ValueError(f"rate={self.rate} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    size: int
    inner: Inner
    optional: Inner | None = None
    names: tuple = ()
    length: int | None = None
    extra: dict = dataclasses.field(default_factory=dict)


def test_a_section_becomes_a_dataclass_with_its_nested_sections():
    section = ConfigDict(
        dict(
            size=1,
            inner=dict(rate=2),
            optional=dict(rate=None, steps=None),
            names=["a", "b"],
            extra=dict(x=1),
        )
    )
    got = call(Outer, "outer", section)
    assert got == Outer(size=1, inner=Inner(rate=2), names=("a", "b"), extra={"x": 1})
    assert hash(got.inner) == hash(Inner(rate=2))


def test_an_optional_section_is_on_as_soon_as_one_key_is_set():
    got = call(Outer, "outer", dict(size=1, inner=dict(rate=0.0), optional=dict(rate=1.0, steps=None)))
    assert got.optional == Inner(rate=1.0, steps=3), "an unset key takes the default"


def test_unset_means_the_default_unless_none_is_a_value():
    assert call(Inner, "s", dict(rate=1.0, steps=None)).steps == 3
    assert call(Outer, "s", dict(size=1, inner=dict(rate=1.0), length=None)).length is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            dict(sise=1),
            "config.s.sise is unknown (did you mean size?); keys: extra, inner, length, names,",
        ),
        (dict(inner=dict(rate=1.0)), "config.s.size is missing"),
        (dict(size="1"), "config.s.size='1' is of type str, expected int"),
        (dict(size=True), "config.s.size=True is of type bool, expected int"),
        (dict(size=1.5), "config.s.size=1.5 is of type float, expected int"),
        (dict(size=None), "config.s.size is not set; give --config.s.size=VALUE"),
        (dict(size=1, inner=dict(rate="x")), "config.s.inner.rate='x' is of type str, expected float"),
        (dict(size=1, inner=dict(rate=-1.0)), "config.s.inner.rate=-1.0 must not be negative"),
        (dict(size=1, inner=dict(speed=1)), "config.s.inner.speed is unknown; keys: rate, steps"),
        (dict(size=1, inner=dict(rate=1.0), optional=dict(steps=1)), "config.s.optional.rate is missing"),
        (
            dict(size=1, inner=dict(rate=1.0), length="7"),
            "config.s.length='7' is of type str, expected int or",
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_mismatches_are_one_line_with_the_whole_key(values, message):
    with pytest.raises(ConfigError) as caught:
        call(Outer, "s", values)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_an_argument_that_the_program_supplies_is_not_a_key():
    def function(*, size: int, workdir: str) -> tuple[int, str]:
        return size, workdir

    assert bind(function, "s", dict(size=1), "workdir")(workdir="/w") == (1, "/w")
    assert isinstance(bind(function, "s", dict(size=1), "workdir"), functools.partial)
    with pytest.raises(ConfigError, match=r"config\.s\.workdir is unknown; keys: size"):
        bind(function, "s", dict(size=1, workdir="x"), "workdir")


def test_a_renamed_key_names_its_successor():
    with pytest.raises(
        ConfigError, match=r"config\.data\.heldout_source is now config\.data\.validation_source"
    ):
        call(Outer, "data", dict(heldout_source=""))


GOOD = """from ml_collections import ConfigDict
def get_config(arg="x"):
    # ×…é
    return ConfigDict(dict(arg=arg))
"""


def test_a_config_file_is_run_with_its_argument_and_locked(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(GOOD, encoding="utf-8")
    assert (load_file(str(path)).arg, load_file(f"{path}:a=1:b").arg) == ("x", "a=1:b")
    assert load_file(str(path)).is_locked


def test_text_after_the_colon_that_a_config_file_does_not_read_is_refused(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(GOOD.replace("arg=arg", "a=1"), encoding="utf-8")
    assert load_file(str(path)).a == load_file(f"{path}:").a == 1
    with pytest.raises(ConfigError, match=r"c.py:precision=mxfp8: get_config does not use its argument"):
        load_file(f"{path}:precision=mxfp8")
    path.write_text(GOOD.replace("arg=arg", "a=[arg for _ in range(2)][0], b=(lambda: arg)()"))
    assert load_file(f"{path}:x").a == load_file(f"{path}:x").b == "x"


def test_a_config_file_that_was_rewritten_within_a_second_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "c.py"
    for arg in ("x", "y"):
        path.write_text(GOOD.replace('"x"', f'"{arg}"'), encoding="utf-8")
        os.utime(path, (1e9, 1e9))
        assert load_file(str(path)).arg == arg
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef get_config(:\n", ", line 2: SyntaxError: invalid syntax"),
        ("x = 1\ny = z\n", ", line 2: NameError: name 'z' is not defined"),
        ("import nosuch_module\n", ", line 1: ModuleNotFoundError: No module named 'nosuch_module'"),
        ("def get_config(arg):\n  return 1 / 0\n", ", line 2: ZeroDivisionError: division by zero"),
        (
            "def get_config(arg):\n  raise ValueError('size=x:\\n  one of a, b')\n",
            ", line 2: size=x: one of a",
        ),
        (
            "def get_config(arg):\n  open('/nowhere')\n",
            ", line 2: FileNotFoundError: [Errno 2] No such file",
        ),
        ("def get_config():\n  pass\n", ": TypeError: get_config() takes 0 positional arguments but 1 was"),
        (
            "def get_config(arg):\n  pass\n",
            ": get_config returns NoneType, not a ConfigDict; return the con",
        ),
        (
            "def get_config(arg):\n  return {}\n",
            ": get_config returns dict, not a ConfigDict; return the con",
        ),
        ("get_config = 3\n", " has no function get_config(arg), which returns the config"),
        (b"def get_config(arg):\n\n  x = '\xff'\n", ", line 3: SyntaxError: "),
        (b"\x00", ": "),
        (None, " is neither a file nor a preset; presets: clip/b16, "),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_config_file_that_fails_is_one_line_with_file_and_line(text, message, tmp_path):
    path = tmp_path / "c.py"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load_file(f"{path}:arg")
    got = str(caught.value)
    assert "\n" not in got and got.startswith((f"{path}{message}", f"--config={path}{message}")), got
