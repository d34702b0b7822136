"""Runs that start from weights: of another library, of the Hub, or of another run."""

import gc
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp import convert
from maxlp.data.tokenizers import make_tokenizer
from maxlp.data.tokenizers.training import train_bpe
from maxlp.families.clip import hf
from maxlp.optim import eval_params
from maxlp.run import changes, cli, pretrained, run_dir
from maxlp.run.config import ConfigError
from maxlp.run.experiment import resolve, resolve_settings
from maxlp.run.pretrained import published_params
from maxlp.run.settings import read
from maxlp.run.tokenizer import prepare_tokenizer
from maxlp.runtime import hub
from maxlp.runtime.safetensors import Tensors, write_tensors
from tests.families.clip import goldens
from tests.pretrained import TEXTS, TOKENS, configured, save_run, write_llama
from tests.run.fixtures import changed, load

ROPE = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with other sizes, another RoPE and another dtype than any preset."""
    from maxlp.families.llama.model import RopeScaling

    changes = dict(rope_theta=3e5, rope_scaling=RopeScaling(**ROPE), param_dtype="bfloat16")
    return write_llama(tmp_path_factory.mktemp("hf") / "model", **changes)


def initial_params(c, workdir: Path, devices: int = 1) -> dict:
    """The parameters before the first step."""
    run = resolve(c, jax.devices()[:devices])
    with jax.set_mesh(run.mesh):
        _, abstract = run.abstract_state()
        return run.initial_state(abstract, workdir)["params"]


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


# --- what is taken from weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 8])
def test_sizes_rope_tokenizer_and_weights_are_those_of_the_folder(folder, tmp_path, devices):
    c = configured(tmp_path, folder)
    given, model = load("debug"), read(c).model
    assert (model.embed_dim, model.num_layers, model.vocab_size) == (64, 2, TOKENS)
    assert (model.rope_theta, vars(model.rope_scaling)) == (3e5, ROPE)
    assert c.data.tokenizer == c.train.init_from == str(folder)
    assert (model.dtype, model.param_dtype, model.remat) == ("float32", "float32", "none")
    assert c.optimizer == given.optimizer and c.mesh == given.mesh
    prepare_tokenizer(read(c), tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == '{"chat_template": "{{ messages }}"}'

    params = initial_params(c, tmp_path, devices)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(params)} == {devices}
    convert.import_weights(folder, tmp_path / "imported", dtype="float32")
    assert_same(params, initial_params(configured(tmp_path, tmp_path / "imported"), tmp_path))


def test_the_optimizer_begins_with_the_weights(folder, tmp_path):
    """Schedule-free AdamW keeps them twice: the average of both copies is what is evaluated."""
    schedule_free = {"optimizer__name": "schedule_free_adamw", "optimizer__schedule": "constant"}
    run = resolve(configured(tmp_path, folder, **schedule_free), jax.devices()[:1])
    with jax.set_mesh(run.mesh):
        _, abstract = run.abstract_state()
        state = run.initial_state(abstract, tmp_path)
    # The average is (y - (1 - b1) z) / b1: a few roundings of numbers of the size of y.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
        eval_params(state["opt_state"], state["params"]),
        state["params"],
    )


def test_no_state_is_in_memory_while_weights_are_loaded(folder, tmp_path, monkeypatch):
    load, live = pretrained.load, []

    def counted(*args):
        live.append(sum(x.nbytes for x in jax.live_arrays()))
        return load(*args)

    c = configured(tmp_path, folder)
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    monkeypatch.setattr(pretrained, "load", counted)
    initial_params(c, tmp_path)
    assert len(live) == 1 and live[0] <= before


CONTRADICTIONS = {
    "model.embed_dim": (32, 64),
    "model.rope_theta": (1e4, 3e5),
    "model.rope_scaling.factor": (4.0, 8.0),
    "model.tie_embeddings": (False, True),
    "model.vocab_size": (512, TOKENS),
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_a_flag_that_contradicts_the_weights_is_refused_with_both_values(folder, tmp_path, key):
    given, theirs = CONTRADICTIONS[key]
    words = f"config.{key}={given!r} contradicts --from={folder}, which has {theirs!r}"
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}"):
        configured(tmp_path, folder, **{key: given})


def test_flags_that_agree_or_decide_how_to_train_are_taken(folder, tmp_path):
    flags = {"model.embed_dim": 64, "model.max_seq_len": 64, "model.init_std": 0.5, "model.remat": "block"}
    model = read(configured(tmp_path, folder, **flags)).model
    assert (model.max_seq_len, model.init_std, model.remat) == (64, 0.5, "block")


def test_what_acts_in_training_comes_from_the_config_file(folder, tmp_path):
    c = changed(load("debug"), {"model.qk_clip": 100.0, "model.init_std": 0.5})
    model = pretrained.configure(c, tmp_path, str(folder)).model
    assert model.qk_clip == 100.0 and model.init_std != 0.5
    images = changed(load("debug", family="clip"), {"model.visual.patch_dropout": 0.5})
    weights = load("debug", family="clip").model.to_dict()
    joined = pretrained.joined_model(weights, images.model.to_dict(), {}, "weights")
    assert joined["visual"] == weights["visual"] | {"patch_dropout": 0.5}


def test_what_holds_no_weights_is_refused_with_what_does(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    ways_out = r"; give a run, a folder of weights, or hf:ORG/NAME of the Hub$"
    for source, found in (
        (tmp_path / "nowhere", "does not exist"),
        (folder / "config.json", "is a file"),
        (tmp_path, r"holds no config\.json"),
        (tmp_path / "empty", "is empty"),
    ):
        with pytest.raises(ConfigError, match=f"^--from={re.escape(str(source))} {found}{ways_out}"):
            configured(tmp_path / "run", source)


def test_weights_of_another_family_are_refused(folder, tmp_path):
    c = load("debug", family="clip")
    with pytest.raises(ConfigError, match=r"holds a llama, but config.model.name=clip; .* --config=llama/"):
        pretrained.configure(c, tmp_path, str(folder))


# --- the tokenizer ----------------------------------------------------------------------------------------


def settings(tmp_path: Path, weights: Any, tokenizer: str):
    c = configured(tmp_path, weights)
    with c.unlocked():
        c.data.tokenizer, c.data.source = tokenizer, f"text:{tmp_path}/corpus/*.txt?split=all"
    return read(c)


@pytest.mark.parametrize("kind", ["folder", "run"])
def test_another_tokenizer_than_that_of_the_weights_is_refused(folder, tmp_path, kind):
    (tmp_path / "corpus").mkdir()
    for name in "ab":
        (tmp_path / "corpus" / f"{name}.txt").write_text("never the same words again and again " * 20)
    weights = folder
    if kind == "run":
        weights = tmp_path / "run"
        save_run(weights, configured(tmp_path, folder))
    (tmp_path / "other.json").write_bytes(train_bpe(["cdcd"], 260).files["tokenizer.json"])
    for spec in ("bpe:265", "bytes", f"{tmp_path}/other.json"):
        words = (
            f"config.data.tokenizer={spec} is not the tokenizer that config.train.init_from={weights} was"
        )
        with pytest.raises(ConfigError, match=f"^{re.escape(words)}.*--swap_tokenizer={re.escape(spec)}"):
            prepare_tokenizer(settings(tmp_path, weights, spec), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_same_tokenizer_from_another_file_or_learned_again_is_accepted(folder, tmp_path):
    (tmp_path / "corpus").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "corpus" / f"{i}.txt").write_text(text)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text()), indent=1))
    others = f"{folder}/tokenizer.json?eos=<|end_of_text|>", f"{again}?eos=<|pad|>"
    for i, spec in enumerate((f"bpe:{TOKENS}", str(again), *others)):
        workdir = tmp_path / f"run{i}"
        workdir.mkdir()
        prepare_tokenizer(settings(tmp_path, folder, spec), workdir)


def test_a_file_of_the_same_tokens_with_another_end_of_text_is_refused(folder, tmp_path):
    run, again = tmp_path / "weights", tmp_path / "again.json"
    c = configured(tmp_path, folder)
    with c.unlocked():
        c.data.tokenizer += "?eos=<|pad|>"
    save_run(run, c)
    again.write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text()), indent=1))
    same, other = (f"{again}?eos={name}" for name in ("<|pad|>", "<|end_of_text|>"))
    pretrained.check_tokenizer(str(run), same, make_tokenizer(same))
    with pytest.raises(ConfigError, match="is not the tokenizer"):
        pretrained.check_tokenizer(str(run), other, make_tokenizer(other))


@pytest.mark.parametrize("spec", ["bpe:512", "{tmp}/large.json"])
def test_a_tokenizer_with_more_tokens_than_the_weights_can_be_swapped(folder, tmp_path, spec):
    """It is no way out to set model.vocab_size, which would contradict the weights."""
    (tmp_path / "large.json").write_bytes(
        train_bpe([f"{i:x}" for i in range(5000)], 512).files["tokenizer.json"]
    )
    spec = spec.format(tmp=tmp_path)
    with pytest.raises(ConfigError, match=r"has 512 tokens.*; give that of the weights") as error:
        s = settings(tmp_path, folder, spec)
        resolve_settings(s, jax.devices()[:1])
        prepare_tokenizer(s, tmp_path / "new")
    assert str(error.value).endswith(f", or exchange it: --from={folder} --swap_tokenizer={spec}")
    resolve(configured(tmp_path, folder, swap=spec), jax.devices()[:1])


def test_a_new_tokenizer_for_weights_without_one_is_refused(folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer=bpe:4096 is not the tokenizer .*; give theirs"):
        pretrained.check_tokenizer(str(bare), "bpe:4096", train_bpe(TEXTS, TOKENS))
    pretrained.check_tokenizer(str(bare), f"{folder}/tokenizer.json", train_bpe(TEXTS, TOKENS))


# --- tensors ----------------------------------------------------------------------------------------------

NORM, EXTRA = "model.norm.weight", "model.extra.weight"
DAMAGES: dict[str, Any] = {
    "missing": (lambda tensors: tensors.pop(NORM), f"tensor '{NORM}' is missing, but the config describes"),
    "unknown": (
        lambda tensors: tensors.update({EXTRA: np.ones(2)}),
        f"tensor '{EXTRA}' has no place in the ",
    ),
    "another shape": (
        lambda tensors: tensors.update({NORM: np.ones(65)}),
        rf"tensor '{NORM}' of shape \(65,\) does not fit final_norm/scale of shape \(64,\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_dry_run_compares_the_tensors_of_weights_without_reading_them(
    folder, tmp_path, monkeypatch, damage
):
    change, message = DAMAGES[damage]
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = dict(Tensors(folder))
    change(tensors)
    write_tensors(other, tensors, dtype="float32")
    run, of_other = (resolve(configured(tmp_path, source), jax.devices()[:1]) for source in (folder, other))
    monkeypatch.setattr(Tensors, "__getitem__", lambda *_: pytest.fail("reads a tensor"))
    pretrained.check(run.settings, run.mesh)
    with pytest.raises(ConfigError, match=f"^config.train.init_from={other}: {message}"):
        pretrained.check(of_other.settings, run.mesh)


# --- weights of a run -------------------------------------------------------------------------------------


def moved(state: dict) -> dict:
    """Trained parameters that differ from their average, of which x = (y - (1 - b1) z) / b1."""
    return state | {"params": jax.tree.map(lambda leaf: leaf + 0.125, state["params"])}


def test_weights_are_those_of_the_checkpoint_that_is_named_or_the_newest(folder, tmp_path):
    base = tmp_path / "base"
    c = configured(base, folder)
    save_run(base, c, step=3)
    save_run(base, c, moved, step=4)
    older, newest = (
        initial_params(configured(tmp_path, path), tmp_path) for path in (base / "checkpoints" / "3", base)
    )
    assert_same(newest, moved({"params": older})["params"])


def test_a_schedule_free_run_passes_on_its_average(folder, tmp_path):
    base = tmp_path / "base"
    averaging = dict(optimizer__name="schedule_free_adamw", optimizer__schedule="constant")
    save_run(base, configured(base, folder, **averaging), moved)
    run = resolve(configured(tmp_path, base), jax.devices()[:1])
    with jax.set_mesh(run.mesh):
        average = published_params(base, None, run.mesh)
    params = initial_params(configured(tmp_path, base), tmp_path)
    assert_same(params, average)
    trained = pretrained.checkpoint.restore(base, {"params": params}).state["params"]
    assert not np.array_equal(trained["final_norm"]["scale"], params["final_norm"]["scale"])


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.full)])
def test_a_run_with_adapters_passes_on_the_merged_weights(folder, tmp_path, devices):
    base = tmp_path / "base"
    save_run(base, configured(base, folder, train__lora__rank=4), moved)
    params = initial_params(configured(tmp_path, base, model__param_dtype="bfloat16"), tmp_path, devices)
    run = resolve(configured(tmp_path, base), jax.devices()[:1])
    with jax.set_mesh(run.mesh):
        merged = published_params(base, None, run.mesh)
    # Four devices may add the products of an adapter in another order, next to a boundary of bfloat16.
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(merged), strict=True):
        tolerance = 0 if devices == 1 else 2.0**-7
        theirs = np.asarray(theirs.astype(jnp.bfloat16), np.float32)
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=tolerance)
    untrained = initial_params(configured(tmp_path, folder), tmp_path)
    kernel = nnx.traversals.flatten_mapping(merged)["layers", "attn", "q_proj", "kernel"]
    assert not np.array_equal(kernel, untrained["layers"]["attn"]["q_proj"]["kernel"])


@pytest.mark.parametrize("own", [{}, {"data.text_len": 12, "data.lowercase": False}])
def test_texts_become_tokens_as_in_the_run_that_weights_come_from(own, tmp_path):
    base, workdir = tmp_path / "base", tmp_path / "run"
    reads = {"data.text_len": 9, "data.lowercase": True}
    (base / "checkpoints").mkdir(parents=True)
    run_dir.save_config(base, changed(load("debug", family="clip"), reads))
    c = pretrained.configure(changed(load("debug", family="clip"), own), workdir, str(base), None, own)
    assert {key: c.data[key.removeprefix("data.")] for key in reads} == reads | own
    (workdir / "checkpoints" / "3").mkdir(parents=True)
    run_dir.save_config(workdir, c)
    again = pretrained.configure(load("debug", family="clip"), workdir, str(base))
    assert changes.check_config(workdir, again) == {}


def test_a_new_run_reports_what_its_model_computes_otherwise_than_that_of_its_weights(
    folder, tmp_path, capsys
):
    """As a config with ``init_from`` can, but no --from. A vocabulary that is exchanged is expected."""
    c = configured(tmp_path, folder, "bpe:300")
    pretrained.report_differences(read(c), tmp_path)
    assert capsys.readouterr().out == ""
    c.model.rope_theta = 1e4
    pretrained.report_differences(read(c), tmp_path)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("not as in the model of config.train.init_from: config.model.rope_theta: 300000")
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    pretrained.report_differences(read(c), tmp_path)
    assert capsys.readouterr().out == ""


# --- a run that is started again --------------------------------------------------------------------------


def test_the_same_command_resumes_without_the_weights(folder, tmp_path):
    source, workdir = tmp_path / "source", tmp_path / "run"
    shutil.copytree(folder, source)
    first = configured(workdir, source)
    save_run(workdir, first)
    shutil.rmtree(source)
    again = configured(workdir, source)
    assert again.to_json() == first.to_json()
    assert changes.check_config(workdir, again) == {}
    with pytest.raises(ConfigError, match=r"model.embed_dim=32 contradicts"):
        configured(workdir, source, model__embed_dim=32)


def test_a_resumed_run_refuses_weights_of_another_model(folder, tmp_path):
    workdir, other = tmp_path / "run", write_llama(tmp_path / "other", rope_theta=1e4)
    save_run(workdir, configured(workdir, folder))
    with pytest.raises(ConfigError, match=r"model\.rope_theta"):
        changes.check_config(workdir, configured(workdir, other))


@pytest.mark.parametrize("swap", [None, "bpe:300"])
def test_a_run_resumes_without_its_flags(folder, tmp_path, monkeypatch, swap):
    """With a preset that leaves the tokenizer to the weights; without one, the config is complete."""

    def read_config(workdir: Path, tokenizer: str | None = None):
        c = changed(load("debug"), {"data.seq_len": 32, "data.tokenizer": tokenizer})
        given = {"config": c, "from": SimpleNamespace(value=None), "swap_tokenizer": None}
        monkeypatch.setattr(cli.flags, "FLAGS", type("Flags", (dict,), given)(given))
        monkeypatch.setattr(cli, "overrides", dict)
        return cli.read_config(workdir)

    first = configured(tmp_path / "run", folder, swap)
    save_run(tmp_path / "run", first)
    assert read_config(tmp_path / "run").to_json() == first.to_json()
    assert read_config(tmp_path / "run", "bytes").train.init_from == ""
    assert read_config(tmp_path / "new").data.tokenizer is None


# --- the Hub ----------------------------------------------------------------------------------------------


def test_a_hub_id_is_taken_at_one_commit(folder, tmp_path, fake_hub, monkeypatch):
    commit, workdir = fake_hub.push("org/tiny", folder), tmp_path / "run"
    c = configured(workdir, "org/tiny")
    assert (c.train.init_from, c.data.tokenizer) == ("hf:org/tiny", "hf:org/tiny")
    assert not any("safetensors" in path for path in fake_hub.requests), "only the config until it is used"
    save_run(workdir, c)
    assert run_dir.hub_commits(workdir) == {"hf:org/tiny": commit}
    assert_same(initial_params(c, tmp_path), initial_params(configured(tmp_path, folder), tmp_path))

    # The branch moves to another model, and the run is started again: before its first checkpoint …
    fake_hub.push("org/tiny", write_llama(tmp_path / "other", seed=1, embed_dim=32))
    shutil.rmtree(workdir / "checkpoints")
    monkeypatch.setattr(hub, "commits", {})
    assert configured(workdir, "org/tiny").to_json() == c.to_json()
    # … and another run takes the new commit.
    monkeypatch.setattr(hub, "commits", {})
    assert configured(tmp_path / "new", "org/tiny").model.embed_dim == 32


def test_a_resumed_run_needs_no_network(folder, tmp_path, fake_hub, monkeypatch):
    fake_hub.push("org/tiny", folder, "v1")
    c = configured(tmp_path / "run", "org/tiny@v1")
    save_run(tmp_path / "run", c)
    shutil.rmtree(tmp_path / "hf_cache")
    fake_hub.repos.clear()
    fake_hub.requests.clear()
    monkeypatch.setattr(hub, "commits", {})
    again = configured(tmp_path / "run", "org/tiny@v1")
    prepare_tokenizer(read(again), tmp_path / "run")
    assert again.to_json() == c.to_json() and fake_hub.requests == []


def test_import_takes_a_hub_id(folder, tmp_path, fake_hub):
    fake_hub.push("org/tiny", folder)
    convert.import_weights("hf:org/tiny", tmp_path / "a")
    convert.import_weights(folder, tmp_path / "b")
    assert_same(*(initial_params(configured(tmp_path, tmp_path / name), tmp_path) for name in "ab"))


def test_the_image_processor_of_a_hub_id_is_taken(tmp_path, fake_hub):
    """It is a file of its own, and says how pixels are normalized."""
    folder = tmp_path / "clip"
    folder.mkdir()
    config, preprocessor = hf.config_to_hf(goldens.load("clip_hf_gelu").config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor | dict(image_std=[0.25] * 3)))
    write_tensors(folder, {"visual_projection.weight": np.zeros((2, 2), np.float32)}, dtype="float32")
    fake_hub.push("org/clip", folder)
    assert pretrained.find("hf:org/clip").model["image_std"] == (0.25,) * 3
