"""Input pipelines: `text` for documents, `image_text` for images with captions.

Each has a dataclass for the `data` section of a config and a function `make_data(config, split=…)`. A
dataset is iterable; its iterators yield this process's rows of the global batches and have
`get_state` and `set_state`. A state is a dict that JSON can hold:

    {"step": number of batches yielded,
     "streams": {name: position in that part of the data},
     "settings": everything that determines the order of the data}

Nothing here uses JAX, and importing this package imports neither pipeline.
"""

from collections.abc import Sequence
from typing import Any


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the states of all processes at one step into one that any number of processes can
    restore.

    Raises:
      ValueError: the states differ in step or settings.
    """
    for state in states:
        for key in ("step", "settings"):
            if state[key] != states[0][key]:
                raise ValueError(
                    f"data states have different {key}: {_difference(states[0][key], state[key])};"
                    " all processes must read the same data: give every host the same files"
                )
    streams = {name: part for state in states for name, part in state["streams"].items()}
    return {**states[0], "streams": streams}


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, dict):
        keys = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
        one, other = ({key: each.get(key) for key in sorted(keys)} for each in (one, other))
    return f"{one} and {other}"
