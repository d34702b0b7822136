import json
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from maxlp import convert
from maxlp.families.llama import hf
from maxlp.parallel import sharding
from maxlp.run import build
from maxlp.run import run_dir as workdir

GOLDENS = Path(__file__).parent / "goldens"
FILES = {  # golden: format, config, weights
    "clip_hf_quick_gelu": ("hf_clip", "config.json", hf.WEIGHTS),
    "clip_hf_siglip": ("hf_clip", "config.json", hf.WEIGHTS),
    "clip_open_clip": ("open_clip", convert.OPEN_CLIP_CONFIG, convert.OPEN_CLIP_WEIGHTS),
}


def make_source(directory: Path, name: str) -> Path:
    """A golden as the directory that its library would have written."""
    _, config, weights = FILES[name]
    with np.load(GOLDENS / f"{name}.npz") as golden:
        tensors = {
            key.removeprefix("weights/"): golden[key].astype(np.float32)
            for key in golden
            if key.startswith("weights/")
        }
        hf.write_tensors(directory, tensors, dtype="float32", weights=weights)
        (directory / config).write_text(str(golden["config"]))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


def assert_same_tensors(a: Path, b: Path, weights: str) -> None:
    a, b = hf.Tensors(a, weights), hf.Tensors(b, weights)
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], strict=True)


@pytest.mark.parametrize("name", FILES)
def test_what_goes_in_comes_out_bit_for_bit(name, tmp_path):
    format_name, config, weights = FILES[name]
    source = make_source(tmp_path / "in", name)
    convert.import_weights(source, tmp_path / "run")
    convert.export_weights(tmp_path / "run", tmp_path / "out", format_name)
    assert_same_tensors(source, tmp_path / "out", weights)
    assert (tmp_path / "out" / "merges.txt").read_bytes() == (source / "merges.txt").read_bytes()
    convert.import_weights(tmp_path / "out", tmp_path / "again")
    first, again = (workdir.load_config(tmp_path / run).to_dict() for run in ("run", "again"))
    assert first == again
    assert json.loads((tmp_path / "out" / config).read_text())
    with np.load(GOLDENS / f"{name}.npz") as golden:
        scale = hf.Tensors(tmp_path / "out", weights)["logit_scale"]
        np.testing.assert_array_equal(scale, golden["weights/logit_scale"].astype(np.float32), strict=True)


def test_an_import_is_a_run_that_computes_the_golden_features(tmp_path):
    convert.import_weights(make_source(tmp_path / "in", "clip_open_clip"), tmp_path / "run")
    c = workdir.load_config(tmp_path / "run")
    graphdef, state, at_step = build.restore_model(
        c, tmp_path / "run", None, sharding.make_mesh(data=1, fsdp=8)
    )
    assert at_step == 0
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    with np.load(GOLDENS / "clip_open_clip.npz") as golden:
        features_BE = jax.jit(lambda model, text: model.encode_text(text))(model, golden["text"])
        np.testing.assert_allclose(features_BE, golden["text_features"], atol=3e-6, rtol=0)


def test_between_the_libraries(tmp_path):
    """What open_clip wrote becomes Hugging Face's, in bfloat16 and for larger images, if it fits there."""
    source = make_source(tmp_path / "in", "clip_open_clip")
    config = json.loads((source / convert.OPEN_CLIP_CONFIG).read_text())
    for tower in ("vision_cfg", "text_cfg"):
        del config["model_cfg"][tower]["ls_init_value"]
    tensors = {k: v for k, v in hf.Tensors(source, convert.OPEN_CLIP_WEIGHTS).items() if "gamma" not in k}
    plain = tmp_path / "plain"
    hf.write_tensors(plain, tensors, dtype="float32", weights=convert.OPEN_CLIP_WEIGHTS)
    (plain / convert.OPEN_CLIP_CONFIG).write_text(json.dumps(config))

    convert.import_weights(plain, tmp_path / "run", image_size=40)
    convert.export_weights(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    found = hf.Tensors(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vision_config"]["image_size"] == 40
    with np.load(GOLDENS / "clip_open_clip.npz") as golden:
        positions = found["vision_model.embeddings.position_embedding.weight"]
        np.testing.assert_allclose(positions.astype(np.float32), golden["resized"], atol=2e-3)
    joint = tensors["transformer.resblocks.1.attn.in_proj_weight"]
    np.testing.assert_array_equal(
        found["text_model.encoder.layers.1.self_attn.k_proj.weight"],
        joint[24:48].astype(ml_dtypes.bfloat16),
        strict=True,
    )

    convert.import_weights(source, tmp_path / "scaled")
    with pytest.raises(ValueError, match=r"model.layer_scale=0.1 has no counterpart in Hugging Face"):
        convert.export_weights(tmp_path / "scaled", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_what_is_not_there_is_said_in_one_line(tmp_path):
    source = make_source(tmp_path / "in", "clip_hf_quick_gelu")

    def error(*args) -> str:
        command = [sys.executable, "-m", "maxlp.convert", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        return line

    assert "config.json does not exist: --input=" in error(
        "import", f"--input={tmp_path}/none", f"--output={tmp_path}/run"
    )
    (source / "config.json").write_text(json.dumps(dict(model_type="blip")))
    with pytest.raises(ValueError, match="model_type='blip' is not supported; one of llama, clip, siglip"):
        convert.import_weights(source, tmp_path / "run")
    (source / "config.json").write_text('{"model_type": "clip"')
    with pytest.raises(ValueError, match=r"in/config.json: Expecting"):
        convert.import_weights(source, tmp_path / "run")
    (source / "config.json").write_text(json.dumps(dict(model_type="llama")))
    with pytest.raises(ValueError, match=r"--image_size=32 is for a CLIP; .*/in holds a llama"):
        convert.import_weights(source, tmp_path / "run", image_size=32)
    (source / "config.json").write_text(json.dumps(dict(model_type="clip")))
    (source / hf.WEIGHTS).rename(source / "pytorch_model.bin")  # pickles are not read
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor"):
        convert.import_weights(source, tmp_path / "run")
