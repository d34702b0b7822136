import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp import convert
from maxlp.core import train_step as step
from maxlp.data import tokenizers
from maxlp.data.tokenizers.training import train_bpe
from maxlp.families.llama import hf
from maxlp.parallel import sharding
from maxlp.run import build
from maxlp.run import run_dir as workdir
from maxlp.runtime import checkpoint

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture
def source(tmp_path) -> Path:
    """A Hugging Face directory: a golden's float32 weights in shards, and a tokenizer."""
    with np.load(GOLDENS / "llama_3_1.npz") as golden:
        weights = {
            key.removeprefix("weights/"): golden[key].astype(np.float32)
            for key in golden
            if key.startswith("weights/")
        }
        config = json.loads(str(golden["config"])) | dict(dtype="float32")
    hf.write_tensors(tmp_path / "hf", weights, dtype="float32", max_shard_bytes=30_000)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    texts = ["to be or not to be, that is the question"] * 10
    train_bpe(texts, 270, str(tmp_path / "hf" / "tokenizer.json"))
    return tmp_path / "hf"


def restored(run: Path, mesh: jax.sharding.Mesh, **model_changes) -> dict:
    c = workdir.load_config(run)
    c.model.update(model_changes)
    _, abstract = step.abstract_model(build.model(c), mesh)
    return checkpoint.load_params(str(run), abstract["params"])


def assert_same_tensors(a: Path, b: Path) -> None:
    a, b = hf.Tensors(a), hf.Tensors(b)
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], strict=True)


def test_what_goes_in_comes_out_bit_for_bit(source, tmp_path):
    convert.import_hf_llama(source, tmp_path / "run")
    convert.export_hf_llama(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(source, tmp_path / "out")
    theirs, ours = (json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "out"))
    assert hf.config_from_hf(ours) == hf.config_from_hf(theirs)
    assert ours["torch_dtype"] == "float32"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (ours["bos_token_id"], ours["eos_token_id"]) == (0, 1)
    special = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (special["bos_token"], special["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")


def test_an_import_is_a_run_that_computes_the_golden_logits(source, tmp_path):
    convert.import_hf_llama(source, tmp_path / "run")
    c = workdir.load_config(tmp_path / "run")
    mesh = sharding.make_mesh(data=1, fsdp=8)
    graphdef, state, at_step = build.restore_model(c, tmp_path / "run", None, mesh)
    assert at_step == 0
    tokenizers.make_tokenizer(build.saved_tokenizer(c, tmp_path / "run"))
    with np.load(GOLDENS / "llama_3_1.npz") as golden:
        from flax import nnx

        model = nnx.merge(graphdef, state["params"], state["model_state"])
        logits = jax.jit(lambda model, tokens: model(tokens))(model, golden["tokens"])
        np.testing.assert_allclose(logits, golden["logits"], atol=3e-5, rtol=0)


def test_an_import_is_something_to_start_from_in_any_dtype_and_on_any_mesh(source, tmp_path):
    convert.import_hf_llama(source, tmp_path / "run", dtype="bfloat16")
    params = restored(tmp_path / "run", sharding.make_mesh(data=2, fsdp=2, tensor=2), param_dtype="float32")
    kernel = params["layers"]["mlp"]["up_proj"]["kernel"]
    assert len(kernel.sharding.device_set) == 8
    expected = hf.Tensors(source)["model.layers.1.mlp.up_proj.weight"].T
    np.testing.assert_array_equal(kernel[1], expected.astype(jnp.bfloat16).astype(np.float32), strict=True)


def test_export_rounds_to_the_dtype_asked_for(source, tmp_path):
    convert.import_hf_llama(source, tmp_path / "run")
    convert.export_hf_llama(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    exported, original = hf.Tensors(tmp_path / "out"), hf.Tensors(source)
    for name in original:
        np.testing.assert_array_equal(exported[name], original[name].astype(jnp.bfloat16), strict=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_export_of_a_step(source, tmp_path):
    convert.import_hf_llama(source, tmp_path / "run")
    params = restored(tmp_path / "run", sharding.make_mesh(devices=jax.devices()[:1]))
    root = tmp_path / "run" / "checkpoints"
    with checkpoint.Checkpointer(root, every_steps=1) as checkpoints:
        checkpoints.save(7, {"params": jax.tree.map(lambda x: x + 1, params)}, data_state={})
    convert.export_hf_llama(tmp_path / "run", tmp_path / "newest")
    convert.export_hf_llama(tmp_path / "run", tmp_path / "step_0", step_number=0)
    assert_same_tensors(source, tmp_path / "step_0")
    newest = hf.Tensors(tmp_path / "newest")["model.norm.weight"]
    np.testing.assert_array_equal(newest, hf.Tensors(source)["model.norm.weight"] + 1)
    with pytest.raises(ValueError, match="checkpoints/5"):
        convert.export_hf_llama(tmp_path / "run", tmp_path / "step_5", step_number=5)


def test_nothing_is_overwritten_and_nothing_is_invented(source, tmp_path):
    with pytest.raises(ValueError, match=r"is not empty; choose a new directory"):
        convert.import_hf_llama(source, source)
    with pytest.raises(ValueError, match=r"holds no model"):
        convert.import_hf_llama(tmp_path / "nowhere", tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds no run"):
        convert.export_hf_llama(tmp_path / "nowhere", tmp_path / "out")


def test_the_command(source, tmp_path):
    def convert_cli(*args, module="convert") -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", f"maxlp.{module}", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = convert_cli("import", f"--input={source}", f"--output={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert f"--config.train.init_from={tmp_path}/run" in done.stdout
    done = convert_cli("export", f"--workdir={tmp_path}/run", f"--output={tmp_path}/out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/out holds config.json, ")
    done = convert_cli(f"--workdir={tmp_path}/run", module="evaluate")
    assert done.returncode == 2 and "imported weights and names no data; give --config=FILE" in done.stderr
    assert_same_tensors(source, tmp_path / "out")
    done = convert_cli("export", f"--output={tmp_path}/out2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --workdir is missing")
    assert len(done.stderr.splitlines()) == 1
