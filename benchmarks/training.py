"""What the benchmarks share: flags, configs with changed values, compiled train steps, random data, timing.

Scripts that use it import it by file name, so run them as files and not with `-m`.
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from maxlp.core.train_state import State
from maxlp.families.llama.presets import llama
from maxlp.parallel.batches import global_batch
from maxlp.parallel.sharding import batch_sharding
from maxlp.planning import topologies
from maxlp.run.experiment import Experiment

# Without files to read, and without statistics of each tensor, which would add to the time of a step.
RANDOM_TEXT = {"data.source": "random", "data.tokenizer": "random", "spikes.statistics": False}
CONSTANT_RATE = {
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
}


def topology(name: str) -> topologies.Topology:
    """A topology by its name, as the ``type`` of a flag.

    Raises:
      ArgumentTypeError: an invalid name; of a ValueError argparse would not print the message.
    """
    try:
        return topologies.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def changed(c: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    """A copy of the config with some values replaced, such as ``{"model.visual.width": 64}``.

    The keys of a dictionary are changed one by one; the section keeps its others.
    """
    c = c.copy_and_resolve_references()
    with c.unlocked():
        for path, value in changes.items():
            *sections, key = path.split(".")
            section: Any = c
            for name in sections:
                section = section[name]
            if isinstance(value, Mapping):
                section[key].update(value)
            else:
                section[key] = value
    return c


def llama_config(sizes: Mapping[str, Any], changes: Mapping[str, Any]) -> ConfigDict:
    """The config of a Llama that trains on random text at a constant learning rate.

    Args:
      sizes: values of the ``model`` section.
      changes: other values, as in `changed`.
    """
    return changed(llama(**sizes), RANDOM_TEXT | CONSTANT_RATE | {"loss.num_chunks": 1} | changes)


def random_text(run: Experiment) -> dict[str, jax.Array]:
    """A global batch of random tokens; each row is one document."""
    s = run.settings
    B, S = s.data.batch_size, s.data.seq_len
    tokens = np.random.default_rng(0).integers(0, s.model.vocab_size, (B, S + 1), np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((B, S), np.int32),
        "positions": np.tile(np.arange(S, dtype=np.int32), (B, 1)),
        "loss_mask": np.ones((B, S), bool),
    }
    return global_batch(batch, run.mesh)


def random_pairs(run: Experiment) -> dict[str, jax.Array]:
    """A global batch of random images and texts, made on the devices; images repeat from the 1025th on."""
    data, vocab_size = run.settings.data, run.settings.model.text.vocab_size

    def draw() -> dict[str, jax.Array]:
        shapes, key = run.family.batch_shapes(data), jax.random.key(0)
        B, *size = shapes["image"].shape
        images = jax.random.bits(key, (min(B, 1024), *size), jnp.uint8)
        return {
            "image": jnp.resize(images, (B, *size)),
            "text": jax.random.randint(key, shapes["text"].shape, 0, vocab_size),
        }

    return jax.jit(draw, out_shardings=batch_sharding(run.mesh))()


def random_batch(run: Experiment) -> dict[str, jax.Array]:
    """A global batch of random tokens, or of random images and texts for a CLIP."""
    return (random_text if run.family.unit == "tokens" else random_pairs)(run)


class CompiledRun:
    """An experiment whose train step is compiled.

    Attributes:
      run: the experiment.
      graphdef: the structure of the model.
      abstract: the training state as shapes, dtypes and shardings.
      step: (state, batch) to (state, metrics), compiled; the state is donated.
      compile_seconds: of tracing and compiling, and after `time_steps` also of the first steps.
    """

    def __init__(self, run: Experiment):
        self.run = run
        with jax.set_mesh(run.mesh):
            self.graphdef, self.abstract = run.abstract_state()
            step = run.jit_step(self.graphdef, self.abstract)
            start = time.perf_counter()
            self.step = step.lower(self.abstract, run.abstract_batch()).compile()
        self.compile_seconds = time.perf_counter() - start

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """The step's programs: with delayed scaling one for the first step, and one for the others."""
        return (self.step.cold, self.step.warm) if self.run.settings.starts_cold else (self.step,)

    @property
    def program(self) -> jax.stages.Compiled:
        """The program that ran last."""
        return self.step.last if self.run.settings.starts_cold else self.step

    def initial_state(self) -> State:
        with jax.set_mesh(self.run.mesh):
            return self.run.initial_state(self.abstract)

    def time_steps(
        self, batch: dict[str, jax.Array], steps: int, seconds: float = float("inf")
    ) -> tuple[list[float], dict[str, jax.Array]]:
        """Times steps on one batch, after a first step of each program, which counts as compilation.

        Args:
          steps: the largest number of timed steps.
          seconds: from three steps on, no other begins once their sum reaches this.

        Returns:
          the seconds of each timed step, and the metrics of the last one.
        """
        state, taken = self.initial_state(), []
        jax.block_until_ready((state, batch))
        for _ in self.programs:
            (state, metrics), first = timed(self.step, state, batch)
            self.compile_seconds += first
        while len(taken) < steps and (len(taken) < 3 or sum(taken) < seconds):
            (state, metrics), one = timed(self.step, state, batch)
            taken.append(one)
        return taken, metrics


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The result of a call, and the seconds until the devices have computed it."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return result, time.perf_counter() - start


def matmul_types(hlo: str) -> Counter[str]:
    """The number of matmuls in an optimized program by the dtypes of their operands: {"bf16·bf16": 3}.

    A matmul in the body of a loop counts once.
    """
    types = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", hlo))
    found: Counter[str] = Counter()
    for line in hlo.splitlines():
        match = re.search(r"(?:cublas[^\"]*\"|= \S+ dot\(|= \S+ convolution\()", line)
        operands = re.search(r"(?:custom-call|dot|convolution)\(([^)]*)\)", line)
        if match and operands:
            names = re.findall(r"%([\w.-]+)", operands[1])[:2]
            found["·".join(types.get(name, "?") for name in names)] += 1
    return found
