"""How `evaluate` uses a run's settings. (Tests of the families check the numbers of its evaluators.)"""

import dataclasses
import io
import json
import re
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from ml_collections import ConfigDict

from maxlp import evaluate
from maxlp.data.image_text import make_data
from maxlp.evaluate import (
    counted,
    formatted,
    locked,
    make_mesh,
    of_same_model,
    on_training_data,
    probe_data,
)
from maxlp.families.llama import harness
from maxlp.parallel import sharding
from maxlp.run import run_dir
from maxlp.run.config import ConfigError
from maxlp.run.settings import read
from maxlp.runtime import files, storage
from tests.commands import run_command
from tests.run.fixtures import changed, load


def settings(family="llama", **values):
    return read(changed(load("debug", family=family), {k.replace("__", "."): v for k, v in values.items()}))


def test_results_take_few_digits():
    """The perplexity of a diverged run, too."""
    values = {0.25: "0.2500", 3.98: "3.9800", 12.0: "12", 137_496: "137,496", 5.3e43: "5.3e+43"}
    values |= {float("inf"): "inf", 1: "1.0000", 1234.5: "1,234"}
    assert {value: formatted(value) for value in values} == values


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "batch 1,001"), (False, "")])
def test_a_terminal_shows_how_many_batches_are_done(is_terminal, shown, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", stream)
    batches = [{"number": n} for n in range(1001)]
    assert [*counted(batches)] == batches
    lines = stream.getvalue().split("\r\x1b[K")  # each replaces the one before
    assert lines[-1] == "" and lines[-2:][0].startswith(shown)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("glyphs", "glyphs?split=train"),
        ("tar:/a?text=txt", "tar:/a?text=txt&split=train"),
        ("tar:/a?.tar", "tar:/a?.tar?split=train"),
        ("tfds:a?split=train[:99%]", "tfds:a?split=train[:99%]"),
    ],
)
def test_a_linear_probe_is_fitted_to_the_training_split(source, expected):
    s = settings("clip", data__source=source, data__validation_source="digits")
    data = on_training_data(s).data
    assert (data.source, data.validation_source) == (expected, "")
    assert dataclasses.replace(data, source=source, validation_source="digits") == s.data


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ((), r"images with labels, and digits has no classes; name them"),
        (("0", "1"), r"training images with the classes of digits, and glyphs.* has others; set --config"),
    ],
)
def test_a_linear_probe_needs_training_images_with_the_same_classes(classes, message):
    s = settings("clip", data__validation_source="digits", data__tokenizer="bytes")
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=message):
        probe_data(s, "bytes", classes, mesh)
    names = make_data(s.data, split="train").classes
    assert "split=train" in probe_data(s, "bytes", names, mesh).config.source


def test_a_run_is_evaluated_on_any_number_of_devices_and_a_given_mesh_is_kept():
    s = settings(mesh__fsdp=3)
    with pytest.raises(ConfigError, match=r"mesh\.fsdp=3"):
        make_mesh(s, fixed=True)
    assert dict(make_mesh(s, fixed=False).shape)["fsdp"] == len(jax.devices())
    assert dict(make_mesh(settings(mesh__fsdp=4, mesh__data=2), fixed=True).shape)["fsdp"] == 4
    s = settings(train__microbatches=2)  # of 8 rows, on 8 devices
    assert dict(make_mesh(s, fixed=True).shape)["fsdp"] == len(jax.devices())
    s = settings("llama", optimizer__name="sgd", optimizer__adascale=2.0, train__microbatches=2)
    assert make_mesh(s, fixed=True).size == len(jax.devices())
    s = settings(profile__start=10**9)  # of a run before this was refused
    assert make_mesh(s, fixed=True).size == len(jax.devices())
    for sent in (dict(precision__exchange="int8", precision__scatter="int8"), dict(train__local__steps=3)):
        for fixed, data in ((False, 3), (True, 1)):
            s = settings(mesh__fsdp=-1, mesh__data=data, **sent)
            assert dict(make_mesh(s, fixed=fixed).shape)["data"] == 1


def test_other_data_is_evaluated_with_the_recipe_average_and_adapters_of_the_run(tmp_path):
    trained = {"precision.recipe": "mxfp8", "optimizer.name": "schedule_free_adamw"}
    trained |= {"train.lora.alpha": 4.0}
    books = {"data.source": "text:books"}
    of_run, given = (changed(load("debug"), keys).to_dict() for keys in (trained, books))
    assert of_same_model(given, books, of_run, tmp_path) == given | {
        section: of_run[section] for section in ("precision", "optimizer", "train")
    }
    with pytest.raises(ConfigError, match=r"config\.train\.lora\.alpha=200\.0 has no effect"):
        of_same_model(given, {"train.lora.alpha": 200.0}, of_run, tmp_path)
    with pytest.raises(ConfigError, match=r"another model \(.*num_layers"):
        of_same_model(given | {"model": given["model"] | {"num_layers": 2}}, {}, of_run, tmp_path)
    imported = {"model": of_run["model"]}  # names no recipe
    assert of_same_model(given, {"precision.recipe": "mxfp8"}, imported, tmp_path) == given


@pytest.mark.parametrize("own", [{}, {"data.text_len": 12, "data.lowercase": False}])
def test_other_texts_become_tokens_as_in_training(own, tmp_path):
    reads = {"data.tokenizer": "bpe:300", "data.lowercase": True, "data.text_len": 9}

    def config(**keys):
        return changed(load("debug", family="clip"), keys).to_dict()

    of_run = config(**reads, **{"data.batch_size": 7})
    assert of_same_model(config(**own), own, of_run, tmp_path) == config(**(reads | own))


def test_imported_weights_need_no_preset_of_their_size(tmp_path):
    """The vocabulary is theirs too: a preset's is of another one."""
    given, imported = load("debug").to_dict(), changed(load("debug"), {"model.num_layers": 7}).to_dict()
    imported = {"model": imported["model"], "data": {"tokenizer": "tokenizer.json?eos=[EOS]"}}
    kernel = {"model.attention": "cudnn"}  # does not depend on weights
    given["model"]["attention"] = "cudnn"
    got = of_same_model(given, kernel, imported, tmp_path)
    assert got["model"] == given["model"] | {"num_layers": 7}
    assert got["data"] == given["data"] | {"tokenizer": "tokenizer.json?eos=[EOS]"}
    given["data"]["tokenizer"] = "tokenizer.json?eos=b"
    own = {"data.tokenizer": "tokenizer.json?eos=b"}
    assert of_same_model(given, own, imported, tmp_path)["data"] == given["data"]
    with pytest.raises(ConfigError, match=r"num_layers=4 contradicts --workdir=.*, which has 7; drop"):
        of_same_model(given, {"model.num_layers": 4}, imported, tmp_path)
    with pytest.raises(ConfigError, match=r"config\.train\.eval_batches=1 has no effect: .*; drop"):
        of_same_model(given, {"train.eval_batches": 1}, imported, tmp_path)
    clip = load("debug", family="clip").to_dict()
    with pytest.raises(ConfigError, match=r"--workdir=.* holds a llama, but config.model.name=clip;"):
        of_same_model(clip, {}, imported, tmp_path)


def test_the_error_for_imported_weights_names_keys_that_exist(tmp_path):
    run_dir.save_config(tmp_path, ConfigDict({"model": load("debug").model}))
    done = run_command("evaluate", f"--workdir={tmp_path}")
    named = re.fullmatch(r"error: .* names no data; .*--config\.data\.(\w+)='.*'\n", done.stderr)
    assert named and all(named[1] in load("debug", family=each).data for each in ("llama", "clip"))


def test_a_damaged_config_of_a_run_is_not_taken_for_imported_weights():
    assert run_dir.is_imported(ConfigDict({"model": {}, "precision": {}, "data": {"tokenizer": "bytes"}}))
    assert not run_dir.is_imported(ConfigDict({"model": {}, "train": []}))
    assert not run_dir.is_imported(ConfigDict({"model": {}, "mesh": {}}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lm_eval=a", "--linear_probe"], "--linear_probe has no effect with --lm_eval; drop it"),
        (["--lm_eval=a", "--config=llama/debug"], "--config has no effect with --lm_eval; drop it"),
        (["--lm_eval_limit=3"], "--lm_eval_limit has no effect without --lm_eval; drop it"),
        (["--l2=5"], "--l2 has no effect without --linear_probe; drop it"),
    ],
)
def test_a_flag_without_effect_is_refused(arguments, message, tmp_path):
    done = run_command("evaluate", f"--workdir={tmp_path}", *arguments)
    assert done.returncode == 2 and f"error: {message}\n" in done.stderr


def test_two_evaluations_at_once_wait_for_each_other(tmp_path):
    """What one adds to lm_eval.json must not replace what the other adds."""
    order, entered = [], threading.Event()

    def other():
        entered.set()
        with locked(tmp_path):
            order.append("other")

    thread = threading.Thread(target=other)
    with locked(tmp_path):
        thread.start()
        entered.wait(10)
        time.sleep(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "other"]


@pytest.fixture
def lm_eval(monkeypatch):
    """An evaluation at step 3 with one result."""
    options = ("include", "apply_chat_template", "num_fewshot", "limit")
    names = ("step", "lm_eval", *(f"lm_eval_{name}" for name in options))
    monkeypatch.setattr(evaluate.flags, "FLAGS", SimpleNamespace(**dict.fromkeys(names)))
    language = SimpleNamespace(
        restore=lambda *_: None, tokenizer=None, model=SimpleNamespace(max_seq_len=8), step=3
    )
    monkeypatch.setattr(evaluate, "LanguageModel", lambda _: language)
    monkeypatch.setattr(harness, "evaluate", lambda *_, **__: ({"a": {"acc": 0.5}}, "the table"))


def test_results_join_those_of_other_tasks_and_are_printed_if_not_saved(tmp_path, lm_eval, capsys):
    path = tmp_path / "lm_eval.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="delete it, and evaluate again"):
        evaluate.run_lm_eval(tmp_path)
    assert capsys.readouterr().out == f"{tmp_path} at step 3\nthe table\n"
    earlier = {"a": {"other": 1.0}}
    path.write_text(json.dumps({"2": earlier, "3": earlier}))
    evaluate.run_lm_eval(tmp_path)
    assert json.loads(path.read_text()) == {"2": earlier, "3": {"a": {"other": 1.0, "acc": 0.5}}}


def test_results_of_a_run_in_a_bucket_are_there_afterwards(bucket, lm_eval):
    storage.write(f"{bucket}/config.json", b"{}")
    evaluate.run_lm_eval(files.local_path(bucket))
    assert json.loads(storage.read(f"{bucket}/lm_eval.json")) == {"3": {"a": {"acc": 0.5}}}
