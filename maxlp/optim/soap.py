"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv:2409.11321).

For one layer's (m, n) matrix with gradient G, and with Q_L, Q_R the eigenvectors of L and R

    M ← b1 · M + (1 - b1) · G                     V ← b2 · V + (1 - b2) · (Q_Lᵀ G Q_R)²
    step = Q_L · (Q_Lᵀ M̂ Q_R / (√V̂ + eps)) · Q_Rᵀ
    L ← b2 · L + (1 - b2) · G Gᵀ                  R ← b2 · R + (1 - b2) · Gᵀ G

(algorithm 3; the hats are Adam's bias correction). The first gradient gives the first bases and no step, as
in the authors' code, so that no gradient is rotated to a basis that it has shaped. Later, every
`precondition_frequency` steps, Q ← QR(L Q), one step of a power iteration. Its columns are sorted by their
eigenvalues first, and V with them. M is kept in the space of the gradient, so that no result depends on the
signs of eigenvectors, which libraries leave open.

Until the gradients span a long side, the rest of its basis is arbitrary: there, steps differ between
devices or meshes by more than rounding. `one_sided` avoids that, and the memory of long sides.

The state of a matrix has 2 m n + 2 m² + 2 n² numbers. Layers are distributed over the devices, as with
Muon: each device keeps the sides and second moments of its own layers. In a step it receives their
gradients and first moments and sends their steps back; in a refresh it decomposes only their sides. Where
no mesh axis divides the number of layers, sides and second moments are stored by columns, and they too are
distributed by layers for the update, with layers of zeros. Where only some axes do, or stages split the
layers, the other axes split columns, and each step gathers the bases.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlp.optim.config import OptimizerKind
from maxlp.optim.partition import by_target
from maxlp.optim.tree_utils import HIDDEN_KERNELS, Targets, widened
from maxlp.parallel.by_layers import (
    LikeParams,
    by_layer,
    gather_back,
    gather_back_state,
    keep_spread,
    spread,
    spread_state,
)
from maxlp.parallel.opt_state import SplitByLayers
from maxlp.schema import Count


class Side(NamedTuple):
    """L or R of a matrix, and its eigenvectors as rows: float32 (*layers, m, m)."""

    gram: jax.Array
    basis: jax.Array


class Rotated(NamedTuple):
    """The second moment in the eigenbasis, and a `Side` for L and R of each matrix.

    A side that is too long has an `optax.MaskedNode` instead.
    """

    nu: optax.Updates
    left: Any
    right: Any


class SoapState(NamedTuple):
    """The number of gradients so far, the first moment, and `Rotated` of whole matrices.

    The first moment is sharded like the parameters. From it XLA infers the sharding of the gradients before
    they are distributed by layers.
    """

    count: jax.typing.ArrayLike
    mu: optax.Updates
    whole: SplitByLayers | LikeParams


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


def _soap(
    b1: float, b2: float, eps: float, mu_dtype: Any, gap: int, no_side: Callable[..., Any]
) -> optax.GradientTransformation:
    def init(params: optax.Params) -> SoapState:
        zeros = optax.tree.zeros_like(widened(params))
        left = jax.tree.map(functools.partial(no_side, dim=-2), params)
        right = jax.tree.map(functools.partial(no_side, dim=-1), params)
        whole = SplitByLayers(Rotated(zeros, left, right))
        return SoapState(jnp.zeros([], jnp.int32), optax.tree.cast(zeros, mu_dtype), whole)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        count, whole = state.count, state.whole.state
        steps = jnp.maximum(count, 1)  # the first gradient takes none
        seen = jnp.where(count == 0, 0.0, 1.0)
        turned = functools.partial(_turned, count=count, gap=gap, b2=b2)

        def one(u: jax.Array, m: jax.Array, v: jax.Array, left: Any, right: Any) -> tuple:
            m = b1 * widened(m) + seen * (1 - b1) * widened(u)
            g = spread(widened(u), with_state=True)
            bases = [_basis(side) for side in (left, right)]
            nu = b2 * spread_state(v) + seen * (1 - b2) * _rotated(g, bases) ** 2
            # Without the barrier XLA would take the spread m for all later uses of m, and gather it again.
            m_hat = spread(jax.lax.optimization_barrier(m), with_state=True)
            m_hat = _rotated(m_hat, bases) / (1 - b1**steps)
            scaled = m_hat / (jnp.sqrt(nu / (1 - b2**steps)) + eps)
            u = gather_back(_rotated(scaled, bases, back=True), like=u).astype(u.dtype)
            # The bases turn in place, after the last use of the old ones.
            u, left, right = jax.lax.optimization_barrier((u, left, right))
            left, nu = turned(g, nu, left, dim=-2)
            right, nu = turned(g, nu, right, dim=-1)
            return u, optax.tree.cast(m, mu_dtype), gather_back_state(nu, like=v), left, right

        leaves, structure = jax.tree.flatten(updates)
        others = map(structure.flatten_up_to, (state.mu, whole.nu, whole.left, whole.right))
        done: list[tuple] = []
        on_mesh = jax.sharding.get_abstract_mesh().size > 1
        for of_matrix in zip(leaves, *others, strict=True):
            if done and on_mesh:  # one by one: otherwise XLA would hold the temporaries of all at once
                of_matrix, done[-1] = jax.lax.optimization_barrier((of_matrix, done[-1]))
            done.append(one(*of_matrix))
        updates, mu, *rest = (structure.unflatten(new[i] for new in done) for i in range(5))
        whole = state.whole._replace(state=Rotated(*rest))
        return updates, SoapState(optax.safe_increment(count), mu, whole)

    return optax.GradientTransformation(init, update)


def _no_side(p: jax.Array, *, dim: int, longest: int, one_sided: bool) -> Side | optax.MaskedNode:
    """A side before the first gradient, or the placeholder of one that is not rotated."""
    m, n = p.shape[-2:]
    short = -2 if m <= n else -1
    if p.shape[dim] > longest or (one_sided and dim != short):
        return optax.MaskedNode()
    zeros = jnp.zeros((*p.shape[:-2], p.shape[dim], p.shape[dim]), jnp.float32)
    return Side(zeros, zeros)


def _basis(side: Any) -> jax.Array | None:
    """The basis of a side, split by layers; None if it is not rotated."""
    return spread_state(side.basis) if isinstance(side, Side) else None


def _rotated(x: jax.Array, bases: list[jax.Array | None], back: bool = False) -> jax.Array:
    """Q_Lᵀ X Q_R or, with ``back``, Q_L X Q_Rᵀ."""

    def one(x: jax.Array, left: jax.Array | None, right: jax.Array | None) -> jax.Array:
        if left is not None:
            x = (_transposed(left) if back else left) @ x
        if right is not None:
            x = x @ (right if back else _transposed(right))
        return x

    return by_layer(one, x, *bases, alone=False)


def _turned(
    g: jax.Array, nu: jax.Array, side: Any, *, count: jax.Array, gap: int, dim: int, b2: float
) -> tuple[Any, jax.Array]:
    """Adds the gradient to a side, and moves the second moment to its new basis at a refresh."""
    if not isinstance(side, Side):
        return side, nu

    def add(gram: jax.Array, g: jax.Array) -> jax.Array:
        return b2 * gram + (1 - b2) * (g @ _transposed(g) if dim == -2 else _transposed(g) @ g)

    def first(basis: jax.Array, nu: jax.Array, gram: jax.Array) -> tuple[jax.Array, jax.Array]:
        del basis
        _, vectors = jnp.linalg.eigh(gram)  # as columns, the smallest eigenvalue first
        return _transposed(vectors)[..., ::-1, :], nu

    def later(basis: jax.Array, nu: jax.Array, gram: jax.Array) -> tuple[jax.Array, jax.Array]:
        # In the default precision of accelerators, directions of small eigenvalues would mix.
        power = jnp.matmul(basis, gram, precision="highest")
        order = jnp.argsort(jnp.sum(basis * power, axis=-1), axis=-1, descending=True)[..., None]
        q, _ = jnp.linalg.qr(_transposed(jnp.take_along_axis(power, order, axis=-2)))
        along = order if dim == -2 else _transposed(order)
        return _transposed(q), jnp.take_along_axis(nu, along, axis=dim)

    def refreshed(turning: tuple[jax.Array, jax.Array], gram: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(count == 0, first, later, *turning, gram)

    def due() -> tuple[jax.Array, jax.Array]:
        turning = by_layer(refreshed, (spread_state(side.basis), nu), gram)
        basis, turned = jax.tree.map(keep_spread, turning)
        return gather_back_state(basis, like=side.basis), turned

    gram = by_layer(add, spread_state(side.gram), g, alone=False)
    basis, nu = jax.lax.cond(count % gap == 0, due, lambda: (side.basis, nu))
    return Side(gather_back_state(gram, like=side.gram), basis), nu


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -2, -1)


SOAP = OptimizerKind(
    scale_by=scale_by_soap,
    not_galore="its bases are those of whole gradients",
    second_moment=optax.ScaleByAdamState,  # that of all other parameters
    matmuls="once",
    moves=3,
)
