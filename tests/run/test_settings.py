"""Settings: presets are exact, every section's values are checked, saved configs give the same settings."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from maxlp import schema
from maxlp.nn.lora import Adapter
from maxlp.optim.config import OPTIMIZERS, options_of
from maxlp.run import constraints, run_dir
from maxlp.run.config import ConfigError
from maxlp.run.experiment import resolve
from maxlp.run.settings import LoraConfig, TrainConfig, read
from tests.fixtures import make_llama
from tests.run.fixtures import changed, load

ROOT = Path(__file__).parents[2]
PRESETS = {
    "60m": 58_073_600,
    "130m": 134_105_856,
    "350m": 367_969_280,
    "1b": 1_339_082_752,
    "llama2_7b": 6_738_415_616,
    "llama3_2_1b": 1_235_814_400,
    "finetune": 1_235_814_400,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


@pytest.mark.parametrize(("name", "count"), PRESETS.items())
def test_a_preset_has_the_published_number_of_parameters(name, count):
    s = read(load(name))
    assert s.num_params == count
    constraints.check(s, s.machine(8, "cpu"))


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (12.0, 3.0)])
def test_alpha_is_twice_the_rank_by_default(alpha, scale):
    def build():
        model = make_llama()(nnx.Rngs(0))
        LoraConfig(rank=4, alpha=alpha).add_to(model, nnx.Rngs(0))
        return model

    model = nnx.eval_shape(build)
    assert {m.scale for _, m in nnx.iter_modules(model) if isinstance(m, Adapter)} == {scale}


def test_every_config_file_is_a_preset_or_debug():
    names = {path.stem for path in (ROOT / "configs" / "llama").glob("*.py")} - {"__init__"}
    assert names == PRESETS.keys() | {"debug", "tiny"}


@pytest.mark.parametrize("family", ["llama", "clip"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8", "int8_switchback", "fp16", "pure_bf16"])
def test_debug_configs_take_every_choice_of_precision(family, recipe):
    run = resolve(
        load("debug", f"precision={recipe},optimizer=stable_adamw,galore=16,low_bit=8bit", family)
    )
    _, state = run.abstract_state()
    assert {"loss_scale"} & state.keys() == ({"loss_scale"} if recipe == "fp16" else set())
    assert run.settings.is_quantized == (recipe not in ("fp16", "pure_bf16"))
    if recipe == "pure_bf16":
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state["params"])} == {"bfloat16"}


def test_options_of_wrappers_are_keys_of_the_command_line():
    c = load("debug")
    assert read(c).optimizer.galore is None and read(c).precision.loss_scale is None
    values = {
        "optimizer.galore.rank": 8,
        "optimizer.galore.update_proj_gap": 10,
        "optimizer.low_bit.mu": "int8",
        "optimizer.low_bit.nu": "float32",
        "optimizer.options.nesterov": True,
        "precision.loss_scale.initial": 256.0,
        "precision.options.history": 4,
        "precision.recipe": "fp8_delayed",
    }
    for key, value in values.items():  # as the command line sets them: the config is locked
        section, *path, name = key.split(".")
        target = c[section]
        for part in path:
            target = target[part]
        target[name] = value
    s = read(c)
    assert (s.optimizer.galore.rank, s.optimizer.galore.update_proj_gap, s.optimizer.galore.scale) == (
        8,
        10,
        0.25,
    )
    assert s.optimizer.options == {"nesterov": True}
    assert (s.optimizer.low_bit.mu, s.precision.loss_scale.initial, s.precision.options.history) == (
        "int8",
        256.0,
        4,
    )


def test_options_of_optimizers_are_keys_of_the_command_line():
    """All of them, with their types; unset ones do not reach the optimizer."""
    known = {}
    for name in OPTIMIZERS:
        known |= options_of(name)
    keys = load("debug").optimizer.options
    assert read(load("debug")).optimizer.options == {}
    assert set(keys) == known.keys(), "maxlp/run/presets.py names the options of all optimizers"
    for key, hint in known.items():
        name = schema.name(hint)
        assert keys.get_type(key).__name__ == {"(str, …)": "tuple"}.get(name, name), key


BAD_VALUES = [
    ({"model.num_heads": 5}, "config.model.num_heads=5 is not a multiple of num_kv_heads=3"),
    ({"model.head_dim": 33}, "config.model.head_dim=33 is odd"),
    ({"model.num_layers": 0}, "config.model.num_layers=0 must be at least 1"),
    ({"model.embed_dim": -64}, "config.model.embed_dim=-64 must be at least 1"),
    ({"model.name": "gpt"}, "config.model.name='gpt' is unknown; one of llama, qwen3"),
    ({"model.pipeline.rounds": 0}, "config.model.pipeline.rounds=0 must be at least 1"),
    (
        {"mesh.dta": 3},
        "config.mesh.dta is unknown (did you mean data?); keys: context, data, dcn_data, fsdp, sta",
    ),
    ({"optimizer.name": "adam"}, "config.optimizer.name='adam' is unknown"),
    ({"optimizer.schedule": "step"}, "config.optimizer.schedule='step' is unknown"),
    ({"optimizer.b1": 1.0}, "config.optimizer.b1=1.0 must be at least 0 and below 1"),
    ({"optimizer.galore.rank": -1}, "config.optimizer.galore.rank=-1 must be at least 0"),
    (
        {"optimizer.galore.scale": 0.5},
        "config.optimizer.galore.rank is not set; give --config.optimizer.ga",
    ),
    *(
        (values, f"config.{[*values][-1]}=() has no values; give one or more, or leave it unset")
        for values in (  # what --config.KEY=None gives: nothing would have an adapter, or be projected
            {"train.lora.rank": 4, "train.lora.targets": ()},
            {"optimizer.galore.rank": 4, "optimizer.galore.targets": ()},
            {"optimizer.name": "muon", "optimizer.options.targets": ()},
        )
    ),
    ({"optimizer.low_bit.block_size": 256}, "config.optimizer.low_bit.mu is not set; give --config.opt"),
    ({"optimizer.low_bit.mu": "int8"}, "config.optimizer.low_bit.nu is not set; give --config.optimizer.l"),
    ({"precision.recipe": "fp4"}, "config.precision.recipe='fp4' is unknown"),
    ({"precision.first_blocks": -1}, "config.precision.first_blocks=-1 must be at least 0"),
    (
        {"precision.loss_scale.initial": 3.0},
        "config.precision.loss_scale.initial=3.0 must be a power of two",
    ),
    ({"data.packing": "none"}, "config.data.packing='none' is unknown"),
    ({"data.seq_len": 1}, "config.data.seq_len=1 must be at least 2"),
    ({"data.name": "text"}, "config.data.name is unknown"),
    ({"loss.num_chunks": 0}, "config.loss.num_chunks=0 must be at least 1"),
    ({"loss.z_loss": -1.0}, "config.loss.z_loss=-1.0 must be at least 0"),
    ({"train.total_steps": 0}, "config.train.total_steps=0 must be at least 1"),
    ({"train.seed": -1}, "config.train.seed=-1 must be at least 0"),
    ({"spikes.guard": "stop"}, "config.spikes.guard='stop' is unknown"),
    ({"checkpoint.interval": 1}, "config.checkpoint.interval is unknown"),
    ({"metrics.wandb": True}, "config.metrics.wandb is unknown"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=lambda v: str(v)[:50])
def test_a_wrong_value_is_one_line_with_its_key(values, message):
    with pytest.raises(ConfigError) as caught:
        read(changed(load("debug"), values))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_missing_and_unknown_sections():
    c = load("debug")
    del c["loss"]
    with pytest.raises(ConfigError, match=r"config\.loss is missing; sections: model, "):
        read(c)
    c = load("debug")
    with c.unlocked():
        c.speed = ConfigDict()
    with pytest.raises(ConfigError, match=r"config\.speed is unknown; sections: model, "):
        read(c)


def test_a_saved_config_gives_the_same_settings(tmp_path):
    c = changed(
        load("debug", "precision=fp8_current"), {"precision.rules": (("lm_head", "int8_switchback"),)}
    )
    run_dir.save_config(tmp_path, c)
    again, s = read(run_dir.load_config(tmp_path)), read(c)
    for field in dataclasses.fields(s):
        if field.name not in ("checkpoint", "metrics", "profile"):  # partials have no equality
            assert getattr(again, field.name) == getattr(s, field.name)
    assert again.matmuls == s.matmuls


def test_a_config_of_version_0_1_still_loads(tmp_path):
    """As version 0.1 wrote it: data with a name, held-out data, wrappers as whole dicts or None."""
    old = json.loads(load("debug").to_json_best_effort())
    old["data"] |= {"name": "text", "source": "jsonl:/d/*.jsonl?heldout=0.1"}
    for key in ("shuffle",):
        del old["data"][key]
    old["optimizer"] |= {"galore": {"rank": 8}, "low_bit": {}, "decay_with_clip": False}
    old["precision"] |= {"loss_scale": None, "options": {}, "min_dim": 64, "rules": [["*", "bf16"]]}
    old["profile"]["start"] = old["train"]["total_steps"] + 1
    old["model"]["rope_scaling"] = None
    (tmp_path / "config.json").write_text(json.dumps(old))
    s = read(run_dir.load_config(tmp_path))
    assert s.data.source == "jsonl:/d/*.jsonl?validation=0.1"
    assert (s.optimizer.galore.rank, s.optimizer.low_bit.mu) == (8, "float8_e4m3fn")
    assert (s.optimizer.name, s.optimizer.decay_with_clip) == ("adamw", True)
    assert s.precision.loss_scale is None and s.model.rope_scaling is None
    # What had no effect, and is refused today.
    assert (s.precision.min_dim, s.precision.rules) == (0, ())
    assert not s.profile.keywords.get("start")
    # What has an effect, because the matmuls of the blocks sample tokens.
    old["precision"] |= {"options": {"keep": 0.5}, "min_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read(run_dir.load_config(tmp_path)).precision.min_dim == 64


LOWEST = dict(total_steps=1, microbatches=1, log_every=1, eval_every=0, eval_batches=0, seed=0)


@pytest.mark.parametrize(("key", "lowest"), LOWEST.items())
def test_numbers_of_a_run_have_a_lower_bound(key, lowest):
    values = dict.fromkeys(LOWEST, 7) | dict(init_from="")
    assert getattr(TrainConfig(**values | {key: lowest}), key) == lowest
    with pytest.raises(ValueError, match=rf"^{key}={lowest - 1} must be at least {lowest}"):
        TrainConfig(**values | {key: lowest - 1})
