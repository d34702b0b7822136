"""GaLore: the optimizer runs in the subspace where the gradient mostly lives.

For a kernel with gradient G, of which m is the short side (written here as the first), every
`update_proj_gap` steps the left singular vectors of G give P, (m, r). In between

    R = Pᵀ G                  (r, n)   what the inner optimizer sees: its moments are r/m as large
    ΔW = scale · P · inner(R)  (m, n)

(Zhao et al. 2024, arXiv:2403.03507, algorithm 2.) Memory for a kernel falls from 2mn to mr + 2nr.

`optax.contrib.galore` (0.2.8) is another algorithm, for one device. It projects the *long* side (less
memory, another trajectory: `side="long"` here); kernels stacked over layers get plain Adam without a
word, and a `vmap` over layers would turn its condition into a selection and run the SVD at every step;
the projector has the dtype of the parameter, and its signs are left to the SVD library, though momentum
is kept across a refresh and the run depends on them; on a mesh every device gathers every gradient.

Sharding. The moments of R carry all mesh axes of their kernel on the long dim, the projector on the
short one (`parallel.opt_state` derives both from the shapes). The gradient is asked to
have its short dim whole, so that PᵀG and P·inner(R) need no communication: it changes from one split to
another, which moves each element once, and only the projector is gathered. `basis="randomized"` sums
(m, r) blocks over devices; `basis="svd"` gathers one layer's gradient at a time, at a refresh.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from maxlp.numerics.blockwise import decode, encode
from maxlp.optim.tree_utils import (
    HIDDEN_KERNELS,
    LayerAxes,
    layer_axes,
    map_moments,
    matches,
    name_of,
)

OVERSAMPLING, POWER_ITERATIONS = 8, 2  # Halko et al. 2011: 5 to 10, and 1 or 2
OVERLAPS = 5  # refreshes that the lazy schedule looks back on
BLOCK_SIZE = 256  # entries of a low-bit projector that share a scale
NEVER = -(2**30)


class Subspace(NamedTuple):
    """Of one kernel, (*layers, …): where its gradients are projected to.

    projector: float32 (*layers, short, rank), or (*layers, rank, short) if the short dim of the kernel is
        its last; or the `Blocks` of that.
    last_refresh: the count at which the projector was made, `NEVER` before the first.
    stretch: the gap over `update_proj_gap`, 1 unless lazy.
    overlaps: |cos| of the leading vectors before and after the last refreshes.
    """

    projector: Any
    last_refresh: jax.Array
    stretch: jax.Array
    overlaps: jax.Array


class GaloreState(NamedTuple):
    """Finished updates, a `Subspace` for each projected kernel, the state of the inner transformation."""

    count: jax.typing.ArrayLike
    subspaces: Any
    inner: optax.OptState


def galore(
    inner: optax.GradientTransformation,
    *,
    rank: int,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    side: str = "short",
    basis: str = "svd",
    moments: str = "keep",
    projector: str = "float32",
    lazy_threshold: float = 0.0,
    targets: Sequence[str] = HIDDEN_KERNELS,
    seed: int = 0,
    layer_axes: LayerAxes = layer_axes,
) -> optax.GradientTransformation:
    """Runs `inner` on the projected gradients of the kernels that `targets` names, on others as they are.

    Args:
        inner: a rescaling that needs no parameters: `scale_by_adam`, `scale_by_stable_adam`, …
        rank: r, at most the short side (of which then nothing is left out).
        update_proj_gap: steps between refreshes; the first is at the first step.
        scale: the paper's α, a factor of the projected kernels' updates.
        side: "short" is the paper's and galore-torch's `std` (a square kernel is projected on its input
            side), "long" their `reverse_std`: less memory still, and P changes the larger side.
        basis: "svd", or "randomized": a range finder with two power iterations (Halko et al. 2011), much
            faster, with a random matrix that depends on `seed` and the count alone.
        moments: at a refresh "keep" them as they are (the paper), "reset" them to what they would be if
            this were the first step, or "reproject": with C = P_newᵀ P_old, μ ← C μ and ν ← C² ν
            (elementwise square: as if the directions were uncorrelated).
        projector: "float32", or "int8" or "int4" with a scale for 256 entries of a row (Q-GaLore,
            Zhang et al. 2024, arXiv:2407.08296; their code has a zero point too, which a basis does not
            need).
        lazy_threshold: Q-GaLore's lazy update, for each layer: once the leading direction keeps, on
            average over 5 refreshes, at least this cosine with the one before, the gap doubles. 0.4 in
            the paper; 0 is off.
        targets: regular expressions, searched in paths such as `layers/attn/q_proj/kernel`.
        seed: of the random matrices.
        layer_axes: how many leading axes of the parameter at a path count its layers.

    Raises:
        ValueError: a value that is not allowed; at `init`, a target that matches nothing or no matrix.
    """
    for key, value, allowed in (
        ("side", side, ("short", "long")),
        ("basis", basis, ("svd", "randomized")),
        ("moments", moments, ("keep", "reset", "reproject")),
        ("projector", projector, ("float32", "int8", "int4")),
    ):
        if value not in allowed:
            raise ValueError(f"{key}={value!r} is unknown, choose one of: {', '.join(allowed)}")
    if rank < 1 or update_proj_gap < 1:
        raise ValueError(f"{rank=} and {update_proj_gap=} must be at least 1")
    if projector == "int4" and rank % 2:
        raise ValueError(f"{rank=} must be even for projector='int4', which holds two entries in a byte")

    choose: Any = {"side": side, "rank": rank}

    def subspace(path: KeyPath, p: jax.Array) -> Subspace | optax.MaskedNode:
        if not matches(path, targets):
            return optax.MaskedNode()
        layers = p.shape[: layer_axes(path)]
        if p.ndim - len(layers) != 2:
            raise ValueError(
                f"galore targets {name_of(path)}, which is no matrix: {p.shape}; narrow {targets=}"
            )
        dim, m, r = _projected(p.shape, **choose)
        if projector == "int4" and r % 2:
            raise ValueError(f"{name_of(path)} has rank {r}, which is odd; use projector='int8'")
        return Subspace(
            projector=_packed(jnp.zeros((*layers, m, r), jnp.float32), projector, dim),
            last_refresh=jnp.full(layers, NEVER, jnp.int32),
            stretch=jnp.ones(layers, jnp.int32),
            overlaps=jnp.full((*layers, OVERLAPS), -jnp.inf),
        )

    def init(params: optax.Params) -> GaloreState:
        names = [name_of(path) for path, _ in jax.tree.flatten_with_path(params)[0]]
        for target in targets if names else ():
            if not any(re.search(target, name) for name in names):
                raise ValueError(f"galore target {target!r} matches no parameter; one is {names[0]}")
        spaces = jax.tree.map_with_path(subspace, params)

        def seen(p: jax.Array, space: Any) -> jax.Array:
            if not isinstance(space, Subspace):
                return p
            dim, _, r = _projected(p.shape, **choose)
            return jnp.zeros([r if i == p.ndim + dim else n for i, n in enumerate(p.shape)], jnp.float32)

        return GaloreState(jnp.zeros([], jnp.int32), spaces, inner.init(jax.tree.map(seen, params, spaces)))

    def refreshed(path: KeyPath, g: jax.Array, old: Any, count: jax.Array) -> Any:
        """The subspace for this step: that of the last one, or a new one for those layers that are due."""
        if not isinstance(old, Subspace):
            return old
        dim, m, r = _projected(g.shape, **choose)
        due = count - old.last_refresh >= update_proj_gap * old.stretch
        key = jax.random.fold_in(jax.random.key(seed), count)

        def new_basis(layer: tuple[jax.Array, jax.Array]) -> jax.Array:
            g, due = layer
            a = (g if dim == -2 else g.T).astype(jnp.float32)
            return jax.lax.cond(
                due, lambda: BASES[basis](a, r, key), lambda: jnp.zeros((m, r), jnp.float32)
            )

        def refresh() -> Subspace:
            # Layer after layer: in a batch the condition would be a selection, and every layer computed.
            p_new = _over_layers(new_basis, layer_axes(path))((g, due))
            done = due & jnp.isfinite(p_new).all(axis=(-2, -1))  # of a NaN no basis is made: next step
            p_old = _unpacked(old.projector, projector, dim)
            cos = jnp.abs(jnp.sum(p_new[..., :1] * p_old[..., :1], axis=-2))
            known = done & (old.last_refresh >= 0)
            overlaps = jnp.concatenate([old.overlaps[..., 1:], cos], axis=-1)
            overlaps = jnp.where(known[..., None], overlaps, old.overlaps)
            calm = known & (jnp.mean(overlaps, axis=-1) >= lazy_threshold) & (lazy_threshold > 0)
            return Subspace(
                projector=jax.tree.map(
                    lambda new, old: jnp.where(done[..., None, None], new, old),
                    _packed(p_new, projector, dim),
                    old.projector,
                ),
                last_refresh=jnp.where(done, count, old.last_refresh),
                stretch=jnp.where(calm, 2 * old.stretch, old.stretch),
                overlaps=overlaps,
            )

        return jax.lax.cond(jnp.any(due), refresh, lambda: old)

    def moved(state: Any, count: jax.Array, *trees: Any) -> Any:
        """The inner state with the moments of refreshed layers brought into their new subspace.

        `trees` are the gradients, the projected ones, the old and the new subspaces.
        """
        leaves = [dict(jax.tree.flatten_with_path(t, is_leaf=_is_subspace)[0]) for t in trees]

        def one(moment: str, path: KeyPath, x: jax.Array) -> jax.Array:
            if path not in leaves[-1]:
                return x
            g, low_rank, old, new = (tree[path] for tree in leaves)
            dim = _projected(g.shape, **choose)[0]
            moves = (new.last_refresh == count) & (old.last_refresh >= 0)

            def move() -> jax.Array:
                if moments == "reset":
                    y = low_rank if moment == "mu" else jnp.square(low_rank)
                else:
                    p_old, p_new = (_unpacked(space.projector, projector, dim) for space in (old, new))
                    overlap = jnp.swapaxes(p_old, -2, -1) @ p_new
                    overlap = overlap if moment == "mu" else jnp.square(overlap)
                    y = _project(overlap, x, dim)
                return jnp.where(moves[..., None, None], y, x).astype(x.dtype)

            return jax.lax.cond(jnp.any(moves), move, lambda: x)

        return map_moments(one, state)

    def project(g: jax.Array, space: Any) -> jax.Array:
        if not isinstance(space, Subspace):
            return g
        dim = _projected(g.shape, **choose)[0]
        return _project(_whole(_unpacked(space.projector, projector, dim)), g, dim)

    def unproject(g: jax.Array, u: jax.Array, space: Any) -> jax.Array:
        if not isinstance(space, Subspace):
            return u
        dim = _projected(g.shape, **choose)[0]
        p = _whole(_unpacked(space.projector, projector, dim))
        return _whole((scale * _unproject(p, u.astype(g.dtype), dim)).astype(g.dtype), dim)

    def short_side_whole(g: jax.Array, space: Any) -> jax.Array:
        return _whole(g, _projected(g.shape, **choose)[0]) if isinstance(space, Subspace) else g

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        count, old = state.count, state.subspaces
        with jax.named_scope("galore"):
            grads = jax.tree.map(short_side_whole, updates, old)
            new = jax.tree.map_with_path(lambda k, g, space: refreshed(k, g, space, count), grads, old)
            low_rank = jax.tree.map(project, grads, new)
            inner_state = state.inner
            if moments != "keep":
                inner_state = moved(inner_state, count, grads, low_rank, old, new)
            low_rank, inner_state = inner.update(low_rank, inner_state)
            updates = jax.tree.map(unproject, grads, low_rank, new)
        return updates, GaloreState(optax.safe_increment(count), new, inner_state)

    return optax.GradientTransformation(init, update)


def _is_subspace(x: Any) -> bool:
    return isinstance(x, Subspace)


def _projected(shape: tuple[int, ...], side: str, rank: int) -> tuple[int, int, int]:
    """The projected dim of a kernel (-2 or -1), its size, and the rank that is left of it."""
    rows, columns = shape[-2:]
    dim = -2 if (rows <= columns) == (side == "short") else -1
    return dim, shape[dim], min(rank, rows, columns)


def _project(p: jax.Array, g: jax.Array, dim: int) -> jax.Array:
    """Pᵀ G or G P, in float32."""
    subscripts = "...mr,...mn->...rn" if dim == -2 else "...mr,...nm->...nr"
    return jnp.einsum(subscripts, p.astype(g.dtype), g, preferred_element_type=jnp.float32)


def _unproject(p: jax.Array, u: jax.Array, dim: int) -> jax.Array:
    """P U or U Pᵀ, in float32."""
    subscripts = "...mr,...rn->...mn" if dim == -2 else "...mr,...nr->...nm"
    return jnp.einsum(subscripts, p.astype(u.dtype), u, preferred_element_type=jnp.float32)


def _whole(x: jax.Array, dim: int | None = None) -> jax.Array:
    """Asks for an array of which one dim, or all, is whole on every device; no mesh, no wish."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    axes: list[Any] = [None if dim is None else PartitionSpec.UNCONSTRAINED] * x.ndim
    axes[dim or 0] = None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def _packed(p: Any, projector: str, dim: int) -> Any:
    """P, (*layers, m, r), as it is stored: m where the kernel has it, so that it can lie as there."""
    p = p if projector == "float32" else encode(p, projector, block_size=BLOCK_SIZE)
    return p if dim == -2 else jax.tree.map(lambda x: jnp.swapaxes(x, -2, -1), p)


def _unpacked(p: Any, projector: str, dim: int) -> jax.Array:
    p = p if dim == -2 else jax.tree.map(lambda x: jnp.swapaxes(x, -2, -1), p)
    return p if projector == "float32" else decode(p, projector, block_size=BLOCK_SIZE)


def _over_layers(fn: Callable[[Any], Any], axes: int) -> Callable[[Any], Any]:
    """`fn` for each layer of arrays with that many leading axes."""
    for _ in range(axes):
        fn = functools.partial(jax.lax.map, fn)
    return fn


# --- bases: of a (m, n), r orthonormal columns (m, r), the directions of most energy first ------------


def _svd_basis(a: jax.Array, r: int, key: jax.Array) -> jax.Array:
    del key
    u, _, _ = jnp.linalg.svd(a, full_matrices=False)
    return _signed(u[:, :r])


def _randomized_basis(a: jax.Array, r: int, key: jax.Array) -> jax.Array:
    """Halko et al. 2011, algorithms 4.4 and 5.1: QR in between keeps float32 from losing directions."""
    m, n = a.shape
    with jax.default_matmul_precision("highest"):
        y = a @ jax.random.normal(key, (n, min(r + OVERSAMPLING, m)), jnp.float32)
        for _ in range(POWER_ITERATIONS):
            y = a @ (a.T @ jnp.linalg.qr(y)[0])
        q, _ = jnp.linalg.qr(y)
        b = q.T @ a
        _, vectors = jnp.linalg.eigh(b @ b.T)
        return _signed(q @ vectors[:, : -r - 1 : -1])


BASES = {"svd": _svd_basis, "randomized": _randomized_basis}


def _signed(u: jax.Array) -> jax.Array:
    """Each column with its largest entry positive: the sign that libraries leave open."""
    largest = jnp.take_along_axis(u, jnp.argmax(jnp.abs(u), axis=0)[None], axis=0)
    return jnp.where(largest < 0, -u, u)
