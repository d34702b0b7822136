"""What the fidelity experiments share: variants of a config, their training, and the results file."""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from training import CompiledRun, changed

from configs.llama import tiny
from maxlp.core.train_state import State, init_state, shardings
from maxlp.parallel.batches import global_batch
from maxlp.run.experiment import Experiment, make_data, resolve
from maxlp.run.settings import read
from maxlp.run.tokenizer import prepare_tokenizer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Watch = Callable[[State], dict[str, jax.Array]]  # scalars to record of the state after each step


def watch_nothing(state: State) -> dict[str, jax.Array]:
    return {}


class Data:
    """The training batches of each seed, and the validation batches.

    Args:
      base: the config whose variants are compared; all of them read its data.
      folder: where a tokenizer may be written.
      validation_batches: how many there are; None takes all.
    """

    def __init__(self, base: ConfigDict, folder: Path, validation_batches: int | None = None):
        run = resolve(base)
        self.base, self.mesh = base, run.mesh
        self.tokenizer = prepare_tokenizer(run.settings, folder)
        self.validation = make_data(run.settings, self.tokenizer, "validation", self.mesh)
        self.validation_batches = list(itertools.islice(iter(self.validation), validation_batches))

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def batches(self, seed: int, steps: int) -> list[dict]:
        settings = read(changed(self.base, {"train.seed": seed}))
        iterator = iter(make_data(settings, self.tokenizer, "train", self.mesh))
        batches = list(itertools.islice(iterator, steps))
        iterator.close()
        return batches


def with_random_tokens(batch: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """A batch of `configs/llama/tiny.py` with random tokens in place of its text."""
    tokens = random_rows(batch, np.random.default_rng(seed))
    return batch | {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def random_rows(batch: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Random tokens (B, S + 1) for a batch of `configs/llama/tiny.py`."""
    B, S = batch["tokens"].shape
    return rng.integers(0, tiny.get_config().model.vocab_size, (B, S + 1), np.int32)


class Trainer:
    """A variant's train step, compiled once for all seeds, and its evaluation on the validation data.

    Args:
      changes: values of the config of ``data`` to replace.
      adapt: changes the experiment before it is compiled.
    """

    def __init__(
        self,
        changes: dict[str, Any],
        data: Data,
        adapt: Callable[[Experiment], Experiment] = lambda run: run,
    ):
        run = adapt(resolve(changed(data.base, {"spikes.statistics": False} | changes)))
        compiled = CompiledRun(run)
        s = run.settings
        self.settings, self.mesh, self.data = s, run.mesh, data
        self.graphdef, self.step = compiled.graphdef, compiled.step
        self.evaluator = run.family.evaluator(self.graphdef, s.model, s.data, s.loss, data.validation)
        self.shardings = shardings(compiled.abstract)
        self._init = jax.jit(
            functools.partial(init_state, run.make_model, run.tx, gates=run.gates),
            out_shardings=self.shardings,
        )

    def init(self, seed: int) -> State:
        with jax.set_mesh(self.mesh):
            return self._init(jax.random.key(seed))

    def train(self, state: State, batches: list[dict], watch: Watch) -> tuple[State, dict]:
        """Trains on the batches.

        Returns:
          the new state; and by name (loss, grad_norm and those of ``watch``) the values of all steps.
        """
        records = []
        for batch in batches:
            state, metrics = self.step(state, global_batch(batch, self.mesh))
            records.append({key: metrics[key] for key in ("loss", "grad_norm")} | watch(state))
        records = jax.device_get(records)
        return state, {key: [digits(record[key]) for record in records] for key in records[0]}

    def evaluate(self, state: State, limit: int | None = None) -> dict[str, float]:
        """The family's metrics on the first ``limit`` validation batches."""

        def batches() -> Iterator[dict]:
            return (global_batch(batch, self.mesh) for batch in self.data.validation_batches[:limit])

        with jax.set_mesh(self.mesh):
            return {key: digits(value) for key, value in self.evaluator(state, batches).items()}


class Results:
    """{variant: {seed: measurements}} in a JSON file."""

    def __init__(self, experiment: str):
        self.path = RESULTS / f"fidelity_{experiment}.json"
        self.runs = json.loads(self.path.read_text()) if self.path.exists() else {}

    def has(self, name: str, seed: int) -> bool:
        return str(seed) in self.runs.get(name, {})

    def add(self, name: str, seed: int, measured: dict) -> None:
        self.runs.setdefault(name, {})[str(seed)] = measured
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.runs, separators=(",", ":")) + "\n")


def make_parser(doc: str, experiments: list[str]) -> argparse.ArgumentParser:
    """The flags of `fidelity.py` and `fidelity_clip.py`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("experiments", nargs="+", choices=experiments)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[], help="names of variants")
    parser.add_argument(
        "--draw", action="store_true", help="train nothing; tables and figures of the recorded results"
    )
    return parser


def check_names(parser: argparse.ArgumentParser, only: list[str], *variants: Iterable[str]) -> None:
    """Ends the command with an error if one of the names is not that of a variant."""
    chosen = {*itertools.chain(*variants)}
    if unknown := sorted({*only} - chosen):
        parser.error(
            f"--only {unknown[0]!r} is not a variant of these experiments; the variants: "
            f"{', '.join(sorted(chosen))}"
        )


def run_missing(
    experiment: str,
    variants: dict[str, dict[str, Any]],
    seeds: list[int],
    data: Data,
    measure: Callable[[Trainer, int], dict[str, Any]],
    only: list[str] | None = None,
    adapt: Callable[[Experiment], Experiment] = lambda run: run,
) -> None:
    """Measures each variant with each seed, except for what the results of the experiment have.

    Args:
      variants: changes of the config of ``data``, by name; each variant is compiled once.
      measure: trains with a seed and returns what to record, the validation loss under ``validation``.
      only: names of variants to measure; all by default.
      adapt: see `Trainer`.
    """
    results, trainers = Results(experiment), {}
    for seed, name in itertools.product(seeds, variants):
        if results.has(name, seed) or (only and name not in only):
            continue
        start = time.time()
        if name not in trainers:
            trainers[name] = Trainer(variants[name], data, adapt)
        measured = measure(trainers[name], seed)
        results.add(name, seed, measured)
        loss = f"{measured['validation']:.4f} " if "validation" in measured else ""
        print(f"{experiment} / {name} / seed {seed}: {loss}({time.time() - start:.0f} s)", flush=True)


def digits(x: Any) -> float:
    """The number rounded to six significant digits, so that the files of results stay small."""
    return float(f"{float(x):.6g}")
