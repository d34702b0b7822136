"""Muon for stacked parameters: orthogonal steps for the matrices of the blocks."""

from typing import Annotated, Any

import jax
import optax
from jax.tree_util import KeyPath

from maxlp.optim.tree_utils import HIDDEN_KERNELS, LayerAxes, layer_axes, matches
from maxlp.schema import Count, DecayRate, Positive, RegularExpression


def scale_by_muon(
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    beta: DecayRate = 0.95,
    ns_steps: Count = 5,
    rms: Positive = 0.2,
    targets: tuple[Annotated[str, RegularExpression()], ...] = HIDDEN_KERNELS,
    layer_axes: LayerAxes = layer_axes,
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices of the layers, Adam for all other parameters.

    The momentum M of each layer's (m, n) matrix is replaced by the nearest orthogonal matrix, scaled to
    the RMS of a typical Adam step, so that both share one learning rate and one weight decay (Liu et al.
    2025, arXiv:2502.16982):

        U = rms · √max(m, n) · NewtonSchulz(M)

    Args:
      b1, b2, eps: of Adam.
      mu_dtype: dtype of the first moments; None for the parameter's.
      beta: decay rate of the (Nesterov) momentum.
      ns_steps: Newton-Schulz iterations.
      rms: RMS of a Muon step, in units of the learning rate.
      targets: regular expressions, searched in names such as `layers/attn/q_proj/kernel`.
      layer_axes: gives the number of leading layer axes of the parameter at a path.
    """

    def dimensions(params: optax.Params) -> Any:
        def one(path: KeyPath, _: Any) -> optax.contrib.MuonDimensionNumbers:
            n = layer_axes(path)
            return optax.contrib.MuonDimensionNumbers((n,), (n + 1,))

        return jax.tree.map_with_path(one, params)

    def to_rms(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        # The RMS of an orthogonal (m, n) matrix is 1/√max(m, n).
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
