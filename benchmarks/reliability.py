"""Does a run lose anything? Kills, damaged files, second launches, clocks set back, full disks.

    python -m benchmarks.reliability --work=/dev/shm/reliability

Every case starts `maxlp.train` on a small Llama, breaks something at a random moment, and starts the same
command again if it ended. It holds if the run ends with exactly the weights, optimizer state, data
position and training records of an undisturbed run, or if the command refused with one line. What does not
hold is printed with its output and kept in --work, and the exit code is 1. Full disks need root, to mount a
small file system; clocks need a C compiler. One case in twenty (--scale=0.05) takes 5 minutes on two busy
cores; each row says how long it took.
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from absl import logging

from tests.run_outputs import checkpoint, records
from tests.runtime.damage import DAMAGES
from tests.training_runs import SMALL

STEPS = 40
OPTIONS = [
    *SMALL,
    f"--config.train.total_steps={STEPS}",
    "--config.train.eval_every=0",
    "--config.data.batch_size=2",
]
HOUR, MONTH = 3600, 30 * 24 * 3600
TIMEOUT = 300.0  # seconds for a command; a case whose command hangs does not hold


FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["maxlp.train", "maxlp.monitoring.curves", "orbax.checkpoint.v1", "tensorboardX"]
)


def train(arguments: list[str], log: Path) -> None:
    """The command `maxlp.train`, in a process of its own, with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from maxlp import train as command
    from maxlp.run import cli

    sys.argv = ["maxlp.train", *arguments]
    command.define_flags()
    cli.run(command.main)


def wait(process: subprocess.Popen, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


@dataclasses.dataclass
class Command:
    """A running command."""

    log: Path
    kill: Callable[[], None]
    wait: Callable[[float], None]
    poll: Callable[[], int | None]

    @property
    def out(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def finish(self) -> tuple[int, str]:
        """Waits for the end of the command; returns its exit code and its output.

        Raises:
          AssertionError: it hangs.
        """
        self.wait(TIMEOUT)
        code, out = self.poll(), self.out
        if code is None:
            self.kill()
            raise AssertionError(f"it hangs: {out[-2000:]}")
        self.log.unlink(missing_ok=True)
        return code, out

    def end(self) -> tuple[bool, str]:
        """Kills the command; returns whether it had ended by itself, and its output."""
        ended = self.poll() is not None
        self.kill()
        return ended, self.finish()[1]


@dataclasses.dataclass
class Campaign:
    """The folder in which the cases run, with the undisturbed run that they are compared with.

    Attributes:
      work: a folder; a case that holds leaves nothing in it.
      seconds: duration of an undisturbed run.
    """

    work: Path
    seconds: float = 0.0

    def start(self, workdir: Path, *options: str, **env: str) -> "Command":
        arguments = [f"--workdir={workdir}", *OPTIONS, *options]
        log = self.work / f"{workdir.name}-{secrets.token_hex(4)}.log"
        if not env:  # forked from a process that has imported everything, in half the time
            process = FORKED.Process(target=train, args=(arguments, log))
            process.start()
            return Command(log, process.kill, process.join, lambda: process.exitcode)
        with log.open("w") as file:
            command = [sys.executable, "-m", "maxlp.train", *arguments]
            popen = subprocess.Popen(command, env=os.environ | env, stdout=file, stderr=file)
        return Command(log, popen.kill, lambda seconds: wait(popen, seconds), popen.poll)

    def run(self, workdir: Path, *options: str, **env: str) -> tuple[int, str]:
        return self.start(workdir, *options, **env).finish()

    @property
    def reference(self) -> Path:
        return self.work / "reference"

    def check(self, workdir: Path) -> None:
        """Compares a finished run with the undisturbed one."""
        assert checkpoint(workdir, STEPS) == checkpoint(self.reference, STEPS), (
            "the last checkpoint differs"
        )
        assert records(workdir) == records(self.reference), "the records differ"

    def moment(self, rng: random.Random) -> float:
        """A random number of seconds after the start of a run, up to shortly after its end."""
        return rng.uniform(0, 1.1 * self.seconds)


def refusal(out: str) -> str:
    """The line of a command that ended with an error.

    Raises:
      AssertionError: not one line, or a traceback.
    """
    lines = [line for line in out.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in out, f"not one line: {out[-3000:]}"
    return lines[0]


# --- cases: each returns an outcome, or several with counts ---------------------------------------------


def kill(campaign: Campaign, workdir: Path, rng: random.Random) -> Counter[str]:
    """Kills a run at random moments, five times in the same workdir, then lets it end."""
    reached: Counter[str] = Counter()
    for _ in range(5):
        process = campaign.start(workdir)
        time.sleep(campaign.moment(rng))
        ended, out = process.end()
        reached["after the end" if ended else "while training" if "\nstep " in out else "at start-up"] += 1
    code, out = campaign.run(workdir)
    assert code == 0, out[-3000:]
    campaign.check(workdir)
    return reached


def damage(campaign: Campaign, workdir: Path, rng: random.Random) -> str:
    """Damages a random file of a run that was killed: one of its checkpoints, or one beside them."""
    shutil.copytree(campaign.work / "killed", workdir)
    paths = sorted(p for p in workdir.rglob("*") if p.is_file() and p.stat().st_size)
    in_checkpoint = rng.random() < 0.5
    path = rng.choice([p for p in paths if ("checkpoints" in p.parts) == in_checkpoint])
    kind = rng.choice(sorted(DAMAGES))
    before = {p: p.read_bytes() for p in paths if "checkpoints" in p.parts and p != path}
    DAMAGES[kind](path, rng)
    code, out = campaign.run(workdir)
    if code == 2:
        assert path.name in refusal(out), f"{kind} of {path}: {out[-1000:]}"
        assert all(p.read_bytes() == content for p, content in before.items()), "checkpoints have changed"
        return "refused"
    assert code == 0, f"{kind} of {path}: {out[-3000:]}"
    assert checkpoint(workdir, STEPS) == checkpoint(campaign.reference, STEPS), f"{kind} of {path}"
    return "fell back to the checkpoint before" if "is damaged" in out else "not needed, or repaired"


def second_start(campaign: Campaign, workdir: Path, rng: random.Random) -> str:
    """Starts the command four times at once in an empty workdir: one runs to its end."""
    processes = [campaign.start(workdir) for _ in range(4)]
    results = [process.finish() for process in processes]
    assert sorted(code for code, _ in results) == [0, 2, 2, 2], results
    assert all("is in use" in refusal(out) for code, out in results if code)
    campaign.check(workdir)
    return "3 refused, 1 equal"


def late_start(campaign: Campaign, workdir: Path, rng: random.Random) -> str:
    """Starts the command again at a random moment of a run."""
    first = campaign.start(workdir)
    time.sleep(rng.uniform(0.3, 0.9) * campaign.seconds)
    code, out = campaign.run(workdir)
    assert first.finish()[0] == 0
    campaign.check(workdir)
    if code == 0:
        assert "nothing is left to train" in out, out
        return "the first had ended"
    assert code == 2 and "is in use" in refusal(out), out
    return "refused"


def clock(campaign: Campaign, workdir: Path, rng: random.Random) -> str:
    """Sets the clock of a run back 20 times within a second, from a random step on."""
    file = workdir.with_suffix(".clock")
    file.write_bytes(b"")
    jump, first = rng.choice((HOUR, MONTH)), rng.randrange(1, STEPS - 5)
    preload = {"LD_PRELOAD": str(campaign.work / "clock.so"), "CLOCK_FILE": str(file)}
    process = campaign.start(workdir, "--config.checkpoint.every_steps=1", **preload)
    while process.poll() is None and f"\nstep {first}/" not in process.out:
        time.sleep(0.01)
    for _ in range(20):
        os.truncate(file, file.stat().st_size + jump)
        time.sleep(0.05)
    code, out = process.finish()
    assert code == 0, out[-3000:]
    campaign.check(workdir)
    file.unlink()
    return "the run started itself again" if "clock was set back" in out else "no save was disturbed"


def full_disk(campaign: Campaign, workdir: Path, rng: random.Random) -> str:
    """Fills the disk of a run at a random moment; then frees it and starts the run again."""
    workdir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", workdir], check=True)
    try:
        process, ballast = campaign.start(workdir / "run"), workdir / "ballast"
        time.sleep(campaign.moment(rng))
        with ballast.open("wb", buffering=0) as file:
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    while file.write(bytes(4096)):
                        pass
                time.sleep(0.002)
        code, out = process.finish()
        ballast.unlink()
        if code == 0:
            campaign.check(workdir / "run")
            return "after the end"
        assert code == 1 and "No space left on device" in refusal(out), out[-3000:]
        assert str(workdir) in refusal(out), out
        code, out = campaign.run(workdir / "run")
        assert code == 0, out[-3000:]
        campaign.check(workdir / "run")
        return "one line, then resumed"
    finally:
        subprocess.run(["umount", "-l", workdir], check=True)


# --- the table -------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[Campaign, Path, random.Random], str | Counter[str]], int, int]] = {
    # name: function, cases, events in a case
    "kill -9": (kill, 20, 5),
    "damaged file": (damage, 200, 1),
    "second launch in a live run": (late_start, 20, 1),
    "four launches at once": (second_start, 5, 3),
    "clock set back by 1 h or 30 d": (clock, 15, 20),
    "disk full": (full_disk, 24, 1),
}


def run_cases(campaign: Campaign, name: str, count: int, jobs: int, seed: int) -> bool:
    """Prints a row of the table; returns whether all of its cases hold."""
    function, _, events = CASES[name]
    outcomes: Counter[str] = Counter()

    def one(number: int) -> str | Counter[str] | None:
        workdir = campaign.work / f"{name.replace(' ', '_')}-{number}"
        try:
            outcome = function(campaign, workdir, random.Random(f"{seed} {name} {number}"))
        except Exception as error:
            print(f"{workdir} does not hold: {type(error).__name__}: {error}", flush=True)
            return None
        shutil.rmtree(workdir, ignore_errors=True)
        return outcome

    began = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(one, range(count)):
            outcomes.update(outcome if isinstance(outcome, Counter) else [outcome or "DOES NOT HOLD"])
    held = count - outcomes["DOES NOT HOLD"]
    summary = "; ".join(f"{n} × {outcome}" for outcome, n in outcomes.most_common() if n)
    minutes = (time.monotonic() - began) / 60
    print(f"| {name} | {count * events} | {held} of {count} | {summary} | {minutes:.1f} |", flush=True)
    return held == count


def prepare(work: Path) -> Campaign:
    """Makes the undisturbed run, and one that was killed in its second half."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    # JAX reads these in the processes that are started from here on.
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(work / "xla"), "JAX_PLATFORMS": "cpu"}
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_NUM_CPU_DEVICES": "1"}
    campaign = Campaign(work)
    for name in ("compiles", "reference"):  # the first fills the compilation cache
        began = time.monotonic()
        code, out = campaign.run(work / name)
        assert code == 0, out
        campaign.seconds = time.monotonic() - began
    killed = work / "killed"
    process = campaign.start(killed)
    while f"step {STEPS // 2 + 2}/" not in process.out:
        time.sleep(0.01)
    process.end()
    compiler = shutil.which("cc")
    if compiler:
        source = Path(__file__).with_name("reliability_clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", work / "clock.so", source, "-ldl"], check=True)
    return campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("/dev/shm/reliability"), help="Folder to work in; emptied first."
    )
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="Rows of the table.")
    parser.add_argument("--scale", type=float, default=1.0, help="Factor on the number of cases.")
    parser.add_argument("--jobs", type=int, default=2, help="Cases that run at once.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.set_verbosity(logging.ERROR)
    campaign = prepare(args.work)
    print(f"an undisturbed run: {STEPS} steps, {campaign.seconds:.1f} s; seed {args.seed}", flush=True)
    print("| disturbance | events | cases that hold | what happened | minutes |")
    print("|---|---|---|---|---|", flush=True)
    all_hold = True
    for name in args.only:
        if name.startswith("disk") and os.geteuid() != 0:
            print(f"| {name} | 0 | | needs root |  |")
        elif name.startswith("clock") and not (args.work / "clock.so").exists():
            print(f"| {name} | 0 | | needs a C compiler |  |")
        else:
            count = max(1, round(args.scale * CASES[name][1]))
            all_hold &= run_cases(campaign, name, count, args.jobs, args.seed)
    return int(not all_hold)


if __name__ == "__main__":
    sys.exit(main())
