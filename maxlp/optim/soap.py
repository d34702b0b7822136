"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv:2409.11321).

For one layer's (m, n) matrix with gradient G, and with Q_L, Q_R the eigenvectors of L and R

    M ← b1 · M + (1 - b1) · G                     V ← b2 · V + (1 - b2) · (Q_Lᵀ G Q_R)²
    step = Q_L · (Q_Lᵀ M̂ Q_R / (√V̂ + eps)) · Q_Rᵀ
    L ← b2 · L + (1 - b2) · G Gᵀ                  R ← b2 · R + (1 - b2) · Gᵀ G

(algorithm 3; the hats are Adam's bias correction). The first gradient gives the first bases and no step, as
in the authors' code: no gradient is seen in a basis that it has shaped. Later, every
`precondition_frequency` steps, Q ← QR(L Q), one step of a power iteration. Its columns are sorted by their
eigenvalues first, and V with them. M is kept in the space of the gradient, so that no result depends on the
signs of eigenvectors, which libraries leave open.

Until the gradients span a long side, the rest of its basis is arbitrary: there, another device or mesh
takes other steps, by more than rounding. `one_sided` avoids that, and the memory of long sides.

The state of a matrix has 2 m n + 2 m² + 2 n² numbers. On a mesh, all of them are sharded; a refresh gathers
the (m, m) and (n, n) arrays that it decomposes.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.config import Conflict, OptimizerConfig, OptimizerKind
from maxlp.optim.partition import by_target
from maxlp.optim.tree_utils import HIDDEN_KERNELS, Targets, widened
from maxlp.schema import Count


class Side(NamedTuple):
    """L or R of a matrix, and its eigenvectors as columns: float32 (*layers, m, m)."""

    gram: jax.Array
    basis: jax.Array


class SoapState(NamedTuple):
    """Gradients seen, Adam's moments, and a `Side` for L and R of each matrix.

    The second moment is in the eigenbasis. A side that is too long has an `optax.MaskedNode` instead.
    """

    count: jax.typing.ArrayLike
    mu: optax.Updates
    nu: optax.Updates
    left: Any
    right: Any


def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    precondition_frequency: Count = 10,
    max_precond_dim: Count = 10_000,
    one_sided: bool = False,
    targets: Targets = HIDDEN_KERNELS,
) -> optax.GradientTransformation:
    """SOAP for the matrices of the layers, Adam for all other parameters.

    Args:
      b1, b2, eps: of both; b2 is also the decay rate of L and R.
      mu_dtype: dtype of the first moments; None for float32 (of Adam's: the parameter's).
      precondition_frequency: steps between refreshes of the bases.
      max_precond_dim: longer sides of a matrix keep their coordinates.
      one_sided: only the short side of a matrix is rotated, the first of a square one.
      targets: regular expressions, searched in names such as `layers/attn/q_proj/kernel`.
    """
    sides = functools.partial(_no_side, longest=max_precond_dim, one_sided=one_sided)
    soap = _soap(b1, b2, eps, mu_dtype, precondition_frequency, sides)
    return by_target({"soap": soap, "adam": optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)}, targets)


def _conflicts(config: OptimizerConfig) -> Iterator[Conflict]:
    """The keys that SOAP cannot work with."""
    if config.galore is not None and config.has_galore:
        yield "galore.rank", config.galore.rank, "its bases are those of whole gradients; set galore.rank=0"


def _soap(
    b1: float, b2: float, eps: float, mu_dtype: Any, gap: int, no_side: Callable[..., Any]
) -> optax.GradientTransformation:
    def init(params: optax.Params) -> SoapState:
        zeros = optax.tree.zeros_like(widened(params))
        sides = (jax.tree.map(functools.partial(no_side, dim=dim), params) for dim in (-2, -1))
        return SoapState(jnp.zeros([], jnp.int32), optax.tree.cast(zeros, mu_dtype), zeros, *sides)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        count, grads = state.count, widened(updates)
        steps = jnp.maximum(count, 1)  # the first gradient takes none
        seen = jnp.where(count == 0, 0.0, 1.0)
        rotated = jax.tree.map(_rotated, grads, state.left, state.right)
        mu = jax.tree.map(lambda m, g: b1 * widened(m) + seen * (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, r: b2 * v + seen * (1 - b2) * r**2, state.nu, rotated)

        def step(u: jax.Array, m: jax.Array, v: jax.Array, left: Any, right: Any) -> jax.Array:
            m_hat = _rotated(m, left, right) / (1 - b1**steps)
            scaled = m_hat / (jnp.sqrt(v / (1 - b2**steps)) + eps)
            return _rotated(scaled, left, right, back=True).astype(u.dtype)

        updates = jax.tree.map(step, updates, mu, nu, state.left, state.right)
        left, nu = _turned(grads, nu, state.left, count=count, gap=gap, dim=-2, b2=b2)
        right, nu = _turned(grads, nu, state.right, count=count, gap=gap, dim=-1, b2=b2)
        mu = optax.tree.cast(mu, mu_dtype)
        return updates, SoapState(optax.safe_increment(count), mu, nu, left, right)

    return optax.GradientTransformation(init, update)


def _no_side(p: jax.Array, *, dim: int, longest: int, one_sided: bool) -> Side | optax.MaskedNode:
    """A side before the first gradient, or the placeholder of one that is not rotated."""
    m, n = p.shape[-2:]
    if p.shape[dim] > longest or (one_sided and dim != (-2 if m <= n else -1)):
        return optax.MaskedNode()
    zeros = jnp.zeros((*p.shape[:-2], p.shape[dim], p.shape[dim]), jnp.float32)
    return Side(zeros, zeros)


def _rotated(x: jax.Array, left: Any, right: Any, back: bool = False) -> jax.Array:
    """Q_Lᵀ X Q_R or, with ``back``, Q_L X Q_Rᵀ."""
    if isinstance(left, Side):
        x = (left.basis if back else _transposed(left.basis)) @ x
    if isinstance(right, Side):
        x = x @ (_transposed(right.basis) if back else right.basis)
    return x


def _turned(grads: Any, nu: Any, sides: Any, **options: Any) -> tuple[Any, Any]:
    """Adds the gradients to all left or all right sides, and moves the second moments to the new bases."""
    leaves, structure = jax.tree.flatten(grads)
    both = [
        _turned_side(*one, **options)
        for one in zip(leaves, structure.flatten_up_to(nu), structure.flatten_up_to(sides), strict=True)
    ]
    return structure.unflatten(side for side, _ in both), structure.unflatten(v for _, v in both)


def _turned_side(
    g: jax.Array, nu: jax.Array, side: Any, *, count: jax.Array, gap: int, dim: int, b2: float
) -> tuple[Any, jax.Array]:
    """As `_turned`, for one matrix; its basis changes only at a refresh."""
    if not isinstance(side, Side):
        return side, nu
    gram = b2 * side.gram + (1 - b2) * (g @ _transposed(g) if dim == -2 else _transposed(g) @ g)

    def first() -> tuple[jax.Array, jax.Array]:
        return jnp.linalg.eigh(gram)[1][..., ::-1], nu

    def later() -> tuple[jax.Array, jax.Array]:
        values = jnp.sum(side.basis * (gram @ side.basis), axis=-2)
        order = jnp.argsort(values, axis=-1, descending=True)[..., None, :]
        q, _ = jnp.linalg.qr(gram @ jnp.take_along_axis(side.basis, order, axis=-1))
        along = _transposed(order) if dim == -2 else order
        return q, jnp.take_along_axis(nu, along, axis=dim)

    def due() -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(count == 0, first, later)

    basis, nu = jax.lax.cond(count % gap == 0, due, lambda: (side.basis, nu))
    return Side(gram, basis), nu


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -2, -1)


SOAP = OptimizerKind(
    scale_by=scale_by_soap,
    conflicts=_conflicts,
    second_moment=optax.ScaleByAdamState,  # that of all other parameters
    matmuls="once",
)
