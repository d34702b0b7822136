"""What a resumed run may change: every key of a config is on one side."""

import inspect
import json
import re
import shutil

import pytest

from maxlp import families
from maxlp.run import changes, run_dir, same_model
from maxlp.run.config import ConfigError
from maxlp.run.settings import SECTIONS, SUPPLIED, sections
from tests.run.fixtures import changed, load

# By section and family; keys of a nested section are those of the whole.
FIXED = {
    "llama model": "vocab_size embed_dim num_layers num_heads num_kv_heads head_dim mlp_dim max_seq_len "
    "rope_theta rope_scaling norm_eps qk_norm logit_soft_cap qk_clip tie_embeddings init_std name",
    "clip model": "embed_dim visual text act norm_eps layer_scale qk_norm init logit_scale logit_bias "
    "image_mean image_std image_resize image_interpolation name",
    "llama data": "source tokenizer seq_len batch_size packing max_documents shuffle "
    "shuffle_tokens num_epochs",
    "clip data": "source tokenizer text_len lowercase image_size batch_size crop_scale classes templates "
    "templates_file max_pixels num_epochs",
    "llama loss": "z_loss",
    "clip loss": "kind",
    "train": "seed lora",
}
FREE = {
    "llama model": "dtype param_dtype attention scan_layers remat pipeline",
    "clip model": "dtype param_dtype attention scan_layers remat",
    "llama data": "num_workers",
    "clip data": "validation_source max_broken num_threads num_workers",
    "llama loss": "num_chunks",
    "clip loss": "method tile_size",
    "train": "total_steps microbatches log_every eval_every eval_batches init_from swap_tokenizer "
    "release_gradients local",
    "precision": "recipe options rules first_blocks last_blocks min_dim smooth_swiglu loss_scale "
    "health_every sharpness_every magnitudes_every scalify exchange scatter high_precision_from",
    "mesh": "stage data fsdp context tensor dcn_data",
    "optimizer": "name learning_rate schedule warmup_steps final_lr_fraction decay_fraction clip_norm "
    "weight_decay decay_embeddings decay_with_clip b1 b2 eps mu_dtype options adagc galore low_bit "
    "adascale param_rounding offload",
    "spikes": "guard statistics update_ratios window threshold min_history merge_steps rms_threshold lead "
    "guard_threshold rewind_steps skip_batches max_actions",
    "checkpoint": "every_steps keep_last keep_every",
    "metrics": "tensorboard wandb_project wandb_group wandb_tags",
    "profile": "start steps",
}
for _table in (FIXED, FREE):  # a Qwen3 has the sections of a Llama
    _table |= {f"qwen3 {section}": _table[f"llama {section}"] for section in ("model", "data", "loss")}


def test_a_record_without_a_state_of_the_data_is_passed_over(tmp_path):
    for step, state in ((3, {"step": 3}), (6, 3)):
        folder = tmp_path / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(json.dumps({"step": step, "data_state": state}))
    assert run_dir.saved_data_state(tmp_path) == {"step": 3}


def schema() -> dict[str, set[str]]:
    """The keys of every section, by the class or function that the section configures."""
    found = {}
    for family in families.FAMILIES:
        for section, function in sections(families.get(family)).items():
            name = f"{family} {section}" if section in ("model", "data", "loss") else section
            found[name] = set(inspect.signature(function).parameters) - {*SUPPLIED.get(section, ())}
        found[f"{family} model"].add("name")
    return found


def of_family(name: str) -> dict[str, dict[str, str]]:
    return {"model": {"name": name}}


def test_every_key_is_classified():
    known = schema()
    assert {name.split()[-1] for name in known} == set(SECTIONS)
    for name, keys in known.items():
        fixed, free = (set(table.get(name, "").split()) for table in (FIXED, FREE))
        *family, section = name.split()
        configs = [of_family(*family)] if family else []
        assert fixed | free == keys and not fixed & free, (
            f"{name}: add a new key to FIXED, or to FREE if a resumed run may change it"
        )
        for key in keys:
            assert changes.is_fixed(f"{section}.{key}", *configs) == (key in fixed), key
    assert changes.is_fixed("model.visual.patch_dropout", of_family("clip"))
    assert not changes.is_fixed("model.pipeline.rounds", of_family("llama"))


@pytest.fixture
def run(tmp_path):
    """The workdir of a run with a checkpoint."""
    run_dir.save_config(tmp_path, load("debug"))
    step = tmp_path / "checkpoints" / "3"
    step.mkdir(parents=True)
    (step / "checkpoint.json").write_text(json.dumps({"data_state": {}}))
    return tmp_path


def test_another_function_or_other_data_is_refused(run):
    for key, value in {
        "model.rope_theta": 1e6,
        "model.norm_eps": 1e-6,
        "model.rope_scaling.factor": 8.0,
        "loss.z_loss": 1e-4,
        "data.seq_len": 64,
        "data.source": "stdlib?validation=0.1",
        "train.seed": 1,
    }.items():
        c = changed(load("debug"), {key: value, "train.log_every": 7})
        with pytest.raises(
            ConfigError, match=rf"\(config.{key}: .* -> .*\); .* add --allow_change$"
        ) as error:
            changes.check_config(run, c)
        assert "log_every" not in str(error.value) and "\n" not in str(error.value)
        assert any(
            line.startswith(f"config.{key}: ") for line in changes.check_config(run, c, allow=True).values()
        )


def test_a_run_of_another_family_is_named_in_one_sentence(run):
    """Nearly every key differs then, of which the family is the reason."""
    with pytest.raises(ConfigError) as error:
        changes.check_config(run, load("debug", family="clip"))
    assert str(error.value) == (
        f"{run} holds a run of another family (config.model.name: 'llama' -> 'clip'); use a new workdir"
    )
    assert "model.name" in changes.check_config(run, load("debug", family="clip"), allow=True)


def test_a_tuple_equals_the_list_that_a_file_holds_instead():
    """A config of weights has tuples, that of a run lists."""
    ours, saved = ({"model": {"image_mean": mean}} for mean in ((0.4, 0.5), [0.4, 0.5]))
    assert not changes.differences(saved, ours)


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        # dynamic8 and companded8 are both uint8, so that the arrays of a checkpoint fit either.
        ("low_bit=8bit", "optimizer.low_bit.nu", "companded8"),
        ("low_bit=8bit", "optimizer.low_bit.block_size", 320),
        ("optimizer=schedule_free_adamw", "optimizer.b1", 0.8),
    ],
)
def test_numbers_are_not_read_as_others(run, argument, key, value, allow):
    run_dir.save_config(run, load("debug", argument))
    c = changed(load("debug", argument), {key: value})
    with pytest.raises(ConfigError, match=rf"would be misread \(config\.{re.escape(key)}: "):
        changes.check_config(run, c, allow=allow)
    shutil.rmtree(run / "checkpoints")
    assert len(changes.check_config(run, c, allow=allow)) == 1


def test_other_changes_are_reported(run):
    values = {
        "optimizer.learning_rate": 1.0,
        "mesh.fsdp": 2,
        "model.remat": "block",
        "train.total_steps": 900,
    }
    before = (run / "config.json").read_bytes()
    lines = list(changes.check_config(run, changed(load("debug"), values)).values())
    assert sorted(line.split(":")[0] for line in lines) == sorted(f"config.{key}" for key in values)
    assert (run / "config.json").read_bytes() == before
    assert changes.check_config(run, load("debug")) == {}


def test_a_config_that_cannot_be_compared_is_reported(run, capsys):
    assert changes.check_config(run, load("debug")) == {} and not capsys.readouterr().out
    (run / "config.json").unlink()
    assert changes.check_config(run, load("debug")) == {}
    assert capsys.readouterr().out.startswith(f"{run / 'config.json'} is missing: ")


def test_a_run_without_a_checkpoint_may_change(run):
    c = changed(load("debug"), {"model.rope_theta": 1e6})
    (run / "checkpoints" / "3").rename(run / "checkpoints" / "3.unfinished")
    assert list(changes.check_config(run, c).values()) == ["config.model.rope_theta: 10000.0 -> 1000000.0"]
    assert changes.check_config(run / "new", c) == {}


def test_the_newest_readable_record_counts(run):
    newer = run / "checkpoints" / "6"
    newer.mkdir()
    (newer / "checkpoint.json").write_text('{"data_state": {"step": 6}}')
    assert run_dir.saved_data_state(run) == {"step": 6}
    (newer / "checkpoint.json").write_text('{"data_st')
    assert run_dir.saved_data_state(run) == {}
    newer.rename(run / "checkpoints" / "6.damaged")
    (run / "checkpoints" / "3" / "checkpoint.json").unlink()
    assert run_dir.saved_data_state(run) == {}, "a run has begun"
    assert run_dir.saved_data_state(run / "new") is None


def test_weights_are_of_another_model_if_it_computes_something_else():
    same = {"model.init_std": 0.5, "model.max_seq_len": 2048, "model.remat": "block"}

    def found(values):
        return same_model.model_differences(
            load("debug").model.to_dict(), changed(load("debug"), values).model.to_dict()
        )

    assert found(same) == {}
    assert found(same | {"model.norm_eps": 1e-6}) == {
        "model.norm_eps": "config.model.norm_eps: 1e-05 -> 1e-06"
    }


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_key_that_the_run_did_not_have_yet_is_no_change_at_its_default(run, family):
    """Whether the config sets it or not."""

    def with_defaults(section, values):
        for name, parameter in inspect.signature(section).parameters.items():
            if isinstance(parameter.default, bool | int | float | str):
                yield name, values.get(name), parameter.default

    c = load("debug", family=family)
    old = json.loads(c.to_json_best_effort())
    removed = [
        f"{name}.{key}"
        for name, section in sections(families.get(family)).items()
        for key, value, default in with_defaults(section, old[name])
        if value in (None, default) and old[name].pop(key, "absent") != "absent"
    ]
    assert len(removed) > 20
    (run / "config.json").write_text(json.dumps(old))
    assert changes.check_config(run, c) == {}
    lines = changes.check_config(run, changed(c, {"train.release_gradients": True})).values()
    assert list(lines) == ["config.train.release_gradients: False -> True"]


def test_a_run_from_before_norms_of_queries_and_keys_goes_on(run):
    path = run / "config.json"
    config = json.loads(path.read_text())
    del config["model"]["qk_norm"]
    path.write_text(json.dumps(config))
    assert changes.check_config(run, load("debug")) == {}
    with pytest.raises(ConfigError, match=r"config\.model\.qk_norm: False -> True"):
        changes.check_config(run, changed(load("debug"), {"model.qk_norm": True}))


def test_a_clip_from_before_lower_case_goes_on(run):
    c = load("debug", family="clip")
    old = json.loads(c.to_json_best_effort())
    del old["data"]["lowercase"]
    (run / "config.json").write_text(json.dumps(old))
    assert changes.check_config(run, c) == {}
    with pytest.raises(ConfigError, match=r"config\.data\.lowercase: False -> True"):
        changes.check_config(run, changed(c, {"data.lowercase": True}))


def test_keys_that_only_one_of_two_versions_has_are_changes(run):
    path = run / "config.json"
    config = json.loads(path.read_text())
    del config["loss"]["z_loss"]
    config["model"]["gone"] = 2
    path.write_text(json.dumps(config))
    c = changed(load("debug"), {"loss.z_loss": 1e-4})
    assert set(changes.check_config(run, c, allow=True)) == {"loss.z_loss", "model.gone"}
    with pytest.raises(ConfigError, match=r"config\.loss\.z_loss: 0\.0 -> 0\.0001"):
        changes.check_config(run, c)
