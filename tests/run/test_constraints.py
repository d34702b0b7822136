"""Every rule of the table refuses its case with key, value and way out, and valid settings are accepted."""

import re

import pytest

from maxlp.run import constraints
from maxlp.run.config import ConfigError
from maxlp.run.settings import read
from tests.run.fixtures import changed, load

# rule -> (changes of configs/llama/debug.py, devices, platform, part of the message)
BFLOAT16 = {"model.param_dtype": "bfloat16"}
SCALIFY = {"model.dtype": "float16", "precision.scalify": "fp16"}
LORA = {"train.lora.rank": 4, "train.init_from": "run"}
ADASCALE = {"optimizer.name": "sgd", "optimizer.adascale": 2.0, "train.microbatches": 2}
LATE = {"precision.high_precision_from": 5, "precision.recipe": "nvfp4"}
RELEASED = {"train.release_gradients": True, "optimizer.clip_norm": 0.0}
APOLLO = {"optimizer.name": "apollo"}
INT8 = {"precision.exchange": "int8"}
SCATTER = {"precision.scatter": "int8"}
REPLICAS = INT8 | {"mesh.data": 2}
AVERAGED = {"optimizer.name": "schedule_free_adamw", "optimizer.schedule": "constant"}
LOCAL = {"train.local.steps": 10, "train.total_steps": 300, "mesh.data": 2}
SAMPLED = {"precision.recipe": "wta_crs"}
NOT_LOW_BIT = {"optimizer.low_bit.mu": "float32", "optimizer.low_bit.nu": "float32"}
REFUSED = {
    "batch_divides": [
        ({"data.batch_size": 12}, 8, "cpu", "use a multiple of 8"),
        ({"train.microbatches": 5}, 1, "cpu", "train.microbatches=5"),
    ],
    "attention_runs": [
        ({"model.attention": "splash"}, 1, "gpu", "runs on tpu"),
        ({"mesh.context": 2, "model.attention": "xla"}, 2, "cpu", "use model.attention=ring"),
        ({"model.attention": "cudnn"}, 1, "gpu", "use model.attention=flash"),
    ],
    "float16_is_scaled": [({"model.dtype": "float16"}, 1, "cpu", "precision=fp16")],
    "scalify_is_compatible": [
        ({"precision.scalify": "fp16"}, 1, "cpu", "set model.dtype=float16"),
        (SCALIFY | {"precision.loss_scale.initial": 2.0}, 1, "cpu", "set no loss scale"),
        (SCALIFY | {"precision.recipe": "fp8_current"}, 1, "cpu", "set precision.recipe=bf16"),
        (SCALIFY | {"precision.rules": (("*/q_proj", "fp8_current"),)}, 1, "cpu", "set no rules"),
        (SCALIFY | {"precision.min_dim": 64}, 1, "cpu", "set precision.min_dim=0"),
        (SCALIFY | {"precision.high_precision_from": 4}, 1, "cpu", "set precision.high_precision_from=0"),
        (SCALIFY | {"precision.health_every": 10}, 1, "cpu", "set precision.health_every=0"),
        (SCALIFY | {"precision.magnitudes_every": 10}, 1, "cpu", "set precision.magnitudes_every=0"),
        (SCALIFY, 1, "gpu", "set model.attention=xla"),
        (SCALIFY | {"model.remat": "offload"}, 1, "cpu", "set model.remat=block"),
        (SCALIFY | {"mesh.stage": 2}, 2, "cpu", "set mesh.stage=1"),
        (SCALIFY | {"train.lora.rank": 4, "train.init_from": "run"}, 1, "cpu", "set no adapters"),
        (SCALIFY | {"train.release_gradients": True}, 1, "cpu", "set train.release_gradients=False"),
        (SCALIFY | {"loss.num_chunks": 8}, 2, "cpu", "loss.num_chunks=8 on 2 devices cannot be combined"),
    ],
    "low_communication_is_compatible": [
        (INT8, 1, "cpu", "mesh.data=1, a single replica, cannot be combined with precision.exchange=int8"),
        (REPLICAS | {"mesh.stage": 2}, 4, "cpu", "set mesh.stage=1"),
        (REPLICAS | {"mesh.context": 2, "model.attention": "ring"}, 4, "cpu", "set mesh.context=1"),
        (REPLICAS | {"precision.loss_scale.initial": 2.0}, 2, "cpu", "no loss scale"),
        (REPLICAS | SCALIFY, 2, "cpu", "set precision.scalify=none"),
        (REPLICAS | ADASCALE, 2, "cpu", "optimizer.adascale=2.0 cannot be combined"),
        (
            REPLICAS | {"train.release_gradients": True, "optimizer.clip_norm": 0.0},
            2,
            "cpu",
            "set train.release_gradients=False",
        ),
        (REPLICAS | LORA, 2, "cpu", "train.lora cannot be combined with precision.exchange=int8"),
        (
            SCATTER,
            1,
            "cpu",
            "mesh.fsdp=1, which splits no gradient, cannot be combined with precision.scatter",
        ),
        (SCATTER | {"mesh.stage": 2}, 4, "cpu", "set mesh.stage=1"),
        (SCATTER | {"mesh.context": 2, "model.attention": "ring"}, 4, "cpu", "set mesh.context=1"),
        (SCATTER | SCALIFY, 2, "cpu", "set precision.scalify=none"),
        (SCATTER | LORA, 2, "cpu", "train.lora cannot be combined with precision.scatter=int8"),
        (SCATTER | REPLICAS | LORA, 4, "cpu", "train.lora cannot be combined with precision.exchange=int8"),
        (LOCAL | {"mesh.data": 1}, 1, "cpu", "with train.local.steps=10; set mesh.data=2 or more"),
        (LOCAL | {"mesh.stage": 2}, 4, "cpu", "set mesh.stage=1"),
        (LOCAL | {"mesh.context": 2, "model.attention": "ring"}, 4, "cpu", "set mesh.context=1"),
        (LOCAL | {"precision.loss_scale.initial": 2.0}, 2, "cpu", "no loss scale"),
        (LOCAL | ADASCALE, 2, "cpu", "optimizer.adascale=2.0 cannot be combined with train.local.steps=10"),
        (LOCAL | LORA, 2, "cpu", "train.lora cannot be combined"),
        (
            LOCAL | SAMPLED | {"mesh.fsdp": 2, "mesh.tensor": 2},
            8,
            "cpu",
            "precision.recipe=wta_crs on a mesh split over fsdp and tensor cannot be combined",
        ),
        (LOCAL | {"spikes.guard": "skip"}, 2, "cpu", "set spikes.guard=rollback or off"),
        (LOCAL | {"precision.recipe": "fp8_delayed"}, 2, "cpu", "set a recipe without delayed scales"),
        (LOCAL | {"precision.rules": (("*/q_proj", "fp8_gaudi"),)}, 2, "cpu", "without delayed scales"),
        (LOCAL | BFLOAT16, 2, "cpu", "set model.param_dtype=float32"),
        (
            LOCAL | AVERAGED,
            2,
            "cpu",
            "set optimizer.name=adamw",
        ),
        (LOCAL | {"optimizer.galore.rank": 8}, 2, "cpu", "set optimizer.galore.rank=0"),
        (LOCAL | {"train.total_steps": 301}, 2, "cpu", "train.total_steps=301 is not a multiple"),
    ],
    "skipped_tensors_have_moments": [
        (
            {"precision.loss_scale.per_tensor": True, "optimizer.name": "muon"},
            1,
            "cpu",
            "per_tensor=True needs optimizer.name=adamw or stable_adamw",
        ),
        (
            {"precision.loss_scale.per_tensor": True, "optimizer.galore.rank": 8},
            1,
            "cpu",
            "galore, low_bit",
        ),
        (
            {"precision.loss_scale.per_tensor": True}
            | {"optimizer.low_bit.mu": "dynamic8", "optimizer.low_bit.nu": "dynamic8"},
            1,
            "cpu",
            "galore, low_bit",
        ),
        (ADASCALE | {"precision.loss_scale.per_tensor": True}, 1, "cpu", "adascale and param_rounding"),
        (
            BFLOAT16
            | {"precision.loss_scale.per_tensor": True, "optimizer.param_rounding": "float16_master"},
            1,
            "cpu",
            "param_rounding=float16_master; choose that",
        ),
        (
            {"precision.loss_scale.per_tensor": True, "spikes.guard": "skip"},
            1,
            "cpu",
            "set spikes.guard=rollback or off",
        ),
    ],
    "float16_params_have_scales": [
        ({"model.param_dtype": "float16"}, 1, "cpu", "use float32"),
        (SCALIFY | {"model.param_dtype": "float16"}, 1, "cpu", "param_rounding=nearest"),
        (
            {"model.param_dtype": "float16", "optimizer.param_rounding": "nearest"},
            1,
            "cpu",
            "needs precision.scalify",
        ),
    ],
    "rounded_params_have_16_bits": [
        ({"optimizer.param_rounding": "kahan"}, 1, "cpu", "bfloat16"),
        ({"optimizer.param_rounding": "float16_master"}, 1, "cpu", "is for model.param_dtype=bfloat16"),
        (BFLOAT16 | {"optimizer.param_rounding": "nearest"}, 1, "cpu", "param_dtype=float16"),
    ],
    "averages_are_in_float32": [(BFLOAT16 | AVERAGED, 1, "cpu", "schedule_free_adamw; set float32")],
    "precision_fits_model": [
        ({"precision.rules": (("layers/mlp/fc", "fp8_current"),)}, 1, "cpu", "layers/mlp/fc"),
        ({"precision.recipe": "fp8_current", "precision.first_blocks": 4}, 1, "cpu", "first_blocks=4"),
        ({"precision.recipe": "mxfp8", "model.mlp_dim": 500}, 1, "cpu", "recipe='mxfp8'"),
    ],
    "recipe_uses_its_options": [
        ({"precision.options.format": "int8"}, 1, "cpu", "quantizes no matmul"),
        (
            {"precision.recipe": "fp8_current", "precision.min_dim": 1000},
            1,
            "cpu",
            "precision.recipe=fp8_current has no effect: precision.min_dim=1000, precision.rules",
        ),
        # All layers but those that stay in high precision anyway.
        (
            {
                "precision.recipe": "fp8_current",
                "precision.first_blocks": 1,
                "precision.last_blocks": 1,
                "precision.rules": (("layers/[12]/*", "bf16"),),
            },
            1,
            "cpu",
            "first_blocks=1 and last_blocks=1 leave it no matmul",
        ),
        (
            {
                "precision.recipe": "fp8_current",
                "precision.first_blocks": 2,
                "precision.last_blocks": 1,
                "precision.smooth_swiglu": "balanced",
                "precision.rules": (("layers/2/mlp/down_proj", "bf16"),),
            },
            1,
            "cpu",
            "no matmul of a gated product",
        ),
        (
            {"precision.recipe": "fp8_current", "precision.rules": (("*", "int8_switchback"),)},
            1,
            "cpu",
            "precision.recipe=fp8_current has no effect",
        ),
        (
            {"precision.recipe": "quest", "precision.options.grad_rounding": "stochastic"},
            1,
            "cpu",
            "does not quantize gradients",
        ),
        (
            {"precision.recipe": "fp8_current", "precision.options.history": 16},
            1,
            "cpu",
            "precision.options.history=16 has no effect with precision.recipe=fp8_current",
        ),
        (
            {"precision.recipe": "mxfp8", "precision.options.power_of_two": False},
            1,
            "cpu",
            "no scales of tensors or rows",
        ),
        (
            {"precision.min_dim": 64},
            1,
            "cpu",
            "precision.min_dim=64 has no effect with precision.recipe=bf16",
        ),
        ({"precision.rules": (("*", "bf16"),)}, 1, "cpu", "keep every matmul in the model's dtype"),
        ({"precision.smooth_swiglu": "channel"}, 1, "cpu", "no matmul of a gated product"),
        (SAMPLED | {"precision.smooth_swiglu": "balanced"}, 1, "cpu", "no matmul of a gated product"),
        (SAMPLED | {"precision.options.format": "int8"}, 1, "cpu", "quantizes no matmul"),
        (
            {"precision.recipe": "int8_switchback", "precision.options.keep": 1.0},
            1,
            "cpu",
            "precision.options.keep=1.0 has no effect",
        ),
    ],
    "trained_tokenizer_fits_model": [
        ({"data.tokenizer": "bpe:4k"}, 1, "cpu", "as in bpe:4096"),
        ({"data.tokenizer": "bpe:512?chat_template=plain"}, 1, "cpu", "without options"),
        ({"data.tokenizer": "bpe:512", "model.vocab_size": 256}, 1, "cpu", "model.vocab_size=512"),
    ],
    "mesh_divides_params": [
        ({"model.embed_dim": 100}, 8, "cpu", "mesh.fsdp=8"),
        ({**LORA, "model.vocab_size": 4097, "mesh.tensor": 2}, 2, "cpu", "mesh.tensor=2"),  # frozen
    ],
    "targets_are_matrices": [
        *(
            (
                {"optimizer.name": name, "optimizer.options": {"targets": (target,)}},
                1,
                "cpu",
                message,
            )
            for name in ("muon", "normuon", "soap", "apollo", "apollo_mini")
            for target, message in (("fc", "'fc' matches no parameter"), ("norm", "is not a matrix"))
        ),
        ({"optimizer.galore.rank": 8, "optimizer.galore.targets": ("fc",)}, 1, "cpu", "'fc'"),
        ({"optimizer.galore.rank": 8, "optimizer.galore.targets": ("norm",)}, 1, "cpu", "not a matrix"),
        (
            {"optimizer.galore.rank": 64, "optimizer.galore.projector": "int4", "model.mlp_dim": 33},
            1,
            "cpu",
            "an even rank",
        ),
        ({"optimizer.galore.rank": 192}, 1, "cpu", "rank=192 must be at most 191, because no target"),
        ({"optimizer.galore.rank": 512}, 1, "cpu", "above 192; lower it or set galore.rank=0"),
        (APOLLO | {"optimizer.options": {"rank": 193}}, 1, "cpu", "options.rank=193 must be at most 192"),
    ],
    "adascale_has_microbatches": [
        (ADASCALE | {"train.microbatches": 1}, 1, "cpu", "raise train.microbatches"),
        (ADASCALE | {"optimizer.adascale": 999.0}, 1, "cpu", "data.batch_size="),
    ],
    "released_gradients_are_compatible": [
        ({"train.release_gradients": True}, 1, "cpu", "clip_norm=0.0"),
        (RELEASED | {"train.microbatches": 2}, 1, "cpu", "=1"),
        (RELEASED | ADASCALE, 1, "cpu", "optimizer.adascale=2.0"),
        (RELEASED | {"mesh.stage": 2}, 2, "cpu", "mesh.stage=1"),
        (RELEASED | {"spikes.guard": "skip"}, 1, "cpu", "rollback"),
        (RELEASED | {"spikes.update_ratios": True}, 1, "cpu", "spikes.update_ratios=False"),
        (RELEASED | {"precision.loss_scale.initial": 1.0}, 1, "cpu", "loss_scale"),
        (RELEASED | {"model.remat": "offload"}, 1, "cpu", "model.remat=block"),
    ],
    "both_phases_have_the_same_state": [
        (LATE | {"train.total_steps": 5}, 1, "cpu", "an earlier step"),
        (LATE | {"precision.recipe": "fp8_delayed"}, 1, "cpu", "histories"),
    ],
    "magnitudes_are_not_pipelined": [
        ({"precision.magnitudes_every": 5, "mesh.stage": 2}, 2, "cpu", "mesh.stage=2; set it to 0")
    ],
    "adapters_start_from_weights": [({"train.lora.rank": 4}, 1, "cpu", "needs train.init_from")],
    "swapped_vocabularies_are_trained": [
        ({"train.swap_tokenizer": True}, 1, "cpu", "give --from"),
        ({**LORA, "train.swap_tokenizer": True}, 1, "cpu", "train.lora.rank=4 would leave frozen"),
    ],
    "adapters_are_compatible": [
        ({**LORA, "train.release_gradients": True, "optimizer.clip_norm": 0.0}, 1, "cpu", "frees nothing"),
        (SAMPLED | LORA, 1, "cpu", "freezes the kernels"),
        ({**LORA, "optimizer.galore.rank": 8}, 1, "cpu", "optimizer.galore"),
        (
            {**LORA, "optimizer.param_rounding": "kahan", "model.param_dtype": "bfloat16"},
            1,
            "cpu",
            "are in float32",
        ),
    ],
    "offloading_needs_released_gradients": [
        ({"optimizer.offload": True}, 1, "cpu", "set train.release_gradients=True")
    ],
    "outputs_can_be_made": [
        ({"profile.start": 500, "train.total_steps": 400}, 1, "cpu", "lower it, or set 0"),
        (
            {"checkpoint.every_steps": 300, "checkpoint.keep_every": 500},
            1,
            "cpu",
            "checkpoint.keep_every=500 is not a multiple of checkpoint.every_steps=300",
        ),
    ],
}
ACCEPTED = [
    {"checkpoint.every_steps": 300, "checkpoint.keep_every": 600},
    {"profile.start": 20},
    {
        "precision.recipe": "fp8_current",
        "precision.smooth_swiglu": "balanced",
        "precision.rules": (("layers/1/mlp/down_proj", "bf16"),),
    },
    {},
    {"train.release_gradients": True, "optimizer.clip_norm": 0.0, "spikes.guard": "rollback"},
    {"train.release_gradients": True, "optimizer.clip_norm": 0.0, "optimizer.offload": True},
    {"train.release_gradients": True, "optimizer.clip_norm": 0.0, "precision.recipe": "fp8_delayed"},
    {"precision.recipe": "mxfp8", "data.seq_len": 100},
    SAMPLED | {"precision.options.keep": 1.0},  # it is 0.3 by default
    {"precision.options.keep": 0.5, "precision.min_dim": 64},
    {"model.dtype": "float16", "precision.loss_scale.initial": 256.0},
    {"precision.loss_scale.per_tensor": True, "optimizer.galore.rank": 0} | NOT_LOW_BIT,
    {"optimizer.name": "adafactor"} | NOT_LOW_BIT,
    ADASCALE,
    {"optimizer.galore.rank": 191},
    LORA | {"optimizer.galore.rank": 0},  # off
    APOLLO,  # of rank 256, which the config does not set
    APOLLO | {"optimizer.options": {"rank": 192}},
    SCALIFY | {"loss.num_chunks": 8},  # on one device
    BFLOAT16 | {"optimizer.param_rounding": "kahan"},
    BFLOAT16 | AVERAGED | LORA,  # adapters are float32
    SCALIFY | {"model.param_dtype": "float16", "optimizer.param_rounding": "nearest"},
]


def refuse(values, devices, platform):
    s = read(changed(load("debug"), values))
    with pytest.raises(ConfigError) as caught:
        constraints.check(s, s.machine(devices, platform))
    return str(caught.value)


@pytest.mark.parametrize(
    ("rule", "values", "devices", "platform", "part"),
    [(rule, *case) for rule, cases in REFUSED.items() for case in cases],
    ids=lambda v: str(v)[:40],
)
def test_a_rule_refuses_with_a_key_and_a_remedy(rule, values, devices, platform, part):
    message = refuse(values, devices, platform)
    assert re.match(r"config\.[a-z]+\.[a-z_]+", message) and "\n" not in message
    assert part in message
    # The message is that of this rule: no rule before it in the table refuses the settings.
    s = read(changed(load("debug"), values))
    machine = s.machine(devices, platform)
    first = next(r for r in (*s.family.rules, *constraints.RULES) if _refuses(r, s, machine))
    assert first.__name__ == rule


def _refuses(rule, s, machine):
    try:
        return bool(rule(s, machine))
    except ConfigError:
        return True


def test_every_rule_has_a_case_and_a_reason():
    assert {rule.__name__ for rule in constraints.RULES} == REFUSED.keys()
    assert all(rule.__doc__ for rule in constraints.RULES)


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_what_fits_together_is_accepted(values):
    s = read(changed(load("debug"), values))
    constraints.check(s, s.machine(1, "cpu"))
