"""Every rule about a Llama's settings: what breaks it, and the line that names it."""

import pytest

from configs.llama import debug
from maxlp.families.llama.constraints import RULES
from maxlp.run import constraints, settings
from maxlp.run.config import ConfigError

CONTEXT = {"model.attention": "ring", "mesh.context": 2, "mesh.tensor": 2, "model.num_kv_heads": 2}
STAGES = {"mesh.stage": 4, "mesh.fsdp": 2, "data.batch_size": 16}
FP8 = {"precision.recipe": "fp8_delayed", "precision.first_blocks": 0, "precision.last_blocks": 0}


def check(changes: dict) -> None:
    """Checks the debug config with some values replaced, for eight CPU devices."""
    c = debug.get_config()
    base = {"data.tokenizer": "bytes", "model.num_heads": 4, "model.num_kv_heads": 4}
    c.update_from_flattened_dict(base | changes)
    read = settings.read(c)
    constraints.check(read, read.machine(8, "cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data.seq_len": 1024},
        CONTEXT,
        STAGES,
        STAGES | FP8,
        STAGES | {"model.pipeline.rounds": 1, "model.remat": "dots"},
    ],
    ids=["fsdp", "all positions", "context", "stages", "fp8_in_stages", "dots_in_stages"],
)
def test_settings_that_work_are_accepted(changes):
    check(changes)


def test_a_rule_for_one_layer_makes_its_stage_another_program():
    with pytest.raises(ConfigError, match=r"needs stages that are alike.*name no layer"):
        check(STAGES | FP8 | {"precision.rules": (("layers/1/mlp/down_proj", "bf16"),)})


BROKEN = {
    "positions_within_range": ({"data.seq_len": 2048}, "data.seq_len=2048 is above model.max_seq_len=1024"),
    "head_splits_sequence": (
        CONTEXT | {"data.seq_len": 24, "loss.num_chunks": 8},
        "data.seq_len=24 is not a multiple of loss.num_chunks=8 × mesh.context=2 × mesh.stage=1",
    ),
    "blocks_split_sequence": (
        CONTEXT | {"data.seq_len": 252},
        "data.seq_len=252 is not a multiple of 2 × mesh.context=2 × mesh.stage=1 × mesh.tensor=2",
    ),
    "chunked_head_is_not_delayed": (
        FP8 | {"loss.num_chunks": 2, "precision.rules": (("lm_head", "fp8_gaudi"),)},
        "loss.num_chunks=2 runs lm_head several times per step",
    ),
    "sampled_sequences_are_whole": (
        CONTEXT | {"precision.recipe": "wta_crs"},
        "mesh.context=2 splits the sequences of which precision.recipe=wta_crs samples tokens",
    ),
    "pipelines_have_stages": (
        {"model.pipeline.rounds": 2},
        "model.pipeline.rounds=2 has no effect with mesh.stage=1; unset it, or set more stages",
    ),
    "stages_divide_layers": (
        STAGES | {"model.pipeline.rounds": 2},
        "model.num_layers=4 is not a multiple of mesh.stage=4 × model.pipeline.rounds=2",
    ),
    "stages_divide_microbatches": (
        STAGES | {"model.pipeline.microbatches": 6, "data.batch_size": 12},
        "model.pipeline.microbatches=6 is not a multiple of mesh.stage=4; use 8",
    ),
    "pipeline_divides_rows": (
        STAGES | {"data.batch_size": 6},
        "model.pipeline.microbatches=4 does not divide the 3 rows",
    ),
    "rounds_are_recomputed": (
        STAGES | {"model.num_layers": 8, "model.pipeline.rounds": 2},
        "model.pipeline.rounds=2 with model.remat=none would keep a copy of the weights",
    ),
    "stages_are_alike": (
        STAGES | {"precision.recipe": "fp8_current"},
        "mesh.stage=4 needs stages that are alike; set precision.first_blocks=0",
    ),
    "qk_clip_scales_whole_kernels": (
        {"model.qk_clip": 50.0, "model.param_dtype": "bfloat16"},
        "qk_clip=50.0 is a change that model.param_dtype=bfloat16 may round away; use float32",
    ),
}


def test_every_rule_has_a_case():
    assert BROKEN.keys() == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("rule", BROKEN)
def test_settings_that_break_a_rule_are_refused_in_one_line(rule):
    changes, message = BROKEN[rule]
    with pytest.raises(ConfigError) as error:
        check(changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.qk_norm": True}, "qk_clip=50.0 has no effect with qk_norm=True"),
        ({"train.lora.rank": 4, "train.init_from": "weights"}, "kernels that train.lora keeps frozen"),
        ({"train.local.steps": 8}, "the logits of all replicas, but with train.local each trains alone"),
        ({"precision.scalify": "fp16", "model.dtype": "float16"}, "which precision.scalify drops"),
        (
            {"optimizer.name": "schedule_free_adamw", "optimizer.schedule": "constant"},
            "the averaged weights of schedule_free_adamw; unset it or use adamw",
        ),
    ],
)
def test_what_does_not_go_with_qk_clip_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        check({"model.qk_clip": 50.0} | changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh.context": 2, "model.attention": "xla"},
            "config.model.attention=xla cannot split the sequence over mesh.context=2",
        ),
        (CONTEXT | {"model.num_kv_heads": 1}, "a multiple of mesh.tensor=2, not 1"),
        ({"mesh.tensor": 8, "data.seq_len": 252}, "data.seq_len=252 is not a multiple of mesh.tensor=8"),
        (STAGES | {"model.pipeline.rounds": 0}, "rounds=0 must be at least 1"),
        (STAGES | {"train.release_gradients": True, "optimizer.clip_norm": 0.0}, "mesh.stage=4 cannot be"),
    ],
)
def test_other_settings_of_meshes_that_cannot_work_are_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        check(changes)
    assert message in str(error.value) and "\n" not in str(error.value)
