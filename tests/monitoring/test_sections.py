import dataclasses
import json
import math
import os
import re
import time

import numpy as np
import pytest
from absl import logging
from ml_collections import ConfigDict

from maxlp.monitoring import sections
from maxlp.monitoring.curves import plot_curves
from maxlp.monitoring.run_record import load_run
from maxlp.run import run_dir
from maxlp.runtime import lock
from maxlp.runtime.checkpoint import StepInfo
from maxlp.runtime.files import write_json
from tests.monitoring.fixtures import write_records, write_run, write_spike


def shown(path):
    """The report as {section: {label: text}}, with wrapped lines joined."""
    found = {}
    for paragraph in sections.report_text(load_run(path)).split("\n\n"):
        title, *lines = re.sub(r"\n {3,}", " ", paragraph).split("\n")
        parts = (line.strip().partition("  ") for line in lines)
        found[title] = {label: text.strip() for label, _, text in parts}
    return found


def test_a_finished_run(tmp_path):
    write_run(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    text = shown(tmp_path)
    assert text["Run"]["state"] == "finished, 400 steps"
    assert text["Run"]["started"].endswith("at step 0")
    assert text["Run"]["resumed"].endswith("at step 200")
    assert "8 × cpu, 1 process, host " in text["Run"]["device"]
    assert "jax 0." in text["Run"]["versions"]
    assert text["Config"]["model"] == "name=llama embed_dim=128"
    assert text["Loss"]["tokens seen"] == "819,200 (2,048 per step)"
    tail = np.mean([1.5 + 4 * math.exp(-step / 50) for step in (370, 380, 390, 400)])
    assert text["Loss"]["train/loss"] == f"{tail:.4f}, mean of the last 4 records"
    first = "2.1000 at step 400 on the first 10 validation batches, best 2.0000 at step 300"
    assert text["Loss"]["eval/bits_per_byte"] == first
    assert text["Loss"]["eval_full/loss"] == "2.0000 at step 400 on all validation data"
    assert text["Speed"]["perf/tokens_per_sec"] == "median 1,205, 5th to 95th percentile 1,030 to 1,380"
    mfu = "50.0% (full attention FLOPs), 40.0% (causal); peak 197 TFLOP/s per device"
    assert text["Speed"]["MFU"] == mfu
    assert text["Speed"]["memory/host_peak_gib"] == "maximum 1.40"
    assert "Spikes" not in text and "Checkpoints" not in text
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, "a report changes no file"


def test_the_losses_of_a_diverged_run_are_short(tmp_path):
    records = [{"step": 1, "time": 0.0, "train/loss": 1e30}, {"step": 1, "time": 0.0, "eval/loss": 1e30}]
    write_records(tmp_path, records)
    text = dict(sections.loss_lines(load_run(tmp_path)))
    assert text["train/loss"] == "1.0000e+30 in the last record"
    assert text["eval/loss"].startswith("1.0000e+30 at ")


@pytest.mark.parametrize(
    ("losses", "loss", "shown"),
    [
        ([5.0] + [math.log(64) + 0.005] * 20, dict(kind="softmax"), True),
        ([5.0] + [math.log(64) + 0.02] * 20, dict(kind="softmax"), False),
        ([5.0] + [math.log(64)] * 19 + [4.1], dict(kind="softmax"), False),
        ([math.log(64)] * 2, dict(kind="softmax"), False),  # in the warm-up
        ([math.log(64)] * 20, dict(kind="sigmoid"), False),
    ],
)
def test_a_contrastive_loss_at_chance_is_named(losses, loss, shown, tmp_path):
    records = [{"step": 10 * i, "train/loss": value} for i, value in enumerate(losses, 1)]
    write_records(tmp_path, records)
    config = dict(data=dict(batch_size=64), optimizer=dict(warmup_steps=20), loss=loss)
    write_json(tmp_path / "config.json", config)
    assert ("at chance" in dict(sections.loss_lines(load_run(tmp_path)))) == shown


def test_skipped_steps_are_added_up(tmp_path):
    counts = {10: 3.0, 20: 0.0, 30: 1.0}
    records = [{"step": n, "train/loss": 1.0, "train/skipped": count} for n, count in counts.items()]
    write_records(tmp_path, records)
    assert dict(sections.loss_lines(load_run(tmp_path)))["skipped"] == "4 steps"


def test_a_run_in_progress_with_damaged_files(tmp_path):
    write_run(tmp_path, steps=120)
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 130, "train/lo')
    state = "at step 120 of 400 (30.0%), last record 0:0"
    assert shown(tmp_path)["Run"]["state"].startswith(f"stopped {state}")
    (tmp_path / lock.NAME).write_text("{}")
    assert shown(tmp_path)["Run"]["state"].startswith(f"in progress {state}")
    long_ago = time.time() - lock.WATCH_SECONDS - 1
    os.utime(tmp_path / lock.NAME, (long_ago, long_ago))
    assert shown(tmp_path)["Run"]["state"].startswith(f"killed or suspended {state}")
    (tmp_path / lock.NAME).unlink()
    for wrong in ('{"starts": [3]}', '{"starts": [{"step": "a"}]}', None):
        (tmp_path / "run.json").write_text(wrong) if wrong else (tmp_path / "run.json").unlink()
        for config in ('{"model": 3, "train": []}', '{"data": {"batch_size": "a"}}', '{"model": {"na'):
            (tmp_path / "config.json").write_text(config)
            text = shown(tmp_path)
    assert text["Run"]["state"].startswith("stopped at step 120, last record 0:0")
    assert set(text) == {"Run", "Loss", "Speed"}


def test_what_ended_a_launch_is_shown(tmp_path):
    write_run(tmp_path, steps=20)
    run_dir.record_end(tmp_path, "SIGTERM")
    assert shown(tmp_path)["Run"]["resumed"].endswith(" at step 200; ended by SIGTERM")
    with pytest.raises(OSError), run_dir.recording_errors(tmp_path):
        raise OSError(28, "No space\nleft")
    text = shown(tmp_path)["Run"]
    assert text["resumed"].endswith(" at step 200; ended by OSError: [Errno 28] No space left")
    assert text["started"].endswith(" at step 0")


def test_an_error_that_cannot_be_recorded_is_raised_all_the_same(tmp_path):
    (tmp_path / "run.json").write_text("[damaged")
    with pytest.raises(OSError, match="No space"), run_dir.recording_errors(tmp_path):
        raise OSError(28, "No space left")


def test_what_is_null_in_a_start_counts_as_missing(tmp_path):
    write_run(tmp_path, steps=20)
    info = json.loads((tmp_path / "run.json").read_text())
    texts = []
    for value in ({}, dict.fromkeys(info["starts"][0])):
        (tmp_path / "run.json").write_text(json.dumps({"starts": [value]}))
        texts.append(shown(tmp_path))
    assert texts[0] == texts[1] and texts[0]["Run"]["command"] == "?"


def test_a_run_whose_data_has_ended_is_finished_until_it_goes_on(tmp_path):
    run_dir.save_config(tmp_path, ConfigDict({"train": {"total_steps": 100}}))
    records = [{"step": 27, "train/loss": 1.0}, {"step": 27, "eval_full/loss": 1.0}]
    write_records(tmp_path, records)
    assert shown(tmp_path)["Run"]["state"] == "finished, 27 steps"
    records.append({"step": 28, "time": time.time(), "train/loss": 1.0})
    write_records(tmp_path, records)
    assert shown(tmp_path)["Run"]["state"].startswith("stopped at step 28 of 100")


def test_a_run_whose_steps_count_as_more_than_one(tmp_path):
    run_dir.save_config(tmp_path, ConfigDict({"train": {"total_steps": 100}}))
    records = [{"step": 10, "time": time.time(), "train/tau": 40.0}, {"step": 10, "time": time.time()}]
    write_records(tmp_path, records)
    state = shown(tmp_path)["Run"]["state"]
    assert state.startswith("stopped at step 10, which count as 40 of 100 (40.0%), last record 0:0")
    records.append({"step": 27, "time": time.time(), "train/tau": 101.5})
    write_records(tmp_path, records)
    assert shown(tmp_path)["Run"]["state"] == "finished, 27 steps"


def test_an_empty_directory(tmp_path):
    assert shown(tmp_path) == {"Run": {"directory": str(tmp_path), "state": "no metrics yet"}}
    assert list(tmp_path.iterdir()) == []


def test_skipped_and_truncated_examples_and_recalls(tmp_path):
    run_dir.save_config(tmp_path, ConfigDict({"data": {"text_len": 77}, "train": {"eval_batches": 0}}))
    recalls = {f"eval/recall_{k}": k / 10 for k in (1, 5, 10)}
    records = [
        {"step": 1, "data/skipped": 1},
        {"step": 2, "data/skipped": 5, "data/texts_cut": 0.03} | recalls,
    ]
    write_records(tmp_path, records)
    text = shown(tmp_path)
    truncated = "3.0% since the last launch (longer than data.text_len=77)"
    assert text["Data"] == {"skipped": "5 broken examples", "truncated texts": truncated}
    assert list(text["Loss"]) == list(recalls)  # 10 after 5
    assert text["Loss"]["eval/recall_5"] == "50.00% at step 2 on all validation data"


def test_conversations_that_do_not_fit(tmp_path):
    run_dir.save_config(tmp_path, ConfigDict({"data": {"seq_len": 64}}))
    fractions = {"data/conversations_cut": 0.25, "data/conversations_skipped": 0.031}
    write_records(tmp_path, [{"step": 1} | fractions])
    assert shown(tmp_path)["Data"] == {
        "conversations cut": "25.0% since the last launch (longer than data.seq_len=64)",
        "conversations skipped": "3.1% since the last launch (no answer within data.seq_len=64)",
    }


def test_the_best_evaluation_is_one_that_covers_as_much_text_as_the_last(tmp_path):
    evals = [(1, 1.0, 10), (2, 3.0, 99), (3, 4.0, 99)]
    records = [{"step": n, "eval/loss": loss, "eval/tokens": tokens} for n, loss, tokens in evals]
    write_records(tmp_path, records)
    assert shown(tmp_path)["Loss"] == {"eval/loss": "4.0000 at step 3, best 3.0000 at step 2"}


@pytest.mark.parametrize(("value", "text"), [(32.4567, "32.46"), (21_873.4, "21,870"), (1e26, "1e+26")])
def test_large_perplexities(tmp_path, value, text):
    write_records(tmp_path, [{"step": 1, "eval/perplexity": value}])
    assert shown(tmp_path)["Loss"]["eval/perplexity"] == f"{text} at step 1 on validation data"


def test_losses_that_are_not_finite(tmp_path):
    write_run(tmp_path, losses=[2.0] * 3 + [math.nan] * 4 + [math.inf] + [2.0] * 32)
    text = shown(tmp_path)
    assert text["Loss"]["not finite"] == "5 records, the first at step 40"
    assert text["Loss"]["train/loss"].startswith("2.0000, ")
    write_run(tmp_path, losses=[math.nan] * 40)
    assert shown(tmp_path)["Loss"]["train/loss"].startswith("nan, ")


def test_a_second_start_from_nothing(tmp_path):
    run_dir.record_launch(tmp_path, ConfigDict(), 0, num_params=1000, units_per_step=2048)
    run_dir.record_launch(tmp_path, ConfigDict(), 0, num_params=8030261248, units_per_step=2048)
    text = shown(tmp_path)
    assert set(text["Run"]) >= {"started", "restarted"}
    assert text["Config"] == {"parameters": "8,030,261,248"}


def test_of_many_starts_the_first_and_the_last_are_listed(tmp_path):
    starts = [{"step": 10 * n, "time": f"day {n}"} for n in range(500)]
    run = dataclasses.replace(load_run(tmp_path), info={"starts": starts})
    _, _, first, between, *last = sections.run_lines(run)[: sections.MAX_ENTRIES + 3]
    assert (first, between) == (("started", "day 0 at step 0"), ("", "and 490 more"))
    assert last[-1] == ("resumed", "day 499 at step 4990") and len(last) == sections.MAX_ENTRIES - 1


def test_gradients_that_are_always_zero_are_named(tmp_path, monkeypatch):
    zero, always, now = ("train/grad_norms/layers/mlp/up_proj/kernel/" + n for n in "012")
    records = [{"step": n, always: 0.5, zero: 0.0, now: float(n < 20)} for n in range(21)]
    write_records(tmp_path, [*records, {"step": 20, "eval/loss": 2.0}])
    (line,) = sections.gradient_lines(load_run(tmp_path))
    assert line == ("zero", "layers/mlp/up_proj/kernel/0, in the last 10 records")
    write_records(tmp_path, [record | {now: 0.0} for record in records])
    monkeypatch.setattr(sections, "MAX_ENTRIES", 1)
    (line,) = sections.gradient_lines(load_run(tmp_path))
    assert line == ("zero", "layers/mlp/up_proj/kernel/0 and 1 more, in the last record")
    write_records(tmp_path, [record | {zero: math.nan} for record in records[:20]])
    assert "Gradients" not in shown(tmp_path)


def test_the_updates_of_all_tensors_are_compared_and_those_without_are_named(tmp_path):
    ratios = {"tok_embed/embedding": 6e-4, "layers/attn/q_proj/kernel/0": 0.03, "max": 0.03}
    ratios |= {"layers/attn/q_proj/kernel/1": 0.032, "layers/mlp_norm/scale/0": 0.0}
    records = [
        {"step": n, "train/learning_rate": 3e-4 * n}
        | {f"train/update_ratios/{name}": value / n for name, value in ratios.items()}
        for n in (1, 2)
    ]
    write_records(tmp_path, records)
    when = "at step 2 (learning rate 0.0006), and in brackets at step 1 (learning rate 0.0003)"
    assert shown(tmp_path)["Updates"] == {
        "‖update‖ / ‖weight‖": when,
        "tok_embed/embedding": "3.0e-04 (6.0e-04)",
        "layers/attn/q_proj/kernel": "1.5e-02 to 1.6e-02 (3.0e-02 to 3.2e-02)",
        "layers/mlp_norm/scale": "0.0e+00 (0.0e+00)",
        "zero": "layers/mlp_norm/scale/0, in the last 2 records",
    }


def test_the_logit_scale_of_a_clip_is_shown_with_its_beginning(tmp_path):
    write_records(
        tmp_path, [{"step": n, "train/loss": 1.0, "train/logit_scale": 10.0 * n} for n in range(1, 11)]
    )
    assert shown(tmp_path)["Loss"]["train/logit_scale"] == "100 at step 10 (10 at step 1)"


def test_quantization_is_that_of_the_last_measurement(tmp_path):
    values = {"amax": 2.0, "scale": 0.5, "age": 1.0, "saturated": 0.25, "underflow": 0.0}
    health = {f"health/layers/mlp/0/input/{name}": value for name, value in values.items()}
    records = [{"step": 5} | health | {"health/layers/mlp/0/input/amax": 9.0}, {"step": 10} | health]
    write_records(tmp_path, records)
    text = shown(tmp_path)["Quantization"]
    assert text["measured at"] == "step 10"
    assert text["layers/mlp input"].startswith("amax 2, scale 0.5, age up to 1, saturated 25.00%")
    current = health | {"health/layers/mlp/0/input/age": 0.0, "health/layers/mlp/1/input/amax": 3.0}
    write_records(tmp_path, [{"step": 5} | current])
    text = shown(tmp_path)["Quantization"]
    assert text["layers/mlp input"].startswith("amax 2 to 3, scale 0.5, saturated 25.00%")


def test_magnitudes_are_those_of_the_first_and_the_last_measurement(tmp_path):
    def record(step, *values):
        return {"step": step} | {f"magnitude/visual/layers/{i}": x for i, x in enumerate(values)}

    records = [record(5, 1.0, 2.0, 0.5), {"step": 7, "train/loss": 1.0}, record(10, 3.0, 8.0, 4.0)]
    write_records(tmp_path, records)
    assert shown(tmp_path)["Outputs of the blocks"] == {
        "mean |x|": "at step 10, and at step 5 in brackets",
        "visual/layers": "3 (1) after the first block, 4 (0.5) after the last, at most 8 (block 1)",
    }


def test_checkpoints_are_listed_with_their_state(tmp_path):
    infos = [
        StepInfo(100, tmp_path, "damaged", 0, time.time()),
        StepInfo(2000, tmp_path, "complete", 3 * 2**20, time.time()),
    ]
    run = dataclasses.replace(load_run(tmp_path), checkpoints=infos)
    (bad, bad_text), (good, good_text) = sections.checkpoint_lines(run)
    assert (bad, good) == ("step 100", "step 2,000")
    assert bad_text.startswith("damaged, 0.0 MiB") and good_text.startswith("complete, 3.0 MiB")


def test_of_many_checkpoints_the_oldest_the_newest_and_the_incomplete_are_listed(tmp_path):
    infos = [StepInfo(step, tmp_path, "complete", 0, time.time()) for step in range(2000)]
    infos[70] = infos[70]._replace(status="damaged")
    run = dataclasses.replace(load_run(tmp_path), checkpoints=infos)
    *listed, (_, text) = sections.checkpoint_lines(run)
    steps = [0, 70, *range(2000 - sections.MAX_ENTRIES + 1, 2000)]
    assert [label for label, _ in listed] == [f"step {step:,}" for step in steps]
    assert text == "and 1,989 more that are complete"


# --- Spikes -------------------------------------------------------------------------------------------


def test_spikes_among_the_logged_losses_follow_the_definition_of_the_config(tmp_path, monkeypatch):
    losses = 2 + 0.01 * np.sin(np.arange(40))
    losses[[20, 30]] += 1.0
    write_run(tmp_path, losses=losses)
    assert list(shown(tmp_path)["Spikes"]) == ["step 210", "step 310"]
    with monkeypatch.context() as shorter:
        shorter.setattr(sections, "MAX_ENTRIES", 1)
        assert sections.spike_lines(load_run(tmp_path))[1] == ("", "and 1 more")
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"spikes": {"threshold": 1000.0}})
    assert "Spikes" not in shown(tmp_path)


def test_how_often_rms_rose_before_the_loss_is_counted_if_every_step_is_logged(tmp_path):
    write_json(tmp_path / "config.json", config := {"model": {}, "train": {"log_every": 1}})
    losses, rms = 2 + 0.01 * np.sin(np.arange(100)), np.ones(100)
    losses[[30, 60, 90]] += 1.0
    rms[[22, 60, 80]] = 2.0  # 8 steps before the first spike, at the second, 10 steps before the third
    records = [{"step": i + 1, "train/loss": losses[i], "train/rms/max": rms[i]} for i in range(100)]
    write_records(tmp_path, records)
    assert shown(tmp_path)["Spikes"]["led by RMS_t"] == (
        "1 of 3 spikes came 1 to 8 steps after the largest RMS_t rose above 1.8 (0.7 would by chance)"
    )  # 3 · (8 + 8 + 8) / 100
    write_json(tmp_path / "config.json", config | {"spikes": {"rms_threshold": 2.5, "lead": 4}})
    assert shown(tmp_path)["Spikes"]["led by RMS_t"].startswith("0 of 3 spikes came 1 to 4 steps")
    write_json(tmp_path / "config.json", config | {"train": {"log_every": 10}})
    assert "led by RMS_t" not in shown(tmp_path)["Spikes"]
    write_json(tmp_path / "config.json", config)
    (tmp_path / "spikes").mkdir()
    rollback = {"spike": {"step": 91}, "to": 50, "batches": [50, 91]}
    write_json(tmp_path / "spikes" / "rollbacks.json", [rollback])
    assert "led by RMS_t" not in shown(tmp_path)["Spikes"], "of other steps than the records"


def test_recorded_spikes_and_rollbacks(tmp_path):
    write_run(tmp_path, steps=10)
    first = {"tensor": "layers/mlp/up_proj/kernel/3", "step": 206, "value": 4.2}
    write_spike(tmp_path, 210, first=first)
    rollback = {"spike": {"step": 210}, "to": 100, "batches": [100, 300]}
    write_json(tmp_path / "spikes" / "rollbacks.json", [rollback])
    assert shown(tmp_path)["Spikes"] == {
        "step 210": "loss 3.0000, 5.0 σ above the preceding mean 2.0000; "
        "first tensor layers/mlp/up_proj/kernel/3, RMS_t 4.20, 4 steps earlier",
        "rolled back": "from step 210 to step 100, skipping batches 101 to 300",
        "replay": f"python -m maxlp.report {tmp_path} --spike=210",
    }


def test_a_damaged_record_of_a_spike_is_named_and_the_others_are_shown(tmp_path, monkeypatch):
    """So a run ends as usual: it draws its spikes after the last step."""
    write_run(tmp_path, steps=10)
    (tmp_path / "spikes").mkdir()
    (tmp_path / "spikes" / "5.json").write_text('{"step": 5, "lo')
    (tmp_path / "spikes" / "6.json").write_text('{"step": 6}')
    write_spike(tmp_path, 7)
    named = []
    monkeypatch.setattr(logging, "warning", lambda *words: named.append(words[0] % words[1:]))
    assert list(shown(tmp_path)["Spikes"]) == ["step 7", "replay"]
    assert ["spikes/5.json is damaged (" in named[0], "spikes/6.json is damaged (no" in named[1]] == [
        True
    ] * 2
    assert all("or delete it: only this spike" in line for line in named) and len(named) == 2
    assert plot_curves(load_run(tmp_path))


def test_lines_are_as_long_as_the_terminal_is_wide(tmp_path, monkeypatch):
    write_run(tmp_path)
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = sections.section_text("Loss", sections.loss_lines(load_run(tmp_path)))
        longest = max(map(len, text.splitlines()))
        assert longest <= min(columns, sections.MAX_WIDTH) < longest + 20


def test_a_new_section_is_one_function(tmp_path, monkeypatch):
    write_run(tmp_path, steps=10)
    monkeypatch.setitem(sections.SECTIONS, "New", lambda run: [("finished", f"{run.step}")])
    assert shown(tmp_path)["New"] == {"finished": "10"}
