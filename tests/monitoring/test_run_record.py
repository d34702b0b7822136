import dataclasses
import json

import numpy as np
import pytest

from maxlp.monitoring.run_record import load_run, tail
from maxlp.monitoring.sections import loss_lines
from maxlp.monitoring.spikes import SpikeConfig
from tests.monitoring.fixtures import write_records


def test_an_empty_directory_is_a_run_that_has_not_begun(tmp_path):
    run = load_run(tmp_path)
    assert (run.config, run.info, run.records, run.checkpoints) == ({}, {}, [], [])
    assert (run.launches, run.num_params, run.step, run.units_per_step) == ([], None, 0, 0)
    assert run.spike_config == SpikeConfig()
    assert [len(values) for values in run.series("train/loss")] == [0, 0]
    with pytest.raises(ValueError, match="missing is not a directory; give the --workdir of a run"):
        load_run(tmp_path / "missing")


def test_parameters_are_those_of_the_newest_start(tmp_path):
    run = dataclasses.replace(load_run(tmp_path), info={"starts": [{"num_params": 1}, {"num_params": 2}]})
    assert run.num_params == 2


@pytest.mark.parametrize(
    ("starts", "seen"),
    [
        ([(0, 10), (35, 40)], 35 * 10 + 23 * 40),
        ([(0, 10), (35, 40), (20, 5)], 20 * 10 + 38 * 5),  # a rollback, or damaged checkpoints
        ([(0, None), (35, 40)], 58 * 40),  # by an earlier version
        ([], 58 * 40),
    ],
)
def test_what_was_seen_follows_the_batch_sizes_of_all_starts(tmp_path, starts, seen):
    info = {"starts": [{"step": step} | ({"units_per_step": n} if n else {}) for step, n in starts]}
    data = {"batch_size": 4, "seq_len": 10}
    write_records(tmp_path, [{"step": 58}])
    run = dataclasses.replace(load_run(tmp_path), info=info, config={"data": data})
    assert run.units_seen == seen


@pytest.mark.parametrize(
    ("data", "unit", "units"),
    [(dict(batch_size=8, seq_len=256), "tokens", 2048), (dict(batch_size=8), "images", 8)],
)
def test_throughput_counts_tokens_or_images(tmp_path, data, unit, units):
    (tmp_path / "config.json").write_text(json.dumps({"data": data}))
    run = load_run(tmp_path)
    assert (run.unit, run.units_per_step) == (unit, units)


def test_the_spike_config_ignores_unknown_keys(tmp_path):
    spikes = {"threshold": 5.0, "statistics": False, "of_another_version": 1}
    (tmp_path / "config.json").write_text(json.dumps({"spikes": spikes}))
    assert load_run(tmp_path).spike_config == SpikeConfig(threshold=5.0, statistics=False)


def test_a_spike_config_with_a_wrong_value_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"spikes": {"window": "x"}}))
    with pytest.raises(ValueError, match=r"config.json is damaged \(spikes.window='x' is of type str"):
        _ = load_run(tmp_path).spike_config


def test_a_series_holds_the_records_that_have_it(tmp_path):
    write_records(tmp_path, [{"step": 1, "a": 0.5}, {"step": 2, "b": 1}, {"step": 3, "a": 0.25}])
    steps, values = load_run(tmp_path).series("a")
    assert steps.tolist() == [1, 3] and values.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("full", "part"), [(2.5, "the first 20 validation batches"), (2.0, "all validation data")]
)
def test_an_evaluation_of_no_more_than_there_is_covers_all(tmp_path, full, part):
    (tmp_path / "config.json").write_text(json.dumps({"train": {"eval_batches": 1}}))
    assert load_run(tmp_path).validation_part("eval") == "the first validation batch"
    (tmp_path / "config.json").write_text(json.dumps({"train": {"eval_batches": 20}}))
    records = [{"step": 3, "eval/loss": 2.0, "eval/accuracy": 0.0}]
    write_records(tmp_path, records)
    run = load_run(tmp_path)
    assert run.validation_part("eval") == "the first 20 validation batches"
    assert dataclasses.replace(run, config={}).validation_part("eval") == "validation data"
    records += [
        {"step": 3, "eval_full/loss": full, "eval_full/accuracy": 0.0},
        {"step": 3, "magnitude/layers/0": 1.0},
    ]
    write_records(tmp_path, records)
    run = load_run(tmp_path)
    assert (run.validation_part("eval"), run.validation_part("eval_full")) == (part, "all validation data")
    shown = [name for name, _ in loss_lines(run) if name.startswith("eval") and name.endswith("loss")]
    assert shown == ["eval/loss", "eval_full/loss"][: 2 if full == 2.5 else 1], "numbers are listed once"


@pytest.mark.parametrize(("records", "used"), [(1, 1), (9, 1), (40, 4), (1000, 10)])
def test_the_tail_is_a_tenth_and_at_most_ten(records, used):
    losses = np.arange(records)
    assert tail(losses).tolist() == losses[-used:].tolist()
