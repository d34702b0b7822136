"""`convert`: folders of other libraries become runs, and runs become such folders."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from maxlp import convert
from maxlp.core.train_state import abstract_model
from maxlp.data.tokenizers import make_tokenizer
from maxlp.data.tokenizers.training import train_bpe
from maxlp.families import weights
from maxlp.families.llama.hf import config_from_hf
from maxlp.families.weights import formats
from maxlp.parallel import sharding
from maxlp.run import run_dir
from maxlp.run.restore import restore_model
from maxlp.run.settings import make_model, read_model
from maxlp.run.tokenizer import saved_tokenizer
from maxlp.runtime import checkpoint
from maxlp.runtime.safetensors import Tensors, write_tensors
from tests import training_runs
from tests.commands import run_command
from tests.run.fixtures import load

GOLDENS = Path(__file__).parent / "goldens"
SOURCES = {  # golden -> family, format
    "llama_3_1": ("llama", "hf_llama"),
    "qwen3": ("qwen3", "hf_qwen3"),
    "clip_hf_quick_gelu": ("clip", "hf_clip"),
    "clip_hf_siglip": ("clip", "hf_clip"),
    "clip_open_clip": ("clip", "open_clip"),
}


def weights_file(name: str) -> str:
    family, format_name = SOURCES[name]
    return formats(family)[format_name].weights_file


def write_source(folder: Path, name: str, **changes: Any) -> Path:
    """A golden as the folder that its library would have written, in shards if that library reads them.

    Args:
      changes: of the JSON config.
    """
    family, format_name = SOURCES[name]
    weight_format = formats(family)[format_name]
    with np.load(GOLDENS / f"{name}.npz") as golden:
        tensors = {
            key.removeprefix("weights/"): golden[key].astype(np.float32)
            for key in golden
            if key.startswith("weights/")
        }
        config = json.loads(str(golden["config"]))
    shard = 30_000 if weight_format.max_shard_bytes < sys.maxsize else sys.maxsize
    write_tensors(
        folder, tensors, dtype="float32", weights=weight_format.weights_file, max_shard_bytes=shard
    )
    (folder / weight_format.config_file).write_text(json.dumps(config | changes))
    if family in ("llama", "qwen3"):
        made = train_bpe(["to be or not to be, that is the question"] * 10, 270)
        (folder / "tokenizer.json").write_bytes(made.files["tokenizer.json"])
    else:
        (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, Path]:
    """A folder as Hugging Face writes it, and the run it was imported to."""
    root = tmp_path_factory.mktemp("llama")
    source = write_source(root / "source", "llama_3_1", dtype="float32")
    convert.import_weights(source, root / "run")
    return source, root / "run"


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> tuple[Path, Path]:
    """A folder as open_clip writes it, and the run it was imported to."""
    root = tmp_path_factory.mktemp("clip")
    source = write_source(root / "source", "clip_open_clip")
    convert.import_weights(source, root / "run")
    return source, root / "run"


def restored_params(run: Path, mesh: jax.sharding.Mesh, **model_changes: Any) -> dict:
    c = run_dir.load_config(run)
    c.model.update(model_changes)
    _, abstract = abstract_model(make_model(*read_model(c)), mesh)
    return checkpoint.restore(str(run), {"params": abstract["params"]}).state["params"]


def assert_same_tensors(a: Path, b: Path, weights: str = "model.safetensors") -> None:
    a_tensors, b_tensors = Tensors(a, weights), Tensors(b, weights)
    assert set(a_tensors) == set(b_tensors)
    for name in a_tensors:
        np.testing.assert_array_equal(a_tensors[name], b_tensors[name], strict=True)


# --- round trips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip_hf_quick_gelu", "clip_hf_siglip", "clip_open_clip"])
def test_a_clip_survives_the_round_trip_to_the_bit(name, tmp_path):
    source = write_source(tmp_path / "source", name)
    convert.import_weights(source, tmp_path / "run")
    convert.export_weights(tmp_path / "run", tmp_path / "out", SOURCES[name][1])
    assert_same_tensors(source, tmp_path / "out", weights_file(name))
    assert (tmp_path / "out" / "merges.txt").read_bytes() == (source / "merges.txt").read_bytes()
    convert.import_weights(tmp_path / "out", tmp_path / "again")
    first, again = (run_dir.load_config(tmp_path / run).to_dict() for run in ("run", "again"))
    assert first == again


def test_a_llama_survives_the_round_trip_to_the_bit(llama, tmp_path):
    source, run = llama
    out = tmp_path / "out"
    convert.export_weights(run, out)
    assert_same_tensors(source, out)
    config = json.loads((out / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert config["torch_dtype"] == "float32" and config_from_hf(config) == config_from_hf(original)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    special = json.loads((out / "tokenizer_config.json").read_text())
    assert (special["bos_token"], special["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")


def test_files_that_would_describe_another_model_are_not_written(llama, tmp_path, monkeypatch):
    """As those of a format that does not know a setting of the model."""
    known = weights.formats("llama")["hf_llama"]

    def config_files(model, make_tokenizer):
        return known.config_files(dataclasses.replace(model, logit_soft_cap=None), make_tokenizer)

    forgetful = dataclasses.replace(known, config_files=config_files)
    monkeypatch.setattr(weights, "formats", lambda family: {"hf_llama": forgetful})
    run = shutil.copytree(llama[1], tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["model"]["logit_soft_cap"] = 30.0
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"another model \(config.model.logit_soft_cap: 30.0 -> None\)"):
        convert.export_weights(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_llama_of_bytes_is_exported_with_the_ids_of_its_special_tokens(llama, tmp_path):
    run = shutil.copytree(llama[1], tmp_path / "run")
    for path in run.glob("tokenizer*"):
        path.unlink()
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"data": {"tokenizer": "bytes"}}))
    convert.export_weights(run, tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["bos_token_id"], exported["eos_token_id"]) == (256, 257)


def test_open_clip_to_hugging_face_in_bfloat16_for_larger_images(clip, tmp_path):
    source, run = clip
    refusal = r"model.layer_scale=0.1 has no counterpart in Hugging Face's CLIP.*; try --format=open_clip$"
    with pytest.raises(ValueError, match=refusal):
        convert.export_weights(run, tmp_path / "never")
    assert not (tmp_path / "never").exists()

    config = json.loads((source / "open_clip_config.json").read_text())
    for tower in ("vision_cfg", "text_cfg"):
        del config["model_cfg"][tower]["ls_init_value"]
    tensors = Tensors(source, weights_file("clip_open_clip"))
    tensors = {name: tensor for name, tensor in tensors.items() if "gamma" not in name}
    plain = tmp_path / "plain"
    write_tensors(plain, tensors, dtype="float32", weights=weights_file("clip_open_clip"))
    (plain / "open_clip_config.json").write_text(json.dumps(config))
    convert.import_weights(plain, tmp_path / "run", image_size=40)
    convert.export_weights(tmp_path / "run", tmp_path / "out", dtype="bfloat16")

    found = Tensors(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vision_config"]["image_size"] == 40 and config["torch_dtype"] == "bfloat16"
    with np.load(GOLDENS / "clip_open_clip.npz") as golden:
        positions = found["vision_model.embeddings.position_embedding.weight"]
        resized = golden["resized"]
        # In bfloat16, which rounds by up to 2^-9, instead of float32.
        np.testing.assert_allclose(positions.astype(np.float32), resized, rtol=2**-8, atol=1e-6)
    joint = tensors["transformer.resblocks.1.attn.in_proj_weight"]
    np.testing.assert_array_equal(
        found["text_model.encoder.layers.1.self_attn.k_proj.weight"],
        joint[24:48].astype(jnp.bfloat16),
        strict=True,
    )


def test_a_qwen3_survives_the_round_trip_to_the_bit(tmp_path):
    source = write_source(tmp_path / "source", "qwen3", dtype="float32")
    convert.import_weights(source, tmp_path / "run")
    assert run_dir.load_config(tmp_path / "run").model.name == "qwen3"
    convert.export_weights(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_the_matmuls_of_blocks_survive_the_round_trip_in_8_bits(scheme, llama, tmp_path):
    source, run = llama
    convert.export_weights(run, tmp_path / "out", quantize=scheme)
    convert.import_weights(tmp_path / "out", tmp_path / "again", dtype="float32")
    convert.export_weights(tmp_path / "again", tmp_path / "plain")
    original, found, codes = Tensors(source), Tensors(tmp_path / "plain"), Tensors(tmp_path / "out")
    assert set(found) == set(original)
    quantized = {name for name in original if f"{name}_scale" in codes}
    assert len(quantized) == 2 * 7 and all("_proj" in name for name in quantized)
    for name in original:
        w = original[name]
        if name in quantized:
            scale = codes[f"{name}_scale"].astype(np.float32)
            bound = scale / 2 if scheme == "int8" else np.maximum(np.abs(w) / 16, scale * 2.0**-10)
        else:
            bound = np.abs(w) * 2.0**-8  # half a step of bfloat16, with 8 bits
        assert (np.abs(found[name] - w) <= bound * (1 + 2.0**-15)).all(), name


def test_what_cannot_be_quantized_is_refused(llama, clip, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"--quantize=int8 writes .* in bfloat16; drop --dtype=float32"):
        convert.export_weights(llama[1], out, dtype="float32", quantize="int8")
    with pytest.raises(ValueError, match="--quantize=fp8 is for language models, not for hf_clip"):
        convert.export_weights(clip[1], out, quantize="fp8")
    assert not out.exists()


@pytest.mark.slow
def test_8_bits_cost_less_than_a_hundredth_of_a_nat(tmp_path):
    """Measured on a model that has learned something: its loss has fallen from 6.2 to about 4."""
    steps = ("--config.train.total_steps=60", "--config.checkpoint.every_steps=60")
    training_runs.finish(training_runs.start(tmp_path / "run", *steps))

    of_evaluation = [flag for flag in training_runs.SMALL if re.match(r"--config(=|\.model|\.data)", flag)]

    def loss(run: Path) -> float:
        done = run_command("evaluate", f"--workdir={run}", *of_evaluation)
        [value] = re.findall(r"^ *loss +([\d.]+)", done.stdout, re.MULTILINE)
        return float(value)

    expected = loss(tmp_path / "run")
    for scheme in ("int8", "fp8"):
        out, again = tmp_path / scheme, tmp_path / f"run_{scheme}"
        convert.export_weights(tmp_path / "run", out, quantize=scheme)
        convert.import_weights(out, again, dtype="float32")
        assert abs(loss(again) - expected) < 0.01


# --- an import is a run ---------------------------------------------------------------------------------


def imported_model(run: Path) -> nnx.Module:
    mesh = sharding.make_mesh(data=1, fsdp=8)
    graphdef, state, step = restore_model(run_dir.load_config(run), run, None, mesh)
    assert step == 0
    return nnx.merge(graphdef, state["params"], state["model_state"])


def test_an_imported_llama_computes_the_golden_logits(llama):
    _, run = llama
    make_tokenizer(saved_tokenizer(run_dir.load_config(run).data.tokenizer, run))
    with np.load(GOLDENS / "llama_3_1.npz") as golden:
        logits = jax.jit(lambda model, tokens: model(tokens))(imported_model(run), golden["tokens"])
        # As in `families/decoders.py`.
        np.testing.assert_allclose(logits, golden["logits"], atol=3e-5, rtol=0)


def test_an_imported_clip_computes_the_golden_features(clip):
    with np.load(GOLDENS / "clip_open_clip.npz") as golden:
        encode = jax.jit(lambda model, text: model.encode_text(text))
        features_BE = encode(imported_model(clip[1]), golden["text"])
        # As in `families/clip/test_weights.py`.
        np.testing.assert_allclose(features_BE, golden["text_features"], atol=3e-6, rtol=0)


def test_training_starts_from_an_import_of_any_dtype_on_any_mesh(llama, tmp_path):
    source, _ = llama
    convert.import_weights(source, tmp_path / "run", dtype="bfloat16")
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    kernel = restored_params(tmp_path / "run", mesh, param_dtype="float32")["layers"]["mlp"]["up_proj"][
        "kernel"
    ]
    assert len(kernel.sharding.device_set) == 8
    expected = Tensors(source)["model.layers.1.mlp.up_proj.weight"].T
    np.testing.assert_array_equal(kernel[1], expected.astype(jnp.bfloat16).astype(np.float32), strict=True)


# --- exports --------------------------------------------------------------------------------------------


def test_export_rounds_to_the_given_dtype(llama, tmp_path):
    source, run = llama
    convert.export_weights(run, tmp_path / "out", dtype="bfloat16")
    exported, original = Tensors(tmp_path / "out"), Tensors(source)
    for name in original:
        np.testing.assert_array_equal(exported[name], original[name].astype(jnp.bfloat16), strict=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_an_exported_tokenizer_makes_texts_lower_case_if_the_run_did(normalizer, clip, tmp_path):
    run = shutil.copytree(clip[1], tmp_path / "run")
    content = json.loads(train_bpe(["to be or not to be é"] * 10, 270).files["tokenizer.json"])
    (run / "tokenizer.json").write_text(json.dumps(content | {"normalizer": normalizer}))
    c = run_dir.load_config(run)
    c.data.lowercase = True
    run_dir.save_config(run, c)
    convert.export_weights(run, tmp_path / "out", "open_clip")
    of_run, exported = (make_tokenizer(str(folder)) for folder in (run, tmp_path / "out"))
    text = "To BE, E\u0301 and É"
    assert exported.encode(text).tolist() == of_run.encode(text.lower()).tolist()


@pytest.mark.parametrize(
    ("name", "is_imported", "before", "behind"),
    [("llama_3_1", True, [], []), ("llama_3_1", False, [0], []), ("clip_hf_siglip", False, [0], [1])],
)
def test_an_exported_tokenizer_adds_the_special_tokens_of_training(
    name, is_imported, before, behind, tmp_path
):
    source = write_source(tmp_path / "source", name)
    content = json.loads(train_bpe(["to be or not to be"] * 10, 265).files["tokenizer.json"])
    (source / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    convert.import_weights(source, tmp_path / "run")
    if not is_imported:  # a run that was trained has all sections
        imported, trained = run_dir.load_config(tmp_path / "run"), load("debug", family=SOURCES[name][0])
        trained.model, trained.precision = imported.model, imported.precision
        trained.data.tokenizer = imported.data.tokenizer
        run_dir.save_config(tmp_path / "run", trained)
    convert.export_weights(tmp_path / "run", tmp_path / "out", SOURCES[name][1])
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = made.encode("to be", add_special_tokens=False).ids
    assert made.encode("to be").ids == [*before, *text, *behind]


@pytest.mark.parametrize(
    ("name", "table", "exported"),
    [
        ("clip_hf_siglip", "text_model.embeddings.position_embedding.weight", 5),
        ("clip_hf_quick_gelu", "text_model.embeddings.position_embedding.weight", None),
    ],
)
def test_texts_are_padded_as_in_training(name, table, exported, tmp_path, caplog):
    """A SigLIP pools the last position, which other libraries take at the end of the longest text."""
    source = write_source(tmp_path / "source", name)
    convert.import_weights(source, tmp_path / "run")
    c = run_dir.load_config(tmp_path / "run")
    c.data.text_len = 5
    run_dir.save_config(tmp_path / "run", c)
    convert.export_weights(tmp_path / "run", tmp_path / "out", SOURCES[name][1])
    rows = Tensors(source)[table][:exported]
    assert ("texts longer than data.text_len=5 were not trained" in caplog.text) == (exported is None)
    np.testing.assert_array_equal(Tensors(tmp_path / "out")[table], rows)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["max_position_embeddings"] == len(rows)
    convert.import_weights(tmp_path / "out", tmp_path / "again")


def test_export_takes_the_newest_or_the_given_step(tmp_path):
    source = write_source(tmp_path / "source", "llama_3_1")
    run = tmp_path / "run"
    convert.import_weights(source, run)
    params = restored_params(run, sharding.make_mesh(devices=jax.devices()[:1]))
    with checkpoint.Checkpointer(run / "checkpoints", every_steps=1) as checkpoints:
        checkpoints.save(7, {"params": jax.tree.map(lambda x: x + 1, params)}, data_state={})
    convert.export_weights(run, tmp_path / "newest")
    convert.export_weights(run, tmp_path / "step_0", step=0)
    assert_same_tensors(source, tmp_path / "step_0")
    newest = Tensors(tmp_path / "newest")["model.norm.weight"]
    np.testing.assert_array_equal(newest, Tensors(source)["model.norm.weight"] + 1)
    with pytest.raises(ValueError, match="checkpoints/5"):
        convert.export_weights(run, tmp_path / "step_5", step=5)


# --- mistakes -------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(llama):
    source, run = llama
    with pytest.raises(ValueError, match=r"--output=.* is not empty; choose a new directory"):
        convert.import_weights(source, source)
    with pytest.raises(ValueError, match=r"--output=.* is not empty; choose a new directory"):
        convert.export_weights(run, run)


def test_a_family_without_weight_formats_is_named(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("maxlp.families.llama.export.FORMATS", {})
    with pytest.raises(ValueError, match=r"holds a llama, a family without weight formats; add one to"):
        convert.export_weights(llama[1], tmp_path / "out")


def test_a_run_that_could_not_be_read_is_not_written(llama, tmp_path):
    with pytest.raises(ValueError, match=r"^--output=.*/run\[1\] contains \["):
        convert.import_weights(llama[0], tmp_path / "run[1]")
    assert not list(tmp_path.iterdir())


def test_folders_without_a_model_or_a_run_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"holds no model: there is neither config.json nor open_clip_config"
    ):
        convert.import_weights(tmp_path, tmp_path / "run")
    with pytest.raises(ValueError, match=r"/nowhere does not exist; give a folder$"):
        convert.import_weights(tmp_path / "nowhere", tmp_path / "run")
    (file := tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"/model.safetensors is a file; give a folder$"):
        convert.import_weights(file, tmp_path / "run")
    with pytest.raises(ValueError, match="holds no run"):
        convert.export_weights(tmp_path / "nowhere", tmp_path / "out")


@pytest.mark.parametrize(
    "content, options, message",
    [
        (
            '{"model_type": "blip"}',
            {},
            "model_type='blip' is not supported; one of llama, qwen3",
        ),
        (
            '{"model": {"name": "llama"}}',
            {},
            "source holds a run or imported weights already; train --from=",
        ),
        ('{"model_type": "clip"', {}, "source/config.json is damaged .Expecting"),
        ('{"model_type": "clip"}', {}, r"neither model.safetensors nor .* convert pickles \(.bin, .pth\)"),
        (
            '{"model_type": "clip"}',
            {"format_name": "gguf"},
            "one of hf_llama, hf_qwen3, hf_clip, open_clip",
        ),
    ],
)
def test_inputs_that_cannot_be_imported_are_refused(tmp_path, content, options, message):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(content)
    (source / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        convert.import_weights(source, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_options_of_another_family_are_refused(llama, clip, tmp_path):
    source, run = llama
    with pytest.raises(ValueError, match=r"--image_size=32 is for image models, .* holds a llama"):
        convert.import_weights(source, tmp_path / "run", image_size=32)
    with pytest.raises(
        ValueError, match=r"--format=open_clip is not for .* holds a llama; one of hf_llama"
    ):
        convert.export_weights(run, tmp_path / "out", "open_clip")
    with pytest.raises(ValueError, match=r"--adapter is for language models, not for hf_clip"):
        convert.export_adapter(clip[1], tmp_path / "out")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(torch_dtype="int8", dtype=None),
            r"torch_dtype='int8' is not supported, only float32, bfloat16",
        ),
        (dict(hidden_size="64"), r"hidden_size='64' is of type str, expected int"),
        (dict(num_hidden_layers=-2), r"num_hidden_layers=-2 must be at least 1"),
        (dict(vocab_size=True), r"vocab_size=True is of type bool, expected int"),
        (
            dict(vocab_size=10**30),
            r"vocab_size=1000.* does not fit into 64 bits",
        ),
        (dict(num_hidden_layers=10**9), r"source: tensor 'model.layers.2.* is missing"),
        (dict(intermediate_size=10**9), r"source: tensor 'model.layers.0.mlp.* does not fit"),
        (dict(rms_norm_eps=float("nan")), r"rms_norm_eps=nan must be a finite number"),
        (dict(rope_parameters=[1]), r"rope_parameters=\[1\] is of type list, expected keys and values"),
        (dict(rope_theta=7.0), r"rope_parameters.rope_theta=500000.0 differs from rope_theta=7.0"),
        (dict(tie_word_embeddings="no"), r"tie_word_embeddings='no' is of type str, expected bool"),
        (dict(num_attention_heads=3, num_key_value_heads=2), r"source/config.json: num_heads=3"),
    ],
)
def test_a_config_with_a_wrong_value_is_refused(llama, tmp_path, changes, message):
    source = tmp_path / "source"
    shutil.copytree(llama[0], source)
    edit(source / "config.json", **changes)
    with pytest.raises(ValueError, match=message) as error:
        convert.import_weights(source, tmp_path / "new" / "run")
    assert str(error.value).startswith(str(source)) and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["[]", "3", "null", '"llama"', "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        convert.import_weights(tmp_path, tmp_path / "run")


def changed_tensors(source: Path, target: Path, name: str, value: float) -> None:
    """A copy of a folder whose tensor has one other value."""
    tensors = {key: np.array(tensor) for key, tensor in Tensors(source).items()}
    tensors[name].flat[3] = value
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*safetensors*"))
    write_tensors(target, tensors, dtype="float32")


def test_numbers_that_are_not_finite_are_neither_imported_nor_exported(llama, tmp_path):
    norm = "model.norm.weight"
    changed_tensors(llama[0], tmp_path / "nan", norm, np.nan)
    with pytest.raises(
        ValueError, match=rf"nan: tensor '{norm}' holds NaN or infinity in float32; give intact weights$"
    ):
        convert.import_weights(tmp_path / "nan", tmp_path / "run")
    changed_tensors(llama[0], tmp_path / "large", norm, 1e6)
    with pytest.raises(ValueError, match=rf"large: tensor '{norm}' holds NaN .* in float16; .* or float32"):
        convert.import_weights(tmp_path / "large", tmp_path / "run", dtype="float16")
    convert.import_weights(tmp_path / "large", tmp_path / "run")
    with pytest.raises(ValueError, match=rf"run: tensor '{norm}' holds NaN or infinity in float16"):
        convert.export_weights(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_a_failed_export_leaves_an_empty_folder_empty(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_copy_tokenizer", lambda *_: 1 / 0)
    (tmp_path / "out").mkdir()
    for output in (tmp_path / "out", tmp_path / "new" / "out"):
        with pytest.raises(ZeroDivisionError):
            convert.export_weights(llama[1], output)
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


# --- the command ----------------------------------------------------------------------------------------


def test_the_command(llama, tmp_path):
    source, _ = llama
    done = run_command("convert", "import", f"--input={source}", f"--output={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert f"--from={tmp_path}/run" in done.stdout
    done = run_command("convert", "export", f"--workdir={tmp_path}/run", f"--output={tmp_path}/out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/out holds config.json, ")
    assert_same_tensors(source, tmp_path / "out")
    done = run_command("convert", "export", f"--output={tmp_path}/out2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: --workdir is missing")


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("import", "--quantize=int8", "--quantize is for export, not for import; drop it"),
        ("export", "--image_size=336", "--image_size is for import, not for export; drop it"),
    ],
)
def test_a_flag_of_the_other_command_is_refused(name, flag, message):
    done = run_command("convert", name, flag)
    assert done.returncode == 2 and done.stderr == f"error: {message}\n"


def test_importing_a_llama_loads_nothing_of_clip(llama, tmp_path):
    program = (
        "import sys, pathlib; from maxlp import convert; "
        f"convert.import_weights(pathlib.Path('{llama[0]}'), pathlib.Path('{tmp_path}/run')); "
        "found = [name for name in sys.modules if 'families.clip' in name or 'image_text' in name]; "
        "sys.exit(', '.join(found) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_import_names_no_data_to_evaluate(llama):
    done = run_command("evaluate", f"--workdir={llama[1]}")
    assert done.returncode == 2
    assert "imported weights and names no data; give --config=FILE, such as --config=llama/" in done.stderr
