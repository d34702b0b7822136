"""What presets share has the values of its sources."""

import dataclasses
import functools
import inspect
import json
import math

import numpy as np
import pytest
from ml_collections import ConfigDict

from maxlp import families
from maxlp.families.clip.hf import OPENAI_MEAN, OPENAI_STD
from maxlp.families.clip.presets import CLIP_SIZES, clip, siglip
from maxlp.families.llama.presets import LLAMA_3_1_ROPE, LLAMA_3_2_ROPE, llama_c4
from maxlp.monitoring.spikes import SpikeConfig
from maxlp.optim import galore
from maxlp.optim.config import (
    OPTIMIZERS,
    AdaGCConfig,
    GaloreConfig,
    LowBitConfig,
    OptimizerConfig,
    options_of,
)
from maxlp.parallel.sharding import make_mesh
from maxlp.precision import RECIPES, DynamicLossScale, PrecisionConfig
from maxlp.precision.recipes import RecipeOptions
from maxlp.run import changes, constraints
from maxlp.run.config import PRESETS, load_file
from maxlp.run.presets import SCALIFY, own_choice, parse_arg, sections
from maxlp.run.settings import LocalConfig, LoraConfig, TrainConfig, read
from maxlp.runtime.checkpoint import Checkpointer
from maxlp.runtime.profiler import Profiler
from maxlp.runtime.writers import MetricWriter
from tests.run.fixtures import load


@pytest.mark.parametrize(
    ("section", "kind", "without"),
    [
        ("precision", PrecisionConfig, set()),
        ("precision.options", RecipeOptions, set()),
        ("precision.loss_scale", DynamicLossScale, set()),
        ("optimizer", OptimizerConfig, set()),
        ("optimizer.galore", GaloreConfig, set()),
        ("optimizer.low_bit", LowBitConfig, set()),
        ("optimizer.adagc", AdaGCConfig, set()),
        ("mesh", make_mesh, {"devices"}),
        ("train", TrainConfig, {"swap_tokenizer"}),  # only configs with `init_from` have it
        ("train.lora", LoraConfig, set()),
        ("train.local", LocalConfig, set()),
        ("spikes", SpikeConfig, set()),
        ("checkpoint", Checkpointer, {"directory", "on_complete"}),
        ("metrics", MetricWriter, {"run_config", "total_steps", "resume_step", "workdir"}),
        ("profile", Profiler, {"workdir"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_shared_section_has_the_keys_and_the_defaults_of_what_it_configures(section, kind, without):
    found = functools.reduce(getattr, section.split("."), sections({}, {}, {}))
    parameters = inspect.signature(kind).parameters
    assert set(found) == set(parameters) - without
    for name, value in found.items():
        default = parameters[name].default
        is_unset = value in (None, "") or isinstance(value, ConfigDict)
        assert is_unset or default is inspect.Parameter.empty or value == default, name


def test_the_command_line_can_set_the_options_of_every_optimizer():
    known = {option for name in OPTIMIZERS for option in options_of(name)}
    found = set(sections({}, {}, {}).optimizer.options)
    assert found == known, "_optimizer of maxlp/run/presets.py lists all options, with their types"


def test_llama_stretches_its_wavelengths_as_published():
    """The ``rope_scaling`` of Llama 3.1's and 3.2's ``config.json``."""
    published = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    assert published == LLAMA_3_1_ROPE and published | dict(factor=32.0) == LLAMA_3_2_ROPE


def test_runs_on_c4_are_those_of_galore():
    c = llama_c4(1000, 0.01)
    assert c.data.seq_len * c.data.batch_size == 131_072
    assert (c.optimizer.warmup_steps, c.train.total_steps, c.optimizer.final_lr_fraction) == (
        100,
        1000,
        0.1,
    )
    assert (c.optimizer.weight_decay, c.optimizer.learning_rate, c.optimizer.b2) == (0.0, 0.01, 0.999)


@pytest.mark.parametrize(("name", "rank"), [("60m", 128), ("130m", 256), ("350m", 256), ("1b", 512)])
def test_a_bare_galore_is_the_setting_of_its_paper(name, rank):
    """Table 2 and section 4.1 of arXiv:2403.03507: rate 0.01, α 0.25, a new subspace every 200 steps."""
    own, other = (read(load(name, arg)).optimizer for arg in ("galore", "galore=64"))
    assert (own.galore.rank, own.galore.scale, own.galore.update_proj_gap) == (rank, 0.25, 200)
    assert own.learning_rate == other.learning_rate == 0.01 and other.galore.rank == 64
    assert not galore.rate_warnings(own)
    full = read(load(name)).optimizer
    assert full.galore is None
    assert full == dataclasses.replace(own, galore=None, learning_rate=full.learning_rate)


@pytest.mark.parametrize("name", ["8b", "llama2_7b"])
def test_galore_of_7_billion_parameters_has_the_rate_of_its_paper(name):
    optimizer = read(load(name, "galore")).optimizer
    assert (optimizer.galore.rank, optimizer.learning_rate) == (1024, 0.005)
    assert optimizer == read(load(name, "galore=1024")).optimizer and not galore.rate_warnings(optimizer)


def test_a_rank_alone_keeps_the_rate_of_the_projected_kernels():
    full, projected = (read(load("tiny", arg)).optimizer for arg in ("", "galore=32"))
    assert projected.learning_rate * projected.galore.scale == full.learning_rate
    assert not galore.rate_warnings(projected)
    with pytest.raises(ValueError, match="galore: this config has no rank of its own; add one"):
        load("tiny", "galore")


def test_clip_and_siglip_have_the_statistics_and_the_temperature_of_their_papers():
    c, s = clip(**CLIP_SIZES["b32"]), siglip()
    assert (tuple(c.model.image_mean), tuple(c.model.image_std)) == (OPENAI_MEAN, OPENAI_STD)
    assert math.exp(c.model.logit_scale) == pytest.approx(1 / 0.07) and c.model.logit_bias is None
    assert tuple(s.model.image_mean) == tuple(s.model.image_std) == (0.5, 0.5, 0.5)
    assert (c.model.image_resize, s.model.image_resize) == ("shortest", "squash")
    assert math.exp(s.model.logit_scale) == pytest.approx(10) and s.model.logit_bias == -10.0
    assert (c.optimizer.b2, s.optimizer.b2, c.loss.kind, s.loss.kind) == (0.98, 0.95, "softmax", "sigmoid")
    assert c.model.text.mlp_dim == 4 * c.model.text.width


@pytest.mark.parametrize(
    ("arg", "values"),
    [
        ("precision=scalify_fp16", {"model.dtype": "float16", "precision.scalify": "fp16"}),
        (
            "precision=scalify_fp16_params",
            {
                "precision.scalify": "fp16",
                "model.param_dtype": "float16",
                "optimizer.param_rounding": "nearest",
                "optimizer.low_bit.nu": "float16",
            },
        ),
        ("precision=fp16", {"model.dtype": "float16", "precision.loss_scale.initial": 2.0**15}),
        ("precision=pure_bf16", {"model.dtype": "bfloat16", "model.param_dtype": "bfloat16"}),
        ("precision=fp8_delayed", {"precision.recipe": "fp8_delayed", "model.dtype": "bfloat16"}),
        ("low_bit=fp8", {"optimizer.low_bit.mu": "float8_e4m3fn", "optimizer.low_bit.nu": "float8_e5m2"}),
        ("low_bit=8bit", {"optimizer.low_bit.nu": "dynamic8", "optimizer.low_bit.block_size": 256}),
        ("low_bit=companded", {"optimizer.low_bit.mu": "companded8", "optimizer.low_bit.block_size": 32}),
        (
            "optimizer=schedule_free_adamw",
            {"optimizer.name": "schedule_free_adamw", "optimizer.schedule": "constant"},
        ),
        ("optimizer=lion,galore=16", {"optimizer.name": "lion", "optimizer.galore.rank": 16}),
    ],
)
def test_an_argument_changes_what_it_names(arg, values):
    plain, chosen = (json.loads(load("8b", a).to_json_best_effort()) for a in ("", arg))
    assert changes.flat(chosen).items() >= values.items()
    assert chosen["data"] == plain["data"] and chosen["train"] == plain["train"]


@pytest.mark.parametrize("machine", [("gpu", "NVIDIA H100 80GB HBM3"), ("tpu", "TPU v5p")])
@pytest.mark.parametrize("precision", [*RECIPES, "fp16", *SCALIFY, "pure_bf16"])
def test_an_8b_can_be_trained_in_every_precision_without_more_flags(precision, machine):
    s = read(load("8b", f"precision={precision}"))
    platform, kind = machine
    constraints.check(s, s.machine(1, platform, device_kind=kind))


@pytest.mark.parametrize("precision", ["fp16", "pure_bf16", "scalify_fp16"])
def test_a_precision_replaces_the_recipe_of_the_config(precision):
    assert load("low_precision", family="clip").precision.recipe == "int8_switchback"
    assert load("low_precision", f"precision={precision}", "clip").precision.recipe == "bf16"


def test_every_key_can_be_set_on_the_command_line():
    """A key that holds a plain None has no type, so that no value from the command line fits it."""

    def keys(c: ConfigDict, prefix: str = ""):
        for name in c:
            if isinstance(c[name], ConfigDict):
                yield from keys(c[name], f"{prefix}{name}.")
            elif c.get_type(name) is type(None):
                yield f"{prefix}{name}"

    for path in sorted(PRESETS.glob("*/*.py")):
        c = load_file(str(path))
        assert not list(keys(c)), path
        family = families.get(c.model.name)
        for name, kind in (("model", family.Model), ("data", family.Data), ("loss", family.Loss)):
            missing = set(inspect.signature(kind).parameters) - set(c[name])
            assert not missing, f"{path}: add {missing} to the presets.py of its family"


def test_an_unknown_precision_lists_recipes_and_what_else_the_argument_takes():
    with pytest.raises(ValueError, match=r"precision='qest' is unknown; one of .*quest.*fp16.*pure_bf16$"):
        load("8b", "precision=qest")


def test_arguments_have_the_type_of_their_default():
    found = parse_arg("n=3,x=0.5,name=b,on,off=false", n=1, x=1.0, name="a", on=False, off=True, kept=7)
    assert found.to_dict() == dict(n=3, x=0.5, name="b", on=True, off=False, kept=7)
    for arg in ("m=1", "n=x", "on=maybe"):
        with pytest.raises(ValueError, match=r"config argument .*"):
            parse_arg(arg, n=1, on=False)
    assert np.all([parse_arg(arg, n=1).n == 1 for arg in ("", ",", None)])


def test_a_choice_of_a_preset_leaves_the_others():
    values = {"s": 1, "m": 2}
    assert own_choice("galore,size=m,low_bit=8bit", "size", values, "s") == (2, "galore,low_bit=8bit")
    assert own_choice("", "size", values, "s") == (1, "")
    with pytest.raises(ValueError, match=r"^config argument size='x': one of s, m$"):
        own_choice("size=x", "size", values, "s")
