"""What a batch holds, in a few numbers: they show whether its data are to blame for a loss spike."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from maxlp.runtime.messages import rounded

TOKENS = ("tokens", "text")  # the arrays of token ids, of a language model and of a CLIP
SHOWN_ROWS = 4


def batch_statistics(batch: Mapping[str, np.ndarray]) -> dict[str, float]:
    """A few numbers of each array of a batch, such as ``tokens: repeated rows``.

    The extremes over the rows show a single damaged one: a token that is repeated, random tokens, an image
    of one colour or of noise.

    Args:
      batch: arrays whose first axis is that of the examples, called rows here. Pixels are uint8 or floats,
        masks are bools, and other integers are ids or positions.
    """
    found = {}
    for name, x in batch.items():
        rows = x.reshape(len(x), -1)
        if x.dtype == bool:
            found[f"{name}: share that is true"] = float(x.mean())
            continue
        what = "distinct values"
        of_rows = [float(len(np.unique(row))) for row in rows]
        if np.issubdtype(x.dtype, np.inexact) or x.dtype == np.uint8:
            what = "deviation"
            of_rows = [float(row.std(dtype=np.float64)) for row in rows]
            found[f"{name}: mean"] = float(x.mean(dtype=np.float64))
        found[f"{name}: {what}, least of a row"] = min(of_rows)
        found[f"{name}: {what}, most of a row"] = max(of_rows)
        found[f"{name}: repeated rows"] = float(len(rows) - len({row.tobytes() for row in rows}))
    return found


def batch_lines(
    steps: Sequence[int], found: Sequence[Mapping[str, float]], min_history: int
) -> Iterator[str]:
    """The statistics of the last step's batch beside their ranges in the steps before it, in 80 columns.

    Args:
      steps: the numbers of the steps, rising; at least one.
      found: `batch_statistics` of each.
      min_history: number of steps before the last one that it takes to call a number higher or lower.
    """
    *before, last = found
    title = f"steps {steps[0]} to {steps[-2]}" if before else ""
    yield f"{f'the batch of step {steps[-1]}':<55}{title:>17}".rstrip()
    for name, value in last.items():
        reference = beyond = ""
        if before:
            least, most = (of([one[name] for one in before]) for of in (min, max))
            reference = f"{rounded(least, 3)} to {rounded(most, 3)}"
            if len(before) >= min_history and not least <= value <= most:
                beyond = "lower" if value < least else "higher"
        yield f"  {name:<45}{rounded(value, 3):>8}{reference:>17}{beyond:>8}".rstrip()


def text_lines(batch: Mapping[str, np.ndarray], decode: Callable[[np.ndarray], str]) -> Iterator[str]:
    """The beginnings of the first texts of a batch, and of those with the fewest and most distinct tokens.

    Args:
      decode: from the ids of a row to its text.
    """
    for ids in (batch[name] for name in TOKENS if name in batch):
        distinct = [len(np.unique(row)) for row in ids]
        extremes = {int(np.argmin(distinct)), int(np.argmax(distinct))}
        for row in sorted({*range(min(SHOWN_ROWS, len(ids)))} | extremes):
            yield f"  row {row}: {decode(ids[row])!r}"[:80]
