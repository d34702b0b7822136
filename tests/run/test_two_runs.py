"""The command diff: which configs can be compared, and what it prints and writes."""

import json

import pytest

from maxlp.run import two_runs
from maxlp.run.config import ConfigError
from maxlp.run.difference import AS_TRAINED, ON_INPUTS, Difference, TensorSite
from maxlp.run.settings import read
from tests.run.fixtures import TINY, changed, load

CONFIG = {"model": {"remat": "none", "embed_dim": 64, "pipeline": {"repeats": 1}}, "train": {"seed": 0}}


def test_assignments_change_values_of_any_type():
    found = two_runs.changed(
        CONFIG, ["model.remat=block", "model.pipeline.repeats=2", "train.x=[true, 1e-3]"]
    )
    assert found["model"] == {"remat": "block", "embed_dim": 64, "pipeline": {"repeats": 2}}
    assert found["train"] == {"seed": 0, "x": [True, 0.001]}
    assert CONFIG["model"]["remat"] == "none"


@pytest.mark.parametrize("wrong", ["remat=block", "model.remat", "nothing.remat=1", "model.remat.x=1"])
def test_what_is_no_assignment_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"is not SECTION.KEY=VALUE .*write it as in --other=model.remat"):
        two_runs.changed(CONFIG, [wrong])


def test_only_programs_may_differ():
    assert two_runs.check(CONFIG, two_runs.changed(CONFIG, ["model.remat=block"])) == [
        "config.model.remat: 'none' -> 'block'"
    ]
    for fixed in ("model.embed_dim=32", "train.seed=1", "data.source=x"):
        other = two_runs.changed(CONFIG | {"data": {}}, [fixed])
        with pytest.raises(ConfigError, match="diff needs the same model, data and seed"):
            two_runs.check(CONFIG | {"data": {}}, other)
    with pytest.raises(ConfigError, match="A and B have the same config; give one that differs"):
        two_runs.check(CONFIG, CONFIG | {"metrics": {"tensorboard": False}})


def test_runs_with_other_tokenizers_are_refused(tmp_path):
    s = read(load("debug"))
    for name, text in (("a", "{}"), ("b", "{ }")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
    two_runs.check_tokenizers(s, tmp_path / "a", tmp_path / "a")
    with pytest.raises(ConfigError, match=r"a/tokenizer.json and .*b/tokenizer.json differ: diff needs"):
        two_runs.check_tokenizers(s, tmp_path / "a", tmp_path / "b")


def report(*excesses):
    sites = [
        TensorSite(ON_INPUTS, "gradient of input", "layers/mlp/down_proj", 31),
        TensorSite(AS_TRAINED, "loss", ""),
    ]
    long = TensorSite(AS_TRAINED, "optimizer state", "0/inner_state/mu/layers/attn/q_proj/kernel", 31)
    found = [
        Difference(site, x * 1e-6, 1e-6, "max") for site, x in zip([*sites, long], excesses, strict=True)
    ]
    return two_runs.Report(3, found, "maxlp/nn/layers.py:145:12 (Linear.__call__): dot_general")


def test_the_report_fits_a_terminal_and_is_written(tmp_path):
    clean, differs = report(0.1, 0.5, 0.2), report(0.5, float("inf"), 3.0)
    assert list(two_runs.lines(clean, 5)) == [
        "step 3: none of 3 tensors differs by more than rounding;",
        "  the nearest to its bound, 0.50 of it: loss",
    ]
    printed = list(two_runs.lines(differs, 5))
    assert printed[0] == "step 3: 2 of 3 tensors differ by more than rounding; the first is"
    assert printed[1] == "  loss (as trained)" and "layers.py:145:12" in printed[3]
    assert max(map(len, printed)) <= 80 and printed[-1].startswith("…")
    written = json.loads(two_runs.write([clean, differs], ["config.x: 1 -> 2"], tmp_path).read_text())
    assert [one["value"] for one in written["steps"][1]["tensors"]] == [5e-7, None, 3e-6]


def tiny(**changes):
    return read(changed(load("debug"), TINY | changes))


@pytest.mark.full
def test_a_config_and_a_change_of_it_are_compared_from_any_step():
    a = tiny()
    clean = list(two_runs.reports(a, None, tiny(**{"model.remat": "block"}), 2, 2))
    assert [one.step for one in clean] == [2, 3] and not any(one.beyond for one in clean)
    assert [one.step for one in two_runs.reports(a, None, tiny(**{"model.remat": "block"}), 2, 1)] == [2]
    [other] = two_runs.reports(a, None, tiny(**{"optimizer.b2": 0.9}), None, 2)
    assert other.step == 1 and other.beyond[0].site.kind == "optimizer state"
    assert "/nu/" in other.beyond[0].site.path and "optax" in other.source


def test_optimizers_with_other_states_are_refused():
    with pytest.raises(ConfigError, match=r"config\.optimizer: A and B keep different states"):
        next(two_runs.reports(tiny(), None, tiny(**{"optimizer.name": "lion"}), None, 1))
