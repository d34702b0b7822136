"""Shows what a run was and how it went, from its workdir.

    python -m maxlp.report /tmp/run
    python -m maxlp.report /tmp/run --spike=2300 --precision=float32

The first command prints a text (`monitoring.sections`) and draws `loss.png` (`monitoring.curves`), whether
the run is in progress, was killed or has finished. With --spike, the steps before that step are run again
to show which tensor diverged first (`run.replay`).
"""

import sys

from absl import app, flags, logging

from maxlp.monitoring.curves import plot_curves
from maxlp.monitoring.run_record import Run, load_run
from maxlp.monitoring.sections import report_text


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "An alternative to DIR, as in the other commands.")
    flags.DEFINE_integer("spike", None, "Step to replay up to, from the checkpoint before it.")
    flags.DEFINE_string(
        "precision", "recipe", "Precision of the replay: recipe (that of the run), bf16 or float32."
    )


def main(argv: list[str], spike: int | None = None, precision: str = "recipe") -> None:
    """Prints the report of a workdir and draws its curves, or replays the steps before a spike.

    Args:
      argv: the program's name and the workdir.
      spike: step to replay up to; None prints the report.
      precision: one of `replay.PRECISIONS`.
    """
    if len(argv) != 2:
        raise app.UsageError("give one workdir: python -m maxlp.report DIR")
    try:
        run = load_run(argv[1])
        if spike is not None:
            replay_spike(run, spike, precision)
            return
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(report_text(run))
    if path := plot_curves(run.workdir):
        print(f"\nCurves in {path}")


def replay_spike(run: Run, spike: int, precision: str) -> None:
    if spike > run.step + (run.setting("train", "log_every") or 0):
        raise ValueError(f"--spike={spike} is beyond the run, whose last record is of step {run.step}")
    from maxlp.run.replay import replay  # imports the training code

    logging.set_verbosity(logging.WARNING)
    replay(run.workdir, spike, precision)


def run_command(argv: list[str]) -> None:
    values = flags.FLAGS
    main(argv + [values.workdir] * bool(values.workdir), values.spike, values.precision)


if __name__ == "__main__":
    define_flags()
    app.run(run_command)
