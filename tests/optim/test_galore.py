import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from maxlp.numerics import blockwise as codes
from maxlp.optim.galore import BASES, galore
from maxlp.optim.stable_adamw import scale_by_stable_adam
from maxlp.parallel import sharding
from maxlp.parallel.opt_state import opt_state_shardings
from tests.optim.common import assert_trees_close, is_shape, random_tree, run

GOLDEN = Path(__file__).parent / "goldens" / "galore.npz"
ADAM = optax.scale_by_adam(0.9, 0.95, 1e-8)
SHAPES = {
    "tok_embed": {"embedding": (16, 8)},
    "layers": {
        "attn_norm": {"scale": (3, 8)},
        "attn": {"q_proj": {"kernel": (3, 8, 8)}, "k_proj": {"kernel": (3, 8, 4)}},
        "mlp": {"up_proj": {"kernel": (3, 8, 16)}, "down_proj": {"kernel": (3, 16, 8)}},
    },
}


def gradients(steps, shapes=SHAPES, seed=0):
    return [random_tree(shapes, seed + i) for i in range(steps)]


def kernel(shape):
    return {"layers": {"attn": {"q_proj": {"kernel": shape}}}}


def sgd(tx, lr=1e-2):
    return optax.chain(tx, optax.scale(-lr))


def subspace(state, *path):
    return functools.reduce(dict.__getitem__, path, optax.tree.get(state, "subspaces"))


@pytest.mark.parametrize("shape", ["tall", "wide", "square"])
@pytest.mark.parametrize(("side", "proj_type"), [("short", "std"), ("long", "reverse_std")])
def test_galore_torch_takes_the_same_steps_through_three_subspaces(shape, side, proj_type):
    golden = np.load(GOLDEN)
    # Its weights are (out, in), ours (in, out).
    grads = [{"kernel": jnp.asarray(g.T)} for g in golden[f"{shape}_grads"]]
    params = {"kernel": jnp.asarray(golden[f"{shape}_0"].T)}
    inner = optax.scale_by_adam(0.9, 0.95, 1e-12)
    tx = sgd(galore(inner, rank=3, update_proj_gap=10, side=side, targets=("kernel",)))
    want = golden[f"{shape}_{proj_type}"]
    for steps in (1, 10, 11, 24):
        got, _ = run(tx, params, grads[:steps])
        np.testing.assert_allclose(got["kernel"].T, want[steps - 1], atol=2e-5)
    assert np.abs(want[-1] - golden[f"{shape}_0"]).max() > 0.01, "it moved far more than the tolerance"


@pytest.mark.parametrize("side", ["short", "long"])
def test_full_rank_is_adam_in_rotated_coordinates(side):
    """U Adam(Uᵀ G) with the U of the first gradient, computed without any of galore's code."""
    shapes, grads = kernel((5, 7)), gradients(6, kernel((5, 7)))
    leaf = lambda tree: tree["layers"]["attn"]["q_proj"]["kernel"]  # noqa: E731
    tx = galore(ADAM, rank=100, scale=1.0, side=side, layer_axes=lambda path: 0)
    got, _ = run(sgd(tx), random_tree(shapes, 9), grads)
    first = np.asarray(leaf(grads[0]))
    u = np.linalg.svd(first if side == "short" else first.T, full_matrices=False)[0]
    rotated = [(u.T @ leaf(g)) if side == "short" else (leaf(g) @ u) for g in grads]
    zero = jnp.zeros_like(rotated[0])
    steps, _ = run(sgd(ADAM), zero, rotated)
    want = leaf(random_tree(shapes, 9)) + (u @ steps if side == "short" else steps @ u.T)
    np.testing.assert_allclose(leaf(got), want, atol=1e-5)


def test_what_is_no_target_is_left_to_the_inner_transformation():
    params, grads = random_tree(SHAPES, 50), gradients(5)
    got, _ = run(sgd(galore(ADAM, rank=2, update_proj_gap=2)), params, grads)
    want, _ = run(sgd(ADAM), params, grads)
    assert_trees_close(got["tok_embed"], want["tok_embed"], rtol=1e-6)
    assert_trees_close(got["layers"]["attn_norm"], want["layers"]["attn_norm"], rtol=1e-6)
    assert (
        np.abs(got["layers"]["mlp"]["up_proj"]["kernel"] - want["layers"]["mlp"]["up_proj"]["kernel"]).max()
        > 0.01
    )


@pytest.mark.parametrize(
    ("basis", "moments"), [("svd", "keep"), ("randomized", "reset"), ("randomized", "reproject")]
)
def test_stacked_layers_equal_single_ones(basis, moments):
    params, grads = random_tree(SHAPES, 50), gradients(5)
    tx = sgd(galore(ADAM, rank=2, update_proj_gap=2, basis=basis, moments=moments))
    got, _ = run(tx, params, grads)
    for i in range(3):
        one = lambda tree, i=i: {"layer": jax.tree.map(lambda x: x[i], tree["layers"])}  # noqa: E731
        want, _ = run(tx, one(params), [one(g) for g in grads])
        assert_trees_close(one(got), want, rtol=1e-4, atol=2e-5)


def low_rank(m, n, r, noise, seed=0):
    rng = np.random.default_rng(seed)
    signal = rng.normal(size=(m, r)) * np.geomspace(1, 0.1, r) @ rng.normal(size=(r, n))
    return jnp.asarray(signal + noise * rng.normal(size=(m, n)), jnp.float32)


def test_bases_are_orthonormal_and_have_fixed_signs():
    a = low_rank(24, 40, 6, 0.01)
    for make in (jax.jit(f, static_argnums=1) for f in BASES.values()):
        u = np.asarray(make(a, 6, jax.random.key(0)))
        np.testing.assert_allclose(u.T @ u, np.eye(6), atol=2e-6)
        assert (u[np.abs(u).argmax(axis=0), range(6)] > 0).all()
        np.testing.assert_allclose(make(-a, 6, jax.random.key(0)), u, atol=1e-4)


def test_randomized_basis_is_that_of_the_svd():
    """Vectors where the spectrum has gaps; the energy captured where it has none."""
    a = low_rank(24, 40, 6, 1e-3)
    u, v = (np.asarray(BASES[b](a, 5, jax.random.key(1))) for b in ("svd", "randomized"))
    np.testing.assert_allclose(u, v, atol=1e-3)
    noise = low_rank(64, 80, 1, 1.0)
    energy = [float(jnp.sum((BASES[b](noise, 16, jax.random.key(1)).T @ noise) ** 2)) for b in BASES]
    assert 0.97 * energy[0] < energy[1] <= energy[0] * 1.0001


def test_refresh_happens_every_gap_and_only_then():
    tx = galore(ADAM, rank=2, update_proj_gap=3)
    params = random_tree(SHAPES, 50)
    state, update = tx.init(params), jax.jit(tx.update)
    seen = []
    for g in gradients(8):
        _, state = update(g, state)
        seen.append(np.asarray(subspace(state, "layers", "mlp", "up_proj", "kernel").projector))
    changed = [not np.array_equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, False, True, False, False, True, False]


def primitives(jaxpr, into_branches):
    """Names of the operations of a jaxpr, with or without those in branches of a condition."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name != "cond" or into_branches:
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(value, "jaxpr"):
                    yield from primitives(value.jaxpr, into_branches)


def test_the_svd_is_in_a_branch_that_other_steps_skip():
    """Under vmap it would be a selection, and the SVD of every layer computed at every step."""
    tx = galore(ADAM, rank=2)
    params = random_tree(SHAPES, 50)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params)).jaxpr
    assert "svd" in primitives(jaxpr, into_branches=True)
    assert "svd" not in primitives(jaxpr, into_branches=False)


def test_moments_at_a_refresh():
    """After one refresh the first moments are: kept, the new gradient's, or rotated into the new basis."""
    shapes = kernel((6, 9))
    grads = gradients(3, shapes)
    leaf = lambda tree: np.asarray(tree["layers"]["attn"]["q_proj"]["kernel"])  # noqa: E731
    free = dict(rank=2, update_proj_gap=2, layer_axes=lambda path: 0)

    def states(moments):
        tx = galore(ADAM, moments=moments, **free)
        before = run(tx, random_tree(shapes, 9), grads[:2])[1]
        return before, run(tx, random_tree(shapes, 9), grads)[1]

    for moments in ("keep", "reset", "reproject"):
        before, after = states(moments)
        p_old, p_new = (
            subspace(s, "layers", "attn", "q_proj", "kernel").projector for s in (before, after)
        )
        assert np.abs(p_old - p_new).max() > 0.1
        r = p_new.T @ leaf(grads[2])
        c = p_new.T @ p_old
        mu, nu = leaf(before.inner.mu), leaf(before.inner.nu)
        if moments == "reset":
            mu, nu = r, r**2
        elif moments == "reproject":
            mu, nu = c @ mu, c**2 @ nu
        np.testing.assert_allclose(leaf(after.inner.mu), 0.9 * mu + 0.1 * r, atol=1e-5)
        np.testing.assert_allclose(leaf(after.inner.nu), 0.95 * nu + 0.05 * r**2, atol=1e-5)


def test_a_gradient_that_is_not_finite_makes_no_basis():
    shapes = kernel((2, 6, 9))
    tx = galore(ADAM, rank=2, update_proj_gap=2)
    grads = gradients(4, shapes)
    grads[2]["layers"]["attn"]["q_proj"]["kernel"] = (
        grads[2]["layers"]["attn"]["q_proj"]["kernel"].at[1, 0, 0].set(jnp.nan)
    )
    path = ("layers", "attn", "q_proj", "kernel")
    third, fourth = (subspace(run(tx, grads[0], grads[:n])[1], *path) for n in (3, 4))
    assert third.last_refresh.tolist() == [2, 0] and np.isfinite(third.projector).all()
    assert fourth.last_refresh.tolist() == [2, 3], "the other layer's turn comes with the next gradient"


def test_lazy_layers_stretch_their_gap():
    """Layer 0's gradient has one direction for good, layer 1's a new one each time."""
    shapes, rng = kernel((2, 12, 30)), np.random.default_rng(0)
    fixed = np.outer(rng.normal(size=12), rng.normal(size=30))
    tx = galore(ADAM, rank=2, update_proj_gap=2, lazy_threshold=0.8)
    state, update = tx.init(random_tree(shapes, 1)), jax.jit(tx.update)
    refreshes = []
    for step in range(26):
        g = np.stack([fixed, rng.normal(size=(12, 30))]) + 0.01 * rng.normal(size=(2, 12, 30))
        _, state = update({"layers": {"attn": {"q_proj": {"kernel": jnp.asarray(g, jnp.float32)}}}}, state)
        space = subspace(state, "layers", "attn", "q_proj", "kernel")
        refreshes.append((space.last_refresh == step).tolist())
    first, second = np.array(refreshes).T
    # Five overlaps are known at step 10; from there the gaps are 4, 8, 16 …
    assert np.flatnonzero(first).tolist() == [0, 2, 4, 6, 8, 10, 14, 22]
    assert np.flatnonzero(second).tolist() == list(range(0, 26, 2))


@pytest.mark.parametrize(("projector", "worst"), [("int8", 0.02), ("int4", 0.3)])
def test_low_bit_projector(projector, worst):
    params, grads = random_tree(SHAPES, 50), gradients(4)
    exact = run(galore(ADAM, rank=4, update_proj_gap=2), params, grads)[1]
    coarse = run(galore(ADAM, rank=4, update_proj_gap=2, projector=projector), params, grads)[1]
    path = ("layers", "mlp", "up_proj", "kernel")
    want, stored = subspace(exact, *path).projector, subspace(coarse, *path).projector
    got = codes.decode(stored, projector, block_size=256)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0 < error < worst
    assert stored.codes.nbytes == want.nbytes // {"int8": 4, "int4": 8}[projector]


def test_stable_adam_inside_reports_an_rms_for_each_layer():
    tx = galore(scale_by_stable_adam(), rank=2)
    _, state = run(tx, random_tree(SHAPES, 50), gradients(2))
    assert optax.tree.get(state, "rms")["layers"]["mlp"]["up_proj"]["kernel"].shape == (3,)


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
    "tok_embed": {"embedding": (64, 64)},
    "layers": {
        "attn": {"k_proj": {"kernel": (2, 64, 32)}},
        "mlp": {"up_proj": {"kernel": (2, 64, 128)}, "down_proj": {"kernel": (2, 128, 64)}},
    },
}
SMALLEST_GRADIENT = 64 * 32
MESHES = {
    "fsdp8": dict(fsdp=8),
    "fsdp4_tensor2": dict(fsdp=4, tensor=2),
    "fsdp2_tensor4": dict(fsdp=2, tensor=4),
}


def placed(tree, mesh):
    return jax.tree.map(
        lambda names, x: jax.device_put(x, NamedSharding(mesh, sharding.spec(*names))),
        NAMES,
        tree,
        is_leaf=is_shape,
    )


def compiled_step(tx, mesh):
    """A compiled step with pinned shardings, and its state and parameters, on a mesh."""
    params = placed(random_tree(WIDE, 50), mesh)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    where = opt_state_shardings(tx, abstract, mesh)
    state = jax.jit(tx.init, out_shardings=where)(params)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    places = jax.tree.map(lambda x: x.sharding, params)
    compiled = jax.jit(step, out_shardings=(places, where)).lower(params, state, params).compile()
    return compiled, state, params


def run_on_mesh(tx, mesh, steps):
    """What three steps on a mesh and on one device give, and the compiled step."""
    grads = gradients(steps, WIDE)
    want = run(tx, random_tree(WIDE, 50), grads)
    with jax.set_mesh(mesh):
        step, state, params = compiled_step(tx, mesh)
        for g in grads:
            params, state = step(placed(g, mesh), state, params)
    return (params, state), want, step


def assert_same_run(got, want):
    assert_trees_close(jax.device_get(got[0]), jax.device_get(want[0]), atol=3e-5)
    mu, want_mu = (jax.device_get(optax.tree.get(run[1], "mu")) for run in (got, want))
    assert_trees_close(mu, want_mu, atol=2e-4)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_nothing_and_no_device_gathers_a_gradient(mesh):
    mesh = sharding.make_mesh(**MESHES[mesh])
    tx = sgd(galore(ADAM, rank=4, update_proj_gap=2, basis="randomized"))
    got, want, step = run_on_mesh(tx, mesh, steps=3)
    assert_same_run(got, want)

    gathers = re.findall(r"^ *(?:ROOT )?%\S+ = (.*?) all-gather(?:-start)?\(", step.as_text(), re.MULTILINE)
    shapes = [shape for result in gathers for shape in re.findall(r"\w+\[([\d,]+)\]", result)]
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    assert 0 < largest < SMALLEST_GRADIENT
    assert "all-to-all" in step.as_text()

    for path, moment in jax.tree.leaves_with_path(optax.tree.get(got[1], "nu")):
        assert moment.addressable_shards[0].data.size * 8 == moment.size, path
    for space in jax.tree.leaves(
        optax.tree.get(got[1], "subspaces"), is_leaf=lambda x: hasattr(x, "projector")
    ):
        assert space.projector.addressable_shards[0].data.size * 8 == space.projector.size


def test_a_mesh_changes_nothing_with_svd_int8_projector_and_reprojection():
    tx = sgd(galore(ADAM, rank=4, update_proj_gap=2, projector="int8", moments="reproject"))
    got, want, _ = run_on_mesh(tx, sharding.make_mesh(fsdp=4, tensor=2), steps=3)
    assert_same_run(got, want)


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"side": "left"}, r"side='left' is unknown, choose one of: short, long"),
        ({"basis": "qr"}, r"basis='qr'"),
        ({"moments": "zero"}, r"moments='zero'"),
        ({"projector": "int2"}, r"projector='int2'"),
        ({"rank": 0}, r"rank=0"),
        ({"projector": "int4", "rank": 3}, r"rank=3 must be even"),
        ({"targets": ("atn/",)}, r"'atn/' matches no parameter"),
        ({"targets": ("attn_norm",)}, r"layers/attn_norm/scale, which is no matrix"),
    ],
)
def test_errors_are_one_line_with_key_and_value(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        galore(ADAM, **({"rank": 2} | changes)).init(random_tree(SHAPES, 0))
    assert "\n" not in str(error.value)
