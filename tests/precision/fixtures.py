"""One matmul under any recipe, and a network without rounding."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxlp.core.gradients import token_gradients
from maxlp.families.llama import task
from maxlp.nn import stack
from maxlp.parallel import sharding
from maxlp.precision import delayed, inject, make_recipe
from maxlp.precision.dot import QuantDot
from tests.fixtures import Trainer, make_mesh
from tests.nn.fixtures import MlpBlock

# --- one layer ----------------------------------------------------------------------------------------


class Layer:
    """A `QuantDot` outside of a model: `step` is its forward and backward pass as a pure function."""

    def __init__(self, recipe):
        self.structure, backward, forward = nnx.split(QuantDot(recipe), delayed.OverwriteWithGradient, ...)
        self.state = nnx.to_pure_dict(forward), nnx.to_pure_dict(backward)

    def step(self, state, x, kernel, g, out_sharding=None):
        """Output, gradients of input and kernel, and the new state; the kernel is cast as in `Linear`."""
        forward, backward = state
        numbers = (((x.ndim - 1,), (0,)), ((), ()))

        def product(x, kernel, backward):
            dot = nnx.merge(self.structure, forward, backward, copy=True)
            y = dot(x, kernel.astype(x.dtype), numbers, out_sharding=out_sharding)
            return y, nnx.to_pure_dict(nnx.split(dot, delayed.OverwriteWithGradient, ...)[2])

        y, pull, forward = jax.vjp(product, x, kernel, backward, has_aux=True)
        dx, dkernel, backward = pull(g)
        return y, dx, dkernel, (forward, backward)


# --- a network without rounding: no order of its sums changes its results ---------------------------------


class Exact(nnx.Module):
    """Weights of -1, 0 and 1, most of them 0; the loss weighs outputs by the batch's small integers."""

    def __init__(self, scan, remat, rngs, num_layers=3):
        self.layers = stack.stack(MlpBlock, num_layers, rngs)
        for linear in (self.layers.up_proj, self.layers.down_proj):
            draw = jax.random.randint(rngs.params(), linear.kernel.shape, 0, 8)
            linear.kernel[...] = jnp.where(draw == 0, 1.0, jnp.where(draw == 1, -1.0, 0.0))
        self.how = nnx.static(dict(num_layers=num_layers, scan=scan, remat=remat))

    def __call__(self, x_BSD):
        return stack.apply_stack(self.layers, x_BSD, lambda block, x, *_: (block(x), None), **self.how)[0]


def exact_loss(model, batch):
    x_BSD = batch["x"].reshape(*batch["loss_mask"].shape, 8).astype(jnp.float32)
    y_BSD = model(sharding.constrain(x_BSD, "batch", None, None))
    weight_BSD = batch["weight"].reshape(y_BSD.shape).astype(jnp.float32)
    return {"loss": jnp.sum(y_BSD * weight_BSD), "correct": jnp.zeros((), jnp.float32)}


def exact_batch(seed):
    """A batch of integers; its number of tokens is a power of two, so that means over them are exact."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(-2, 3, (16, 4 * 8), np.int32),
        "weight": rng.integers(-1, 2, (16, 4 * 8), np.int32),
        "loss_mask": np.ones((16, 4), bool),
    }


def exact_trainer(
    devices=1, *, microbatches=1, tx=None, scan=True, remat="none", unquantized_blocks=0, recipe=None
) -> Trainer:
    """A trainer of the network, by default with delayed scaling and a learning rate of 0."""

    def make(rngs):
        model = Exact(scan, remat, rngs)
        chosen = recipe or make_recipe("fp8_delayed", history=3)
        inject(model, chosen, first_blocks=unquantized_blocks, last_blocks=unquantized_blocks)
        return model

    gradients = token_gradients(exact_loss, task.num_targets, microbatches=microbatches)
    tx = optax.sgd(0.0) if tx is None else tx
    return Trainer(make_mesh(fsdp=devices), make_model=make, gradients=gradients, tx=tx)


@functools.cache
def exact_params() -> dict:
    """Initial parameters of the network on the host."""
    return jax.device_get(exact_trainer().init()["params"])


# --- docs/low_precision.md ------------------------------------------------------------------------------


def table_rows(title: str) -> dict[str, list[str]]:
    """The cells of a table by the name of the recipe, its first cell."""
    page = (Path(__file__).parents[2] / "docs/low_precision.md").read_text()
    table = page.split(title)[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def documented_recipes() -> dict[str, list[str]]:
    return table_rows("| recipe | bits | rounding | state | hardware |")
