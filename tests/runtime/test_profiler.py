"""Which steps are traced."""

import jax
import pytest

from maxlp.runtime.profiler import Profiler


@pytest.mark.parametrize(
    ("start", "steps", "traced"), [(0, 3, []), (1, 1, [1]), (2, 2, [2, 3]), (4, 3, [4, 5])]
)
def test_the_trace_covers_the_requested_steps(tmp_path, monkeypatch, start, steps, traced):
    events = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: events.append(path))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    profiler, seen = Profiler(tmp_path, start=start, steps=steps), []
    for nth in range(1, 6):
        profiler.before(nth)
        seen += [nth] if profiler.running else []
        profiler.after(nth, ())
    profiler.close()  # ends the trace of a run that is shorter than it
    assert seen == traced
    assert events == ([tmp_path / "profile", "stop"] if traced else [])


@pytest.mark.parametrize("arguments", [{"start": -1}, {"start": 1, "steps": 0}])
def test_wrong_arguments_are_named(tmp_path, arguments):
    with pytest.raises(ValueError, match=r"(start=-1|steps=0) must be at least"):
        Profiler(tmp_path, **arguments)
