"""The two programs of a train step with delayed scales.

While a history is empty, its scale is that of the data (`precision.delayed`), and a program that can wait
for the data reads each tensor twice. Where every history has a value, a program without this choice
computes the same numbers and reads them once. Which of the two runs is a function of the state before the
step: a run that is resumed takes the same one at each step.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from maxlp.core import train_step
from maxlp.core.gradients import Batch, Metrics
from maxlp.core.train_state import State
from maxlp.nn.stack import Block, path_name
from maxlp.parallel import sharding
from maxlp.precision.dot import QuantDot
from maxlp.runtime.distributed import print_primary


def jit_step(
    step: train_step.Step, graphdef: nnx.GraphDef, abstract: State, mesh: Mesh, resumes: bool
) -> "Programs":
    """As `train_step.jit_step`, for a model with delayed scales that start cold."""
    warm = without_cold_start(graphdef, abstract)
    cold, warm = (train_step.jit_step(step, model, abstract, mesh) for model in (graphdef, warm))
    check = jax.jit(functools.partial(warm_steps, graphdef), out_shardings=sharding.replicated(mesh))
    return Programs(cold, warm, check, resumes)


@dataclasses.dataclass
class Programs:
    """A train step, (state, batch) to (state, metrics), that has two programs.

    It is lowered and compiled like one: both programs, or in a run that resumes the warm one; the cold one
    is then compiled if it is needed. (No program is compiled while another one runs: on a GPU the compiler
    measures kernels, and takes memory for that.)

    Attributes:
      cold, warm: the programs.
      warm_steps: see the function, of the state.
      resumes: whether the first step has a state from a checkpoint.
      last: the program that ran last.
    """

    cold: Any
    warm: Any
    warm_steps: Any
    resumes: bool = False
    last: Any = None
    _left: int = 0  # steps before which the host does not look at the state
    _returned: Callable[[], Any] = lambda: None  # the counter in the state after the last step

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        if not self._left or self._returned() is not state["step"]:  # another run's state may follow
            self._left = int(self.warm_steps(state))  # waits for the last step
        program = self.warm if self._left else self.cold
        if program is self.warm and self.last is self.cold:
            print_primary(f"from step {int(state['step']) + 1} on, delayed scales come from histories")
        self.last, self._left = program, max(self._left - 1, 0)
        state, metrics = program(state, batch)
        self._returned = weakref.ref(state["step"])
        return state, metrics

    def trace(self, *args: Any) -> jax.stages.Traced:
        return self.cold.trace(*args)

    def lower(self, *args: Any) -> "Programs":
        cold = self.cold if self.resumes else self.cold.lower(*args)
        return dataclasses.replace(self, cold=cold, warm=self.warm.lower(*args))

    def compile(self) -> "Programs":
        cold = self.cold if self.resumes else self.cold.compile()
        return dataclasses.replace(self, cold=cold, warm=self.warm.compile())


def without_cold_start(graphdef: nnx.GraphDef, abstract: State) -> nnx.GraphDef:
    """The model whose delayed scales never come from the data."""
    model = nnx.merge(graphdef, abstract["params"], abstract["model_state"])
    for _, dot in _quantized(model):
        dot.recipe = dataclasses.replace(dot.recipe, cold_start=False)
    return nnx.graphdef(model)


def warm_steps(graphdef: nnx.GraphDef, state: State) -> jax.Array:
    """For how many steps, from the next one on, every history is certain to have a value.

    A step adds one value to a history, or none if a gate rejects it. So the newest one that is not 0 stays
    for as many steps as the history has places behind it. Blocks that are not quantized add none.
    """
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    left = []
    for used, dot in _quantized(model):
        for history in dot.histories.values():
            values = history[...] > 0
            length = values.shape[-1]
            steps = jnp.where(jnp.any(values, -1), length - jnp.argmax(values, -1), 0)
            left.append(jnp.min(steps, where=used, initial=length))
    return jnp.min(jnp.stack(left))


def _quantized(model: nnx.Module) -> list[tuple[Any, QuantDot]]:
    """The quantized matmuls of a model, each with the layers of its stack that use it (True: all)."""
    dots = {path: module for path, module in nnx.iter_modules(model) if isinstance(module, QuantDot)}
    used: dict[Any, Any] = dict.fromkeys(dots, True)
    for outer, block in nnx.iter_modules(model):
        if not isinstance(block, Block) or not block.parts:
            continue
        for path in dots:
            if path[: len(outer)] == outer:
                linear = path_name(path[len(outer) : -1])
                layers = [[linear not in part.plain] * (part.stop - part.start) for part in block.parts]
                used[path] = np.concatenate(layers)
    return [(used[path], dot) for path, dot in dots.items()]
