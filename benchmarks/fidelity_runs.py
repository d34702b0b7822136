"""What the fidelity experiments share: variants of a config, their training, the file of what was seen."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from maxlp.core import train_step as step
from maxlp.parallel.batches import global_batch
from maxlp.run import build

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Watch = Callable[[dict], dict[str, jax.Array]]


def changed(c: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    """The config with values such as {"model.visual.width": 64} in their places, itself left as it is."""
    c = c.copy_and_resolve_references()
    for path, value in changes.items():
        *sections, key = path.split(".")
        part: Any = c
        for section in sections:
            part = part[section]
        part[key] = value
    return c


class Data:
    """The batches of each seed, and the held-out ones.

    Args:
        base: the config whose variants are compared; its data is that of all of them.
        folder: where a tokenizer may be written.
        heldout_batches: how many there are, None for all.
    """

    def __init__(self, base: ConfigDict, folder: Path, heldout_batches: int | None = None):
        self.base, self.tokenizer = base, build.tokenizer(base, folder)
        self.heldout_set = build.heldout(base, self.tokenizer)
        self.heldout = list(itertools.islice(iter(self.heldout_set), heldout_batches))

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def batches(self, seed: int, steps: int) -> list[dict]:
        iterator = iter(build.train_data(changed(self.base, {"train.seed": seed}), self.tokenizer))
        batches = list(itertools.islice(iterator, steps))
        iterator.close()
        return batches


class Trainer:
    """A variant's train step, compiled once for all seeds, and its held-out evaluation.

    Args:
        changes: to the config of `data`.
        adapt: of the gradients that the step takes.
    """

    def __init__(self, changes: dict[str, Any], data: Data, adapt: Callable[[Any], Any] = lambda g: g):
        self.c, self.data = changed(data.base, changes), data
        self.mesh = build.mesh(self.c)
        build.check(self.c, self.mesh)
        tx, schedule = build.tx(self.c)
        task, make_model = build.task(self.c), build.model(self.c)
        self.graphdef, abstract = step.abstract_state(make_model, tx, self.mesh)
        self.step = step.jit_train_step(
            abstract,
            self.mesh,
            graphdef=self.graphdef,
            gradients=adapt(task.gradients(self.c)),
            tx=tx,
            schedule=schedule,
        )
        self.evaluator = task.evaluator(self.c, self.graphdef, data.heldout_set)
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        init = jax.jit(functools.partial(step.init_state, make_model, tx), out_shardings=self.shardings)
        self.init = lambda seed: init(jax.random.key(seed))

    def train(self, state: dict, batches: list[dict], watch: Watch) -> tuple[dict, dict]:
        """The state after all batches, and what was seen at each: loss, grad_norm and what watch picks."""
        seen = []
        for batch in batches:
            state, out = self.step(state, global_batch(batch, self.mesh))
            seen.append({key: out[key] for key in ("loss", "grad_norm")} | watch(state))
        seen = jax.device_get(seen)
        return state, {key: [digits(s[key]) for s in seen] for key in seen[0]}

    def evaluate(self, state: dict, limit: int | None = None) -> dict[str, float]:
        """The task's held-out measures on the first `limit` batches."""

        def batches():
            return (global_batch(batch, self.mesh) for batch in self.data.heldout[:limit])

        return {key: digits(value) for key, value in self.evaluator(state, batches).items()}


class Results:
    """{variant: {seed: what was measured}} in a JSON file."""

    def __init__(self, experiment: str):
        self.path = RESULTS / f"fidelity_{experiment}.json"
        self.runs = json.loads(self.path.read_text()) if self.path.exists() else {}

    def has(self, name: str, seed: int) -> bool:
        return str(seed) in self.runs.get(name, {})

    def add(self, name: str, seed: int, measured: dict) -> None:
        self.runs.setdefault(name, {})[str(seed)] = measured
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.runs, separators=(",", ":")) + "\n")


def digits(x: Any) -> float:
    return float(f"{float(x):.6g}")
