"""Ranking recipes by their gradients: specs, the table, and an order that is known in advance."""

import jax
import numpy as np
import pytest

from maxlp import lab
from maxlp.precision import RecipeOptions
from maxlp.run import prediction
from maxlp.run.prediction import Prediction
from maxlp.run.settings import read
from tests.run.fixtures import changed, load


def test_specs():
    assert prediction.parse("mxfp8") == ("mxfp8", RecipeOptions())
    options = RecipeOptions(format="e3m1", granularity="row", power_of_two=True, block_size=16)
    spec = "simulate:format=e3m1:granularity=row:power_of_two=True:block_size=16"
    assert prediction.parse(spec) == ("simulate", options)


def test_delayed_scales_are_current_ones_without_a_cold_start_too():
    s = read(load("debug"))
    spec = "fp8_delayed:cold_start=False:history=4"
    assert prediction.with_spec(s, spec).precision.options == RecipeOptions(history=4)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("fp9", "--recipes: 'fp9': recipe='fp9' is unknown; one of bf16"),
        ("simulate:e3m1", "--recipes: 'e3m1' of 'simulate:e3m1' is not OPTION=VALUE; options are resid"),
        ("simulate:formt=e3m1", "--recipes: 'formt=e3m1' of 'simulate:formt=e3m1' is not OPTION=VALUE"),
        ("simulate:format=e3", "--recipes: 'simulate:format=e3': format='e3' is unknown"),
        ("bf16", "--recipes: 'bf16' quantizes no matmul of this run; leave it out"),
    ],
)
def test_wrong_specs_are_one_line(tmp_path, spec, message):
    with pytest.raises(ValueError) as error:
        lab.predict(read(load("debug")), None, None, ["mxfp8", spec], 2, tmp_path / "out")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_recipes_that_fit(tmp_path):
    """The kernels of this model are smaller than the blocks of fp8_blocks."""
    config = load("debug")
    config.model.mlp_dim = 96
    names = prediction.fitting(read(config))
    assert "fp8_current" in names and not {"bf16", "fp8_blocks"} & set(names)
    config.precision.first_blocks = config.model.num_layers
    with pytest.raises(ValueError, match=r"first_blocks=4, last_blocks=1 and min_dim=0; lower them$"):
        lab.predict(read(config), None, None, [], 2, tmp_path)


def test_adapters_are_refused(tmp_path):
    s = read(changed(load("debug"), {"train.lora.rank": 2}))
    with pytest.raises(ValueError, match=r"^config.train.lora.rank=2: predict is for models without adapt"):
        lab.predict(s, None, None, ["mxfp8"], 2, tmp_path)


def test_scale_propagation_is_refused():
    s = read(load("debug", "precision=scalify_fp16"))
    with pytest.raises(ValueError, match=r"^config.precision.scalify=fp16: predict compares recipes"):
        prediction.predictions(s, prediction.fitting(s), None, None, 2)


def test_the_table_has_both_ranks():
    found = [Prediction("a", 0.1, 0.2, 0.0, 0.5), Prediction("long name", 0.2, 0.3, 0.1, 0.4)]
    header, first, second = prediction.table(found)
    assert first.split() == ["a", "1", "1.0e-01", "2.0e-01", "+0.0e+00", "2", "5.0e-01"]
    assert len(header) == len(first) == len(second)
    lines = "\n".join(prediction.table([*found, Prediction("x" * 59, 0.3, 0.4, 0.1, 0.6)])).split("\n")
    assert lines[2:4] == ["a", first[len("long name") :]]
    assert max(map(len, lines)) <= 80


def test_gradients_are_those_of_all_batches_and_losses_their_mean(monkeypatch):
    gradient, calls = prediction._gradient, []

    def checked(s, state, batches):
        total, loss = gradient(s, state, batches)
        if not calls:
            grads, losses = zip(*(gradient(s, state, [batch]) for batch in batches), strict=True)
            # Float32 sums of the batches, in one loop or one by one.
            jax.tree.map(
                lambda x, *parts: np.testing.assert_allclose(x, sum(parts), rtol=1e-6, atol=1e-7),
                total,
                *grads,
            )
            np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-6)
            assert losses[0] != losses[1]
        calls.append(len(batches))
        return total, loss

    monkeypatch.setattr(prediction, "_gradient", checked)
    config = load("debug")
    config.precision.update(first_blocks=0, last_blocks=0)
    config.model.update(dtype="float32", num_layers=1, embed_dim=32, mlp_dim=32, vocab_size=512)
    source = "stdlib?validation=0.002"
    config.data.update(tokenizer="bytes", source=source, seq_len=16, batch_size=8, shuffle_tokens=1024)
    _, [found] = prediction.predictions(read(config), ["int8_all"], None, 1, 2)
    assert calls == [2, 2] and found.loss != 0


@pytest.mark.slow
def test_coarser_formats_turn_the_gradient_further(tmp_path):
    """One bit of mantissa less is twice the rounding error; float32's own is none in a float32 model."""
    config = load("debug")
    config.precision.update(first_blocks=0, last_blocks=0)
    config.model.update(dtype="float32", num_layers=2, vocab_size=512)
    config.data.update(tokenizer="bytes", source="stdlib", seq_len=64, batch_size=8, shuffle_tokens=16384)
    s = read(config)
    specs = [f"simulate:format=e5m{bits}" for bits in (1, 23, 4, 2, 3)]
    step, found = prediction.predictions(s, specs, None, 2, 3)
    assert [p.name[-1] for p in found] == ["3", "4", "3", "2", "1"] and found[0].name.endswith("m23")
    # Up to 1e-4 is the rounding of float32 itself, 24 bits.
    assert found[0].error < 1e-4 and found[1].error < 0.5 * found[3].error < 0.5 * found[4].error
    assert step == 2 and [p.mse for p in found] == sorted(p.mse for p in found)
    path = prediction.write(found, step, tmp_path)
    assert path.name == "predict_2.json" and '"step": 2' in path.read_text()
