"""Bad inputs: valid commands of `bases`, each with one change that makes it bad by construction.

`make_case` draws a case from (seed, number) alone, so that any one can be made again without the others.
A group below is a function from a random generator to a `Case`; the groups take turns.
"""

import dataclasses
import io
import json
import math
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.commands import COMMANDS, Command
from tests.fuzz.keys import KEYS, Group, Text

Damage = Callable[[Path], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A bad input.

    Attributes:
      what: the change in words.
      command: the command that must refuse it.
      needs: the valid inputs that the command and the change use.
      damage: changes the copies of these inputs.
      environment: variables of the command.
      names: the message has to contain one of these: a key, a flag or a file.
      unprivileged: whether the command must not run as root, which permissions do not stop.
    """

    what: str
    command: Command
    needs: tuple[str, ...]
    names: tuple[str, ...]
    damage: Damage | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unprivileged: bool = False


def make_case(seed: int, number: int) -> Case:
    """The case of a number; equal arguments make equal cases."""
    rng = random.Random(f"{seed}:{number}")
    return GROUPS[number % len(GROUPS)](rng)


# --- configs --------------------------------------------------------------------------------------------

DATA = {
    "llama": ("llama.py", "tokenizer.json", "corpus"),
    "clip": ("clip.py", "tokenizer.json", "pictures"),
}
RUN = {"llama": "run", "clip": "run_clip"}
# `earlier_versions` replaces values of these keys that had no effect in older configs.
UPGRADED = {"precision.min_dim", "optimizer.decay_with_clip"}
AS_TRAINED = {"precision", "optimizer", "train"}  # `evaluate` takes these sections from the run


def _config_command(rng: random.Random, family: str, *flags: str) -> Command:
    """A command that reads the config; any of them must refuse a mistake in it."""
    config = f"--config={family}.py"
    commands = (
        Command("train", (config, "--workdir=new", *flags)),
        Command("train", (config, "--workdir=new", "--dry_run", *flags)),
        Command("plan", (config, "--topology=v5p:2x2x1", "--estimate_only", *flags)),
        Command("evaluate", (config, f"--workdir={RUN[family]}", *flags)),
    )
    return rng.choices(commands, (3, 3, 2, 1))[0]


def _train(family: str, *flags: str) -> Command:
    train = TRAIN if family == "llama" else TRAIN_CLIP
    return train._replace(args=(*train.args, *flags))


FILES_AND_FOLDERS = ("train.init_from", "data.source", "data.validation_source", "data.tokenizer")
FILES_AND_FOLDERS += ("data.classes", "data.templates_file")


def config_value(rng: random.Random) -> Case:
    """An invalid value of a key, by a flag or in the file."""
    family = rng.choice(("llama", "clip"))
    key = rng.choice(list(KEYS[family]))
    kind = KEYS[family][key]
    value = rng.choice(list(kind.wrong()))
    by_flag_too = not isinstance(kind, Group) and "\0" not in str(value)
    if isinstance(kind, Text) and not isinstance(value, str):
        by_flag_too = False  # any word is a string there
    *sections, leaf = key.split(".")
    names = (leaf, ".".join(sections)) if len(sections) > 1 else (leaf,)
    in_file = rng.random() < 0.4 or not by_flag_too
    what = f"config.{key} = {_short(value)} {'in the file' if in_file else 'by flag'}"
    flags = () if in_file else (f"--config.{key}={value}",)
    change = _insert(f"{family}.py", f"c.{key} = {_literal(value)}") if in_file else None
    command = _config_command(rng, family, *flags)
    if command.module != "train" and key in FILES_AND_FOLDERS:  # others do not read all of them
        command = _train(family, *flags)
    if command.module == "evaluate" and in_file and sections[0] in AS_TRAINED:
        command = _train(family, *flags)
    needs = (*DATA[family], *([RUN[family]] if command.module == "evaluate" else []))
    return Case(what=what, command=command, needs=needs, names=names, damage=change)


def config_key(rng: random.Random) -> Case:
    """A key or a section that is missing, added, misspelled or of another kind."""
    family = rng.choice(("llama", "clip"))
    key = rng.choice([key for key in KEYS[family] if key.count(".") == 1])
    section, leaf = key.split(".")
    twisted = _misspell(rng, leaf)
    required = ("model.name", "model.dtype", "model.norm_eps", "precision.recipe", "precision.rules")
    required += ("optimizer.learning_rate", "optimizer.b1", "optimizer.eps", "train.total_steps")
    required += ("train.seed", "data.batch_size", "data.source", "data.tokenizer", "checkpoint.every_steps")
    gone = rng.choice(required)
    nulled = "train.seed" if gone in ("data.source", "data.tokenizer") else gone  # `plan` fills those in
    rare = rng.choice(("7", "None", "[1, 2]", "'words'", "float('nan')", "True"))
    lines, names, flags = rng.choice(
        (
            ([f"del c.{gone}"], (gone.split(".")[1],), ()),
            ([f"c.{nulled} = None"], (nulled.split(".")[1],), ()),
            ([f"del c['{section}']"], (section,), ()),
            ([f"c.{section}.{twisted} = 1"], (twisted,), ()),
            ([f"c.{twisted} = 1"], (twisted,), ()),
            ([f"c.{section} = {rare}"], (section,), ()),
            ([], (twisted,), (f"--config.{section}.{twisted}=1",)),
            ([], (section, f"{section}x"), (f"--config.{section}x.{leaf}=1",)),
            ([], (leaf, section), (f"--config.{key}.deeper=1",)),
            ([], (section,), (f"--config.{section}={rare}",)),
            ([f"c.{section}['{twisted}\\n💥'] = 1"], (twisted,), ()),
        )
    )
    change = _insert(f"{family}.py", *lines) if lines else None
    command = _config_command(rng, family, *flags)
    if command.module == "evaluate" and lines and {section, gone.split(".")[0]} & AS_TRAINED:
        command = _train(family, *flags)
    needs = (*DATA[family], *([RUN[family]] if command.module == "evaluate" else []))
    return Case(what="; ".join((*lines, *flags)), command=command, needs=needs, names=names, damage=change)


def config_file(rng: random.Random) -> Case:
    """A file that is no valid config file, or an argument that the config does not take."""
    family = rng.choice(("llama", "clip"))
    name = f"{family}.py"

    def write(content: str | bytes) -> Damage:
        data = content.encode() if isinstance(content, str) else content
        return lambda box: (box / name).write_bytes(data) and None

    body = "def get_config(arg=''):\n    "
    changes: tuple[tuple[str, Damage], ...] = (
        ("empty", write("")),
        ("a syntax error", write("def get_config(:\n    return 1\n")),
        ("bad indentation", write("def get_config(arg=''):\nreturn 1\n")),
        ("no get_config", write("x = 1\n")),
        ("get_config is a number", write("get_config = 7\n")),
        ("returns None", write(body + "pass\n")),
        ("returns a dict", write(body + "return {'model': 1}\n")),
        ("returns a number", write(body + "return 7\n")),
        (
            "returns an empty config",
            write(f"from ml_collections import ConfigDict\n{body}return ConfigDict()\n"),
        ),
        ("raises", write(body + "raise RuntimeError('two\\nlines')\n")),
        ("raises at import", write("1 / 0\n")),
        ("raises KeyError", write(body + "return {}['x']\n")),
        ("imports what is not there", write("import nosuchmodule\n")),
        ("recursion", write("def get_config(arg=''):\n    return get_config(arg)\n")),
        ("exits", write("raise SystemExit(0)\n")),
        ("an assertion", write(body + "assert False\n")),
        ("latin-1", write("# caf\xe9\n".encode("latin-1") + body.encode())),
        ("null bytes", write(b"x = 1\0\n")),
        ("utf-16", write("x = 1\n".encode("utf-16"))),
        ("random bytes", write(random.Random(0).randbytes(400))),
        ("missing", lambda box: (box / name).unlink()),
        ("a directory", lambda box: _to_directory(box / name)),
        ("a link to itself", lambda box: _to_loop(box / name)),
        ("json", write('{"model": {"name": "llama"}}')),
    )
    what, change = rng.choice(changes)
    flags: tuple[str, ...] = ()
    if rng.random() < 0.15:  # of an argument instead
        what, change, flags = "an argument that the config does not take", None, ()
        name = f"{family}.py:{rng.choice(('nosuch=1', 'x', '=', 'arg=2'))}"
        command = Command("train", (f"--config={name}", "--workdir=new"))
        change = _replace(
            f"{family}.py",
            "    return c\n",
            "    from maxlp.run.presets import choose\n\n    return choose(arg, c)\n",
        )
        return Case(what=what, command=command, needs=DATA[family], names=("argument", name), damage=change)
    command = _config_command(rng, family, *flags)
    needs = (*DATA[family], *([RUN[family]] if command.module == "evaluate" else []))
    return Case(
        what=f"{name}: {what}", command=command, needs=needs, names=(name, "config.model"), damage=change
    )


# --- flags ----------------------------------------------------------------------------------------------

NUMBERS = ("-1", "x", "1.5", "", "nan", "1e400", "99999999999999999999999999")
# Of each command: valid arguments, the inputs they need, and for each flag the values that are wrong.
FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "train": (
        ("--config=llama.py", "--workdir=new"),
        DATA["llama"],
        {"dry_run": ("maybe", "2"), "workdir": ("", "gs://bucket/run", "llama.py", "llama.py/new")},
    ),
    "evaluate": (
        ("--workdir=run",),
        ("run", *DATA["llama"]),
        {
            "step": (*NUMBERS, "3"),
            "l2": ("-1", "x", "nan", "inf"),
            "linear_probe": ("true", "maybe"),
            "workdir": ("", "nowhere", "corpus", "llama.py", "gs://bucket/run"),
        },
    ),
    "generate": (
        ("--workdir=run", "--prompt=the hare", "--max_new_tokens=4"),
        ("run", "run_clip", "corpus"),
        {
            "step": (*NUMBERS, "3"),
            "max_new_tokens": (*NUMBERS, "0", "1000"),
            "temperature": ("-0.1", "nan", "inf", "x", ""),
            "top_k": NUMBERS[:-1],  # a huge one takes all tokens
            "top_p": ("0", "-1", "1.5", "nan", "inf", "x"),
            "seed": ("x", "1.5", "99999999999999999999999", "-1"),
            "prompt": ("word " * 200,),
            "workdir": ("", "nowhere", "corpus", "run_clip", "gs://bucket/run"),
        },
    ),
    "plan": (
        ("--config=llama.py", "--topology=v5p:2x2x1", "--estimate_only"),
        DATA["llama"],
        {
            "topology": (
                "",
                "v5p",
                "nosuch:2x2",
                "v5p:0x2x1",
                "v5p:axb",
                "h100:-1x8",
                "v5p:2x2x1*x",
                "v5p:9x9x9x9",
            ),
            "json": ("nowhere/plan.json", "corpus"),
            "plot": ("plan.txt", "nowhere/plan.png", "corpus"),
            "hlo": ("step.txt",),
            "estimate_only": ("maybe",),
            "search": ("2",),
        },
    ),
    "report": (
        ("run",),
        ("run", *DATA["llama"]),
        {"spike": ("-1", "x", "1.5", "100000"), "workdir": ("nowhere", "corpus"), "precision": ("nosuch",)},
    ),
    "prepare": (
        ("text", "--source=text:corpus", "--output=out"),
        DATA["llama"],
        {
            "source": (
                "",
                "nosuch:corpus",
                "text:nowhere",
                "text:corpus?x=1",
                "text:corpus;text:corpus",
                "glyphs",
            ),
            "output": ("", "llama.py", "llama.py/out"),
            "split": ("nosuch", "heldout", ""),
            "tokenizer": ("nowhere.json", "llama.py", "bpe:abc"),
            "train_tokenizer": ("-5", "3", "x", "1.5"),
            "shards": ("0", "-1", "x", "1.5"),
            "num_workers": ("0", "-1", "x"),
            "overwrite": ("maybe",),
        },
    ),
    "lab": (
        ("attribute", "run", "--recipe=fp8_current"),
        ("run", *DATA["llama"]),
        {
            "step": ("-1", "0", "x", "1.5", "100000"),
            "recipe": ("nosuch", "", "fp8_current:x=1"),
            "top": ("0", "-1", "x"),
            "out": ("llama.py", "llama.py/new"),
            "recipes": ("fp8_current",),
            "batches": ("2",),
            "budget": ("0.1",),
            "other": ("model.remat=block",),
            "record": ("new",),
            "against": ("nowhere",),
            "steps": ("2",),
            "config": ("llama.py",),
        },
    ),
    "lab predict": (
        ("predict", "run"),
        ("run", *DATA["llama"]),
        {
            "recipes": ("nosuch", "fp8_current,nosuch", "simulate:format=x", "simulate:x=1"),
            "batches": ("0", "-1", "x"),
            "step": ("-1", "0", "x", "100000"),
            "top": ("5",),
        },
    ),
    "lab choose": (
        ("choose", "run", "--recipe=fp8_current"),
        ("run", *DATA["llama"]),
        {"budget": ("-0.1", "1.5", "nan", "x"), "recipe": ("nosuch", "bf16"), "step": ("0", "100000")},
    ),
    "lab diff": (
        ("diff", "run", "--other=model.remat=block"),
        ("run", *DATA["llama"]),
        {
            "other": ("model.remat", "=", "nosuch=1", "model=1"),
            "steps": ("0", "-1", "x"),
            "step": ("0", "x", "100000"),
            "record": ("new", "llama.py"),
            "against": ("nowhere", "corpus"),
            "budget": ("0.1",),
        },
    ),
    "convert import": (
        ("import", "--input=hf_clip", "--output=out"),
        ("hf_clip", "corpus"),
        {
            "format": ("nosuch", "hf_llama", "open_clip", ""),
            "input": ("", "nowhere", "corpus", "corpus/0.txt"),
            "output": ("", "hf_clip", "corpus/0.txt", "corpus/0.txt/new"),
            "dtype": ("int8", "float64", "x", ""),
            "image_size": ("0", "-5", "x", "31", "1.5"),
        },
    ),
    "convert export": (
        ("export", "--workdir=run", "--output=out"),
        ("run", "corpus"),
        {
            "format": ("nosuch", "hf_clip", "open_clip"),
            "workdir": ("", "nowhere", "corpus", "corpus/0.txt"),
            "output": ("", "run", "corpus/0.txt", "corpus/0.txt/new"),
            "dtype": ("int8", "float64", "x", ""),
            "quantize": ("int4", "x", ""),
            "calibration_sequences": ("-1", "x", "1.5"),
            "step": ("-1", "3", "x", "1.5"),
        },
    ),
}


def flag(rng: random.Random) -> Case:
    """A flag with an invalid value, a misspelled or missing flag, or a superfluous word."""
    name = rng.choice(list(FLAGS))
    module, (args, needs, wrong) = name.split()[0], FLAGS[name]
    draw = rng.random()
    if draw < 0.7:
        key = rng.choice(list(wrong))
        value = rng.choice(wrong[key])
        kept = tuple(each for each in args if not each.startswith(f"--{key}="))
        if module == "report" and key == "workdir":
            kept = ()
        changed, names = (*kept, f"--{key}={value}"), (f"--{key}", key, *([value] if value else []))
        names += ("model_type",) if key == "format" else ()
    elif draw < 0.8:
        twisted = _misspell(rng, rng.choice(list(wrong)))
        changed, names = (*args, f"--{twisted}=1"), (twisted,)
    elif draw < 0.9:
        word = rng.choice(("extra", "-5", "ünïcödé", "workdir=run", "—dry_run"))
        changed, names = (
            (*args, word),
            (word, "'5'" if word == "-5" else word, "one workdir", "a second workdir", "subcommand"),
        )
    else:
        gone = rng.choice(args)
        changed = tuple(each for each in args if each != gone)
        left = {"--estimate_only": ("--estimate_only",), "--max_new_tokens=4": ("--max_new_tokens=nan",)}
        changed += left.get(gone, ())
        if gone in left or gone.startswith("--prompt"):
            changed = (*args, "--nosuch")
        names = (gone.partition("=")[0], "nosuch", "workdir", "subcommand", "'import' or 'export'")
    return Case(what=_flags_of(changed), command=Command(module, changed), needs=needs, names=names)


def _flags_of(args: tuple[str, ...]) -> str:
    return " ".join(each if len(each) < 80 else f"{each[:40]}…" for each in args)


def environment(rng: random.Random) -> Case:
    """Environment variables that do not describe a cluster."""
    group = {"MAXLP_COORDINATOR": "localhost:1", "MAXLP_NUM_PROCESSES": "2", "MAXLP_PROCESS_ID": "0"}
    name, values = rng.choice(
        (
            ("MAXLP_COORDINATOR", ("", "localhost", ":1", "localhost:x", "localhost:-1")),
            ("MAXLP_NUM_PROCESSES", ("", "0", "-1", "x", "2.5", "nan")),
            ("MAXLP_PROCESS_ID", ("", "-1", "2", "x", "1.5")),
            ("MAXLP_DISTRIBUTED", ("2", "yes", "x")),
            ("MAXLP_INIT_TIMEOUT", ("0", "-1", "x", "1.5", "nan")),
            ("MAXLP_HEARTBEAT_TIMEOUT", ("0", "-1", "x", "1.5", "nan")),
        )
    )
    value = rng.choice(values)
    return Case(
        what=f"{name}={value!r}",
        command=rng.choice((TRAIN, EVALUATE, GENERATE)),
        needs=("run", *DATA["llama"]),
        names=(name,),
        environment=(group if name in group else {}) | {name: value},
    )


def paths(rng: random.Random) -> Case:
    """A path that cannot be written or read: no permission, too long a name, a file in its place."""
    command, needs = rng.choice(
        (
            (("train", ("--config=llama.py", "--workdir={}")), DATA["llama"]),
            (("prepare", ("text", "--source=text:corpus", "--output={}")), DATA["llama"]),
            (("convert", ("import", "--input=hf_clip", "--output={}")), ("hf_clip",)),
            (("convert", ("export", "--workdir=run", "--output={}")), ("run",)),
            (
                ("plan", ("--config=llama.py", "--topology=v5p:2x2x1", "--estimate_only", "--json={}")),
                DATA["llama"],
            ),
        )
    )
    module, args = command
    what, place, change = rng.choice(
        (
            ("a folder that is not writable", "locked/new", _locked("locked")),
            ("a name that is too long", "n" * 300, None),
            ("a path that is too long", "/".join(["n" * 200] * 30), None),
            ("below a file", "file/new", _write("file", b"x")),
            ("a file", "file/", _write("file", b"x")),
            ("a broken link", "link/new", lambda box: (box / "link").symlink_to("nowhere/at/all/x")),
            ("a link to itself", "link/new", lambda box: _to_loop(box / "link")),
        )
    )
    filled = tuple(each.format(place) for each in args)
    if what == ("a file" if module == "plan" else "a broken link"):  # plan would replace the file, others
        what, place, change = "a link to itself", "link", lambda box: _to_loop(box / "link")  # follow it
        filled = tuple(each.format(place) for each in args)
    names = (place[:40], place.split("/")[0][:40])
    return Case(
        what=f"{module}: {what}",
        command=Command(module, filled),
        needs=needs,
        names=names,
        damage=change,
        unprivileged="locked" in place,
    )


# --- files ----------------------------------------------------------------------------------------------


def spoil(path: Path, how: str, seed: int) -> None:
    """Replaces a file by something that every reader must refuse."""
    data, rng = path.read_bytes(), random.Random(seed)
    contents = {
        "emptied": b"",
        "cut in half": data[: len(data) // 2],
        "cut by a byte": data[:-1],
        "random bytes": rng.randbytes(max(64, len(data))),
        "zeros": bytes(len(data)),
        "utf-16": data.decode("utf-8", errors="replace").encode("utf-16"),
        "latin-1 inside": b'{"\xe9": 1}',
        "a list": b"[1, 2, 3]\n",
        "a number": b"7\n",
        "null": b"null\n",
        "a string": b'"words"\n',
        "not a number": b"NaN\n",
        "an empty object": b"{}\n",
        "deep": b"[" * 100_000,
        "deep and closed": b"[" * 50_000 + b"]" * 50_000,
        "half JSON": b'{"a": ',
        "html": b"<html><body>404 Not Found</body></html>\n",
        "an LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }
    if how in contents:
        path.write_bytes(contents[how])
    else:
        {"missing": Path.unlink, "a directory": _to_directory, "a link to itself": _to_loop}[how](path)


GENERIC = ("emptied", "cut in half", "random bytes", "zeros", "html", "an LFS pointer", "a directory")
GENERIC += ("a link to itself", "missing")
JSON = ("emptied", "cut in half", "random bytes", "utf-16", "latin-1 inside", "a list", "a number", "null")
JSON += ("a string", "not a number", "deep", "deep and closed", "half JSON", "html", "a directory")
JSON += ("a link to itself", "an empty object")

TRAIN = Command("train", ("--config=llama.py", "--workdir=new"))
RESUME = Command("train", ("--config=llama.py", "--workdir=run", "--config.train.total_steps=6"))
TRAIN_CLIP = Command("train", ("--config=clip.py", "--workdir=new"))
EVALUATE, GENERATE = (
    Command("evaluate", ("--workdir=run",)),
    Command("generate", ("--workdir=run", "--max_new_tokens=4")),
)
EXPORT = Command("convert", ("export", "--workdir=run", "--output=out"))
ATTRIBUTE = Command("lab", ("attribute", "run"))


def state_file(rng: random.Random) -> Case:
    """A file of a run that is damaged."""
    targets = (
        ("run/config.json", JSON, (RESUME, EVALUATE, GENERATE, EXPORT)),
        ("run/run.json", JSON, (RESUME,)),
        ("run/spikes/rollbacks.json", tuple(how for how in JSON if how != "a list"), (RESUME,)),
        ("run/tokenizer.json", JSON, (RESUME, EVALUATE, GENERATE)),
        ("run/metrics.jsonl", ("a directory", "a link to itself"), (RESUME,)),
        ("run/checkpoints", ("a file", "an empty folder", "missing"), (RESUME, EVALUATE, GENERATE, EXPORT)),
        ("run/checkpoints/*", GENERIC, (RESUME, EVALUATE, GENERATE, EXPORT)),
    )
    place, ways, commands = rng.choice(targets)
    how, command, seed = rng.choice(ways), rng.choice(commands), rng.randrange(2**31)

    def damage(box: Path) -> None:
        path = box / place
        if place == "run/checkpoints":
            shutil.rmtree(path)
            {"a file": path.touch, "an empty folder": path.mkdir, "missing": lambda: None}[how]()
        elif place == "run/checkpoints/*":
            for step in path.parent.iterdir():  # all of them: with one left, the command falls back to it
                files = sorted(
                    each for each in step.rglob("*") if each.is_file() and each.stat().st_size > 1
                )
                spoil(random.Random(seed).choice(files), how, seed)
        else:
            path.parent.mkdir(exist_ok=True)
            path.exists() or path.write_text("[]\n")
            spoil(path, how, seed)

    name = place.split("/")[1] if "checkpoints" in place else place.rpartition("/")[2]
    return Case(
        what=f"{place}: {how}",
        command=command,
        needs=("run", *DATA["llama"]),
        names=(name, "checkpoints"[: 11 if "checkpoints" in place else 0] or name),
        damage=damage,
    )


def changed_state(rng: random.Random) -> Case:
    """A file of a run that is valid JSON of the wrong shape."""
    command = rng.choice((EVALUATE, GENERATE, EXPORT, ATTRIBUTE))
    unread = {*UPGRADED, *FILES_AND_FOLDERS}
    key = rng.choice([key for key in KEYS["llama"] if key.count(".") == 1 and key not in unread])
    kind = KEYS["llama"][key]
    value = rng.choice([each for each in kind.wrong() if _is_json(each)])

    def change(config: dict) -> None:
        section, leaf = key.split(".")
        config[section][leaf] = value

    def drop(config: dict) -> None:
        del config[key.split(".")[0]]

    def twist(config: dict) -> None:
        config[key.split(".")[0]] = [1]

    what, edit = rng.choice(
        ((f"{key}={_short(value)}", change), (f"no {key}", drop), (f"{key} in a list", twist))
    )
    return Case(
        what=f"run/config.json: {what}",
        command=command,
        needs=("run", *DATA["llama"]),
        names=(key.split(".")[1], key.split(".")[0], "config.json"),
        damage=_edit_json("run/config.json", edit),
    )


def data_file(rng: random.Random) -> Case:
    """A corpus or a set of images that is damaged."""
    text, image = _source_commands(rng, "text"), _source_commands(rng, "image_text")
    tokenizer = Command("train", ("--config=llama.py", "--workdir=new"))
    manifest = (*(how for how in JSON if how != "utf-16"), "missing")  # `json` reads UTF-16 too
    binary = (
        "emptied",
        "cut in half",
        "random bytes",
        "zeros",
        "html",
        "a directory",
        "a link to itself",
        "missing",
    )
    targets: tuple[tuple[str, tuple[str, ...], Command, tuple[str, ...]], ...] = (
        (
            "docs.jsonl",
            (
                "emptied",
                "random bytes",
                "zeros",
                "html",
                "a list",
                "a number",
                "deep",
                "half JSON",
                "an empty object",
                "a directory",
                "a link to itself",
                "missing",
                "utf-16",
                "null",
            ),
            text("jsonl:docs.jsonl?validation=0.2"),
            (),
        ),
        ("docs.parquet", binary, text("parquet:docs.parquet?validation=0.2"), ()),
        (
            "prepared_text/dataset.json",
            manifest,
            text("array_record:prepared_text?validation=0.2"),
            ("prepared_text",),
        ),
        (
            "prepared_images/dataset.json",
            manifest,
            image("array_record:prepared_images?validation=0.2"),
            ("prepared_images",),
        ),
        (
            "prepared_text/*.array_record",
            binary,
            text("array_record:prepared_text?validation=0.2"),
            ("prepared_text",),
        ),
        (
            "prepared_images/*.array_record",
            binary,
            image("array_record:prepared_images?validation=0.2"),
            ("prepared_images",),
        ),
        ("pictures/pictures.tar", binary, image("tar:pictures/pictures.tar?validation=0.2"), ()),
        (
            "pictures/classes.txt",
            ("emptied", "random bytes", "a directory", "a link to itself", "missing"),
            TRAIN_CLIP,
            (),
        ),
        ("tokenizer.json", (*JSON, "missing"), tokenizer, ()),
    )
    place, ways, command, also = rng.choice(targets)
    how, seed = rng.choice(ways), rng.randrange(2**31)

    def damage(box: Path) -> None:
        for path in sorted(box.glob(place)):
            spoil(path, how, seed)

    needs = tuple({*DATA["llama"], *DATA["clip"], place.split("/")[0]})
    name = place.rpartition("/")[2].removeprefix("*")
    return Case(what=f"{place}: {how}", command=command, needs=needs, names=(name, *also), damage=damage)


def tfds_source(rng: random.Random) -> Case:
    """A dataset of TFDS that is damaged, or a spec that does not fit it."""
    command = _source_commands(rng, "text")
    valid, damage = "tfds:toy_text?text_key=body&data_dir=tfds", None
    if rng.random() < 0.4:
        source = rng.choice(
            (
                *("tfds:toy_text?text_key=body", "tfds:toy_text?data_dir=tfds", "tfds:toy_text", "tfds:"),
                *("tfds:nosuch?data_dir=tfds", "tfds:toy_text/nosuch?text_key=body&data_dir=tfds"),
                *("tfds:toy_text:9.9.9?text_key=body&data_dir=tfds", "tfds:../tfds?data_dir=tfds"),
                *("tfds:toy text?data_dir=tfds", "tfds:toy_text:x?data_dir=tfds", "tfds::?data_dir=tfds"),
                *(
                    f"{valid}&{option}"
                    for option in (
                        *("split=nosuch", "split=train[", "split=train[9:x]", "split=train[:0%]", "split="),
                        *("split=train[999:]", "split=train[:400%]", "split=3", "split=[]"),
                        *("image_key=body", "label_key=x", "nosuch=1", "validation=0.2", "text_key="),
                        *("text_key=nosuch", "data_dir=", "data_dir=llama.py", "data_dir=nosuch"),
                    )
                ),
            )
        )
        what = source
    else:
        files = ("dataset_info.json", "features.json", "*.array_record-*")
        source, place = valid, rng.choice(files)
        ways = GENERIC if place.endswith("*") else (*JSON, "missing")
        how, seed = rng.choice(ways), rng.randrange(2**31)
        what = f"tfds/toy_text/1.0.0/{place}: {how}"

        def damage(box: Path) -> None:
            for path in sorted((box / "tfds/toy_text/1.0.0").glob(place)):
                spoil(path, how, seed)

    needs = ("llama.py", "tokenizer.json", "tfds")
    names = ("tfds:", "TFDS 'toy_text'")
    return Case(what=what, command=command(source), needs=needs, names=names, damage=damage)


def sentencepiece(rng: random.Random) -> Case:
    """A SentencePiece tokenizer that is damaged, or a spec that does not fit it."""
    spec, damage = "spm.model", None
    if rng.random() < 0.3:
        option = rng.choice(("bos=nosuch", "eos=", "pad=<nosuch>", "nosuch=1", "vocab=9"))
        spec = f"spm.model?{option}"
        what = option
    else:
        place = rng.choice(("spm.model", "of another kind", "a folder"))
        how, seed = rng.choice(("cut in half", "cut by a byte", *GENERIC)), rng.randrange(2**31)
        what = f"{place}: {how}"
        spec = {"of another kind": "spm.json", "a folder": "folder"}.get(place, spec)

        def damage(box: Path) -> None:
            if place == "of another kind":
                (box / "spm.model").rename(box / "spm.json")
            elif place == "a folder":
                (box / "folder").mkdir()
                spoil((box / "spm.model").rename(box / "folder" / "tokenizer.model"), how, seed)
            else:
                spoil(box / "spm.model", how, seed)

    command = rng.choice(
        (
            Command("train", ("--config=llama.py", "--workdir=new", f"--config.data.tokenizer={spec}")),
            Command("prepare", ("text", "--source=text:corpus", f"--tokenizer={spec}", "--output=out")),
        )
    )
    names = (spec.partition("?")[0],)
    return Case(what=what, command=command, needs=(*DATA["llama"], "spm.model"), names=names, damage=damage)


def picture(rng: random.Random) -> Case:
    """Images whose bytes are damaged, in an intact tar."""
    kind = rng.choice(("png", "jpg", "webp"))
    how = rng.choice(("emptied", "cut in half", "random bytes", "zeros", "html", *OTHER_FORMATS))
    seed = rng.randrange(2**31)

    def damage(box: Path) -> None:
        path, image = box / "pictures" / "pictures.tar", box / "image"
        with tarfile.open(path) as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar.getmembers()]
        with tarfile.open(path, "w") as tar:
            for name, data in members:
                if name.endswith(kind):
                    image.write_bytes(data)
                    if how in OTHER_FORMATS:
                        image.write_bytes(OTHER_FORMATS[how] + data[len(OTHER_FORMATS[how]) :])
                    else:
                        spoil(image, how, seed)
                    data = image.read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        image.unlink()

    flags = rng.choice(((), ("--linear_probe",)))
    return Case(
        what=f"pictures.tar: {kind}: {how}",
        command=Command("evaluate", ("--workdir=run_clip", *flags)),
        needs=("run_clip", "pictures"),
        names=("pictures.tar",),
        damage=damage,
    )


# The first bytes of image formats that are not supported, and of no format.
OTHER_FORMATS = {
    "GIF": b"GIF89a",
    "BMP": b"BM",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "TIFF": b"II*\0",
    "a wrong magic number": b"\x89PNH\r\n\x1a\n\0\0\0\0",
}


def _source_commands(rng: random.Random, content: str) -> Callable[[str], Command]:
    config = "llama.py" if content == "text" else "clip.py"
    if rng.random() < 0.5:
        return lambda source: Command("prepare", (content, f"--source={source}", "--output=out"))
    return lambda source: Command(
        "train", (f"--config={config}", "--workdir=new", f"--config.data.source={source}")
    )


def record(rng: random.Random) -> Case:
    """One damaged document among many sound ones."""
    lines = (
        *(b'{"text": "half', b"7", b"[]", b"null", b'"words"', b'{"txt": "other"}', b'{"text": 7}'),
        *(b'{"text": null}', b'{"text": ["a"]}', b"{'text': 'single'}", b"\xff\xfe", b"NaN", b"[" * 10_000),
    )
    line, seed = rng.choice(lines), rng.randrange(2**31)
    number = random.Random(seed).randrange(40)

    def damage_line(box: Path) -> None:
        path = box / "docs.jsonl"
        found = path.read_bytes().splitlines()
        found[number] = line
        path.write_bytes(b"\n".join(found) + b"\n")

    def damage_bytes(name: str) -> Damage:
        def damage(box: Path) -> None:
            path = sorted(box.glob(name))[0]
            data = bytearray(path.read_bytes())
            data[400:800] = random.Random(seed).randbytes(400)  # of the documents
            path.write_bytes(data)

        return damage

    what, source, damage, names = rng.choice(
        (
            (
                f"line {number + 1} = {line[:30]!r}",
                "jsonl:docs.jsonl",
                damage_line,
                (f"docs.jsonl:{number + 1}",),
            ),
            (
                f"line {number + 1} = {line[:30]!r}",
                "jsonl:docs.jsonl",
                damage_line,
                (f"docs.jsonl:{number + 1}",),
            ),
            (
                "other bytes",
                "array_record:prepared_text",
                damage_bytes("prepared_text/*.array_record"),
                ("prepared_text",),
            ),
        )
    )
    return Case(
        what=f"{source}: {what}",
        command=Command("prepare", ("text", f"--source={source}?split=all", "--output=out")),
        needs=("docs.jsonl", "prepared_text"),
        names=names,
        damage=damage,
    )


def manifest(rng: random.Random) -> Case:
    """A dataset.json of a wrong shape."""
    content, folder = rng.choice(
        (("text", "prepared_text"), ("text", "prepared_ids"), ("image_text", "prepared_images"))
    )
    edits: tuple[tuple[str, Callable[[dict], Any]], ...] = (
        ("no shards", lambda d: d.pop("shards")),
        ("shards a number", lambda d: d.update(shards=7)),
        ("shards empty", lambda d: d.update(shards=[])),
        ("a shard a number", lambda d: d.update(shards=[7])),
        ("a shard without a file", lambda d: d["shards"][0].pop("file")),
        ("a shard of another size", lambda d: d["shards"][0].update(file_size=3)),
        ("a shard without documents", lambda d: d["shards"][0].pop("documents")),
        ("documents a word", lambda d: d["shards"][0].update(documents="many")),
        ("documents negative", lambda d: d["shards"][0].update(documents=-4)),
        ("documents too many", lambda d: d["shards"][0].update(documents=10**9)),
        ("an absent shard", lambda d: d["shards"][0].update(file="nosuch.array_record")),
        ("a shard elsewhere", lambda d: d["shards"][0].update(file="../docs.jsonl")),
        ("no format", lambda d: d.pop("format")),
        ("another format", lambda d: d.update(format="maxlp-documents-99")),
    )
    if folder == "prepared_ids":
        edits += (
            ("no dtype", lambda d: d.pop("dtype")),
            ("another dtype", lambda d: d.update(dtype="float32")),
            ("a dtype that is none", lambda d: d.update(dtype="words")),
            ("tokenizer a number", lambda d: d.update(tokenizer=7)),
            ("tokenizer without fingerprint", lambda d: d["tokenizer"].pop("fingerprint")),
            ("another fingerprint", lambda d: d["tokenizer"].update(fingerprint="0" * 64)),
        )
        config = "llama.py"
    else:
        config = "llama.py" if content == "text" else "clip.py"
    what, edit = rng.choice(edits)
    command = Command(
        "train",
        (
            f"--config={config}",
            "--workdir=new",
            f"--config.data.source=array_record:{folder}?validation=0.2",
        ),
    )
    return Case(
        what=f"{folder}/dataset.json: {what}",
        command=command,
        needs=(folder, "docs.jsonl", *DATA["llama"], *DATA["clip"]),
        names=(folder,),
        damage=_edit_json(f"{folder}/dataset.json", edit),
    )


# --- weights of other libraries -------------------------------------------------------------------------

MODELS = {
    "sharded": "config.json",
    "hf_clip": "config.json",
    "hf_siglip": "config.json",
    "open_clip": "open_clip_config.json",
}
NUMBERS_OF = {  # paths of sizes in the JSON config of each folder
    "sharded": (
        ("vocab_size",),
        ("hidden_size",),
        ("num_hidden_layers",),
        ("num_attention_heads",),
        ("num_key_value_heads",),
        ("intermediate_size",),
        ("max_position_embeddings",),
        ("head_dim",),
    ),
    "hf_clip": (
        ("projection_dim",),
        *(
            (tower, key)
            for tower in ("vision_config", "text_config")
            for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        ),
        ("vision_config", "image_size"),
        ("vision_config", "patch_size"),
        ("text_config", "vocab_size"),
        ("text_config", "max_position_embeddings"),
    ),
    "open_clip": (
        ("model_cfg", "embed_dim"),
        *(
            ("model_cfg", tower, key)
            for tower, keys in dict(
                vision_cfg=("layers", "width", "head_width", "patch_size", "image_size"),
                text_cfg=("layers", "width", "heads", "context_length", "vocab_size"),
            ).items()
            for key in keys
        ),
    ),
}
NUMBERS_OF["hf_siglip"] = NUMBERS_OF["hf_clip"][1:]
OTHERS_OF = {  # path -> values that are wrong
    "sharded": {
        ("rms_norm_eps",): ("x", 0.0, -1.0, math.nan, math.inf, None, [1]),
        ("rope_theta",): ("x", -1.0, math.nan, math.inf, [1]),
        ("rope_scaling",): ("x", 7, [1], {"rope_type": "yarn"}, {"factor": -1.0}),
        ("rope_parameters",): (
            *("x", 7, [1], {"rope_type": "llama3"}, {"rope_type": "yarn"}, {"rope_type": 7}),
            *({"rope_theta": 0}, {"rope_theta": "x"}, {"rope_type": "llama3", "factor": "x"}),
        ),
        ("tie_word_embeddings",): ("x", 7, [1]),
        ("hidden_act",): ("gelu", 7, [1]),
        ("model_type",): ("mistral", 7, None, [1], {"a": 1}),
        ("torch_dtype",): ("int8", "float64", "x", 7, "float8_e4m3fn", [1]),
        ("attention_bias",): (True, "x"),
        ("initializer_range",): ("x", -1.0, math.nan, [1]),
    },
    "hf_clip": {
        ("vision_config", "hidden_act"): ("relu", 7, [1]),
        ("vision_config", "layer_norm_eps"): ("x", -1.0, math.nan, [1]),
        ("vision_config", "num_channels"): (1, "x", 3.5),
        ("vision_config",): (7, "x", [1]),
        ("text_config",): (7, "x", [1]),
        ("text_config", "eos_token_id"): ("x", -1, 10**9, [1]),
        ("logit_scale_init_value",): ("x", math.nan, math.inf, [1]),
        ("model_type",): ("blip", 7, None, [1]),
    },
    "hf_siglip": {
        ("vision_config", "vision_use_head"): (False, "x"),
        ("text_config", "hidden_act"): ("relu", 7),
        ("text_config",): (7, [1]),
        ("model_type",): ("siglip3", 7),
    },
    "open_clip": {
        ("model_cfg",): (7, "x", [1], None),
        ("model_cfg", "vision_cfg"): (7, "x", [1], None),
        ("model_cfg", "text_cfg"): (7, "x", [1], None),
        ("model_cfg", "vision_cfg", "mlp_ratio"): ("x", -1.0, math.nan, 0.0, [1]),
        ("model_cfg", "vision_cfg", "patch_dropout"): ("x", -1.0, 1.5, math.nan),
        ("model_cfg", "vision_cfg", "ls_init_value"): ("x", math.nan, [1]),
        ("model_cfg", "text_cfg", "pool_type"): ("none", 7, [1]),
        ("model_cfg", "init_logit_scale"): ("x", math.nan, [1]),
        ("model_cfg", "nosuch"): (7, "x"),
        ("preprocess_cfg",): (7, "x", [1]),
        ("preprocess_cfg", "mean"): (7, "x", [0.5], ["a", "b", "c"], [0.5, 0.5, math.nan]),
        ("preprocess_cfg", "std"): (7, [0.5, 0.5, 0.0], [0.5, 0.5], [-1.0, 1.0, 1.0]),
    },
}
WRONG_SIZES = (0, -1, -(10**9), 2.5, "64", None, [64], math.nan, 10**30, True, {"a": 1})
MAY_BE_NULL = ("num_key_value_heads", "head_dim")  # by default these follow from other sizes


def model_config(rng: random.Random) -> Case:
    """The JSON config of weights to import: invalid sizes, wrong types, unsupported architectures."""
    folder = rng.choice(list(MODELS))
    if rng.random() < 0.5:
        path = rng.choice(NUMBERS_OF[folder])
        wrong = [each for each in WRONG_SIZES if not (path[-1] in MAY_BE_NULL and each is None)]
        value = rng.choice(wrong)
    else:
        path = rng.choice(list(OTHERS_OF[folder]))
        value = rng.choice(OTHERS_OF[folder][path])

    def edit(config: dict) -> None:
        *parents, last = path
        for key in parents:
            config = config.setdefault(key, {})
        config[last] = value

    return Case(
        what=f"{folder}/{MODELS[folder]}: {'.'.join(path)} = {_short(value)}",
        command=Command("convert", ("import", f"--input={folder}", "--output=out")),
        needs=(folder,),
        names=(path[-1],),
        damage=_edit_json(f"{folder}/{MODELS[folder]}", edit),
    )


def model_file(rng: random.Random) -> Case:
    """A file of weights to import that is damaged."""
    folder = rng.choice(list(MODELS))
    weights = (
        "emptied",
        "cut in half",
        "cut by a byte",
        "random bytes",
        "zeros",
        "html",
        "an LFS pointer",
        "a directory",
    )
    weights += ("a link to itself", "missing", "a list")
    pattern, ways = rng.choice(
        (
            (MODELS[folder], (*JSON, "missing")),
            ("*.safetensors", weights),
            ("*.index.json", (*JSON, "missing")),
        )
    )
    if pattern == "*.index.json":
        folder = "sharded"
    how, seed = rng.choice(ways), rng.randrange(2**31)
    chosen: list[str] = []

    def damage(box: Path) -> None:
        path = random.Random(seed).choice(sorted((box / folder).glob(pattern)))
        spoil(path, how, seed)

    names = ("safetensors",) if pattern != MODELS[folder] else (MODELS[folder],)
    return Case(
        what=f"{folder}/{pattern}: {how}",
        command=Command("convert", ("import", f"--input={folder}", "--output=out")),
        needs=(folder,),
        names=(*names, *chosen),
        damage=damage,
    )


def shard_index(rng: random.Random) -> Case:
    """An index of shards that does not match its shards."""
    edits: tuple[tuple[str, Callable[[dict], Any], tuple[str, ...]], ...] = (
        ("no weight_map", lambda d: d.pop("weight_map"), ("index.json",)),
        ("weight_map a list", lambda d: d.update(weight_map=[1]), ("index.json",)),
        ("weight_map empty", lambda d: d.update(weight_map={}), ("index.json", "tensor")),
        ("an absent shard", lambda d: _first(d, "nosuch.safetensors"), ("nosuch.safetensors",)),
        ("a shard elsewhere", lambda d: _first(d, "../hf_clip/model.safetensors"), ("index.json",)),
        ("an absolute shard", lambda d: _first(d, "/etc/passwd"), ("index.json",)),
        ("a shard that is a number", lambda d: _first(d, 7), ("index.json",)),
        ("a shard that is null", lambda d: _first(d, None), ("index.json",)),
        ("a shard that is empty", lambda d: _first(d, ""), ("index.json",)),
        (
            "a tensor of another shard",
            lambda d: _first(d, sorted(d["weight_map"].values())[-1]),
            ("tensor", "safetensors"),
        ),
        (
            "a tensor too many",
            lambda d: d["weight_map"].update({"nosuch.weight": next(iter(d["weight_map"].values()))}),
            ("nosuch.weight",),
        ),
        ("a tensor too few", lambda d: d["weight_map"].pop("model.norm.weight"), ("model.norm.weight",)),
    )
    what, edit, names = rng.choice(edits)
    return Case(
        what=f"sharded/model.safetensors.index.json: {what}",
        command=Command("convert", ("import", "--input=sharded", "--output=out")),
        needs=("sharded", "hf_clip"),
        names=names,
        damage=_edit_json("sharded/model.safetensors.index.json", edit),
    )


def _first(index: dict, file: Any) -> None:
    """Assigns the first tensor to another shard."""
    name = min(index["weight_map"], key=lambda each: index["weight_map"][each])
    index["weight_map"][name] = file


def tensor_header(rng: random.Random) -> Case:
    """A safetensors file whose header does not describe its data."""
    folder = rng.choice(("hf_clip", "hf_siglip", "open_clip"))
    file = "open_clip_model.safetensors" if folder == "open_clip" else "model.safetensors"
    seed = rng.randrange(2**31)

    def other(entry: dict, dtype: str, size: float) -> None:
        """The same bytes under another dtype, with a shape that fits them."""
        begin, end = entry["data_offsets"]
        entry.update(dtype=dtype, shape=[int((end - begin) / size)])

    edits: dict[str, Callable[[dict, str], Any]] = {
        "offsets outside the file": lambda h, n: h[n].update(data_offsets=[10**9, 10**9 + 64]),
        "offsets in reverse": lambda h, n: h[n].update(data_offsets=h[n]["data_offsets"][::-1]),
        "negative offsets": lambda h, n: h[n].update(data_offsets=[-64, 0]),
        "offsets that are words": lambda h, n: h[n].update(data_offsets=["a", "b"]),
        "one offset": lambda h, n: h[n].update(data_offsets=[0]),
        "no offsets": lambda h, n: h[n].pop("data_offsets"),
        "overlapping offsets": lambda h, n: h[n].update(
            data_offsets=h[min(set(h) - {n, "__metadata__"})]["data_offsets"]
        ),
        "a negative shape": lambda h, n: h[n].update(shape=[-1, *h[n]["shape"][1:]]),
        "a shape that is a word": lambda h, n: h[n].update(shape="wide"),
        "a shape of floats": lambda h, n: h[n].update(shape=[2.5]),
        "a shape beyond the data": lambda h, n: h[n].update(shape=[*h[n]["shape"], 2]),
        "a huge shape": lambda h, n: h[n].update(shape=[2**62, 2**62]),
        "another rank": lambda h, n: h[n].update(shape=[1, 1, *h[n]["shape"], 1]),
        "integers of 8 bits": lambda h, n: other(h[n], "I8", 1),
        "integers of 32 bits": lambda h, n: other(h[n], "I32", 4),
        "bytes": lambda h, n: other(h[n], "U8", 1),
        "booleans": lambda h, n: other(h[n], "BOOL", 1),
        "a dtype that is none": lambda h, n: h[n].update(dtype="F33"),
        "a dtype that is a number": lambda h, n: h[n].update(dtype=7),
        "an entry that is a list": lambda h, n: h.update({n: [1]}),
        "a tensor too few": lambda h, n: h.pop(n),
        "another name": lambda h, n: h.update({f"{n}.nosuch": h.pop(n)}),
        "a name with a line break": lambda h, n: h.update({f"{n}\nerror: x": h.pop(n)}),
    }
    what = rng.choice(
        [
            *edits,
            "a header beyond the file",
            "a header of length 0",
            "a header that is no JSON",
            "a name twice",
        ]
    )

    def damage(box: Path) -> None:
        path = box / folder / file
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        name = random.Random(seed).choice(sorted(set(header) - {"__metadata__"}))
        text = json.dumps(header)
        if what in edits:
            edits[what](header, name)
            text = json.dumps(header)
        elif what == "a name twice":
            text = text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
        elif what == "a header that is no JSON":
            text = text[:-5]
        size = {"a header beyond the file": 2**40, "a header of length 0": 0}.get(what, len(text.encode()))
        path.write_bytes(size.to_bytes(8, "little") + text.encode() + data[end:])

    return Case(
        what=f"{folder}/{file}: {what}",
        command=Command("convert", ("import", f"--input={folder}", "--output=out")),
        needs=(folder,),
        names=(file, "tensor"),
        damage=damage,
    )


GROUPS: tuple[Callable[[random.Random], Case], ...] = (
    *(config_value, config_value, config_value, config_value, config_key, config_file, flag, flag, paths),
    *(environment, state_file, changed_state, data_file, data_file, record, manifest),
    *(tfds_source, sentencepiece, picture),
    *(model_config, model_config, model_file, shard_index, tensor_header),
)


# --- changes --------------------------------------------------------------------------------------------


def _insert(name: str, *lines: str) -> Damage:
    """Adds lines before the end of a config's function."""
    return _replace(name, "    # changes\n", "".join(f"    {line}\n" for line in lines))


def _replace(name: str, old: str, new: str) -> Damage:
    def change(box: Path) -> None:
        text = (box / name).read_text()
        assert old in text
        (box / name).write_text(text.replace(old, new))

    return change


def _edit_json(name: str, edit: Callable[[dict], Any]) -> Damage:
    def change(box: Path) -> None:
        content = json.loads((box / name).read_text())
        edit(content)
        (box / name).write_text(json.dumps(content))

    return change


def _write(name: str, data: bytes) -> Damage:
    return lambda box: (box / name).write_bytes(data) and None


def _locked(name: str) -> Damage:
    return lambda box: (box / name).mkdir(mode=0o555)


def _to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.symlink(path.name, path)


def _literal(value: Any) -> str:
    """A Python expression."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, tuple):
        return f"({''.join(_literal(each) + ', ' for each in value)})"
    return repr(value)


def _is_json(value: Any) -> bool:
    return not isinstance(value, Mapping) and "\0" not in str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:40]}… ({len(text)} characters)"


def _misspell(rng: random.Random, word: str) -> str:
    """The word with two letters inserted, so that it is not another valid word."""
    at = rng.randrange(1, len(word) + 1)
    return f"{word[:at]}{rng.choice('qxz')}{rng.choice('qxz')}{word[at:]}"


assert {name.split()[0] for name in FLAGS} == set(COMMANDS)
