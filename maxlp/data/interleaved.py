"""The documents of several sources as those of a single one: validation data of a mixture."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlp.data.readers.access import locate


class Interleaved:
    """The documents of several sources, each once; those of one source are spread over the whole."""

    def __init__(self, sources: Sequence[Any]):
        self._sources = sources
        self._ends = list(itertools.accumulate(map(len, sources)))
        places = [(np.arange(len(source)) + 0.5) / len(source) for source in sources]
        self._order = np.argsort(np.concatenate(places), kind="stable")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, row = locate(self._ends, int(self._order[index]))
        return self._sources[number][row]
