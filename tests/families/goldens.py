"""Results of other libraries, in files that programs of `tools` make."""

import json
import pathlib
from typing import Any

import numpy as np

DIRECTORY = pathlib.Path(__file__).parents[1] / "goldens"


def read_golden(name: str) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """The other library's config, and its arrays by group ("weights", "grads" or "") and name."""
    groups: dict[str, dict[str, np.ndarray]] = {"weights": {}, "grads": {}, "": {}}
    with np.load(DIRECTORY / f"{name}.npz") as file:
        for key, value in file.items():
            group, _, tensor = key.rpartition("/")
            groups[group][tensor] = value.astype(np.float32) if group else value
    return json.loads(str(groups[""].pop("config"))), groups
