"""SOAP by algorithm 3 of its paper, in NumPy and float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlp.optim.muon import scale_by_muon
from maxlp.optim.soap import SoapState, scale_by_soap
from maxlp.optim.tree_utils import find_states
from maxlp.parallel import sharding
from maxlp.parallel.opt_state import opt_state_shardings
from tests.optim.common import assert_trees_close, each_step, random_tree, run, run_on_mesh

B1, B2, EPS, GAP = 0.8, 0.9, 0.3, 2
# Of a step: float32 eigenvectors are off by 1e-7 over their relative gaps, which are above 1e-2 here; EPS
# keeps the division of small numbers from amplifying that.
OF_STEP = 4e-5
SHAPES = {
    "layers": {"attn": {"q_proj": {"kernel": (2, 6, 6)}}, "mlp": {"up_proj": {"kernel": (2, 5, 9)}}},
    "lm_head": {"kernel": (8, 16)},
}


def soap(grads, sides):
    """The steps for one matrix; `sides` are the dims that are rotated."""
    m, v = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    grams = {side: np.zeros((grads[0].shape[side],) * 2) for side in sides}
    bases, steps = {side: np.eye(grads[0].shape[side]) for side in (0, 1)}, []
    for t, g in enumerate(grads):
        if t > 0:
            rotated = bases[0].T @ g @ bases[1]
            m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * rotated**2
            m_hat, v_hat = bases[0].T @ m @ bases[1] / (1 - B1**t), v / (1 - B2**t)
            steps.append(bases[0] @ (m_hat / (np.sqrt(v_hat) + EPS)) @ bases[1].T)
        for side in sides:
            grams[side] = B2 * grams[side] + (1 - B2) * (g @ g.T if side == 0 else g.T @ g)
            if t == 0:
                bases[side] = np.linalg.eigh(grams[side])[1][:, ::-1]
            elif t % GAP == 0:
                order = np.argsort(-np.diag(bases[side].T @ grams[side] @ bases[side]))
                bases[side] = np.linalg.qr(grams[side] @ bases[side][:, order])[0]
                v = v.take(order, axis=side)
    return [np.zeros_like(m), *steps]


@pytest.mark.parametrize("one_sided", [False, True])
def test_six_steps_equal_the_definition_for_each_layer(one_sided):
    """Both sides of a square; of a wide matrix the short one, which a single gradient determines."""
    params, grads = random_tree(SHAPES, 0), [random_tree(SHAPES, seed) for seed in range(1, 7)]
    tx = scale_by_soap(B1, B2, EPS, precondition_frequency=GAP, max_precond_dim=6, one_sided=one_sided)
    rotated = {("attn", "q_proj"): (0,) if one_sided else (0, 1), ("mlp", "up_proj"): (0,)}
    for t, (updates, _, _) in enumerate(each_step(tx, params, grads)):
        for path, sides in rotated.items():
            seen, ours = (
                np.stack([np.asarray(g["layers"][path[0]][path[1]]["kernel"], np.float64) for g in trees])
                for trees in (grads[: t + 1], [updates])
            )
            for layer in range(2):
                np.testing.assert_allclose(ours[0, layer], soap(seen[:, layer], sides)[-1], atol=OF_STEP)


def test_a_matrix_with_two_long_sides_has_adam_from_its_second_gradient_on():
    shapes = {"layers": {"attn": {"q_proj": {"kernel": (2, 6, 6)}}}}
    params, (first, *grads) = random_tree(shapes, 0), [random_tree(shapes, seed) for seed in range(1, 4)]
    found = [
        steps
        for steps, *_ in each_step(scale_by_soap(B1, B2, EPS, max_precond_dim=5), params, [first, *grads])
    ]
    adam = [steps for steps, *_ in each_step(optax.scale_by_adam(B1, B2, EPS), params, grads)]
    assert not any(x.any() for x in jax.tree.leaves(found[0]))
    for step, of_adam in zip(found[1:], adam, strict=True):
        assert_trees_close(step, of_adam, rtol=1e-6)  # the same formula, in another program


def test_parameters_that_are_no_targets_have_adam():
    params, grads = random_tree(SHAPES, 0), [random_tree(SHAPES, seed) for seed in (1, 2)]
    got, want = (run(tx(B1, B2, 1e-8), params, grads)[0] for tx in (scale_by_soap, scale_by_muon))
    assert_trees_close(got["lm_head"], want["lm_head"], rtol=1e-6)  # the same Adam, in another program


def test_both_sides_of_a_long_matrix_have_orthonormal_bases():
    shapes = {"layers": {"mlp": {"up_proj": {"kernel": (2, 5, 9)}}}}
    tx = scale_by_soap(B1, B2, EPS, precondition_frequency=GAP, mu_dtype="bfloat16")
    _, state = run(tx, random_tree(shapes, 0), [random_tree(shapes, seed) for seed in range(1, 6)])
    [(_, soap)] = find_states(state, SoapState)
    assert {x.dtype for x in jax.tree.leaves(soap.mu)} == {jnp.dtype(jnp.bfloat16)}
    for side, size in ((soap.whole.state.left, 5), (soap.whole.state.right, 9)):
        for basis in np.asarray(side["layers"]["mlp"]["up_proj"]["kernel"].basis):
            # Sums of up to 9 products in float32.
            np.testing.assert_allclose(basis.T @ basis, np.eye(size), atol=2e-6)


def test_bases_are_refreshed_in_float32_on_accelerators():
    params = random_tree(SHAPES, 0)
    tx = scale_by_soap(B1, B2, EPS, precondition_frequency=GAP, max_precond_dim=8, one_sided=True)
    program = jax.jit(tx.update).lower(params, tx.init(params)).as_text()
    highest = re.findall(r"dot_general.*HIGHEST.*-> tensor<([\dx]+)xf32>", program)
    assert sorted(highest) == ["5x5", "6x6"]


@pytest.mark.parametrize("layers", [2, 3])
def test_a_mesh_changes_nothing_with_both_sides(layers):
    """Of square matrices: one gradient determines all of their eigenvectors.

    Two layers are split over one axis, and columns, which are gathered, over the other; three are filled up
    with zeros.
    """
    shapes = {"layers": {"mlp": {"up_proj": {"kernel": (layers, 8, 8)}}}}
    axes = {"layers": {"mlp": {"up_proj": {"kernel": ("layers", "embed", "mlp")}}}}
    tx = scale_by_soap(B1, B2, EPS, precondition_frequency=GAP)
    params, grads = random_tree(shapes, 0), [random_tree(shapes, seed) for seed in range(1, 6)]
    want, _ = run(tx, params, grads)
    got, state, step = run_on_mesh(tx, sharding.make_mesh(fsdp=4, tensor=2), axes, params, grads)
    assert_trees_close(jax.device_get(got), jax.device_get(want), atol=5 * OF_STEP)
    [(_, soap)] = find_states(state, SoapState)
    large = [x for x in jax.tree.leaves(soap) if x.size >= 64]
    assert len(large) == 6 and not any(x.sharding.is_fully_replicated for x in large)
    gathered = re.findall(r"= \(?f32\[([\d,]+)\]\S* all-gather", step.as_text())
    assert bool(gathered) == (layers == 2) and f"{layers},8,8" not in gathered


def test_in_replicas_of_their_own_devices_share_layers_and_columns():
    """In a `jax.shard_map`, XLA aborted where one axis split the layers, and another one the columns."""
    shapes = {"layers": {"mlp": {"up_proj": {"kernel": (2, 8, 8)}}}}
    axes = {"layers": {"mlp": {"up_proj": {"kernel": ("layers", "embed", "mlp")}}}}
    tx = scale_by_soap(B1, B2, EPS, precondition_frequency=GAP)
    params, grads = random_tree(shapes, 0), [random_tree(shapes, seed) for seed in range(1, 4)]
    want, _ = run(tx, params, grads)
    whole = PartitionSpec()
    update = jax.shard_map(tx.update, in_specs=whole, out_specs=whole, axis_names={"data"}, check_vma=False)
    apart = optax.GradientTransformation(tx.init, update)
    got, *_ = run_on_mesh(apart, sharding.make_mesh(data=2, fsdp=2, tensor=2), axes, params, grads)
    assert_trees_close(jax.device_get(got), jax.device_get(want), atol=3 * OF_STEP)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_devices_share_the_layers(axis):
    """Each one decomposes and rotates whole matrices of its own layers, and gathers none of others.

    Over each axis it sends the gradients and the first moments of a matrix, and its steps back.
    """
    text = compiled_update(4, {"fsdp": 2, axis: 2, "data": 2})
    assert sorted(decomposed(text)) == 4 * ["1,16,16"] + 4 * ["1,8,8"]
    assert len(re.findall(r" all-to-all\(", text)) == 2 * 2 * 3 and "all-gather" not in text


@pytest.mark.parametrize(
    ("layers", "axes"), [(3, {"fsdp": 4}), (6, {"fsdp": 4}), (3, {"fsdp": 2, "tensor": 2})]
)
def test_devices_that_do_not_divide_the_layers_share_them_and_zeros(layers, axes):
    """They gather nothing.

    Over each axis they also send, of a matrix, the second moments there and back, of each side a basis
    there, and what is added up there and back, and at a refresh the basis there and back.
    """
    text = compiled_update(layers, axes | {"data": 2})
    most = -(-layers // 4)
    assert sorted(decomposed(text)) == 4 * [f"{most},16,16"] + 4 * [f"{most},8,8"]
    sent = 2 * (5 + 2 * (3 + 2)) * len(axes)
    assert len(re.findall(r" all-to-all\(", text)) == sent and "all-gather" not in text


def test_stages_and_single_layers_have_no_zeros():
    assert {*decomposed(compiled_update(6, {"stage": 2, "fsdp": 4}))} == {"3,16,16", "3,8,8"}
    assert {*decomposed(compiled_update(1, {"fsdp": 4, "data": 2}))} == {"16,16", "8,8"}


def compiled_update(layers: int, axes: dict[str, int]) -> str:
    """The program of an update of two stacks of matrices, on a mesh with these axes."""
    shapes = {"layers": {"mlp": {name: {"kernel": (layers, 8, 16)} for name in ("gate_proj", "up_proj")}}}
    mesh, spec = sharding.make_mesh(**axes), ("layers", "embed", "mlp")
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, jnp.float32, sharding=NamedSharding(mesh, sharding.spec(*spec))),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tx = scale_by_soap()
    where = opt_state_shardings(tx, params, mesh)
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(tx.init, params),
        where,
    )
    with jax.set_mesh(mesh):
        update = jax.jit(tx.update, out_shardings=(jax.tree.map(lambda p: p.sharding, params), where))
        return update.lower(params, state, params).compile().as_text()


def decomposed(text: str) -> list[str]:
    """The shapes of the arrays that the program decomposes."""
    return re.findall(r"= \(?f32\[([\d,]+)\].* custom_call_target=\"lapack_s(?:geqrf|syevd)", text)
