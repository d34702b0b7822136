import math

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from maxlp.monitoring import curves
from maxlp.monitoring.run_record import load_run
from tests.monitoring.fixtures import write_run, write_spike


def pixels(path, color):
    picture = imread(path)[..., :3]
    return int((np.abs(picture - np.array(to_rgb(color))).max(-1) < 0.02).sum())


def test_the_picture_shows_curves_evaluations_and_spikes(tmp_path):
    losses = 2 + 0.01 * np.sin(np.arange(40))
    write_run(tmp_path, losses=losses)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    path = curves.plot_curves(load_run(tmp_path))
    assert path == tmp_path / "loss.png"
    assert pixels(path, curves.BLUE) > 1000 and pixels(path, curves.ORANGE) > 100
    assert pixels(path, curves.RED) == 0
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p != path} == before
    losses[20] += 1.0
    write_run(tmp_path, losses=losses)
    assert pixels(curves.plot_curves(load_run(tmp_path)), curves.RED) > 10


def test_a_first_record_and_a_new_panel(tmp_path, monkeypatch):
    write_run(tmp_path, steps=10)
    drawn = []
    monkeypatch.setattr(curves, "PANELS", (*curves.PANELS, lambda axes, run: drawn.append(run.step)))
    assert curves.plot_curves(load_run(tmp_path)) is not None
    assert drawn == [10]


def test_any_name_of_a_workdir(tmp_path):
    workdir = tmp_path / r"cost $\foo$ 漢🙂"
    workdir.mkdir()
    write_run(workdir)
    assert curves.plot_curves(load_run(workdir)) == workdir / "loss.png"


def test_losses_that_are_not_finite(tmp_path):
    write_run(tmp_path, losses=[2.0] * 3 + [math.nan] * 4 + [math.inf] + [2.0] * 32)
    assert pixels(curves.plot_curves(load_run(tmp_path)), curves.BLUE) > 1000
    write_run(tmp_path, losses=[math.nan] * 40)
    assert curves.plot_curves(load_run(tmp_path)) is not None


def test_no_picture_without_a_loss(tmp_path):
    assert curves.plot_curves(load_run(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


def test_smoothing_ignores_spikes_and_keeps_the_first_value():
    values = np.array([9.0, 5, 4, 3, 3, 30, 3, 3, np.nan, 3, 2])
    everywhere = np.arange(11)
    got = curves.smooth(values, 2, everywhere)
    assert got[0] == 9.0
    assert got[5] == 3.0
    np.testing.assert_array_equal(curves.smooth(values, 0, everywhere), values)
    np.testing.assert_array_equal(curves.smooth(values, 2, everywhere[::3]), got[::3])
    assert np.isfinite(got).all()
    assert np.isnan(curves.smooth(np.full(3, np.nan), 1, np.arange(3))).all()


def test_a_long_curve_is_smoothed_at_as_many_points_as_can_be_seen(tmp_path, monkeypatch):
    """At every value, the time of the medians would grow with the square of the length."""
    write_run(tmp_path, losses=np.linspace(4, 2, 40))
    monkeypatch.setattr(curves, "SMOOTHED_POINTS", 12)
    values, smoothed, *_ = drawn(tmp_path).lines
    assert (len(values.get_xdata()), len(smoothed.get_xdata())) == (40, 12)
    for end in (0, -1):
        assert smoothed.get_xdata()[end] == values.get_xdata()[end]


def test_the_labels_of_a_run_that_diverged_do_not_overlap(tmp_path):
    write_run(tmp_path, losses=np.geomspace(3, 3e10, 40))
    axes = drawn(tmp_path)
    boxes = [label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()]
    inside = sorted(box.y0 for box in boxes if axes.bbox.y0 <= box.y0 <= axes.bbox.y1)
    assert len(inside) >= 4 and min(np.diff(inside)) > boxes[0].height


def drawn(path):
    """The axes of the loss panel, laid out as in the picture."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots()
    curves.loss_panel(axes, load_run(path))
    figure.draw_without_rendering()
    return axes


def test_the_legend_is_off_the_data_and_tells_the_validation_sets_apart(tmp_path):
    write_run(tmp_path)
    axes = drawn(tmp_path)
    legend, labels = axes.get_legend(), axes.get_legend_handles_labels()[1]
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1
    assert legend.get_window_extent().x1 <= axes.figure.bbox.x1
    assert any(label.startswith("eval (the first 10 validation batches), 1.456") for label in labels)
    assert "eval_full (all validation data), 2.000 at the end" in labels
    assert axes.get_ylabel() == "loss (nats per token, log scale)"


def test_the_title_counts_what_was_seen_with_every_batch_size(tmp_path):
    write_run(tmp_path)
    run = load_run(tmp_path)
    for start, units in zip(run.info["starts"], (1000, 10_000), strict=True):
        start["units_per_step"] = units
    assert run.units_seen == 200 * 1000 + (run.step - 200) * 10_000
    assert curves._subtitle(run).endswith(f"{run.units_seen / 1e6:,.4g} M tokens")


def test_recorded_spikes_are_shaded_also_where_the_loss_is_not_finite(tmp_path):
    """The logged losses are means, in which a spike of a few steps need not stand out."""
    write_run(tmp_path, losses=[2.0] * 40)
    for step, loss in ((210, 4.5), (310, math.nan)):
        write_spike(tmp_path, step, loss=loss)
    axes = drawn(tmp_path)
    assert [(patch.get_x(), patch.get_width()) for patch in axes.patches] == [(210, 10), (310, 10)]
    assert "2 spikes (shaded: 10 steps each)" in axes.get_legend_handles_labels()[1]
