"""Wrong values and impossible combinations are refused with the config, in one line."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxlp.optim import OPTIMIZERS, OptimizerConfig, galore
from tests.optim.common import REQUIRED, make_optimizer, optimizer_config

FP8 = dict(mu="float8_e4m3fn", nu="float8_e5m2")
DYNAMIC8 = dict(mu="dynamic8", nu="dynamic8")
COSINE = dict(schedule="cosine")
FREE = dict(name="schedule_free_adamw")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "adamww"}, r"^name='adamww' is unknown; one of adamw, "),
        ({"schedule": "cosin"}, r"^schedule='cosin' is unknown; one of cosine, linear, wsd, const"),
        ({"learning_rate": 0.0}, r"^learning_rate=0.0 must be above 0"),
        ({"learning_rate": float("nan")}, r"^learning_rate=nan must be a finite number"),
        ({"warmup_steps": -1}, r"^warmup_steps=-1 must be at least 0"),
        ({"final_lr_fraction": 1.5}, r"^final_lr_fraction=1.5 must be between 0 and 1"),
        ({"decay_fraction": 2.0}, r"^decay_fraction=2.0 must be between 0 and 1"),
        ({"clip_norm": -1.0}, r"^clip_norm=-1.0 must be at least 0"),
        ({"weight_decay": -0.1}, r"^weight_decay=-0.1 must be at least 0"),
        ({"b1": 1.0}, r"^b1=1.0 must be at least 0 and below 1"),
        ({"eps": 0.0}, r"^eps=0.0 must be above 0"),
        ({"mu_dtype": "bfloat17"}, r"^mu_dtype='bfloat17' is unknown; one of float32, bfloat16, "),
        (
            {"param_rounding": "up"},
            r"^param_rounding='up' is unknown; one of stochastic, ",
        ),
        (
            {"options": {"nesterow": True}},
            r"^options.nesterow is unknown \(did you mean nesterov\?\); options of name='adamw'",
        ),
        ({"options": {"b1": 0.5}}, r"^options.b1 is unknown"),
        ({"options": {"eps_root": -1.0}}, r"^options.eps_root=-1.0 must be at least 0"),
        ({"name": "lion", "options": {"mode": "soft"}}, r"^options.mode='soft' is unknown; one of hard"),
        ({"name": "muon", "options": {"ns_steps": 0}}, r"^options.ns_steps=0 must be at least 1"),
        (
            {"name": "muon", "options": {"targets": ("mlp(",)}},
            r"^options.targets\[0\]='mlp\(' is not a reg",
        ),
        ({"name": "adamp", "options": {"wd_ratio": 0.0}}, r"^options.wd_ratio=0.0 must be above 0 and at"),
        (
            {"name": "stable_adamw", "options": {"clip_threshold": 0}},
            r"^options.clip_threshold=0 must be ab",
        ),
        (
            {"name": "adafactor", "options": {"decay_rate": "0.8"}},
            r"^options.decay_rate='0.8' is of type st",
        ),
        (
            FREE | {"mu_dtype": "bfloat16"},
            r"^mu_dtype='bfloat16' cannot be combined with name='schedule_free_adamw",
        ),
        (
            {"name": "adafactor", "mu_dtype": "bfloat16"},
            r"^mu_dtype='bfloat16' cannot be combined with name='adaf",
        ),
        (
            FREE | {"options": {"rank": 1}},
            r"^options.rank is unknown; options of name='schedule_free_adamw': none",
        ),
        ({"galore": {"rank": -1}}, r"^rank=-1 must be at least 0"),
        ({"galore": {"rank": 2, "update_proj_gap": 0}}, r"^update_proj_gap=0 must be at least 1"),
        ({"galore": {"rank": 2, "side": "left"}}, r"^side='left' is unknown; one of short, long"),
        ({"galore": {"rank": 2, "basis": "qr"}}, r"^basis='qr' is unknown"),
        ({"galore": {"rank": 2, "moments": "zero"}}, r"^moments='zero' is unknown"),
        ({"galore": {"rank": 2, "projector": "int2"}}, r"^projector='int2' is unknown"),
        ({"galore": {"projector": "int4", "rank": 3}}, r"^rank=3 must be even"),
        ({"galore": {"rank": 2, "lazy_threshold": 1.5}}, r"^lazy_threshold=1.5 must be between 0 and 1"),
        (
            {"galore": {"rank": 2, "targets": ("attn(",)}},
            r"^targets\[0\]='attn\(' is not a regular expression",
        ),
        (
            {"low_bit": {"mu": "fp8", "nu": "fp8"}},
            r"^mu='fp8' is unknown; one of float32, ",
        ),
        ({"decay_fraction": 0.5}, r"^decay_fraction=0.5 has no effect with schedule='constant'; set s"),
        ({"low_bit": FP8 | {"nu": "int4"}}, r"^nu='int4' is unknown"),
        ({"low_bit": FP8 | {"block_size": -1}}, r"^block_size=-1 must be at least 0"),
        (
            {"low_bit": {"mu": "bfloat16", "nu": "float32", "block_size": 256}},
            r"^block_size=256 has no effect with mu=bfloat16 and nu=float32, .* set it to 0",
        ),
        (
            FREE | {"schedule": "cosine"},
            r"^schedule='cosine' cannot be combined with name='schedule_free_adamw': ",
        ),
        (
            FREE | {"schedule": "linear"},
            r"^schedule='linear' cannot be combined with name='schedule_free_adamw': ",
        ),
        (FREE | {"b1": 0.0}, r"^b1=0.0 cannot be combined with name='schedule_free_adamw': "),
        (
            FREE | {"offload": True},
            r"^offload=True cannot be combined with name='schedule_free_adamw': its average is evaluated",
        ),
        (
            FREE | {"param_rounding": "kahan"},
            r"^param_rounding='kahan' cannot be combined with name='schedule_free",
        ),
        (
            {"name": "adamp", "galore": {"rank": 2}},
            r"^galore.rank=2 cannot be combined with name='adamp': ",
        ),
        (
            {"name": "soap", "galore": {"rank": 2}},
            r"^galore.rank=2 cannot be combined with name='soap': .* set gal",
        ),
        (
            {"name": "apollo", "galore": {"rank": 2}},
            r"^galore.rank=2 cannot be combined with name='apollo': ",
        ),
        (
            {"name": "adafactor", "galore": {"rank": 2, "moments": "reset"}},
            r"^galore.moments='reset' cannot be combined with name='adafactor': ",
        ),
        (
            {"name": "normuon", "galore": {"rank": 2, "moments": "reproject"}},
            r"^galore.moments='reproject' cannot be combined with name='normuon': its second moments are",
        ),
        (
            {"name": "stable_spam", "galore": {"rank": 2, "moments": "reset"}},
            r"^galore.moments='reset' cannot be combined with name='stable_spam': its moments are of norm",
        ),
        (
            {"decay_with_clip": False},
            r"^decay_with_clip=False cannot be combined with name='adamw': .* set it to True",
        ),
        (
            {"name": "lion", "options": {"smooth_beta": 2.0, "mode": "refined"}},
            r"^options.smooth_beta=2.0 cannot be combined with name='lion': .* set options.mode='smooth'",
        ),
        (
            {"name": "lion", "low_bit": {"mu": "float32", "nu": "dynamic8"}},
            r"^low_bit.nu='dynamic8' cannot be combined with name='lion': it has no second moment; set",
        ),
        (
            {"name": "sgd", "low_bit": {"mu": "float32", "nu": "int8"}},
            r"^low_bit.nu='int8' cannot be combined with name='sgd': ",
        ),
        (
            FREE | {"low_bit": {"mu": "dynamic8", "nu": "float32"}},
            r"^low_bit.mu='dynamic8' cannot be combined with name='schedule_free_adamw': .* set low_bit.nu",
        ),
        ({"adascale": 0.5}, r"^adascale=0.5 must be at least 1"),
        ({"adascale": 4.0}, r"^adascale=4.0 cannot be combined with name='adamw': .* set name='sgd'"),
        (
            {"name": "sgd", "adascale": 4.0, "galore": {"rank": 2}},
            r"^galore.rank=2 cannot be combined with adascale=4.0, .* set galore.rank=0",
        ),
        (
            {"name": "adafactor", "low_bit": FP8},
            r"^low_bit.mu='float8_e4m3fn' cannot be combined with name='adaf",
        ),
    ],
)
def test_errors_are_one_line_with_key_value_and_remedy(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        make_optimizer(**changes)
    assert "\n" not in str(error.value)


def test_options_are_checked_with_the_section():
    """Rules about the targets of options need not expect numbers among them."""
    with pytest.raises(ValueError, match=r"^options.targets\[0\]=7 is of type int"):
        optimizer_config(name="muon", options={"targets": (7,)})


def test_the_table_of_the_documentation_names_every_optimizer():
    page = (Path(__file__).parents[2] / "docs/optimizers.md").read_text()
    table = page.split("| name | bytes of state per parameter |")[1].split("\n\n")[0]
    names = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted(names) == sorted(OPTIMIZERS), "docs/optimizers.md#choosing has a row for each"


@pytest.mark.parametrize("name", ["adamp", "adafactor", "stable_spam"])
def test_wrappers_that_are_off_go_with_everything(name):
    """rank=0 and float32 are how a command line or a file turns them off."""
    off = dict(galore={"rank": 0, "moments": "reset"}, low_bit={"mu": "float32", "nu": "float32"})
    config = make_optimizer(name=name, **off)
    plain = make_optimizer(name=name)
    params = {"layers": {"attn": {"kernel": jnp.ones((2, 4, 4))}}}
    assert jax.tree.structure(jax.eval_shape(config.tx.init, params)) == jax.tree.structure(
        jax.eval_shape(plain.tx.init, params)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "stable_adamw", "decay_with_clip": False},
        {"low_bit": {"mu": "bfloat16", "nu": "float16", "block_size": 256}},
        {"low_bit": {"mu": "float32", "nu": "float32", "block_size": 256}},  # turned off in a preset
        {"name": "lion", "options": {"smooth_beta": 2.0, "mode": "smooth"}},
        {"name": "lion", "low_bit": FP8},  # as by the argument low_bit=fp8
        FREE | {"low_bit": FP8},
    ],
    ids=str,
)
def test_what_has_an_effect_is_accepted(changes):
    make_optimizer(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(learning_rate=0.01), None),  # the paper's, 60M to 1B
        (dict(learning_rate=0.005), None),  # its 7B
        (dict(learning_rate=0.004), r"learning_rate=0.004 × galore.scale=0.25 = 0.001 is below .* raise"),
        (dict(learning_rate=0.01, scale=1.0), r"galore.scale=1 = 0.01 is above the rates .*; lower one"),
        (dict(learning_rate=1e-4, rank=0), None),
        (dict(learning_rate=1e-4, name="lion"), None),  # Lion's usual rates are others
    ],
)
def test_rates_far_from_those_of_galores_runs_have_a_warning(changes, message):
    values = {"rank": 2} | {key: changes.pop(key) for key in ("rank", "scale") if key in changes}
    warnings = galore.rate_warnings(optimizer_config(**changes, galore=values))
    assert len(warnings) == (message is not None)
    assert all(re.search(message, warning) and "\n" not in warning for warning in warnings)


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({}, ["final_lr_fraction (schedule=constant)"]),
        (COSINE, []),
        ({"schedule": "wsd", "name": "lion"}, ["eps (name=lion)"]),
        (FREE, ["final_lr_fraction (schedule=constant)"]),
        (
            {"schedule": "linear", "name": "adafactor"},
            ["b1 (name=adafactor)", "b2 (name=adafactor)", "eps (name=adafactor)"],
        ),
        ({"schedule": "linear", "name": "sgd"}, ["b2 (name=sgd)", "eps (name=sgd)"]),
        (COSINE | {"galore": {"rank": 2, "seed": 1}}, ["galore.seed (basis=svd)"]),
        (COSINE | {"galore": {"rank": 2, "seed": 1, "basis": "randomized"}}, []),
        (COSINE | {"low_bit": DYNAMIC8 | {"seed": 1}}, ["low_bit.seed (mu=dynamic8, nu=dynamic8)"]),
        (COSINE | {"low_bit": DYNAMIC8 | {"nu": "float16", "seed": 1}}, []),
        (COSINE | {"low_bit": DYNAMIC8 | {"mu": "bfloat16", "seed": 1}}, []),
        (
            COSINE | {"low_bit": FP8 | {"nu": "float32", "seed": 1}},
            ["low_bit.seed (mu=float8_e4m3fn, nu=float32)"],
        ),
    ],
)
def test_required_keys_and_seeds_without_effect_are_named(changes, unused):
    assert optimizer_config(**changes).unused == unused


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_required_keys_change_the_steps_unless_named_as_unused(name):
    changes = dict(name=name, schedule="constant" if name == "schedule_free_adamw" else "linear")
    ones = jnp.ones((8, 8))
    params = {"tok_embed": {"embedding": ones}, "layers": {"attn": {"q_proj": {"kernel": ones}}}}
    grads = [jnp.sin(jnp.arange(64.0).reshape(8, 8) ** power) for power in (1, 2, 3)]

    def trained(**more):
        values = dict(warmup_steps=1, clip_norm=3.0, weight_decay=0.1)
        tx = make_optimizer(total_steps=4, **values | changes | more).tx
        state, p = tx.init(params), params
        for g in grads:
            updates, state = tx.update(jax.tree.map(lambda _, g=g: g, p), state, p)
            p = jax.tree.map(jnp.add, p, updates)
        return jnp.stack(jax.tree.leaves(p))

    others = dict(b1=0.5, b2=0.7, eps=0.1, final_lr_fraction=0.5)
    plain = trained()
    without_effect = [key for key, value in others.items() if (trained(**{key: value}) == plain).all()]
    assert without_effect == [text.split()[0] for text in optimizer_config(**changes).unused]


def test_required_keys_have_no_defaults():
    for key in REQUIRED:
        with pytest.raises(TypeError, match=key):
            OptimizerConfig(**{k: v for k, v in REQUIRED.items() if k != key})
