"""Shows what a run was and how it went, from its workdir.

    python -m maxlp.report /tmp/run
    python -m maxlp.report /tmp/run --spike=2300 --precision=float32

The first command prints a summary and draws the curves in `loss.png`; the run
may be in progress, interrupted or finished. With --spike, the steps before that
step are run again to show which tensor diverged first, and on which data.
"""

from absl import flags, logging

from maxlp.monitoring.curves import plot_curves
from maxlp.monitoring.run_record import Run, load_run
from maxlp.monitoring.sections import report_text
from maxlp.monitoring.spike_records import read_record
from maxlp.run import cli
from maxlp.runtime.files import send, shown


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "The run's directory; the same as DIR without a flag.")
    flags.DEFINE_integer(
        "spike", None, "Step to replay up to, from the checkpoint before it.", lower_bound=1
    )
    flags.DEFINE_string(
        "precision", "recipe", "Precision of the replay: recipe (that of the run), bf16 or float32."
    )


def main(directory: str = "") -> None:
    f = flags.FLAGS
    given = [workdir for workdir in (directory, f.workdir) if workdir]
    if len(given) != 1:
        raise ValueError(f"give one workdir, as in python -m maxlp.report DIR, not {len(given)}")
    show(given[0], f.spike, f.precision)


def show(workdir: str, spike: int | None = None, precision: str = "recipe") -> None:
    """Prints the report of a workdir and draws its curves, or replays the steps before a spike.

    Args:
      spike: step to replay up to; None prints the report.
      precision: one of `replay.PRECISIONS`.

    Raises:
      ValueError: no run in the workdir, or nothing to replay.
    """
    run = load_run(workdir)
    if not ("model" in run.config or run.info or run.records or run.checkpoints):
        raise ValueError(f"{run.workdir} holds no run; give the --workdir of one")
    if spike is not None:
        replay_spike(run, spike, precision)
        return
    if precision != "recipe":
        raise ValueError(f"--precision={precision} applies to a replay only; add --spike=STEP")
    print(shown(report_text(run)))
    try:
        if path := plot_curves(run):
            send(path)
            print(shown(f"\nCurves in {path}"))
    except OSError as error:  # such as for a run of another user
        print(shown(f"\nNo curves: {error}"))


def replay_spike(run: Run, spike: int, precision: str) -> None:
    recorded = read_record(run.workdir, spike)  # of steps that were undone since, for one
    newest = run.step + (run.setting("train", "log_every") or 0)  # steps after the last record
    newest = max(run.step, min(newest, run.setting("train", "total_steps") or newest))
    if spike > newest and not recorded:
        raise ValueError(f"--spike={spike} is beyond the run, whose last record is of step {run.step}")
    from maxlp.run.replay import replay  # imports the training code
    from maxlp.runtime import cpu

    cpu.configure_client(alone=True)
    logging.set_verbosity(logging.WARNING)
    replay(run.workdir, spike, precision)


if __name__ == "__main__":
    define_flags()
    cli.run(main, num_arguments=1)
