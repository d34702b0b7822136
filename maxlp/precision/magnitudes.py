"""The mean |x| that each block of a stack leaves in the residual stream, as metrics of training.

Wortsman et al. 2023 (arXiv:2304.13013, section 2.3) plot it over the depth of a ViT: it grows from block to
block where tensor-wise FP8 fails, and stays level with layer-scale from zero.

The measurement is one more forward pass over the whole batch, in the run's own precision. The mean is over
all positions, padding included. Blocks run one after another, also where training unrolls them.

Shape letters: L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlp.nn.stack import StackCall, find_stacks, index_layer


def measure(
    state: Any, batch: Any, *, graphdef: nnx.GraphDef, loss: Callable[[nnx.Module, Any, jax.Array], Any]
) -> dict[str, jax.Array]:
    """`of_blocks` in the forward pass of a batch; call it in a jitted function, as `run.measurements` does.

    Args:
      loss: (model, batch, step) to the loss, a `core.gradients.Loss`; its value is not computed.
    """
    model = nnx.merge(graphdef, state["params"], state["model_state"])
    return of_blocks(model, lambda: loss(model, batch, state["step"]))


def metrics(found: dict[str, Any]) -> dict[str, float]:
    """``magnitude/<path>/<layer>`` of each block, from what `measure` returns."""
    return {f"magnitude/{path}/{i}": float(x) for path, x_L in found.items() for i, x in enumerate(x_L)}


def of_blocks(model: nnx.Module, forward: Callable[[], Any]) -> dict[str, jax.Array]:
    """The mean |x| of each block's output, float32 (L,), by the path of the stack.

    Args:
      model: each of its stacks is called once by ``forward``; no other use of it may follow.
    """
    found: dict[str, jax.Array] = {}
    for name, blocks in find_stacks(model).items():
        blocks.run_stack = nnx.static(functools.partial(_run_stack, found, name))
    forward()
    return found


def _run_stack(found: dict[str, jax.Array], name: str, call: StackCall) -> jax.Array:
    _, *variables = nnx.split(call.blocks, nnx.Param, ...)
    stacks = tuple(map(nnx.to_pure_dict, variables))
    x, means = call.x, []
    for start, stop, plain in call.parts:

        def body(x: jax.Array, i: jax.Array, plain=plain) -> tuple[jax.Array, jax.Array]:
            params, state = index_layer(stacks, i)
            x, _ = call.layer(x, params, state, plain)
            return x, jnp.mean(jnp.abs(x.astype(jnp.float32)))

        x, mean = jax.lax.scan(body, x, jnp.arange(start, stop))
        means.append(mean)
    found[name] = jnp.concatenate(means)
    return x
