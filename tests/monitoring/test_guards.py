"""Guards skip a step or roll the run back; where they do not act, nothing changes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.monitoring import rollback
from maxlp.monitoring.skip_guard import SkipGuard
from maxlp.monitoring.spike_records import read_record
from maxlp.monitoring.spikes import Detector, SpikeConfig
from maxlp.runtime.checkpoint import list_steps
from tests.fixtures import Trainer, batches
from tests.monitoring import fixtures
from tests.monitoring.fixtures import (
    TOY,
    Batches,
    noisy,
    train,
    train_step,
    train_to_the_end,
    trees_equal,
    write_rollback,
)

# --- Skip ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.default_emitters
def test_a_guard_that_does_not_act_changes_no_bit():
    def losses_and_state(gates):
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
        trainer = Trainer(tx=tx, gates=gates)
        state, metrics = trainer.run(trainer.init(), batches(6, rows=2, length=16))
        assert not any(m.get("skipped", 0) for m in metrics)
        return [m["loss"] for m in metrics], jax.device_get((state["params"], state["opt_state"]))

    losses, state = losses_and_state({})
    guarded_losses, guarded = losses_and_state({"guard": SkipGuard(SpikeConfig(guard="skip"))})
    assert losses == guarded_losses and len(set(losses)) == len(losses)
    assert trees_equal(state, guarded)


@pytest.mark.parametrize("bad", [math.nan, 1e4])
def test_a_skipped_batch_has_no_effect(bad):
    config = SpikeConfig(**TOY, guard="skip")

    def trained(data, numbers):
        state, skipped = fixtures.init(config), []
        for n in numbers:
            data.at = n - 1
            state, metrics = train_step(config)(state, next(data))
            skipped += [n] * int(metrics["skipped"])
        return jax.device_get(state), skipped

    guarded, skipped = trained(Batches({12: bad}), range(1, 21))
    assert skipped == [12] and guarded["step"] == 20
    without, skipped = trained(Batches(), [n for n in range(1, 21) if n != 12])
    assert skipped == []
    for key in ("params", "opt_state"):
        assert trees_equal(without[key], guarded[key])


def accept_all(config, losses):
    """Whether the guard accepts each of these losses."""
    guard = SkipGuard(config)

    def one(state, loss):
        accepted, state, _ = guard.accept(state, {"loss": loss, "grad_norm": 1.0})
        return state, accepted

    return jax.jit(lambda losses: jax.lax.scan(one, guard.init(), losses)[1])(np.float32(losses)).tolist()


def test_the_guard_on_the_device_and_the_detector_on_the_host_agree():
    losses = noisy(200, seed=1).astype(np.float32)
    losses[[50, 51, 120]] += 0.4
    losses[80] = np.inf
    config = SpikeConfig(guard_threshold=3.2, guard="skip")
    accepted, detector = accept_all(config, losses), Detector(config)
    assert accepted == [detector.observe(i, float(loss)) is None for i, loss in enumerate(losses)]
    assert accepted.count(False) >= 4


def test_a_step_is_rejected_above_the_threshold_of_a_sufficient_history():
    """Values of 1 and 3 in turn have a mean of 2 and a standard deviation of 1; equal ones have none."""
    guard = SkipGuard(SpikeConfig(guard="skip", guard_threshold=3.0, min_history=16))
    for spread, number, value, expected in [
        (1.0, 16, 5.0, True),
        (1.0, 16, 5.5, False),
        (1.0, 15, 1e6, True),
        (0.0, 16, 1e6, True),
        (1.0, 0, math.inf, False),  # one that is not finite needs no history, and the other may be
    ]:
        history = np.resize([2 + spread, 2 - spread], number)
        for name, other in (("loss", "grad_norm"), ("grad_norm", "loss")):
            state = guard.init()
            for before in history:
                accepted, state, _ = guard.accept(state, {name: before, other: 1.0})
                assert accepted
            assert guard.accept(state, {name: value, other: 1.0})[0] == expected


def test_a_persistent_change_of_level_is_accepted():
    accepted = accept_all(SpikeConfig(guard="skip", window=16), [*noisy(40), *(noisy(40) + 3)])
    assert all(accepted[:40]) and not accepted[40] and all(accepted[50:])


# --- Rollback -----------------------------------------------------------------------------------------

ROLLBACK = SpikeConfig(**TOY, guard="rollback")


def test_the_run_goes_back_and_skips_the_batches_around_the_spike(tmp_path):
    (first, drawn), state = train_to_the_end(tmp_path, ROLLBACK, {14: math.nan})
    assert first is None
    # The spike is at step 14, with checkpoints at 4, 8 and 12: the newest that is at least 3 steps older is
    # 8, after 8 batches. skip_batches requires two more to be skipped, but batch 14 has to be among them.
    assert rollback.read_rollbacks(tmp_path)[0] | {"spike": 0} == {"spike": 0, "to": 8, "batches": [8, 14]}
    assert drawn == list(range(9, 27)) and math.isfinite(state["params"]["head"]["kernel"].sum())
    infos = {info.path.name: info.status for info in list_steps(tmp_path / "checkpoints")}
    assert infos["12.rolled_back"] == "rolled_back"
    record = read_record(tmp_path, 14)
    assert record["checkpoint"] == "spikes/checkpoints/8" and record["data_state"]["step"] == 13
    # By hand: 8 steps, and 12 more from batch 15 on.
    want, data = fixtures.init(ROLLBACK), Batches()
    for _ in range(20):
        if data.at == 8:
            data.at = 14
        want, _ = train_step(ROLLBACK)(want, next(data))
    assert trees_equal(jax.device_get(want), state)


def test_a_kill_between_rollback_and_the_next_checkpoint_changes_nothing(tmp_path):
    bad = {14: math.nan, 22: 1e4}
    _, want = train_to_the_end(tmp_path / "whole", ROLLBACK, bad)
    with pytest.raises(rollback.RollbackRequested) as event:
        train(tmp_path / "cut", ROLLBACK, bad)
    rollback.roll_back(tmp_path / "cut", event.value.spike, ROLLBACK)
    train(tmp_path / "cut", ROLLBACK, bad, stop_at=10)
    _, got = train_to_the_end(tmp_path / "cut", ROLLBACK, bad)
    assert trees_equal(want, got)
    rollbacks = rollback.read_rollbacks(tmp_path / "cut")
    assert rollbacks == rollback.read_rollbacks(tmp_path / "whole")
    # Batch 22 is drawn at step 16. The run returns to step 12, before which it drew 18 batches.
    assert [(r["to"], r["batches"]) for r in rollbacks] == [(8, [8, 14]), (12, [18, 22])]


def test_a_rollback_past_an_earlier_one_skips_the_batches_of_both_spikes(tmp_path):
    (_, _, drawn), _ = train_to_the_end(tmp_path, ROLLBACK, {14: math.nan, 16: math.nan})
    # From step 8 the run continues with batch 15. Batch 16 is that of step 10; three steps earlier is 4.
    rollbacks = rollback.read_rollbacks(tmp_path)
    assert [(r["to"], r["batches"]) for r in rollbacks] == [(8, [8, 14]), (4, [4, 16])]
    assert drawn == list(range(5, 33))


def test_a_spike_before_the_first_checkpoint_goes_back_to_the_beginning(tmp_path):
    (_, drawn), _ = train_to_the_end(tmp_path, ROLLBACK, {2: math.nan}, total=3)
    assert drawn == [1, 2, 3, 4, 5]


def test_the_number_of_rollbacks_is_limited(tmp_path):
    config = SpikeConfig(**TOY, guard="rollback", max_actions=2)
    with pytest.raises(FloatingPointError, match=r"all 2 rollbacks of spikes\.max_actions=2 are used up"):
        train_to_the_end(tmp_path, config, {n: math.nan for n in range(2, 200)})
    # The second rollback skips batches after those of the first, although no checkpoint counts these.
    rollbacks = rollback.read_rollbacks(tmp_path)
    assert [(r["to"], r["batches"]) for r in rollbacks] == [(0, [0, 2]), (0, [2, 4])]


def test_rollback_without_a_spike_changes_nothing(tmp_path):
    _, off = train(tmp_path / "off", SpikeConfig(**TOY), total=9)
    drawn, on = train(tmp_path / "on", ROLLBACK, total=9)
    assert trees_equal(off, on) and drawn == list(range(1, 10))


@pytest.mark.parametrize(
    ("steps", "target"),
    [([4, 8, 12], 8), ([4, 11, 12], 11), ([8, 12, 16], 8), ([12, 13], 12), ([14], 0), ([], 0)],
)
def test_rollback_takes_the_newest_checkpoint_that_is_old_enough(steps, target):
    assert rollback.rollback_target(steps, spike_step=14, rewind_steps=3) == target


def test_a_rollback_keeps_the_checkpoints_of_earlier_rollbacks(tmp_path):
    (tmp_path / "checkpoints" / "12.rolled_back").mkdir(parents=True)
    train_to_the_end(tmp_path, ROLLBACK, {14: math.nan})
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert {"12.rolled_back", "12.rolled_back-2"} <= names


def test_excluded_batches_are_those_of_rollbacks_to_this_step_or_before(tmp_path):
    write_rollback(tmp_path, spike=8, to=4, batches=[4, 9])
    write_rollback(tmp_path, spike=16, to=12, batches=[18, 22])
    for step_number, position, dropped in [(0, 0, 0), (4, 4, 5), (8, 13, 0), (12, 18, 4), (16, 22, 0)]:
        data = Batches()
        data.at = position
        rollback.skip_excluded_batches(tmp_path, step_number, data)
        assert data.at == position + dropped


@pytest.mark.parametrize(("before", "position"), [(13, 8), (14, 14), (20, 14), (22, 22)])
def test_a_replay_excludes_the_batches_of_the_rollbacks_until_then(tmp_path, before, position):
    """A spike at once after a rollback is recorded where the excluded batches end."""
    write_rollback(tmp_path, spike=14, to=8, batches=[8, 14])
    write_rollback(tmp_path, spike=10, to=8, batches=[14, 22])
    data = Batches()
    data.at = 8
    rollback.skip_excluded_batches(tmp_path, 8, data, before)
    assert data.at == position


def test_data_that_end_within_the_excluded_batches_are_named(tmp_path):
    class Few(Batches):
        def __next__(self):
            if self.at == 12:
                raise StopIteration
            return super().__next__()

    write_rollback(tmp_path, spike=5, to=0, batches=[4, 5000])
    with pytest.raises(
        ValueError, match=r"rollbacks\.json .* up to 5000, .* raise config\.data\.num_epochs"
    ):
        rollback.skip_excluded_batches(tmp_path, 0, Few())


def test_another_run_in_the_workdir_starts_without_the_rollbacks_of_the_earlier(tmp_path):
    rollback.set_spikes_aside(tmp_path)
    for name in ("spikes.old", "spikes.old-2"):
        write_rollback(tmp_path, spike=5, to=0, batches=[0, 600])
        data, others = Batches(), Batches()
        rollback.skip_excluded_batches(tmp_path, 0, data)
        rollback.set_spikes_aside(tmp_path)
        rollback.skip_excluded_batches(tmp_path, 0, others)
        assert (data.at, others.at) == (600, 0)
        assert (tmp_path / name / "rollbacks.json").exists()


@pytest.mark.parametrize(
    "content", ["", "{}", "[3]", '[{"to": 0}]', '[{"to": 4, "spike": {"step": 5}, "batches": []}]']
)
def test_damaged_rollbacks_are_named_with_the_remedy(tmp_path, content):
    (tmp_path / "spikes").mkdir()
    (tmp_path / "spikes" / "rollbacks.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"rollbacks\.json is damaged \(.*\); put back a good copy, or delete it"
    ):
        rollback.skip_excluded_batches(tmp_path, 0, Batches())


def test_the_state_of_the_guard_holds_every_finite_step():
    """Skipped ones too, each in a place of its own; a step that is not finite leaves it as it was."""
    guard = SkipGuard(SpikeConfig(guard="skip", window=4, min_history=2))
    state, expected = guard.init(), []
    for loss in (1.0, 1.1, 50.0, math.nan, 60.0, 1.2, 1.3, math.nan):
        metrics = {"loss": jnp.float32(loss), "grad_norm": jnp.float32(2 * loss)}
        accepted, state, _ = guard.accept(state, metrics)
        expected += [loss] if math.isfinite(loss) else []
        assert state["seen"] == len(expected)
        assert bool(accepted) == (loss not in (50.0,) and math.isfinite(loss))
    # The state holds them in float32.
    np.testing.assert_allclose(sorted(state["values"][0]), sorted(expected[-4:]), rtol=1e-6)
    np.testing.assert_allclose(state["values"][1], 2 * state["values"][0])
