"""Adapters in PEFT's format: base + (alpha / r) B A is the model that an export merges."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from maxlp import convert
from maxlp.run import run_dir
from maxlp.run.pretrained import find
from maxlp.runtime import files, hub
from maxlp.runtime.safetensors import Tensors
from tests.commands import run_command
from tests.pretrained import TEXTS, configured, save_run, write_llama

PREFIX = "base_model.model."
RANK, ALPHA = 4, 6.0


def trained(state: dict) -> dict:
    """Adapters of which neither matrix is zero."""
    rng = np.random.default_rng(0)
    return state | {
        "params": jax.tree.map(
            lambda p: jax.device_put((0.1 * rng.standard_normal(p.shape)).astype(np.float32), p.sharding),
            state["params"],
        )
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("hf") / "base")


def exported(base: Path, folder: Path, **lora) -> tuple[Path, Path, Path]:
    """A run with adapters, and its exports: the merged model and the adapters."""
    lora = {f"train__lora__{key}": value for key, value in lora.items()}
    save_run(folder / "run", configured(folder / "run", base, train__lora__rank=RANK, **lora), trained)
    convert.export_weights(folder / "run", folder / "merged")
    convert.export_adapter(folder / "run", folder / "adapter")
    return folder / "run", folder / "merged", folder / "adapter"


@pytest.mark.parametrize(
    ("lora", "alpha", "modules"),
    [
        ({}, 2 * RANK, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (dict(alpha=ALPHA, targets=("*/q_proj", "*/down_proj")), ALPHA, {"q_proj", "down_proj"}),
    ],
)
def test_base_and_adapter_are_the_merged_model(lora, alpha, modules, base, tmp_path):
    _, merged, adapter = exported(base, tmp_path, **lora)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (RANK, alpha, modules)
    tensors, whole = Tensors(adapter, "adapter_model.safetensors"), Tensors(merged)
    used = set()
    for name, weight in Tensors(base).items():
        stem = PREFIX + name.removesuffix(".weight")
        a, b = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
        if name.split(".")[-2] not in modules:
            np.testing.assert_array_equal(whole[name], weight)
            continue
        used |= {a, b}
        assert tensors[a].shape == (RANK, weight.shape[1]) and tensors[b].shape == (weight.shape[0], RANK)
        product = alpha / RANK * tensors[b].astype(np.float64) @ tensors[a].astype(np.float64)
        assert np.abs(product).max() > 0.01
        # Each of R products, their sum, the scale and the last sum is rounded to float32.
        atol = (2 * RANK + 2) * 2.0**-24 * (np.abs(weight).max() + np.abs(product).max() * RANK)
        np.testing.assert_allclose(whole[name], weight + product, rtol=0, atol=atol)
    assert used == set(tensors)


@pytest.mark.parametrize("flag", ["--quantize=int8", "--calibration_sequences=4"])
def test_flags_for_the_weights_are_refused_with_adapters(flag):
    done = run_command("convert", "export", "--adapter", "--workdir=run", "--output=out", flag)
    assert done.returncode == 2
    assert done.stderr == f"error: {flag} is for the weights of the model; drop it, or drop --adapter\n"


def test_the_command_names_the_files(base, tmp_path):
    run, _, adapter = exported(base, tmp_path)
    done = run_command("convert", "export", "--adapter", f"--workdir={run}", f"--output={tmp_path}/out")
    assert "/out holds adapter_config.json, adapter_model.safetensors, " in done.stdout, done.stderr
    for path in adapter.iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_the_folder_holds_the_tokenizer_but_no_model(base, tmp_path):
    _, merged, adapter = exported(base, tmp_path)
    names = {path.name for path in adapter.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"} | {
        path.name for path in merged.iterdir() if "tokenizer" in path.name
    }


def test_a_base_of_the_hub_is_named_with_its_commit(base, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "commits", {})
    monkeypatch.setattr(hub, "fetch", lambda spec, patterns: base)
    run, _, _ = exported(base, tmp_path)
    c = run_dir.load_config(run)
    c.train.init_from = "hf:org/name@main"
    run_dir.save_config(run, c)
    record = files.read_json(run / "run.json", remedy="")
    files.write_json(run / "run.json", record | {"hub_commits": {"hf:org/name@main": "0123abc"}})
    convert.export_adapter(run, tmp_path / "of_hub", dtype="bfloat16")
    config = json.loads((tmp_path / "of_hub/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", "0123abc")
    dtypes = {str(t.dtype) for t in Tensors(tmp_path / "of_hub", "adapter_model.safetensors").values()}
    assert dtypes == {"bfloat16"}


def test_a_run_without_adapters_is_refused(base, tmp_path):
    save_run(tmp_path / "run", configured(tmp_path / "run", base))
    convert.import_weights(base, tmp_path / "imported")
    for run in ("run", "imported"):
        with pytest.raises(ValueError, match=r"was trained without adapters .*; drop --adapter"):
            convert.export_adapter(tmp_path / run, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def as_written_by_peft(adapter: Path, base: Path, **changes) -> Path:
    """Gives a folder of adapters the config that PEFT 0.21 writes, with these changes."""
    off = dict.fromkeys(("alora_invocation_tokens", "auto_mapping", "corda_config", "layers_to_transform"))
    off |= dict(lora_bias=False, use_dora=False, rank_pattern={}, alpha_pattern={}, loftq_config={})
    on = dict(megatron_core="megatron.core", peft_version="0.21.2", qalora_group_size=16)
    lora = dict(peft_type="LORA", r=RANK, lora_alpha=6, use_rslora=False, init_lora_weights=True)
    model = dict(base_model_name_or_path=str(base), revision=None, bias="none", modules_to_save=None)
    config = off | on | lora | model | dict(target_modules=["q_proj"]) | changes
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


def test_weights_from_an_adapter_are_the_merged_model(base, tmp_path):
    _, merged, adapter = exported(base, tmp_path, alpha=ALPHA)
    found, wanted, model = find(str(adapter)), Tensors(merged), Tensors(base)
    assert found.tensors.keys() == wanted.keys()
    for name, weight in wanted.items():
        largest = np.abs(weight).max() + np.abs(model[name] - weight).max() * RANK
        atol = (2 * RANK + 2) * 2.0**-24 * largest
        np.testing.assert_allclose(found.tensors[name], weight, rtol=0, atol=atol)
    (adapter / "chat_template.jinja").write_text("that of the adapter")
    c = configured(tmp_path / "next", adapter)
    assert c.train.init_from == c.data.tokenizer == str(adapter)
    convert.import_weights(adapter, tmp_path / "imported")
    assert (tmp_path / "imported/chat_template.jinja").read_text() == "that of the adapter"
    convert.export_weights(tmp_path / "imported", tmp_path / "again")
    for name, weight in Tensors(tmp_path / "again").items():
        np.testing.assert_array_equal(weight, found.tensors[name])


@pytest.mark.parametrize("of_hub", [False, True])
def test_adapters_of_a_merged_model_are_not_exported_alone(of_hub, base, tmp_path, monkeypatch):
    """PEFT, given the first adapters as their model, computes something else, and only warns."""
    _, _, adapter = exported(base, tmp_path)
    run, name = tmp_path / "next", "hf:org/adapter" if of_hub else str(adapter)
    save_run(run, configured(run, adapter, train__lora__rank=RANK), trained)
    monkeypatch.setattr(hub, "fetch", lambda spec, patterns: adapter)
    c = run_dir.load_config(run)
    c.train.init_from = name
    run_dir.save_config(run, c)
    with pytest.raises(ValueError, match=f"into which those of {name} were merged.*; drop --adapter"):
        convert.export_adapter(run, tmp_path / "out")
    convert.export_weights(run, tmp_path / "out")


def test_an_adapter_without_a_tokenizer_has_that_of_its_model(base, tmp_path):
    _, _, adapter = exported(base, tmp_path)
    for path in adapter.glob("tokenizer*"):
        path.unlink()
    assert configured(tmp_path / "next", adapter).data.tokenizer == str(base)
    convert.import_weights(adapter, tmp_path / "imported")
    assert (tmp_path / "imported/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("rs", "scale"), [(False, 6 / RANK), (True, 6 / RANK**0.5)])
def test_the_scale_is_that_of_the_config_as_peft_writes_it(rs, scale, base, tmp_path):
    _, _, adapter = exported(base, tmp_path, targets=("*/q_proj",))
    found = find(str(as_written_by_peft(adapter, base, use_rslora=rs))).tensors
    stem, matrices = "model.layers.1.self_attn.q_proj", Tensors(adapter, "adapter_model.safetensors")
    a, b = (matrices[f"{PREFIX}{stem}.lora_{one}.weight"] for one in "AB")
    expected = Tensors(base)[f"{stem}.weight"] + scale * b.astype(np.float64) @ a
    np.testing.assert_allclose(found[f"{stem}.weight"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(use_dora=True), "use_dora=True is not supported, only plain LoRA; merge the adapter"),
        (dict(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\] is not supported"),
        (dict(alpha_pattern={"q_proj": 3}), "alpha_pattern={'q_proj': 3} is not supported"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
        (dict(peft_type="IA3"), "peft_type='IA3' is not supported"),
        (dict(base_model_name_or_path="/no/model"), "base_model_name_or_path='/no/model' is not a folder"),
    ],
)
def test_other_adapters_are_refused(changes, message, base, tmp_path):
    with pytest.raises(ValueError, match=f"adapter_config.json: {message}"):
        find(str(as_written_by_peft(tmp_path, base, **changes)))


def test_adapters_of_another_model_are_refused(base, tmp_path):
    other = write_llama(tmp_path / "other", num_layers=1)
    wide = write_llama(tmp_path / "wide", mlp_dim=128)
    _, _, adapter = exported(base, tmp_path)
    for model, message in ((other, r"layers\.1\..* belongs to no matmul"), (wide, "A and B of shapes")):
        with pytest.raises(ValueError, match=rf"adapter_model.safetensors: .*{message}"):
            convert.import_weights(as_written_by_peft(adapter, model), tmp_path / "next")


@pytest.mark.full
def test_peft_computes_the_same_logits(base, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    _, merged, adapter = exported(base, tmp_path, alpha=ALPHA)
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = transformers.AutoTokenizer.from_pretrained(adapter)(TEXTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        expected = load(merged)(tokens).logits
        found = peft.PeftModel.from_pretrained(load(base), adapter)(tokens).logits
        untrained = load(base)(tokens).logits
    largest = expected.abs().max()
    # Weights, each off by a rounding or two, pass through two layers of sums over up to 64 values.
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-18 * largest)
    assert (untrained - expected).abs().max() > 0.01 * largest
