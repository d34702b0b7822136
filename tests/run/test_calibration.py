"""Exports with the factors of Smooth-SwiGLU in the weights."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp import convert
from maxlp.families import weights
from maxlp.families.llama.model import Llama, LlamaConfig
from maxlp.families.llama.task import FAMILY
from maxlp.parallel import sharding
from maxlp.precision import apply
from maxlp.run import run_dir
from maxlp.run.pretrained import LibraryWeights
from maxlp.runtime import checkpoint
from maxlp.runtime.safetensors import Tensors
from tests.fixtures import LLAMA, llama_config, precision_config
from tests.run.fixtures import changed, load

CHANNEL, FACTOR = 7, 2.0**12
CPU = sharding.make_mesh(devices=jax.devices("cpu")[:1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two runs of one function: in the second, a channel of each gated product is 2^12 times as large."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    c = load("debug")
    model = LLAMA | {"vocab_size": 512, "max_seq_len": 64}
    data = {"source": f"text:{root}/text.txt?split=all", "tokenizer": "bytes", "seq_len": 64}
    values = {f"model.{key}": value for key, value in model.items()}
    changed(c, values | {f"data.{key}": value for key, value in data.items()})
    params = nnx.to_pure_dict(nnx.state(Llama(LlamaConfig(**model), rngs=nnx.Rngs(0)), nnx.Param))
    paths = {}
    for name, factor in (("even", 1.0), ("outlier", FACTOR)):
        mlp = params["layers"]["mlp"]
        up, down = mlp["up_proj"]["kernel"], mlp["down_proj"]["kernel"]
        mlp["up_proj"]["kernel"] = up.at[:, :, CHANNEL].multiply(factor)
        mlp["down_proj"]["kernel"] = down.at[:, CHANNEL].divide(factor)
        paths[name] = root / name
        with checkpoint.Checkpointer(paths[name] / "checkpoints", every_steps=1) as checkpoints:
            checkpoints.save(0, {"params": params, "model_state": {}}, data_state={})
        run_dir.save_config(paths[name], c)
    return paths


@pytest.fixture(scope="module")
def exports(runs, tmp_path_factory) -> dict[tuple[str, int], Path]:
    """By run and number of sequences."""
    root, done = tmp_path_factory.mktemp("exports"), {}
    for name, run in runs.items():
        for sequences in (0, 4):
            done[name, sequences] = root / f"{name}_{sequences}"
            convert.export_weights(run, done[name, sequences], calibration_sequences=sequences)
    return done


@functools.cache
def compiled(recipe: str) -> Callable:
    """A function from a folder to the logits of a text."""
    model = Llama(llama_config(vocab_size=512, max_seq_len=64), rngs=nnx.Rngs(0))
    apply(model, precision_config(recipe), gated_products=FAMILY.gated_products)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    text = np.frombuffer(b"or not to be, that is the question. To be", np.uint8)[None].astype(np.int32)
    run = jax.jit(lambda params: nnx.merge(graphdef, params, rest)(text))
    return functools.partial(_of_folder, run, nnx.to_pure_dict(params))


def _of_folder(run: Callable, like: dict, folder: Path) -> np.ndarray:
    found = LibraryWeights(str(folder))
    params = weights.to_maxlp(found.tensors, like, found.format.layout(found.config))
    with jax.set_mesh(CPU):
        return np.asarray(run(params))


def logits(folder: Path, recipe: str = "bf16") -> np.ndarray:
    """Of the exported weights, with the matmuls in blocks under a recipe."""
    return compiled(recipe)(folder)


@pytest.mark.full
def test_the_exported_model_is_the_same_to_the_bit(exports):
    """Powers of two round nothing."""
    expected = logits(exports["even", 0])
    for export in exports.values():
        np.testing.assert_array_equal(logits(export), expected)


def test_factors_of_two_channels_of_one_function_meet(exports):
    """``sqrt(4^12 a / b)`` is ``2^12 sqrt(a / b)``, so that the outlier is gone exactly."""
    even, outlier, plain = (Tensors(exports[key]) for key in (("even", 4), ("outlier", 4), ("even", 0)))
    other = {name for name in even if not np.array_equal(even[name], plain[name])}
    layers = range(LLAMA["num_layers"])
    assert other == {f"model.layers.{i}.mlp.{end}_proj.weight" for i in layers for end in ("up", "down")}
    for name in even:
        np.testing.assert_array_equal(even[name], outlier[name])


def test_an_outlier_costs_nothing_in_int8_once_its_factor_is_in_the_weights(exports):
    """W8A8: int8 with a scale for each token and each output channel, as runtimes quantize."""
    exact = logits(exports["even", 0])

    def error(name: str, sequences: int, recipe: str = "int8_switchback_q") -> float:
        got = logits(exports[name, sequences], recipe)
        return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))

    for export in (("even", 0), ("outlier", 0), ("outlier", 4)):  # a table in docs/low_precision.md
        print(*export, f"int8 {error(*export):.4f}, fp8 {error(*export, 'fp8_rowwise'):.3f}")
    assert error("outlier", 4) == error("even", 4) < 0.03
    assert error("outlier", 0) > 5 * error("outlier", 4)


def test_more_sequences_never_make_the_measured_channels_smaller(runs, tmp_path, capsys):
    """The text has 8,602 tokens with bos and eos, hence 135 sequences of 64."""
    few, many = tmp_path / "few", tmp_path / "many"
    convert.export_weights(runs["even"], few, calibration_sequences=1)
    convert.export_weights(runs["even"], many, calibration_sequences=10_000)
    used = [line.split(" on ")[1] for line in capsys.readouterr().out.splitlines() if "measured" in line]
    assert used == ["1 sequence of validation data", "135 sequences of validation data"]
    name = "model.layers.0.mlp.down_proj.weight"
    ratio = np.abs(Tensors(many)[name]) / np.abs(Tensors(few)[name])
    assert (ratio >= 1).all() and (ratio > 1).any()


def test_what_has_no_factors_is_refused(runs, exports, tmp_path):
    convert.import_weights(str(exports["even", 0]), tmp_path / "imported")
    with pytest.raises(ValueError, match="imported weights and names no data; drop --calibration_seq"):
        convert.export_weights(tmp_path / "imported", tmp_path / "out", calibration_sequences=4)
    with pytest.raises(ValueError, match="powers of two, for which float16 has no room; set --dtype="):
        convert.export_weights(runs["even"], tmp_path / "out", dtype="float16", calibration_sequences=4)
    assert not (tmp_path / "out").exists()
