"""Keys that change nothing because a switch in their own section is off are accepted, and named."""

import inspect

import jax
import pytest

from maxlp import families
from maxlp.data.text import TextDataConfig
from maxlp.precision.loss_scale import DynamicLossScale
from maxlp.run.experiment import describe, resolve
from maxlp.run.settings import read, sections
from maxlp.run.switched_off import SWITCHES, unused_keys
from tests.run.fixtures import SMALL, changed, load

BASE = SMALL | {
    "data.tokenizer": "bytes",
    "data.shuffle_tokens": TextDataConfig.shuffle_tokens,
    "data.seq_len": 32,
}
GUARD, ROLLBACK = ("guard_threshold", "max_actions"), ("rewind_steps", "skip_batches")
TUNED = {f"spikes.{key}": 50 for key in GUARD + ROLLBACK}
LABELS = {"metrics.wandb_group": "a", "metrics.wandb_tags": ("b",)}
FLOAT16 = {"model.dtype": "float16", "precision.loss_scale.initial": 256.0}
GROWTH = {"precision.loss_scale.growth_interval": 50}


@pytest.mark.parametrize(
    ("values", "unused"),
    [
        ({}, ()),
        (TUNED, tuple(TUNED)),
        (TUNED | {"spikes.guard": "skip"}, ("spikes.rewind_steps", "spikes.skip_batches")),
        (TUNED | {"spikes.guard": "rollback"}, ()),
        (FLOAT16 | {"spikes.max_actions": 50}, ()),
        (FLOAT16 | GROWTH, ()),
        (FLOAT16 | GROWTH | {"precision.loss_scale.per_tensor": True}, tuple(GROWTH)),
        ({"data.shuffle_tokens": 8192, "data.shuffle": False}, ("data.shuffle_tokens",)),
        ({"data.shuffle_tokens": 8192}, ()),
        (
            {"optimizer.decay_embeddings": True, "optimizer.weight_decay": 0.0},
            ("optimizer.decay_embeddings",),
        ),
        ({"optimizer.decay_embeddings": True, "optimizer.weight_decay": 0.1}, ()),
        (LABELS, tuple(LABELS)),
        (LABELS | {"metrics.wandb_project": "c"}, ()),
        ({"profile.steps": 5}, ("profile.steps",)),
        ({"profile.steps": 5, "profile.start": 2}, ()),
    ],
    ids=str,
)
def test_keys_whose_switch_is_off_are_found(values, unused):
    s = read(changed(load("debug"), BASE | values))
    assert tuple(text.split()[0] for text in unused_keys(s)) == unused


@pytest.mark.parametrize(
    ("method", "unused"), [("plain", ["loss.tile_size (method=plain)"]), ("tiled", [])]
)
def test_tiles_are_those_of_one_method(method, unused):
    values = {"loss.tile_size": 8, "loss.method": method}
    assert unused_keys(read(changed(load("debug", family="clip"), values))) == unused


def test_the_description_of_a_run_names_them():
    run = resolve(changed(load("debug"), BASE | {"profile.steps": 5}), jax.devices()[:1])
    assert "without effect: profile.steps (start=0)\n" in describe(run, run.abstract_state()[1]) + "\n"


def test_switches_and_their_keys_exist():
    functions = [("precision.loss_scale", DynamicLossScale)]
    for name in families.FAMILIES:
        functions += sections(families.get(name)).items()
    known = set()
    for section, function in functions:
        known |= {f"{section}.{key}" for key in inspect.signature(function).parameters}
    for path, _, keys in SWITCHES:
        section, _, _ = path.rpartition(".")
        assert {path, *(f"{section}.{key}" for key in keys)} <= known
