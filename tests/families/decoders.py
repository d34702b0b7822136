"""Decoders against Hugging Face's: the goldens of `tools`, and what a model here computes from them."""

import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp.core.train_state import abstract_model
from maxlp.families import weights
from maxlp.families.llama import losses
from maxlp.families.llama.model import Llama, LlamaConfig
from maxlp.parallel import sharding
from tests.families.goldens import read_golden

RUN = dict(dtype="float32", param_dtype="float32", attention="xla", scan_layers=True, remat="none")


class Golden(NamedTuple):
    """A golden: its config, the weights and some gradients by name, and other arrays.

    Attributes:
      hf: the family's module of names.
    """

    hf: ModuleType
    config: LlamaConfig
    weights: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]


def load(name: str, hf: ModuleType) -> Golden:
    config, groups = read_golden(name)
    config = LlamaConfig(**hf.config_from_hf(config), **RUN)
    return Golden(hf, config, groups["weights"], groups["grads"], groups[""])


@functools.lru_cache
def abstract(config: LlamaConfig) -> tuple[nnx.GraphDef, dict]:
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    graphdef, state = abstract_model(lambda rngs: Llama(config, rngs=rngs), mesh)
    return graphdef, state["params"]


def params_of(golden: Golden) -> dict:
    return weights.to_maxlp(golden.weights, abstract(golden.config)[1], golden.hf.LAYOUT)


def loss_and_logits(params: dict, config: LlamaConfig, tokens, positions) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of the next token, and all logits."""
    model = nnx.merge(abstract(config)[0], params)
    x_BSD, _ = model.hidden(tokens, positions)
    targets = tokens[:, 1:]
    logits_BSV = model.logits(x_BSD)
    sums = losses.next_token(logits_BSV[:, :-1], targets, jnp.ones_like(targets, bool), z_loss=0.0)
    return sums["loss"] / sums["tokens"], logits_BSV


def assert_same_outputs_and_gradients(golden: Golden, config: LlamaConfig) -> None:
    """Logits, loss and gradients of a model with the weights of a golden equal those in the file."""
    arrays = golden.arrays
    compute = jax.jit(lambda p, *x: jax.value_and_grad(loss_and_logits, has_aux=True)(p, config, *x))
    (loss, logits), grads = compute(params_of(golden), arrays["tokens"], arrays["positions"])
    # float32 on both sides: logits of some tens, after a few roundings of 2e-6 each
    np.testing.assert_allclose(logits, arrays["logits"], atol=3e-5, rtol=0)
    np.testing.assert_allclose(loss, arrays["loss"], atol=3e-6, rtol=0)
    grads = weights.to_other(grads, golden.hf.LAYOUT)
    for key, expected in golden.grads.items():
        atol = 1e-5 * np.abs(expected).max()  # the same through the backward pass, twice as long
        np.testing.assert_allclose(grads[key], expected, atol=atol, rtol=0, err_msg=key)


def assert_round_trip(golden: Golden) -> None:
    """The tensors of a golden survive the way to parameters and back, bit for bit."""
    back = weights.to_other(params_of(golden), golden.hf.LAYOUT)
    assert set(back) == set(golden.weights)
    for key, weight in golden.weights.items():
        np.testing.assert_array_equal(back[key], weight, strict=True)
