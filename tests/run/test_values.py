"""Every value of a config is checked where it enters: a mutation gives one line with the key and the value.

All is in this process, and nothing is traced or compiled: a hundred cases cost seconds.
"""

import copy
import functools
import math
import re
from typing import Any

import pytest
from ml_collections import ConfigDict

from maxlp.parallel.sharding import MESH_AXES
from maxlp.run.config import ConfigError
from maxlp.run.settings import make_optimizer, read
from tests.run.fixtures import load

FAMILIES = ("llama", "clip")


@functools.cache
def base(family: str) -> dict[str, Any]:
    """The debug config of a family, with wrappers of the optimizer, whose keys need each other."""
    return load("debug", "galore=4,low_bit=8bit", family=family).to_dict()


def with_value(family: str, key: str, value: Any) -> ConfigDict:
    """The debug config with a value that no ConfigDict has checked, as from a JSON file."""
    return with_values(family, {key: value})


def with_values(family: str, values: dict[str, Any]) -> ConfigDict:
    c = copy.deepcopy(base(family))
    for key, value in values.items():
        *path, name = key.split(".")
        functools.reduce(lambda d, part: d[part], path, c)[name] = value
    return ConfigDict(c)


def message(c: ConfigDict) -> str | None:
    """The message with which a config is refused; None if it is accepted."""
    try:
        make_optimizer(read(c))
    except ConfigError as error:
        return str(error)
    return None


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        found |= leaves(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return found


# --- every key ------------------------------------------------------------------------------------------

TEXTS = ("data.source", "data.validation_source", "data.tokenizer", "data.classes", "train.init_from")
# The only keys whose values may be negative, or huge.
MAY_BE_NEGATIVE = re.compile(r"mesh\.(?!dcn_data).*|model\.logit_(scale|bias)|precision\.options\.margin")
MAY_BE_HUGE = re.compile(r"data\.(shuffle_tokens|max_pixels)")
# Two keys of a nested section that only work together, or an option of another optimizer: the message may
# name the other key, or the options that there are.
INCOMPLETE = re.compile(
    r"model\.rope_scaling\..*|optimizer\.options\..*|train\.lora\..*|model\.text\.eos_id"
)


def refused(family: str, key: str, value: Any) -> str:
    """Asserts that the value is refused in one line that begins with its key; returns the line."""
    got = message(with_value(family, key, value))
    assert got is not None, f"config.{key}={value!r} is accepted"
    assert "\n" not in got
    if not INCOMPLETE.fullmatch(key):
        assert got.startswith(f"config.{key}"), got
        assert repr(value) in got or value is None, got
    return got


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_takes_a_number_that_is_not_finite_or_not_of_64_bits(family):
    keys = [key for key in leaves(base(family)) if key != "model.name"]
    assert len(keys) > 100
    for key in keys:
        for value in (math.nan, math.inf, -math.inf, 2**63, -(2**63) - 1):
            refused(family, key, value)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_takes_a_value_of_another_type(family):
    for key, default in leaves(base(family)).items():
        for value in ({"x": 1}, ("x", 1.5), "x", True, 1.5):
            if isinstance(value, type(default)) or (default is None and key not in TEXTS):
                continue
            if key == "optimizer.options" and isinstance(value, dict):
                continue
            if isinstance(value, str) and key in (*TEXTS, "metrics.wandb_project"):
                continue
            refused(family, key, value)


def test_no_axis_of_a_mesh_has_size_0():
    """Whatever the machine is: a plan looks for other sizes only where these cannot run."""
    for axis in MESH_AXES:
        assert "-1 takes the remaining devices" in refused("llama", f"mesh.{axis}", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_some_keys_take_a_negative_number(family):
    for key, default in leaves(base(family)).items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            if MAY_BE_NEGATIVE.fullmatch(key):
                assert message(with_value(family, key, type(default)(-1))) is None, key
            else:
                refused(family, key, type(default)(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_fit_into_32_bits(family):
    for key, default in leaves(base(family)).items():
        if type(default) is int and not MAY_BE_HUGE.fullmatch(key):
            refused(family, key, 2**32)


@pytest.mark.parametrize("family", FAMILIES)
def test_none_means_unset_or_is_refused(family):
    """A key of a config is unset by None, and takes its default; a key without one must be set."""
    for key in leaves(base(family)):
        got = message(with_value(family, key, None))
        assert got is None or INCOMPLETE.fullmatch(key) or got.startswith(f"config.{key} is not set"), got
    for key in ("model.norm_eps", "data.seq_len" if family == "llama" else "data.text_len", "train.seed"):
        assert refused(family, key, None) == f"config.{key} is not set; give --config.{key}=VALUE"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_section_and_required_key_is_named(family):
    for section in base(family):
        c = with_values(family, {})
        with c.unlocked():
            del c[section]
        assert message(c).startswith(f"config.{section} is missing; sections: ")
        c[section] = 3
        assert message(c) == f"config.{section}=3 is not a section; write its keys and values"
    for key in ("model.norm_eps", "optimizer.learning_rate", "train.total_steps", "data.batch_size"):
        c = with_values(family, {})
        section, name = key.split(".")
        with c.unlocked():
            del c[section][name]
        assert message(c) == f"config.{key} is missing; add it to the config file"


# --- single values --------------------------------------------------------------------------------------

ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 64}
FP8 = {"mu": "float8_e4m3fn", "nu": "float8_e5m2"}
BAD: list[tuple[str, dict[str, Any], str]] = [
    # numbers out of range
    ("llama", {"model.rope_theta": 0.0}, "model.rope_theta=0.0 must be at least 1"),
    ("llama", {"model.norm_eps": 0.0}, "model.norm_eps=0.0 must be above 0 and at most 1"),
    ("llama", {"model.norm_eps": 1e-45}, "model.norm_eps=1e-45 must be above 0 and at most 1 in float32"),
    ("llama", {"model.init_std": -0.02}, "model.init_std=-0.02 must be above 0"),
    ("llama", {"model.init_std": 0.0}, "model.init_std=0.0 must be above 0"),
    ("llama", {"loss.z_loss": -1e-4}, "loss.z_loss=-0.0001 must be at least 0"),
    ("llama", {"optimizer.b2": 1 - 1e-9}, "optimizer.b2=0.999999999 must be at least 0 and below 1 in flo"),
    ("llama", {"optimizer.eps": 1e-50}, "optimizer.eps=1e-50 must be above 0 in float32"),
    (
        "llama",
        {"optimizer.decay_fraction": math.inf},
        "optimizer.decay_fraction=inf must be a finite number",
    ),
    ("llama", {"optimizer.final_lr_fraction": 1.5}, "optimizer.final_lr_fraction=1.5 must be between 0 an"),
    ("llama", {"train.microbatches": 0}, "train.microbatches=0 must be at least 1"),
    ("llama", {"train.seed": 2**32}, "train.seed=4294967296 must be at most 4294967295"),
    ("llama", {"data.num_workers": 10_000}, "data.num_workers=10000 must be between 0 and 1024"),
    ("llama", {"profile.steps": 0}, "profile.steps=0 must be at least 1"),
    ("llama", {"checkpoint.keep_last": 0}, "checkpoint.keep_last=0 must be at least 1"),
    ("llama", {"mesh.dcn_data": 0}, "mesh.dcn_data=0 must be at least 1"),
    (
        "clip",
        {"model.logit_scale": 14.3},
        "model.logit_scale=14.3 must be between -4.605170186 and 4.60517018",
    ),
    ("clip", {"model.layer_scale": -1.0}, "model.layer_scale=-1.0 must be at least 0"),
    ("clip", {"model.image_std": (0.5, 0.0, 0.5)}, "model.image_std[1]=0.0 must be above 0 and at most 1"),
    (
        "clip",
        {"model.image_std": (58.4, 57.1, 57.4)},
        "model.image_std[0]=58.4 must be above 0 and at most",
    ),
    ("clip", {"model.image_mean": (0.5, 0.5)}, "model.image_mean=(0.5, 0.5) must have 3 values"),
    (
        "clip",
        {"model.image_mean": 0.5},
        "model.image_mean=0.5 is of type float, expected (float, float, flo",
    ),
    ("clip", {"model.text.eos_id": 10**6}, "model.text.eos_id=1000000 must be below vocab_size="),
    ("clip", {"data.crop_scale": (0.5,)}, "data.crop_scale=(0.5,) must have 2 values"),
    ("clip", {"data.crop_scale": (0.0, 0.5)}, "data.crop_scale[0]=0.0 must be above 0 and at most 1"),
    ("clip", {"data.templates": ("a {name}",)}, "data.templates[0]='a {name}' must have one {} for the cl"),
    ("clip", {"data.templates": ("{}, {}",)}, "data.templates[0]='{}, {}' must have one {} for the class"),
    ("clip", {"data.templates": "a {}"}, "data.templates='a {}' is of type str, expected (str, …)"),
    ("clip", {"data.max_pixels": 0}, "data.max_pixels=0 must be at least 1"),
    ("clip", {"data.num_threads": 0}, "data.num_threads=0 must be between 1 and 1024"),
    # names and dtypes
    ("llama", {"model.dtype": "int8"}, "model.dtype='int8' is unknown; one of float32, bfloat16, float16"),
    (
        "llama",
        {"model.param_dtype": "float8_e4m3fn"},
        "model.param_dtype='float8_e4m3fn' is unknown; one of",
    ),
    ("llama", {"model.remat": "all"}, "model.remat='all' is unknown; one of none, block, dots, offload"),
    ("llama", {"model.attention": "flsh"}, "model.attention='flsh' is unknown; one of auto, xla, fla"),
    ("llama", {"model.name": "gpt"}, "model.name='gpt' is unknown; one of llama, qwen3"),
    (
        "llama",
        {"optimizer.mu_dtype": "int8"},
        "optimizer.mu_dtype='int8' is unknown; one of float32, bfloat1",
    ),
    (
        "llama",
        {"optimizer.schedule": "step"},
        "optimizer.schedule='step' is unknown; one of cosine, linear",
    ),
    ("llama", {"data.packing": "best"}, "data.packing='best' is unknown; one of concat, first_fit"),
    ("clip", {"loss.kind": "triplet"}, "loss.kind='triplet' is unknown; one of softmax, sigmoid"),
    ("clip", {"model.visual.pool": "max"}, "model.visual.pool='max' is unknown; one of cls, gap, map"),
    # sections and dicts inside sections
    ("llama", {"optimizer.galore.rank": "4"}, "optimizer.galore.rank='4' is of type str, expected int"),
    (
        "llama",
        {"optimizer.galore": 4},
        "optimizer.galore=4 is of type int, expected keys and values or None",
    ),
    (
        "llama",
        {"optimizer.galore": {"rank": 4, "targets": ("mlp(",)}},
        "optimizer.galore.targets[0]='mlp(' is not a regular expression: missing )",
    ),
    (
        "llama",
        {"optimizer.galore": {"rnk": 4}},
        "optimizer.galore.rnk is unknown (did you mean rank?); keys: basis, lazy_threshold, moments, ",
    ),
    (
        "llama",
        {"optimizer.low_bit": FP8 | {"block_size": "a"}},
        "optimizer.low_bit.block_size='a' is of type str, expected int",
    ),
    (
        "llama",
        {"optimizer.low_bit": FP8 | {"nu": "int4"}},
        "optimizer.low_bit.nu='int4' is unknown; one of",
    ),
    (
        "llama",
        {"optimizer.low_bit": {"mu": "int8"}},
        "optimizer.low_bit.nu is missing; add it to the config",
    ),
    (
        "llama",
        {"optimizer.options": {"eps_rot": 0}},
        "optimizer.options.eps_rot is unknown (did you mean ep",
    ),
    (
        "llama",
        {"optimizer.options": {"eps_root": "0"}},
        "optimizer.options.eps_root='0' is of type str, exp",
    ),
    (
        "llama",
        {"model.rope_scaling": {"factor": 8.0}},
        "model.rope_scaling.low_freq_factor is missing; add it to the config file",
    ),
    (
        "llama",
        {"model.rope_scaling.factor": 8.0},
        "model.rope_scaling.high_freq_factor is not set; give --config.model.rope_scaling.high_freq_facto",
    ),
    (
        "llama",
        {"model.rope_scaling": ROPE | {"low_freq_factor": 4.0}},
        "model.rope_scaling.low_freq_factor=4.0 must be below high_freq_factor=4.0",
    ),
    (
        "llama",
        {"model.rope_scaling": ROPE | {"factor": 0.5}},
        "model.rope_scaling.factor=0.5 must be at lea",
    ),
    (
        "llama",
        {"precision.rules": ("nosuch",)},
        "precision.rules[0]='nosuch' is of type str, expected (str, ",
    ),
    (
        "llama",
        {"precision.rules": (("*", "fp3"),)},
        "precision.rules[0][1]='fp3' is unknown; one of bf16, f",
    ),
    (
        "llama",
        {"precision.rules": "lm_head"},
        "precision.rules='lm_head' is of type str, expected ((str, s",
    ),
    (
        "llama",
        {"precision.options": {"margin": 1e3}},
        "precision.options.margin=1000.0 must be between -8 an",
    ),
    (
        "llama",
        {"precision.options": {"grad_format": "x"}},
        "precision.options.grad_format='x' is unknown; one",
    ),
    (
        "llama",
        {"precision.loss_scale": {"initial": 3.0}},
        "precision.loss_scale.initial=3.0 must be a power",
    ),
    ("llama", {"model.pipeline": {"rounds": 0}}, "model.pipeline.rounds=0 must be at least 1"),
    ("clip", {"model.visual": "b16"}, "model.visual='b16' is of type str, expected keys and values"),
    # unknown keys
    (
        "llama",
        {"optimizer.learning_rte": 1.0},
        "optimizer.learning_rte is unknown (did you mean learning_ra",
    ),
    ("llama", {"train.stepz": 1}, "train.stepz is unknown"),
    ("clip", {"model.visual.patchsize": 8}, "model.visual.patchsize is unknown (did you mean patch_size?)"),
]


@pytest.mark.parametrize(("family", "values", "start"), BAD, ids=lambda v: str(v)[:60])
def test_a_bad_value_is_one_line_with_key_value_and_remedy(family, values, start):
    got = message(with_values(family, values))
    assert got is not None and got.startswith(f"config.{start}") and "\n" not in got, got


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"optimizer.options": {"clip_threshold": math.inf}, "optimizer.name": "stable_adamw"}),
    ("llama", {"optimizer.options": {"targets": ["mlp/"]}, "optimizer.name": "muon"}),  # as JSON has it
    ("llama", {"optimizer.mu_dtype": "bfloat16"}),
    ("llama", {"optimizer.low_bit": FP8}),
    ("llama", {"model.rope_scaling": ROPE}),
    ("llama", {"precision.rules": [["lm_head", "fp8_current"]]}),
    ("llama", {"train.seed": 2**32 - 1}),
    ("clip", {"model.logit_scale": math.log(100)}),
    ("clip", {"model.image_mean": [0.0, 0.0, 0.0], "model.image_std": [1, 1, 1]}),
    ("clip", {"data.templates": ("a photo of a {}, a {{}}.",), "data.crop_scale": (1, 1)}),
]


@pytest.mark.parametrize(("family", "values"), GOOD, ids=lambda v: str(v)[:60])
def test_a_good_value_is_accepted(family, values):
    assert message(with_values(family, values)) is None
