"""The tokenizer of a run: its own file, made anew until there is a checkpoint, and never exchanged."""

import json

import pytest

from maxlp.data.tokenizers.training import train_bpe
from maxlp.run import run_dir
from maxlp.run.config import ConfigError
from maxlp.run.settings import read
from maxlp.run.tokenizer import prepare_tokenizer, saved_tokenizer
from maxlp.runtime.lock import WorkdirLock
from tests.run.fixtures import changed, load


def settings(tokenizer: str, vocab_size: int = 4096, source: str = "stdlib"):
    values = {"data.tokenizer": tokenizer, "data.source": source, "model.vocab_size": vocab_size}
    return read(changed(load("debug"), values))


def corpus(folder, text: str) -> str:
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(text)
    return f"text:{folder}?split=all"


def write_checkpoint(workdir, tokenizer: str):
    """As much of a checkpoint as says which tokenizer the run was trained with."""
    step = workdir / "checkpoints" / "3"
    step.mkdir(parents=True)
    record = {"data_state": {"step": 3, "settings": {"tokenizer": tokenizer}, "streams": {}}}
    (step / "checkpoint.json").write_text(json.dumps(record))


def swap_ids(file):
    """Exchanges the ids of two bytes, which leaves a valid tokenizer of the same size."""
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))


def test_more_tokens_than_the_model_has_room_for_are_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(train_bpe(["abc"], 259).files["tokenizer.json"])
    with pytest.raises(ConfigError, match=r"^config.data.tokenizer=.* set config.model.vocab_size=259"):
        prepare_tokenizer(settings(str(file), vocab_size=256), tmp_path / "run")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (dict(tokenizer="/nope"), "tokenizer"),
        (dict(tokenizer="bpe:300", source="text:/nope"), "source"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_its_key(tmp_path, values, key):
    with pytest.raises(ValueError, match=rf"^config.data.{key}: {key} '.*/nope': no "):
        prepare_tokenizer(settings(**values), tmp_path / "run")


def test_a_learned_tokenizer_of_a_wrong_size_is_refused_by_its_key(tmp_path):
    source = corpus(tmp_path / "text", "abab " * 9)
    for size, words in ((20, "259"), (1000, "gave only 26[0-9] tokens; set config.data.tokenizer=bpe:26")):
        with pytest.raises(ConfigError, match=rf"^config.data.tokenizer=bpe:{size}: .*{words}"):
            prepare_tokenizer(settings(f"bpe:{size}", source=source), tmp_path)


def test_the_tokenizer_of_a_start_without_a_checkpoint_is_made_anew(tmp_path):
    wrong, right = corpus(tmp_path / "wrong", "xyxyxyxy " * 9), corpus(tmp_path / "right", "abab " * 9)
    workdir, given = tmp_path / "run", tmp_path / "given.json"
    workdir.mkdir()
    prepare_tokenizer(settings("bpe:261", source=wrong), workdir)
    (workdir / "run.json").touch()
    kept = workdir / "tokenizer.json"
    learned_from_wrong = kept.read_bytes()
    prepare_tokenizer(settings("bpe:261", source=right), workdir)
    assert '"xy"' not in kept.read_text() and kept.read_bytes() != learned_from_wrong
    given.write_bytes(train_bpe(["cdcd"], 260).files["tokenizer.json"])
    assert prepare_tokenizer(settings(str(given)), workdir) == str(kept)
    assert kept.read_bytes() == given.read_bytes()
    (workdir / "tokenizer.json").rename(workdir / "tokenizer.model")
    prepare_tokenizer(settings(str(given)), workdir)
    assert {each.name for each in workdir.iterdir()} == {"tokenizer.json", "run.json"}, "of this launch"


@pytest.mark.parametrize("config", ["", '{"model_type": "llama"}'])
def test_the_tokenizer_of_a_folder_that_is_no_run_is_not_replaced(tmp_path, config):
    """As in the output of `prepare`, or a folder of Hugging Face, given by mistake."""
    given, workdir = tmp_path / "given.json", tmp_path / "data"
    given.write_bytes(train_bpe(["cdcd"], 260).files["tokenizer.json"])
    workdir.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (workdir / name).write_text("theirs")
        if config:
            (workdir / "config.json").write_text(config)
        for spec in (str(given), "bytes"):
            with pytest.raises(ConfigError, match=rf"^--workdir={workdir} holds no run, .* {name} "):
                prepare_tokenizer(settings(spec), workdir)
        assert (workdir / name).read_text() == "theirs"
        (workdir / name).unlink()
    (workdir / "tokenizer.json").write_bytes(given.read_bytes())
    assert prepare_tokenizer(settings(str(given)), workdir) == str(workdir / "tokenizer.json")


def test_a_failed_start_leaves_nothing(tmp_path):
    workdir = tmp_path / "a" / "b"
    with pytest.raises(ValueError, match="wrong"), WorkdirLock(workdir) as lock:
        lock.acquire()
        with run_dir.undone_on_failure(workdir):
            source = corpus(tmp_path / "text", "xyxy " * 9)
            prepare_tokenizer(settings("bpe:261", source=source), workdir)
            raise ValueError("wrong")
    assert not (tmp_path / "a").exists()
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt), run_dir.undone_on_failure(workdir):
        (workdir / "tokenizer.json").touch()
        raise KeyboardInterrupt
    assert [each.name for each in workdir.iterdir()] == ["config.json"]


def test_a_run_with_a_checkpoint_keeps_its_tokenizer_without_the_original(tmp_path):
    file, workdir = tmp_path / "tokenizer.json", tmp_path / "run"
    workdir.mkdir()
    made = train_bpe(["abc"], 259)
    file.write_bytes(made.files["tokenizer.json"])
    expected = prepare_tokenizer(settings(str(file)), workdir)
    write_checkpoint(workdir, made.fingerprint)
    file.unlink()
    assert prepare_tokenizer(settings(str(file)), workdir) == expected


def test_another_tokenizer_than_that_of_the_checkpoint_is_refused(tmp_path):
    made = train_bpe(["abc"], 259)
    kept = tmp_path / "tokenizer.json"
    kept.write_bytes(made.files["tokenizer.json"])
    write_checkpoint(tmp_path, made.fingerprint)
    assert saved_tokenizer("bpe:259?eos=x", tmp_path) == f"{kept}?eos=x"
    with pytest.raises(ConfigError, match=r"^config.data.tokenizer=bytes is not the tokenizer"):
        saved_tokenizer("bytes", tmp_path)
    swap_ids(kept)
    for command in (
        lambda: prepare_tokenizer(settings("bpe:259"), tmp_path),
        lambda: saved_tokenizer("bpe:259", tmp_path),
    ):
        with pytest.raises(
            ConfigError, match=r"tokenizer.json is not the tokenizer .* put the original file"
        ):
            command()
    kept.unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer.json .* put back the file"):
        saved_tokenizer("bpe:259", tmp_path)


def test_the_run_keeps_the_chat_template_of_its_tokenizer(tmp_path):
    given, workdir = tmp_path / "given.json", tmp_path / "run"
    given.write_bytes(train_bpe(["abc"], 259).files["tokenizer.json"])
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    workdir.mkdir()
    spec = prepare_tokenizer(settings(f"{given}?bos=<|begin_of_text|>&chat_template=plain"), workdir)
    assert spec == f"{workdir}/tokenizer.json?bos=<|begin_of_text|>"
    assert "Assistant" in (workdir / "chat_template.jinja").read_text()
    assert (workdir / "tokenizer_config.json").read_text() == '{"bos_token": null}'
    (tmp_path / "tokenizer_config.json").unlink()
    (workdir / "run.json").touch()
    assert prepare_tokenizer(settings(str(given)), workdir) == f"{workdir}/tokenizer.json"
    assert {path.name for path in workdir.iterdir()} & {
        "chat_template.jinja",
        "tokenizer_config.json",
    } == set()
