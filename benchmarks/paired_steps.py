"""What changed keys of a config cost in a train step: two compiled programs take turns in one process.

    python benchmarks/paired_steps.py --config=llama/debug spikes.statistics=False

Compiles the step of a config, for random tokens or images, once as it is and once with the keys changed.
The programs alternate step by step, so that a machine that slows down slows both, and which of them goes
first changes from pair to pair. Prints the time of the changed step relative to the other: the median of
the pairs, with a 95 % interval. 95 seconds of CPU time with the debug config.
"""

import argparse
import ast
import math
import statistics

import jax
from training import CompiledRun, changed, random_batch, timed

from maxlp.run.config import ConfigError, load_file
from maxlp.run.experiment import resolve
from maxlp.runtime import cpu, distributed

WARM_UP = 5  # pairs: the first steps fill caches and memory


def assignment(text: str) -> tuple[str, object]:
    """Splits ``section.key=VALUE``; the value is a Python literal, or else a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not SECTION.KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the two values between which the true one lies with about 95 % confidence.

    Their ranks are 1.96 standard deviations, √n / 2 each, from that of the median: the number of values
    below the true median has a binomial distribution.
    """
    ordered, n = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(n))
    low, high = max(n // 2 - reach, 0), min(n // 2 + reach, n - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="llama/debug", help="a preset or a file, as for maxlp.train")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("changes", nargs="+", type=assignment, metavar="SECTION.KEY=VALUE")
    args = parser.parse_args()

    distributed.initialize()
    if jax.default_backend() == "cpu":
        cpu.keep_freed_memory()
    try:
        config = load_file(args.config)
        both = [resolve(c) for c in (config, changed(config, dict(args.changes)))]
    except (ConfigError, KeyError) as error:
        parser.error(str(error))
    runs = [CompiledRun(run) for run in both]
    batch, states = random_batch(runs[0].run), [run.initial_state() for run in runs]
    seconds: list[list[float]] = [[], []]
    for pair in range(WARM_UP + args.pairs):
        for i in (0, 1) if pair % 2 else (1, 0):
            (states[i], _), taken = timed(runs[i].step, states[i], batch)
            seconds[i].append(taken)
    base, other = (values[WARM_UP:] for values in seconds)
    ratio, low, high = median_interval([b / a for a, b in zip(base, other, strict=True)])
    print(
        f"{args.config}: {1e3 * statistics.median(base):.1f} ms a step\n"
        f"changed: {1e3 * statistics.median(other):.1f} ms, {ratio:.4f} times as long "
        f"({low:.4f} to {high:.4f} in {args.pairs} pairs)"
    )


if __name__ == "__main__":
    main()
