"""Taps: without given values they record and change nothing; given values go forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp.core.gradients import batch_gradients
from maxlp.nn.layers import Linear
from maxlp.parallel.batches import global_batch
from maxlp.precision import taps
from tests.fixtures import Trainer, batch


class Two(nnx.Module):
    def __init__(self, rngs):
        sizes = dict(axes=("embed", "mlp"), std=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
        self.first, self.second = Linear(3, 4, **sizes), Linear(4, 2, **sizes)

    def __call__(self, x):
        return self.second(2 * self.first(x))


def loss(model, batch, step):
    value = jnp.sum(jnp.square(model(batch["x"])))
    return value, {"loss": value}


@functools.cache
def setup():
    graphdef, params, _ = nnx.split(Two(nnx.Rngs(0)), nnx.Param, ...)
    state = {"params": nnx.to_pure_dict(params), "model_state": {}, "step": 0}
    data = {"x": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)}
    plain = batch_gradients(loss)

    def trace(graphdef, state):
        return plain(graphdef, state, data, None)

    tapped, found = taps.with_taps(graphdef, state, trace)

    def run(given):
        grads, own, metrics = trace(
            tapped, state | {"model_state": nnx.traversals.unflatten_mapping(given)}
        )
        return grads, nnx.traversals.flatten_mapping(own), metrics["loss"]

    nothing = {path: np.full(tap.shape, np.nan, np.float32) for path, tap in found.items()}
    return trace(graphdef, state), run, nothing, data["x"], state["params"]


def test_taps_record_and_change_nothing():
    (grads, _, metrics), run, nothing, x, params = setup()
    assert list(nothing) == [
        (layer, f"tap_{end}") for layer in ("first", "second") for end in ("input", "output")
    ]
    tapped_grads, own, value = run(nothing)
    jax.tree.map(np.testing.assert_array_equal, tapped_grads, grads)
    assert value == metrics["loss"]
    y = own["second", "tap_output"]
    np.testing.assert_array_equal(own["first", "tap_input"][0], x)
    np.testing.assert_array_equal(y[1], 2 * y[0])  # the gradient of a square
    np.testing.assert_array_equal(own["second", "tap_input"][1], y[1] @ params["second"]["kernel"].T)


def test_given_values_replace_those_of_the_program():
    """Each layer then depends on what it is given, and the first on nothing in the second."""
    _, run, nothing, x, params = setup()
    given = {path: np.ones_like(values) for path, values in nothing.items()}
    grads, own, value = run(given)
    assert value == 10  # squares of the given output
    np.testing.assert_allclose(own["first", "tap_output"][0], np.ones_like(x) @ params["first"]["kernel"])
    np.testing.assert_array_equal(own["second", "tap_input"][0], 2)  # twice the given output of the first
    np.testing.assert_array_equal(own["first", "tap_output"][1], 2)  # twice the given gradient
    np.testing.assert_array_equal(grads["second"]["kernel"], np.full((4, 2), 5.0))
    np.testing.assert_array_equal(grads["first"]["kernel"], np.full((3, 4), 5.0))


def test_the_taps_of_a_llama_are_in_the_order_of_its_layers():
    trainer = Trainer()
    data = global_batch(batch(0), trainer.mesh)
    with jax.set_mesh(trainer.mesh):
        _, found = taps.with_taps(
            trainer.graphdef, trainer.abstract, lambda *args: trainer.gradients(*args, data, None)
        )
    modules = list(dict.fromkeys("/".join(path[:-1]) for path in found))
    attention = [f"layers/attn/{name}_proj" for name in "qkvo"]
    mlp = [f"layers/mlp/{name}_proj" for name in ("gate", "up", "down")]
    blocks = ["layers/attn_norm", *attention, "layers/mlp_norm", *mlp]
    assert modules == ["tok_embed", *blocks, "final_norm"]
    assert found["layers", "mlp", "up_proj", "tap_output"] == taps.Tap(2, (2, 2, 8, 32, 96), jnp.float32)
    assert ("layers", "attn", "q_proj", "tap_input") in found  # which the others of the same input share
    assert ("layers", "attn", "k_proj", "tap_input") not in found
