import math
import shutil

import pytest

from maxlp.monitoring.spike_records import (
    Crossing,
    checkpoint_before,
    first_to_cross,
    recorded_spikes,
    suspect,
)
from maxlp.monitoring.spikes import Spike, SpikeConfig
from maxlp.monitoring.watch import Watch
from maxlp.runtime.checkpoint import StepInfo
from tests.monitoring.fixtures import TOY, Batches, train


def test_a_spike_is_recorded_and_its_checkpoint_outlives_those_of_the_run(tmp_path):
    part = tmp_path / "spikes" / "checkpoints" / "8.unfinished"  # left by a run that was killed
    part.mkdir(parents=True)
    _, state = train(tmp_path, SpikeConfig(**TOY, threshold=8.0), {14: 30.0}, total=14)
    assert state["step"] == 14, "without a guard the run continues"
    (record,) = recorded_spikes(tmp_path)
    assert record["step"] == 14 and record["sigmas"] > 8 and record["policy"]["lead"] == 2
    assert record["data_state"]["step"] == 13
    assert [s["step"] for s in record["steps"]] == [12, 13, 14]
    before, *_, at = record["steps"]
    assert set(before["rms"]) == {"layers/kernel/0", "layers/kernel/1", "head/kernel"}
    assert at["grad_norms"]["head/kernel"] > 3 * before["grad_norms"]["head/kernel"]
    norm = math.hypot(*at["grad_norms"].values())
    assert at["grad_norm"] == pytest.approx(norm, rel=1e-6)  # norms in float32
    assert record["first"]["step"] == 14 and record["first"]["value"] > 1.8
    shutil.rmtree(tmp_path / "checkpoints")
    kept = tmp_path / record["checkpoint"]
    assert kept.name == "8" and (kept / "manifest.txt").exists() and not part.exists()


def test_a_spike_that_is_seen_a_step_late_has_the_position_before_its_own_batch(tmp_path):
    watch, batches = Watch(SpikeConfig(**TOY)), Batches()
    watch.note(0, batches.get_state())
    for n in (1, 2, 3):
        next(batches)
        watch.note(n, batches.get_state())
    spike = watch.observe(2, {"loss": math.nan})
    assert spike is not None
    watch.act(tmp_path, spike, {"skipped": 1.0})
    [record] = recorded_spikes(tmp_path)
    assert record["step"] == 2 and record["data_state"]["step"] == 1


def test_a_resumed_watch_continues_where_it_was():
    def steps_seen(watch):
        return [record["step"] for record in watch.meta()["watch"]["steps"]]

    watch, resumed = Watch(SpikeConfig(**TOY)), Watch(SpikeConfig(**TOY))
    for n in range(1, 9):
        watch.observe(n, {"loss": 1.0 + 0.01 * (n % 2)})
    resumed.set_meta({})  # as from a checkpoint that was saved before there was a watch
    assert steps_seen(resumed) == []
    resumed.set_meta(watch.meta())
    assert steps_seen(resumed) == [6, 7, 8]
    spike = watch.observe(9, {"loss": 2.0})
    assert spike is not None and resumed.observe(9, {"loss": 2.0}) == spike
    assert resumed.meta() == watch.meta()


def test_too_many_skips_in_a_row_stop_the_run():
    watch = Watch(SpikeConfig(guard="skip", max_actions=3))
    for n in (1, 2):
        watch.observe(n, {"loss": math.nan, "skipped": 1.0})
    watch.observe(3, {"loss": 1.0, "skipped": 0.0})
    for n in (4, 5):
        watch.observe(n, {"loss": math.nan, "skipped": 1.0})
    with pytest.raises(FloatingPointError, match=r"^step 6: 3 updates in a row were skipped"):
        watch.observe(6, {"loss": math.nan, "skipped": 1.0})


def test_a_resume_does_not_begin_the_count_of_skips_anew():
    watch, config = None, SpikeConfig(guard="skip", max_actions=3)
    for step, scale in enumerate((4.0, 2.0, 1.0, 1.0), 1):
        saved = watch.meta() if watch else {}
        watch = Watch(config)
        watch.set_meta(saved)
        watch.observe(step, {"loss": math.nan, "skipped": 1.0, "loss_scale": scale})
    with pytest.raises(FloatingPointError, match=r"^step 5: 3 updates in a row"):
        watch.observe(5, {"loss": math.nan, "skipped": 1.0, "loss_scale": 1.0})


@pytest.mark.parametrize("guard", ["off", "skip", "rollback"])
def test_overflows_stop_a_run_only_once_the_loss_scale_no_longer_falls(guard):
    watch = Watch(SpikeConfig(guard=guard, max_actions=3))
    for step, scale in enumerate((64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 1.0), 1):
        watch.observe(step, {"loss": math.nan, "skipped": 1.0, "loss_scale": scale})
    with pytest.raises(FloatingPointError, match=r"^step 9: 3 updates in a row .* loss scale 1\)"):
        watch.observe(9, {"loss": math.nan, "skipped": 1.0, "loss_scale": 1.0})


@pytest.mark.parametrize("guard", ["off", "skip"])
def test_a_loss_that_is_not_finite_stops_the_run_unless_its_step_was_skipped(tmp_path, guard):
    watch, spike = Watch(SpikeConfig(guard=guard)), Spike(7, math.nan, 2.0, math.inf, begins=False)
    watch.observe(6, {"loss": 2.0, "rms": {"head": 2.0}})
    watch.observe(7, {"loss": math.nan})
    watch.act(tmp_path, spike, {"skipped": 1.0})
    with pytest.raises(
        FloatingPointError, match=r"^the loss of step 7 is nan; head was .* set spikes\.guard to skip"
    ) as error:
        watch.act(tmp_path, spike, {})
    assert str(error.value).endswith(f"python -m maxlp.report {tmp_path} --spike=7")


@pytest.mark.parametrize(
    ("before", "last", "named"),
    [
        (
            {"rms": {"a": 1.0, "b": 2.5}},
            {"rms": {"a": math.nan, "b": math.nan}},
            "b was the first with RMS_t",
        ),
        (
            {"rms": {"a": 1.0}, "grad_norms": {"a": 1.0}},
            {"grad_norms": {"a": 1.0, "b": math.inf}},
            "gradient of b",
        ),
        (
            {"grad_norms": {"a": 1.0, "b": 9.0}},
            {"grad_norms": {"a": math.nan, "b": math.nan}},
            "b had the largest",
        ),
    ],
)
def test_the_tensor_that_made_a_loss_not_finite_is_named(before, last, named):
    """A NaN makes all gradients and RMS_t of its step NaN, so that they tell nothing."""
    text = suspect([{"step": 1} | before, {"step": 2} | last], 1.8)
    assert named in text and text.count("\n") == 0
    assert suspect([{"step": 1, "loss": math.nan}], 1.8) == ""


def test_the_first_to_cross_is_the_earliest_then_the_largest():
    steps = [
        {"step": 1, "rms": {"a": 1.0, "b": 1.5}},
        {"step": 2, "rms": {"a": 1.9, "b": 2.5, "c": 1.0}},
        {"step": 3, "rms": {"a": 9.0, "b": 1.0, "c": math.nan}},
    ]
    assert first_to_cross(steps, 1.8) == Crossing("b", 2, 2.5)
    assert first_to_cross(steps[2:], 1.8).tensor == "c"
    assert first_to_cross(steps[:1], 1.8) is None


@pytest.mark.parametrize(
    ("steps", "chosen"), [([4, 8, 12], 8), ([11, 12], 11), ([12, 13], 13), ([14], None)]
)
def test_a_replay_starts_before_the_steps_that_led_to_the_spike(tmp_path, steps, chosen):
    infos = [StepInfo(n, tmp_path / str(n), "complete", 0, 0.0) for n in steps]
    damaged = StepInfo(10, tmp_path / "10", "damaged", 0, 0.0)
    found = checkpoint_before([*infos, damaged], spike_step=14, lead=2)
    assert (found and found.step) == chosen
