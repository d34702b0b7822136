"""Optax's other optimizers as rescalings of stacked parameters."""

import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from maxlp.optim.tree_utils import (
    HIDDEN_KERNELS,
    LayerAxes,
    layer_axes,
    matches,
    name_of,
    over_tensor,
    tensor_mean,
    widened,
)


def scale_by_adafactor(
    mu_dtype: Any = None,
    *,
    momentum: float = 0.0,
    decay_rate: float = 0.8,
    min_dim_size_to_factor: int = 128,
    clipping_threshold: float = 1.0,
    layer_axes: LayerAxes = layer_axes,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, algorithm 4) with an outer learning rate.

    The second moment of a matrix is kept as its row and column means, and steps are clipped to an RMS of
    `clipping_threshold` in each tensor of each layer. The two largest dims are factored: a stack must
    have fewer layers than its matrices have rows.

    Args:
        mu_dtype: dtype of the momentum, None for that of the parameters.
        momentum: decay rate of an average over steps; 0 keeps none.
        decay_rate: the second moment forgets at the rate 1 - t^-decay_rate.
        min_dim_size_to_factor: tensors with a smaller second largest dim keep the whole moment.
        clipping_threshold: RMS that a step may have.
        layer_axes: how many leading axes of the parameter at a path count its layers.
    """

    def clip(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        del params

        def one(path: KeyPath, u: jax.Array) -> jax.Array:
            rms = jnp.sqrt(tensor_mean(jnp.square(widened(u)), layer_axes(path)))
            return (u / over_tensor(jnp.maximum(1.0, rms / clipping_threshold), u)).astype(u.dtype)

        return jax.tree.map_with_path(one, updates)

    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor),
        optax.stateless(clip),
        optax.ema(momentum, debias=False, accumulator_dtype=mu_dtype) if momentum else optax.identity(),
    )


def scale_by_muon(
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    beta: float = 0.95,
    ns_steps: int = 5,
    rms: float = 0.2,
    targets: Sequence[str] = HIDDEN_KERNELS,
    layer_axes: LayerAxes = layer_axes,
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices of the layers, Adam for all else.

    The momentum of each layer's matrix is made orthogonal and scaled to the RMS of a usual Adam step, so
    that one learning rate and one weight decay serve both (Liu et al. 2025, arXiv:2502.16982).

    Args:
        b1, b2, eps: of Adam.
        mu_dtype: dtype of the first moments, None for that of the parameters.
        beta: decay rate of the momentum (with Nesterov's look ahead).
        ns_steps: Newton-Schulz iterations.
        rms: of a Muon step, in units of the learning rate.
        targets: regular expressions, searched in paths such as `layers/attn/q_proj/kernel`.
        layer_axes: how many leading axes of the parameter at a path count its layers.
    """

    def dimensions(params: optax.Params) -> Any:
        def one(path: KeyPath, _: Any) -> optax.contrib.MuonDimensionNumbers:
            n = layer_axes(path)
            return optax.contrib.MuonDimensionNumbers((n,), (n + 1,))

        return jax.tree.map_with_path(one, params)

    def to_rms(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        # An orthogonal (m, n) has an RMS of 1/√max(m, n).
        return jax.tree.map(lambda u: rms * max(u.shape[-2:]) ** 0.5 * u, updates)

    def labels(params: optax.Params) -> Any:
        return jax.tree.map_with_path(lambda k, _: "muon" if matches(k, targets) else "adam", params)

    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=ns_steps, beta=beta, eps=eps, mu_dtype=mu_dtype, weight_dimension_numbers=dimensions
    )
    return optax.partition(
        {
            "muon": optax.chain(orthogonal, optax.stateless(to_rms)),
            "adam": optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype),
        },
        labels,
    )


def scale_by_debiased_rms(b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam without its first moment: what schedule-free averaging wants inside."""
    return optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)


def eval_params(opt_state: Any, params: optax.Params) -> optax.Params:
    """The parameters to evaluate and to publish; with `schedule_free_adamw` not those that are trained.

    Args:
        opt_state: of a transformation made by `make_tx`, or its `eval_part`.
        params: the trained parameters.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=_averages):
        if _averages(node):
            state: Any = types.SimpleNamespace(**node) if isinstance(node, dict) else node
            return optax.contrib.schedule_free_eval_params(state, params)  # reads b1 and z alone
    return params


def eval_part(opt_state: Any) -> dict[str, Any]:
    """What `eval_params` needs of a state (arrays or shapes), at its place in nested dicts: {} for most.

    So a program that only evaluates restores that part alone:
    ``restore(path, {"params": …, "opt_state": eval_part(abstract["opt_state"])})``.
    """
    for path, node in jax.tree.flatten_with_path(opt_state, is_leaf=_averages)[0]:
        if _averages(node):
            part: dict[str, Any] = {"b1": node.b1, "z": node.z}
            for key in reversed(path):
                part = {name_of((key,)): part}
            return part
    return {}


def _averages(node: Any) -> bool:
    found = isinstance(node, dict) and {"b1", "z"} <= node.keys()
    return found or isinstance(node, optax.contrib.ScheduleFreeState)
