"""The Hub: one commit for each id, the library's cache, and errors of one line."""

import pytest
from huggingface_hub import constants

from maxlp.data.tokenizers import make_tokenizer
from maxlp.data.tokenizers.training import train_bpe
from maxlp.runtime import hub


@pytest.fixture
def repo(fake_hub, tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    (folder / "tokenizer.json").write_bytes(train_bpe(["abc"], 259).files["tokenizer.json"])
    fake_hub.push("org/name", folder)
    return folder


def test_names_without_a_prefix_are_ids_unless_they_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a").mkdir()
    assert hub.as_id("org/name") == "hf:org/name" and hub.as_id("org/name@v1.0") == "hf:org/name@v1.0"
    for path in ("models/a", "/models/a", "./models/b", "a/b/c", "name", "gs://a/b", "hf:org/name"):
        assert hub.as_id(path) == path


def test_only_the_files_that_are_asked_for_are_fetched(repo, fake_hub):
    folder = hub.fetch("hf:org/name", ["*.json"])
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json"}
    assert hub.commits == {"hf:org/name": folder.name}


def test_a_branch_that_moves_is_followed_by_the_next_process_only(repo, fake_hub, monkeypatch):
    first = hub.fetch("hf:org/name", ["config.json"])
    (repo / "config.json").write_text('{"changed": 1}')
    second = fake_hub.push("org/name", repo)
    assert hub.fetch("hf:org/name", ["config.json"]) == first
    monkeypatch.setattr(hub, "commits", {})
    assert hub.fetch("hf:org/name", ["config.json"]).name == second


def test_a_tokenizer_is_taken_by_id_with_options(repo, fake_hub):
    made = make_tokenizer("hf:org/name@main?pad=a")
    assert made.fingerprint == make_tokenizer(str(repo)).fingerprint
    assert made.pad_id == make_tokenizer(str(repo)).encode("a")[0]


REFUSED = {
    "hf:org/none": "there is no {url}/org/none, or it is private, nor .* folder ./org/none here; .* `hf",
    "hf:org/name@v9": "no revision v9 in {url}/org/name; give a branch, tag or commit",
    "hf:name": "is not the name of a repository; write hf:ORG/NAME",
    "hf:org/gated": "is gated: accept the conditions at {url}/org/gated, then `hf auth login`",
    "hf:or--g/name": "Cannot have -- or ..",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cannot_be_fetched_is_refused_in_one_line(spec, repo, fake_hub):
    fake_hub.push("org/gated", repo)
    fake_hub.gated.add("org/gated")
    with pytest.raises(ValueError, match=REFUSED[spec].format(url=fake_hub.url)) as caught:
        hub.fetch(spec, ["config.json"])
    assert str(caught.value).startswith(spec) and "\n" not in str(caught.value)


def test_without_a_network_the_cache_is_used_or_the_error_names_it(repo, fake_hub, monkeypatch):
    cached = hub.fetch("hf:org/name", ["*.json"])
    commit = cached.name
    monkeypatch.setattr(hub, "commits", {})
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(fake_hub.url, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between retries
    assert hub.fetch("hf:org/name", ["*.json"]) == cached
    assert hub.fetch(f"hf:org/name@{commit}", ["*.json"]) == cached
    for patterns in (["*.safetensors"], ["*"]):
        with pytest.raises(
            ConnectionError, match=r"^hf:org/name is not complete in .* not answer .* \./org/name here$"
        ):
            hub.fetch("hf:org/name", patterns)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch("hf:org/name", ["*.json"]) == cached
    with pytest.raises(
        ValueError, match=r"^hf:org/other is not complete in .* \./org/other here; unset HF_HUB_OFFLINE"
    ):
        hub.fetch("hf:org/other", ["*.json"])
