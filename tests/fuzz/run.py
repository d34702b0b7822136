"""Gives bad inputs to every command, and checks how each is refused.

    python -m tests.fuzz.run --seed=1 --cases=1000
    python -m tests.fuzz.run --seed=1 --case=17

The rule: exit code 2; one line of at most 1,000 characters on standard error, beginning with "error: " and
naming the key, the flag or the file; no traceback; at most 5 seconds of CPU time after the imports; no file
written, changed or removed.
"""

import argparse
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.commands import LATE, Done, Job, run_all, warm_up
from tests.fuzz import bases
from tests.fuzz.cases import GROUPS, Case, make_case

SECONDS, CHARACTERS = 5.0, 1000
ROOT = Path(__file__).parent.parent.parent


def faults_of(case: Case, done: Done, changes: list[str]) -> list[str]:
    """Violations of the rule in how a case was refused; empty if there are none."""
    lines = done.err.splitlines()
    message = lines[-1] if lines else ""
    found = {
        f"exit code {done.code}": done.code != 2,
        "a traceback": "Traceback" in done.err + done.out,
        f"{len(lines)} lines on standard error": len(lines) != 1,
        "no 'error: ' in front": not message.startswith("error: "),
        f"a line of {len(message)} characters": len(message) > CHARACTERS,
        f"names none of {', '.join(case.names)}": not any(name in message for name in case.names),
        f"{done.seconds:.1f} s": done.seconds > SECONDS,
        f"changed {', '.join(changes[:3])}": bool(changes),
    }
    return [fault for fault, is_there in found.items() if is_there]


def snapshot(folder: Path) -> dict[str, tuple]:
    """Kind, permissions and content of all files below a folder, except the indices that readers keep."""
    found = {}
    for path in folder.rglob("*"):
        name, mode = str(path.relative_to(folder)), path.lstat().st_mode
        if name.endswith(".index.npy"):
            continue
        content = os.readlink(path) if stat.S_ISLNK(mode) else ""
        if stat.S_ISREG(mode):
            content = hashlib.blake2b(path.read_bytes()).hexdigest()
        found[name] = (mode, content)
    return found


def changed(before: dict[str, tuple], after: dict[str, tuple]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def prepare(case: Case, valid: Path, box: Path) -> None:
    """Makes the folder of a case from the valid inputs."""
    box.mkdir(parents=True)
    for name in case.needs:
        copy = shutil.copytree if (valid / name).is_dir() else shutil.copy
        copy(valid / name, box / name)
    if case.unprivileged:
        for path in box.rglob("*"):
            path.chmod(path.stat().st_mode | 0o444)
    if case.damage is not None:
        case.damage(box)


def run_cases(seed: int, numbers: list[int], root: Path, workers: int) -> int:
    """Runs cases below ``root``, which holds the valid inputs; prints failures and returns their number."""
    open_cases, failed = {}, 0

    def jobs() -> Iterator[Job]:
        for job, number in enumerate(numbers):
            case, box = make_case(seed, number), root / str(number) / "box"
            prepare(case, root / "valid" / "box", box)
            open_cases[job] = case, box, snapshot(box)
            yield Job(case.command, box, case.environment, case.unprivileged)

    def finished(job: int, done: Done) -> None:
        nonlocal failed
        case, box, before = open_cases.pop(job)
        if faults := faults_of(case, done, changed(before, snapshot(box))):
            failed += 1
            print(report(seed, numbers[job], case, faults, done, verbose=len(numbers) == 1), flush=True)
        shutil.rmtree(box.parent, ignore_errors=True)

    run_all(jobs(), finished, workers)
    return failed


def report(seed: int, number: int, case: Case, faults: list[str], done: Done, verbose: bool) -> str:
    """A failed case in a few lines; with ``verbose``, everything that the command has printed."""
    lines = [
        f"case {number}: {'; '.join(faults)}",
        f"  {case.what}",
        f"  {case.command}",
        f"  again: python -m tests.fuzz.run --seed={seed} --case={number}",
    ]
    shown = (done.out + done.err).splitlines()
    lines += [f"  | {line[:300]}" for line in (shown if verbose else shown[-2:])]
    return "\n".join(lines)


def run(seed: int, numbers: list[int], workers: int, valid: Path | None = None) -> int:
    """Makes the valid inputs, runs cases, and returns how many fail.

    Args:
      valid: folder of valid inputs, made if it does not exist; None makes them in a temporary one.
    """
    warm_up(*LATE)
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory(prefix="maxlp-fuzz-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "xla"))
        made = root / "valid"
        if valid is None or not valid.exists():
            bases.make(made / "box")
            bases.check(made / "box")
            if valid is not None:  # only now, so that what failed halfway is not taken for valid
                shutil.move(made, valid)
        if valid is not None:
            made.symlink_to(valid.resolve())
        return run_cases(seed, numbers, root, workers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases")
    parser.add_argument("--case", type=int, action="append", help="run this case alone; may be repeated")
    parser.add_argument("--group", help="only cases of this function of `cases`, such as config_value")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--valid", type=Path, help="folder to keep the valid inputs in, to start sooner")
    options = parser.parse_args()
    numbers = options.case or list(range(options.cases))
    if options.group:
        numbers = [n for n in numbers if GROUPS[n % len(GROUPS)].__name__ == options.group]
    failed = run(options.seed, numbers, options.workers, options.valid)
    good = len(numbers) - failed
    print(f"seed {options.seed}: {good} of {len(numbers)} bad inputs are refused as they should be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
