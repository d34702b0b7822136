"""Muon for stacked parameters: orthogonal steps for the matrices of the blocks.

With the momentum M of one layer's (m, n) matrix (Jordan et al. 2024, kellerjordan.github.io/posts/muon)

    M ← beta · M + (1 - beta) · G
    O = NewtonSchulz((1 - beta) · G + beta · M)            near U Vᵀ of its SVD
    step = rms · √max(m, n) · O                            Liu et al. 2025, arXiv:2502.16982

A step is as long as a typical one of Adam, which trains the other parameters, so that all share one
learning rate and one weight decay.

NorMuon (Li et al. 2025, arXiv:2510.05491) evens out the lengths of the neurons' steps, the columns of O:

    v ← b2 · v + (1 - b2) · mean(O², over a column)        step = rms · √(m n) · Ô / ‖Ô‖, Ô = O / (√v + eps)

Sharding. The iteration multiplies whole matrices, so that layers are distributed: one all-to-all gives each
device whole matrices of some layers, and another one returns their steps. No matrix is iterated on twice,
except by replicas (the axis `data`). Layers of zeros make their number divisible by the devices. Where that
is not possible, because stages split the layers or there is a single one, mesh axes shard the long side of
each matrix; all its Gram matrices are then summed over the devices, and each device squares them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.config import Conflict, OptimizerConfig, OptimizerKind
from maxlp.optim.partition import by_target
from maxlp.optim.tree_utils import HIDDEN_KERNELS, Targets, widened
from maxlp.parallel.by_layers import gather_back, spread
from maxlp.schema import Count, DecayRate, Positive

TOGETHER = 2**26  # numbers in the matrices on which one device iterates at a time


class NeuronState(NamedTuple):
    """The second moment of each neuron's orthogonal step, float32 (*layers, 1, n)."""

    v: optax.Updates


def scale_by_muon(
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    beta: DecayRate = 0.95,
    ns_steps: Count = 5,
    rms: Positive = 0.2,
    adam_rate: Positive = 1.0,
    targets: Targets = HIDDEN_KERNELS,
) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, Adam for all other parameters.

    Args:
      b1, b2, eps: of Adam.
      mu_dtype: dtype of the first moments; None for the parameter's.
      beta: decay rate of the (Nesterov) momentum.
      ns_steps: Newton-Schulz iterations.
      rms: RMS of a Muon step, in units of the learning rate.
      adam_rate: factor on Adam's steps, to give its parameters a learning rate of their own.
      targets: regular expressions, searched in names such as `layers/attn/q_proj/kernel`.
    """

    def to_rms(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        # The RMS of an orthogonal (m, n) matrix is 1/√max(m, n).
        return jax.tree.map(lambda u: rms * max(u.shape[-2:]) ** 0.5 * u, updates)

    muon = optax.chain(_orthogonal(beta, ns_steps, eps, mu_dtype), optax.stateless(to_rms))
    return by_target({"muon": muon, "adam": _adam(b1, b2, eps, mu_dtype, adam_rate)}, targets)


def scale_by_normuon(
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    beta: DecayRate = 0.95,
    ns_steps: Count = 5,
    rms: Positive = 0.2,
    adam_rate: Positive = 1.0,
    targets: Targets = HIDDEN_KERNELS,
) -> optax.GradientTransformation:
    """NorMuon for the matrices of the layers; arguments as in `scale_by_muon`, with b2 and eps as above."""
    neurons = _neurons_to_rms(b2, eps, rms)
    normuon = optax.chain(_orthogonal(beta, ns_steps, eps, mu_dtype), neurons)
    return by_target({"muon": normuon, "adam": _adam(b1, b2, eps, mu_dtype, adam_rate)}, targets)


def _adam(b1: float, b2: float, eps: float, mu_dtype: Any, rate: float) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        updates, state = adam.update(updates, state, params)
        return jax.tree.map(lambda u: rate * u, updates), state

    return optax.GradientTransformation(adam.init, update)


def _orthogonal(beta: float, ns_steps: int, eps: float, mu_dtype: Any) -> optax.GradientTransformation:
    """Gives the orthogonalized momentum of gradients, with state and coefficients of optax's Muon."""

    init = optax.contrib.scale_by_muon(mu_dtype=mu_dtype).init

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)

        def one(g: jax.Array, m: jax.Array) -> jax.Array:
            ahead = (1 - beta) * g + beta * m
            return orthogonalized(ahead, state.ns_coeffs, ns_steps, eps).astype(g.dtype)

        updates = jax.tree.map(functools.partial(_by_layers, one), updates, mu)
        count = optax.safe_increment(state.count)
        return updates, state._replace(count=count, mu=optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init, update)


def _by_layers(fn: Callable[..., jax.Array], *stacks: jax.Array) -> jax.Array:
    """``fn`` of arrays (*layers, m, n), on a single device of a few layers at a time.

    The iteration has temporaries several times as large as its matrices. On a mesh the layers are
    distributed over the devices instead.
    """
    mesh, (*layers, m, n) = jax.sharding.get_abstract_mesh(), stacks[0].shape
    if not layers or mesh.size > 1:
        return fn(*stacks)
    divisors = [d for d in range(1, layers[0] + 1) if layers[0] % d == 0]
    together = max((d for d in divisors if d * m * n <= TOGETHER), default=1)
    if together == layers[0]:
        return fn(*stacks)
    return jax.lax.map(lambda part: fn(*part), stacks, batch_size=together)


def orthogonalized(x: jax.Array, coefficients: jax.Array, steps: int, eps: float) -> jax.Array:
    """Newton-Schulz iterations for each matrix of (*layers, m, n), in float32.

    They bring all singular values to about 0.7 to 1.2, with Jordan's coefficients (a, b, c):

        X ← X / ‖X‖        X ← a X + (b X Xᵀ + c (X Xᵀ)²) X
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    with jax.named_scope("newton_schulz"):
        x = widened(jnp.swapaxes(x, -2, -1) if tall else x)
        y = spread(x)
        y = y / (jnp.linalg.norm(y, axis=(-2, -1), keepdims=True) + eps)
        for _ in range(steps):
            gram = y @ jnp.swapaxes(y, -2, -1)
            y = a * y + (b * gram + c * gram @ gram) @ y
        y = gather_back(y, like=x)
    return jnp.swapaxes(y, -2, -1) if tall else y


def _neurons_to_rms(b2: float, eps: float, rms: float) -> optax.GradientTransformation:
    def init(params: optax.Params) -> NeuronState:
        return NeuronState(jax.tree.map(lambda p: jnp.zeros_like(p[..., :1, :], jnp.float32), params))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params

        def moment(u: jax.Array, v: jax.Array) -> jax.Array:
            return b2 * v + (1 - b2) * jnp.mean(jnp.square(widened(u)), axis=-2, keepdims=True)

        def one(u: jax.Array, v: jax.Array) -> jax.Array:
            even = u / (jnp.sqrt(v) + eps)
            norm = jnp.linalg.norm(even, axis=(-2, -1), keepdims=True)
            return (rms * math.prod(u.shape[-2:]) ** 0.5 * even / (norm + eps)).astype(u.dtype)

        v = jax.tree.map(moment, updates, state.v)
        return jax.tree.map(one, updates, v), NeuronState(v)

    return optax.GradientTransformation(init, update)


def _normuon_conflicts(config: OptimizerConfig) -> Iterator[Conflict]:
    """The keys that NorMuon cannot work with."""
    if config.galore is not None and config.galore.moments != "keep":
        reason = "its second moments are of neurons; set galore.moments='keep'"
        yield "galore.moments", config.galore.moments, reason


MUON = OptimizerKind(
    scale_by=scale_by_muon, second_moment=optax.ScaleByAdamState, matmuls="iterated", moves=2
)
NORMUON = dataclasses.replace(MUON, scale_by=scale_by_normuon, conflicts=_normuon_conflicts)
