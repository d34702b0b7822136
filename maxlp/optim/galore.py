"""GaLore: the optimizer runs in the subspace that holds most of the gradient.

For a kernel with an (m, n) gradient G, m ≤ n, the columns of P, (m, r), are the first r left singular
vectors of G. They are computed anew every `update_proj_gap` steps. In each step

    R = Pᵀ G                   (r, n)   what the inner optimizer sees: its moments have r/m of the size
    ΔW = scale · P · inner(R)  (m, n)

and for m > n the same on the other side.

(Zhao et al. 2024, arXiv:2403.03507, algorithm 2.) Memory for a kernel falls from 2mn to mr + 2nr.

`optax.contrib.galore` (0.2.8) is a different algorithm, for one device. It projects the *long* side (less
memory, another trajectory: `side="long"` here). Kernels stacked over layers silently get plain Adam, and
a `vmap` over layers would turn its `cond` into a `select` and run the SVD at every step. The projector
has the parameter's dtype, and its signs are left to the SVD library, although momentum survives a refresh
and the run therefore depends on them. On a mesh every device gathers every gradient.

Sharding. The moments of R are sharded over all mesh axes of their kernel on the long dim, the projector
on the short one (`parallel.opt_state` derives both from the shapes). The short dim of the gradient is
constrained to be unsharded, so that PᵀG and P·inner(R) need no communication: resharding moves each element
once, and only the projector is gathered. In a refresh, `basis="randomized"` sums (m, r) blocks over
devices, and `basis="svd"` gathers one layer's gradient at a time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from maxlp.numerics.blockwise import decode, encode
from maxlp.optim.config import GaloreConfig, OptimizerConfig
from maxlp.optim.partition import check_matrices, map_moments
from maxlp.optim.tree_utils import layer_axes, matches, name_of

OVERSAMPLING, POWER_ITERATIONS = 8, 2  # Halko et al. 2011 (arXiv:0909.4061): 5 to 10, and 1 or 2
OVERLAPS = 5  # the past refreshes by which a layer with lazy updates decides whether to double its gap
BLOCK_SIZE = 256  # entries of a low-bit projector that share a scale
FLOATS = ("float32", "bfloat16")  # dtypes of projectors; those in other formats have scales
NEVER = -(2**30)  # so long ago that a refresh is due
# learning_rate · galore.scale of GaLore's own runs with Adam (arXiv:2403.03507, section 4.1): 0.01 · 0.25
# for 60M to 1B parameters. A factor of 2 to both sides contains the 0.005 · 0.25 of its 7B.
LOWEST_RATE, HIGHEST_RATE = 0.0025 / 2, 0.0025 * 2


def rate_warnings(config: OptimizerConfig) -> list[str]:
    """A warning if the rate of projected kernels is far from those of GaLore's own pre-training runs."""
    if config.galore is None or not config.kind.galore_rates:
        return []
    rate = config.learning_rate * config.galore.scale
    if 0.999 * LOWEST_RATE < rate < 1.001 * HIGHEST_RATE:
        return []
    bound, remedy = ("below", "raise") if rate < LOWEST_RATE else ("above", "lower")
    factors = f"optimizer.learning_rate={config.learning_rate:g} × galore.scale={config.galore.scale:g}"
    rates = f"{bound} the rates of GaLore's runs, {LOWEST_RATE:g} to {HIGHEST_RATE:g}"
    return [f"{factors} = {rate:g} is {rates}; {remedy} one of them"]


class Subspace(NamedTuple):
    """The subspace of one kernel, (*layers, …), to which its gradients are projected.

    Attributes:
      projector: float32 or bfloat16 (*layers, m, rank), or (*layers, rank, m) if the kernel's last dim is
        projected; `Quantized` if it is stored in few bits.
      last_refresh: the count at which the projector was made; `NEVER` before the first refresh.
      stretch: the current gap as a multiple of `update_proj_gap`; 1 unless lazy.
      overlaps: |cos| between the leading vectors before and after each of the last refreshes.
    """

    projector: Any
    last_refresh: jax.Array
    stretch: jax.Array
    overlaps: jax.Array


class GaloreState(NamedTuple):
    """The number of updates, a `Subspace` for each projected kernel, and the state of the inner one."""

    count: jax.typing.ArrayLike
    subspaces: Any
    inner: optax.OptState


class Side(NamedTuple):
    """The projected side of a kernel: its dim (-2 or -1), its size m, and the rank r that is kept."""

    dim: int
    size: int
    rank: int


def galore(inner: optax.GradientTransformation, config: GaloreConfig) -> optax.GradientTransformation:
    """Runs `inner` on the projected gradients of targeted kernels, and on the gradients of all others.

    Args:
      inner: a rescaling that does not need the parameters: `scale_by_adam`, `scale_by_stable_adam`, …
      config: rank, refreshes and targets.

    Raises:
      ValueError: at `init`, a target that matches no parameter or one that is not a matrix.
    """

    def init(params: optax.Params) -> GaloreState:
        check_targets(params, config)
        spaces = jax.tree.map_with_path(lambda k, p: _no_subspace(k, p, config), params)
        seen = jax.tree.map(lambda p, space: _zeros_projected(p, space, config), params, spaces)
        return GaloreState(jnp.zeros([], jnp.int32), spaces, inner.init(seen))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        count, old, inner_state = state.count, state.subspaces, state.inner
        with jax.named_scope("galore"):
            grads = jax.tree.map(lambda g, space: _side_whole(g, space, config), updates, old)
            new = jax.tree.map(lambda g, space: _current_subspace(g, space, count, config), grads, old)
            low_rank = jax.tree.map(lambda g, space: _projected(g, space, config), grads, new)
            if config.moments != "keep":
                inner_state = _moved_moments(inner_state, count, grads, low_rank, old, new, config)
            low_rank, inner_state = inner.update(low_rank, inner_state)
            updates = jax.tree.map(lambda g, u, s: _unprojected(g, u, s, config), grads, low_rank, new)
        return updates, GaloreState(optax.safe_increment(count), new, inner_state)

    return optax.GradientTransformation(init, update)


# --- init -----------------------------------------------------------------------------------------------


def check_targets(params: optax.Params, config: GaloreConfig) -> None:
    """Checks that every target is a matrix that can be projected.

    Raises:
      ValueError: a target that matches no parameter or one that is not a matrix, or a projector with an odd
        rank in int4.
    """
    check_matrices("galore.targets", config.targets, params)
    for path, p in jax.tree.flatten_with_path(params)[0]:
        if not matches(path, config.targets):
            continue
        if config.projector == "int4" and _side(p.shape, config).rank % 2:
            raise ValueError(
                f"galore.projector='int4' needs an even rank, but that of {name_of(path)} with shape "
                f"{p.shape} is {_side(p.shape, config).rank}; set galore.projector='int8'"
            )


def _no_subspace(path: KeyPath, p: jax.Array, config: GaloreConfig) -> Subspace | optax.MaskedNode:
    """The subspace of a targeted kernel before its first refresh."""
    if not matches(path, config.targets):
        return optax.MaskedNode()
    layers = p.shape[: layer_axes(path)]
    dim, m, r = _side(p.shape, config)
    return Subspace(
        projector=_packed(jnp.zeros((*layers, m, r), jnp.float32), dim, config),
        last_refresh=jnp.full(layers, NEVER, jnp.int32),
        stretch=jnp.ones(layers, jnp.int32),
        overlaps=jnp.full((*layers, OVERLAPS), -jnp.inf, jnp.float32),
    )


def _zeros_projected(p: jax.Array, space: Any, config: GaloreConfig) -> jax.Array:
    """Zeros of the shape of a kernel's projected gradient; other parameters as they are."""
    if not _is_subspace(space):
        return p
    side = _side(p.shape, config)
    shape = list(p.shape)
    shape[side.dim] = side.rank
    return jnp.zeros(shape, jnp.float32)


# --- refreshes ------------------------------------------------------------------------------------------


def _current_subspace(g: jax.Array, old: Any, count: jax.Array, config: GaloreConfig) -> Any:
    """The subspace for this step: the last one, with a new basis for the layers that are due."""
    if not _is_subspace(old):
        return old
    due = count - old.last_refresh >= config.update_proj_gap * old.stretch
    key = jax.random.fold_in(jax.random.key(config.seed), count)

    def refresh() -> Subspace:
        # A gradient of zeros, as behind a layer scale of 0, has no subspace: its refresh has to wait.
        has_gradient = jnp.any(g != 0, axis=(-2, -1))
        return _refreshed(g, old, due & has_gradient, count, key, config)

    return jax.lax.cond(jnp.any(due), refresh, lambda: old)


def _refreshed(
    g: jax.Array, old: Subspace, due: jax.Array, count: jax.Array, key: jax.Array, config: GaloreConfig
) -> Subspace:
    side = _side(g.shape, config)
    p_new = _new_projectors(g, due, key, side, config.basis)
    done = due & jnp.isfinite(p_new).all(axis=(-2, -1))  # a NaN gradient postpones the refresh by a step
    p_old = _unpacked(old.projector, side.dim, config)
    cos = jnp.abs(jnp.sum(p_new[..., :1] * p_old[..., :1], axis=-2))
    known = done & (old.last_refresh >= 0)
    overlaps = jnp.concatenate([old.overlaps[..., 1:], cos], axis=-1)
    overlaps = jnp.where(known[..., None], overlaps, old.overlaps)
    calm = known & (jnp.mean(overlaps, axis=-1) >= config.lazy_threshold) & (config.lazy_threshold > 0)
    return Subspace(
        projector=jax.tree.map(
            lambda new, old: jnp.where(done[..., None, None], new, old),
            _packed(p_new, side.dim, config),
            old.projector,
        ),
        last_refresh=jnp.where(done, count, old.last_refresh),
        stretch=jnp.where(calm, 2 * old.stretch, old.stretch),
        overlaps=overlaps,
    )


def _new_projectors(g: jax.Array, due: jax.Array, key: jax.Array, side: Side, basis: str) -> jax.Array:
    """New bases for the layers that are due, float32 (*layers, m, r); zeros for the others."""

    def one(layer: tuple[jax.Array, jax.Array]) -> jax.Array:
        g, due = layer
        a = (g if side.dim == -2 else g.T).astype(jnp.float32)
        return jax.lax.cond(
            due,
            lambda: BASES[basis](a, side.rank, key),
            lambda: jnp.zeros((side.size, side.rank), jnp.float32),
        )

    # One layer after the other: a `vmap` would turn the `cond` into a `select` and compute all layers.
    return jax.lax.map(one, (g, due)) if due.ndim else one((g, due))


def _moved_moments(
    state: Any, count: jax.Array, grads: Any, low_rank: Any, old: Any, new: Any, config: GaloreConfig
) -> Any:
    """The inner state, with the moments of refreshed layers moved to the new subspace."""

    def by_path(tree: Any) -> dict[KeyPath, Any]:
        return dict(jax.tree.leaves_with_path(tree, is_leaf=_is_subspace))

    full, projected = by_path(grads), by_path(low_rank)
    olds, news = by_path(old), by_path(new)

    def one(moment: str, path: KeyPath, x: jax.Array) -> jax.Array:
        if path not in news:
            return x
        g, r, before, after = full[path], projected[path], olds[path], news[path]
        moves = (after.last_refresh == count) & (before.last_refresh >= 0)

        def move() -> jax.Array:
            y = _in_new_subspace(moment, x, r, before, after, _side(g.shape, config).dim, config)
            return jnp.where(moves[..., None, None], y, x).astype(x.dtype)

        return jax.lax.cond(jnp.any(moves), move, lambda: x)

    return map_moments(one, state)


def _in_new_subspace(
    moment: str, x: jax.Array, r: jax.Array, old: Subspace, new: Subspace, dim: int, config: GaloreConfig
) -> jax.Array:
    """A moment after a refresh, as `config.moments` prescribes; `r` is the new projected gradient."""
    if config.moments == "reset":
        return r if moment == "mu" else jnp.square(r)
    p_old, p_new = (_unpacked(space.projector, dim, config) for space in (old, new))
    overlap = jnp.swapaxes(p_old, -2, -1) @ p_new
    overlap = overlap if moment == "mu" else jnp.square(overlap)
    return _project(overlap, x, dim)


# --- projection -----------------------------------------------------------------------------------------


def _projected(g: jax.Array, space: Any, config: GaloreConfig) -> jax.Array:
    """The gradient that the inner transformation sees."""
    if not _is_subspace(space):
        return g
    dim = _side(g.shape, config).dim
    return _project(_whole(_unpacked(space.projector, dim, config)), g, dim)


def _unprojected(g: jax.Array, u: jax.Array, space: Any, config: GaloreConfig) -> jax.Array:
    """The update of the inner transformation, back in the space of the gradient `g`."""
    if not _is_subspace(space):
        return u
    dim = _side(g.shape, config).dim
    p = _whole(_unpacked(space.projector, dim, config))
    return _whole((config.scale * _unproject(p, u.astype(g.dtype), dim)).astype(g.dtype), dim)


def _side_whole(g: jax.Array, space: Any, config: GaloreConfig) -> jax.Array:
    return _whole(g, _side(g.shape, config).dim) if _is_subspace(space) else g


def _is_subspace(x: Any) -> bool:
    return isinstance(x, Subspace)


def _side(shape: tuple[int, ...], config: GaloreConfig) -> Side:
    rows, columns = shape[-2:]
    dim = -2 if (rows <= columns) == (config.side == "short") else -1
    return Side(dim, shape[dim], min(config.rank, rows, columns))


def _project(p: jax.Array, g: jax.Array, dim: int) -> jax.Array:
    """Pᵀ G or G P, in float32."""
    subscripts = "...mr,...mn->...rn" if dim == -2 else "...mr,...nm->...nr"
    return jnp.einsum(subscripts, p.astype(g.dtype), g, preferred_element_type=jnp.float32)


def _unproject(p: jax.Array, u: jax.Array, dim: int) -> jax.Array:
    """P U or U Pᵀ, in float32."""
    subscripts = "...mr,...rn->...mn" if dim == -2 else "...mr,...nr->...nm"
    return jnp.einsum(subscripts, p.astype(u.dtype), u, preferred_element_type=jnp.float32)


def _whole(x: jax.Array, dim: int | None = None) -> jax.Array:
    """Constrains one dim of an array, or all if None, to be unsharded; a no-op without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return x
    axes: list[Any] = [None] * x.ndim
    if dim is not None:
        axes = [PartitionSpec.UNCONSTRAINED] * x.ndim
        axes[dim] = None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def _packed(p: Any, dim: int, config: GaloreConfig) -> Any:
    """P, (*layers, m, r), as it is stored: with m in the kernel's position, so that both shard alike."""
    name = config.projector
    p = p.astype(name) if name in FLOATS else encode(p, name, block_size=BLOCK_SIZE)
    return p if dim == -2 else jax.tree.map(lambda x: jnp.swapaxes(x, -2, -1), p)


def _unpacked(p: Any, dim: int, config: GaloreConfig) -> jax.Array:
    p = p if dim == -2 else jax.tree.map(lambda x: jnp.swapaxes(x, -2, -1), p)
    name = config.projector
    return p.astype(jnp.float32) if name in FLOATS else decode(p, name, block_size=BLOCK_SIZE)


# --- bases: r orthonormal columns (m, r) of a matrix (m, n), the directions of most energy first ---------


def _svd_basis(a: jax.Array, r: int, key: jax.Array) -> jax.Array:
    del key
    u, _, _ = jnp.linalg.svd(a, full_matrices=False)
    return _signed(u[:, :r])


def _randomized_basis(a: jax.Array, r: int, key: jax.Array) -> jax.Array:
    """Halko et al. 2011, algorithms 4.4 and 5.1; the QR in between keeps float32 from losing directions."""
    m, n = a.shape
    largest = jnp.max(jnp.abs(a))  # products are divided by it: the square of 1e-20 would underflow
    with jax.default_matmul_precision("highest"):
        y = a @ jax.random.normal(key, (n, min(r + OVERSAMPLING, m)), jnp.float32)
        for _ in range(POWER_ITERATIONS):
            y = a @ (a.T @ jnp.linalg.qr(y)[0] / largest)
        q, _ = jnp.linalg.qr(y)
        b = q.T @ a / largest
        _, vectors = jnp.linalg.eigh(b @ b.T)
        return _signed(q @ vectors[:, : -r - 1 : -1])


BASES = {"svd": _svd_basis, "randomized": _randomized_basis}


def _signed(u: jax.Array) -> jax.Array:
    """The columns, each with its largest entry made positive: SVD libraries leave the signs open."""
    largest = jnp.take_along_axis(u, jnp.argmax(jnp.abs(u), axis=0)[None], axis=0)
    return jnp.where(largest < 0, -u, u)
