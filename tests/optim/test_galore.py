import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.numerics.blockwise import decode
from maxlp.optim import GaloreConfig
from maxlp.optim.galore import BASES, Subspace, galore
from maxlp.optim.tree_utils import find_states
from maxlp.parallel import sharding
from tests.optim.common import assert_trees_close, each_step, random_tree, run, run_on_mesh

GOLDEN = Path(__file__).parent / "goldens" / "galore.npz"
ADAM = optax.scale_by_adam(0.9, 0.95, 1e-8)
# Of a singular vector in float32: a few 1e-7 over the gaps of the values, above 0.05 of the largest.
VECTORS = 3e-5
SHAPES = {
    "tok_embed": {"embedding": (16, 8)},
    "layers": {
        "attn_norm": {"scale": (2, 8)},
        "attn": {"k_proj": {"kernel": (2, 8, 4)}},
        "mlp": {"up_proj": {"kernel": (2, 8, 16)}},
    },
}


def gradients(steps, shapes=SHAPES, seed=0):
    return [random_tree(shapes, seed + i) for i in range(steps)]


def kernel(shape):
    return {"layers": {"attn": {"q_proj": {"kernel": shape}}}}


def leaf(tree):
    [x] = jax.tree.leaves(tree)
    return np.asarray(x)


def matrix(shape):
    return {"attn": {"q_proj": {"kernel": shape}}}


def sgd(tx, lr=1e-2):
    return optax.chain(tx, optax.scale(-lr))


def subspace(state):
    """The subspace of `kernel`."""
    [(_, space)] = find_states(state, Subspace)
    return space


@pytest.mark.parametrize(("side", "proj_type"), [("short", "std"), ("long", "reverse_std")])
def test_galore_torch_takes_the_same_steps_through_three_subspaces(side, proj_type):
    golden = np.load(GOLDEN)
    shapes = ("tall", "wide", "square")
    # The reference has (out, in) weights, ours are (in, out).
    params = {shape: {"kernel": jnp.asarray(golden[f"{shape}_0"].T)} for shape in shapes}
    config = GaloreConfig(rank=3, update_proj_gap=10, side=side, targets=("kernel",))
    tx = sgd(galore(optax.scale_by_adam(0.9, 0.95, 1e-12), config))
    grads = [{k: {"kernel": golden[f"{k}_grads"][i].T} for k in shapes} for i in range(24)]
    found = [after for _, after, _ in each_step(tx, params, grads)]
    for shape in shapes:
        want = golden[f"{shape}_{proj_type}"]
        # Each of 24 steps rounds parameters of up to 4.
        np.testing.assert_allclose([after[shape]["kernel"].T for after in found], want, atol=24 * 2.0**-23)
        assert np.abs(want[-1] - golden[f"{shape}_0"]).max() > 0.01, "it moves far beyond the tolerance"


@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_optax_takes_the_same_steps_on_the_long_side(b1):
    """Optax projects the long side of single matrices, and leaves the signs of a basis to the SVD.

    Adam's steps in a subspace do not depend on the signs, as long as no momentum outlives the subspace.
    """
    inner, shapes = optax.scale_by_adam(b1, 0.95, 1e-8), {"tall": (9, 5), "wide": (5, 9)}
    params, grads = random_tree(shapes, 0), gradients(9, shapes, seed=1)
    config = GaloreConfig(rank=3, update_proj_gap=4, scale=0.5, side="long", targets=("tall", "wide"))
    theirs = optax.contrib.scale_by_galore(3, 4, 0.5, base_optimizer=inner)
    grads = grads[: 4 if b1 else 9]  # 9: three subspaces
    ours, others = (each_step(sgd(tx), params, grads) for tx in (galore(inner, config), theirs))
    for (_, got, _), (_, want, _) in zip(ours, others, strict=True):
        assert_trees_close(got, want, atol=2e-6)  # steps of up to 0.005 · √3 in float32, rounded 9 times


@pytest.mark.parametrize("side", ["short", "long"])
def test_full_rank_is_adam_in_rotated_coordinates(side):
    """U Adam(Uᵀ G) with the U of the first gradient, computed without any of galore's code."""
    shapes, grads = matrix((5, 7)), gradients(6, matrix((5, 7)))
    tx = galore(ADAM, GaloreConfig(rank=100, scale=1.0, side=side))
    got, _ = run(sgd(tx), random_tree(shapes, 9), grads)
    first = leaf(grads[0])
    u = np.linalg.svd(first if side == "short" else first.T, full_matrices=False)[0]
    rotated = [(u.T @ leaf(g)) if side == "short" else (leaf(g) @ u) for g in grads]
    steps, _ = run(sgd(ADAM), jnp.zeros_like(rotated[0]), rotated)
    want = leaf(random_tree(shapes, 9)) + (u @ steps if side == "short" else steps @ u.T)
    np.testing.assert_allclose(leaf(got), want, atol=2e-6)  # parameters of up to 4, rounded in six steps


def test_parameters_that_are_not_targets_are_left_to_the_inner_transformation():
    params, grads = random_tree(SHAPES, 50), gradients(5)
    got, _ = run(sgd(galore(ADAM, GaloreConfig(rank=2, update_proj_gap=2))), params, grads)
    want, _ = run(sgd(ADAM), params, grads)
    # The same arithmetic, in two programs.
    assert_trees_close(got["tok_embed"], want["tok_embed"], rtol=1e-6)
    assert_trees_close(got["layers"]["attn_norm"], want["layers"]["attn_norm"], rtol=1e-6)
    ours, theirs = (tree["layers"]["mlp"]["up_proj"]["kernel"] for tree in (got, want))
    assert np.abs(ours - theirs).max() > 0.01


def low_rank(m, n, r, noise, seed=0):
    rng = np.random.default_rng(seed)
    signal = rng.normal(size=(m, r)) * np.geomspace(1, 0.1, r) @ rng.normal(size=(r, n))
    return jnp.asarray(signal + noise * rng.normal(size=(m, n)), jnp.float32)


def basis_of(name, a, rank):
    return np.asarray(jax.jit(BASES[name], static_argnums=1)(a, rank, jax.random.key(1)))


def test_bases_are_orthonormal_and_have_fixed_signs():
    a = low_rank(24, 40, 5, 0.01)
    for name in BASES:
        u = basis_of(name, a, 5)
        np.testing.assert_allclose(u.T @ u, np.eye(5), atol=2e-6)  # sums of 24 products in float32
        assert (u[np.abs(u).argmax(axis=0), range(5)] > 0).all()
        np.testing.assert_allclose(basis_of(name, -a, 5), u, atol=VECTORS)


def test_randomized_basis_is_that_of_the_svd():
    """The same vectors where the spectrum has gaps, the same captured energy where it has none."""
    a = low_rank(24, 40, 6, 1e-3)
    np.testing.assert_allclose(basis_of("svd", a, 5), basis_of("randomized", a, 5), atol=VECTORS)
    noise = np.asarray(low_rank(64, 80, 1, 1.0))
    svd, randomized = (np.sum((basis_of(name, noise, 16).T @ noise) ** 2) for name in ("svd", "randomized"))
    assert 0.97 * svd < randomized <= svd * 1.0001


@pytest.mark.parametrize("name", BASES)
def test_bases_do_not_depend_on_the_unit_of_the_gradient(name):
    """2^±80 is about 10^±24."""
    a = low_rank(24, 40, 6, 1e-3)
    for exponent in (-80, 80):
        np.testing.assert_allclose(basis_of(name, a * 2.0**exponent, 5), basis_of(name, a, 5), atol=VECTORS)


def test_refresh_happens_every_gap_and_only_then():
    shapes = kernel((2, 4, 8))
    tx = galore(ADAM, GaloreConfig(rank=2, update_proj_gap=3))
    projectors = [
        np.asarray(subspace(state).projector)
        for *_, state in each_step(tx, random_tree(shapes, 50), gradients(8, shapes))
    ]
    changed = [not np.array_equal(a, b) for a, b in itertools.pairwise(projectors)]
    assert changed == [False, False, True, False, False, True, False]


def test_each_refresh_draws_anew():
    """A random basis of the same gradient, whose spectrum has no gaps."""
    shapes = kernel((1, 32, 40))
    tx = galore(ADAM, GaloreConfig(rank=2, update_proj_gap=1, basis="randomized"))
    g = random_tree(shapes, 1)
    first, second = (np.asarray(subspace(state).projector) for *_, state in each_step(tx, g, [g, g]))
    assert np.abs(first - second).max() > 1e-4


def primitives(jaxpr, into_branches):
    """Names of the primitives of a jaxpr, with or without those in the branches of conditions."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name != "cond" or into_branches:
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(value, "jaxpr"):
                    yield from primitives(value.jaxpr, into_branches)


def test_the_svd_is_in_a_branch_that_other_steps_skip():
    """Under vmap the condition would become a selection, with the SVD of every layer at every step."""
    tx = galore(ADAM, GaloreConfig(rank=2))
    params = random_tree(SHAPES, 50)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params)).jaxpr
    assert "svd" in primitives(jaxpr, into_branches=True)
    assert "svd" not in primitives(jaxpr, into_branches=False)


@pytest.mark.parametrize("moments", ["keep", "reset", "reproject"])
def test_moments_at_a_refresh(moments):
    """After a refresh the moments are kept, the new gradient's, or rotated into the new basis."""
    shapes = matrix((6, 9))
    grads, params = gradients(3, shapes), random_tree(shapes, 9)
    tx = galore(ADAM, GaloreConfig(rank=2, update_proj_gap=2, moments=moments))
    before, after = run(tx, params, grads[:2])[1], run(tx, params, grads)[1]
    p_old, p_new = (np.asarray(subspace(state).projector) for state in (before, after))
    assert np.abs(p_old - p_new).max() > 0.1
    r = p_new.T @ leaf(grads[2])
    c = p_new.T @ p_old
    mu, nu = leaf(before.inner.mu), leaf(before.inner.nu)
    if moments == "reset":
        mu, nu = r, r**2
    elif moments == "reproject":
        mu, nu = c @ mu, c**2 @ nu
    # Numbers of up to 8, after a few roundings to float32.
    np.testing.assert_allclose(leaf(after.inner.mu), 0.9 * mu + 0.1 * r, atol=2e-6)
    np.testing.assert_allclose(leaf(after.inner.nu), 0.95 * nu + 0.05 * r**2, atol=2e-6)


@pytest.mark.parametrize("moments", ["reset", "reproject"])
def test_moments_are_kept_until_the_second_refresh_of_their_own_layer(moments):
    """The gradients of layer 1, and so its subspaces, begin with the second step."""
    shapes = kernel((2, 6, 9))
    grads, params = gradients(3, shapes), random_tree(shapes, 9)
    grads[0] = kernel(jnp.asarray(leaf(grads[0])).at[1].set(0))

    def mu_of_steps(moments):
        tx = galore(ADAM, GaloreConfig(rank=2, update_proj_gap=2, moments=moments))
        return [leaf(state.inner.mu) for *_, state in each_step(tx, params, grads)]

    for t, (moved, kept) in enumerate(zip(mu_of_steps(moments), mu_of_steps("keep"), strict=True)):
        # Numbers of up to 8, after a few roundings to float32.
        same = [np.abs(a - b).max() < 2e-6 for a, b in zip(moved, kept, strict=True)]
        assert same == [t < 2, True]


def test_a_non_finite_gradient_postpones_the_refresh():
    shapes = kernel((2, 6, 9))
    tx = galore(ADAM, GaloreConfig(rank=2, update_proj_gap=2))
    grads = gradients(4, shapes)
    grads[2] = kernel(jnp.asarray(leaf(grads[2])).at[1, 0, 0].set(jnp.nan))
    third, fourth = (subspace(run(tx, grads[0], grads[:n])[1]) for n in (3, 4))
    assert third.last_refresh.tolist() == [2, 0] and np.isfinite(third.projector).all()
    assert fourth.last_refresh.tolist() == [2, 3], "the other layer refreshes with the next gradient"


def test_zeros_have_no_subspace():
    """Behind a layer scale that begins at 0, the first gradient of a kernel is 0."""
    shapes = kernel((2, 6, 9))
    tx = galore(ADAM, GaloreConfig(rank=2, update_proj_gap=200))
    grads = gradients(3, shapes)
    late = [kernel(jnp.asarray(leaf(grads[0])).at[1].set(0)), *grads[1:]]
    first, second = (subspace(run(tx, grads[0], late[:n])[1]) for n in (1, 2))
    assert first.last_refresh[0] == 0 and first.last_refresh[1] < 0
    assert second.last_refresh.tolist() == [0, 1]
    g = np.asarray(leaf(late[1]))[1]
    basis = np.asarray(second.projector)[1]
    u = np.linalg.svd(g)[0][:, :2]
    np.testing.assert_allclose(np.abs(u.T @ basis), np.eye(2), atol=VECTORS)


def test_lazy_layers_stretch_their_gap():
    """The gradient of layer 0 keeps its direction, that of layer 1 has a new one each time."""
    shapes, rng = kernel((2, 12, 30)), np.random.default_rng(0)
    fixed = np.outer(rng.normal(size=12), rng.normal(size=30))
    tx = galore(ADAM, GaloreConfig(rank=2, update_proj_gap=2, lazy_threshold=0.75))

    def gradient():
        g = np.stack([fixed, rng.normal(size=(12, 30))]) + 0.01 * rng.normal(size=(2, 12, 30))
        return kernel(jnp.asarray(g, jnp.float32))

    states = [state for *_, state in each_step(tx, random_tree(shapes, 1), [gradient() for _ in range(26)])]
    first, second = np.array([subspace(state).last_refresh == i for i, state in enumerate(states)]).T
    # Five overlaps are known at step 10; from there the gaps are 4, 8, 16 …
    assert np.flatnonzero(first).tolist() == [0, 2, 4, 6, 8, 10, 14, 22]
    assert np.flatnonzero(second).tolist() == list(range(0, 26, 2))


def test_layers_without_a_threshold_keep_their_gap():
    """Even where each gradient has the direction of all others."""
    shapes = kernel((2, 6, 9))
    tx, grads = galore(ADAM, GaloreConfig(rank=2, update_proj_gap=1)), gradients(1, shapes) * 8
    *_, (*_, state) = each_step(tx, random_tree(shapes, 1), grads)
    assert subspace(state).last_refresh.tolist() == [7, 7] and subspace(state).stretch.tolist() == [1, 1]


@pytest.mark.full
def test_low_bit_projectors_are_close_and_small():
    shapes = kernel((2, 8, 16))
    grads = random_tree(shapes, 0)

    def projector(name):
        tx = galore(ADAM, GaloreConfig(rank=4, projector=name))
        return subspace(run(tx, grads, [grads])[1]).projector

    want = projector("float32")
    half = projector("bfloat16")
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, want.astype(jnp.bfloat16))
    for name, worst, saving in (("int8", 0.02, 4), ("int4", 0.3, 8)):
        stored = projector(name)
        error = np.linalg.norm(decode(stored, name, block_size=256) - want) / np.linalg.norm(want)
        assert 0 < error < worst
        assert stored.codes.nbytes == want.nbytes // saving


# --- on a mesh ----------------------------------------------------------------------------------------

NAMES = {
    "tok_embed": {"embedding": ("vocab", "embed")},
    "layers": {
        "attn": {"k_proj": {"kernel": ("layers", "embed", "kv_heads")}},
        "mlp": {
            "up_proj": {"kernel": ("layers", "embed", "mlp")},
            "down_proj": {"kernel": ("layers", "mlp", "embed")},
        },
    },
}
WIDE = {
    "tok_embed": {"embedding": (32, 32)},
    "layers": {
        "attn": {"k_proj": {"kernel": (2, 32, 16)}},
        "mlp": {"up_proj": {"kernel": (2, 32, 64)}, "down_proj": {"kernel": (2, 64, 32)}},
    },
}
SMALLEST_GRADIENT = 32 * 16
RANDOMIZED = sgd(galore(ADAM, GaloreConfig(rank=4, update_proj_gap=2, basis="randomized")))


def compared_on_mesh(tx, mesh, steps):
    """Parameters and state on a mesh and on one device, and the compiled step."""
    params, grads = random_tree(WIDE, 50), gradients(steps, WIDE)
    *got, step = run_on_mesh(tx, mesh, NAMES, params, grads)
    return got, run(tx, params, grads), step


def assert_same_run(got, want):
    """Up to sums in another order: bases are off by `VECTORS`, moments by that of gradients of up to 5."""
    assert_trees_close(jax.device_get(got[0]), jax.device_get(want[0]), atol=VECTORS)
    mu, want_mu = (jax.device_get(optax.tree.get(run[1], "mu")) for run in (got, want))
    assert_trees_close(mu, want_mu, atol=2e-4)


@pytest.mark.parametrize(
    "mesh", [pytest.param(dict(fsdp=8), marks=pytest.mark.full), dict(fsdp=4, tensor=2)], ids=str
)
def test_a_mesh_changes_nothing_and_no_device_gathers_a_gradient(mesh):
    got, want, step = compared_on_mesh(RANDOMIZED, sharding.make_mesh(**mesh), steps=3)
    assert_same_run(got, want)

    gathers = re.findall(r"^ *(?:ROOT )?%\S+ = (.*?) all-gather(?:-start)?\(", step.as_text(), re.MULTILINE)
    shapes = [shape for result in gathers for shape in re.findall(r"\w+\[([\d,]+)\]", result)]
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    assert 0 < largest < SMALLEST_GRADIENT
    assert "all-to-all" in step.as_text()

    for path, moment in jax.tree.leaves_with_path(optax.tree.get(got[1], "nu")):
        assert moment.addressable_shards[0].data.size * 8 == moment.size, path
    for _, space in find_states(got[1], Subspace):
        assert space.projector.addressable_shards[0].data.size * 8 == space.projector.size


@pytest.mark.full
def test_a_mesh_changes_nothing_with_svd_int8_projector_and_reprojection():
    config = GaloreConfig(rank=4, update_proj_gap=2, projector="int8", moments="reproject")
    got, want, _ = compared_on_mesh(
        sgd(galore(ADAM, config)), sharding.make_mesh(fsdp=4, tensor=2), steps=3
    )
    assert_same_run(got, want)


# --- errors at init: targets that do not fit the parameters -------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ("atn/",)}, r"'atn/' matches no parameter; one is layers/attn/"),
        ({"targets": ("attn_norm",)}, r"matches layers/attn_norm/scale, which is not a matrix: \(2, 8\)"),
        ({"projector": "int4", "targets": ("odd",)}, r"odd with shape \(5, 7\) is 5; set galore.p"),
    ],
)
def test_errors_are_one_line_with_key_and_value(changes, message):
    params = random_tree(SHAPES | {"odd": (5, 7), "bias": (3,)}, 0)
    with pytest.raises(ValueError, match=message) as error:
        galore(ADAM, GaloreConfig(rank=6, **changes)).init(params)
    assert "\n" not in str(error.value)
