"""APOLLO by algorithm 1 of its paper, in NumPy and float64."""

import jax
import numpy as np
import pytest

from maxlp.optim.apollo import scale_by_apollo, scale_by_apollo_mini
from maxlp.parallel import sharding
from tests.optim.common import assert_trees_close, each_step, random_tree, run, run_on_mesh

B1, B2, EPS, GAP, RANK, SEED = 0.8, 0.9, 1e-8, 3, 2, 5
SHAPES = {
    "layers": {"attn": {"q_proj": {"kernel": (2, 6, 9)}}, "mlp": {"down_proj": {"kernel": (2, 8, 5)}}},
    "lm_head": {"kernel": (8, 16)},
}


def projection(step, rank, short):
    key = jax.random.fold_in(jax.random.key(SEED), step // GAP)
    return np.asarray(jax.random.normal(key, (rank, short)), np.float64) / rank**0.5


def apollo(grads, *, rank, scale, by_tensor, growth):
    """The steps for one matrix, whose short side is the first."""
    m = v = last = 0.0
    for t, g in enumerate(grads):
        r = projection(t, rank, len(g)) @ g
        m, v = B1 * m + (1 - B1) * r, B2 * v + (1 - B2) * r**2
        adam = (m / (1 - B1 ** (t + 1))) / (np.sqrt(v / (1 - B2 ** (t + 1))) + EPS)
        axis = None if by_tensor else 0
        step = scale * g * np.linalg.norm(adam, axis=axis) / np.linalg.norm(r, axis=axis)
        if t > 0 and np.linalg.norm(step) > growth * last:
            step *= growth * last / np.linalg.norm(step)
        last = np.linalg.norm(step)
    return step


def transposed(path, kernel):
    return kernel.T if path[0] == "mlp" else kernel


@pytest.mark.parametrize("growth", [1.01, float("inf")])
@pytest.mark.parametrize("mini", [False, True])
def test_five_steps_equal_the_definition_for_each_layer(mini, growth):
    """Through two projections, of a wide and a tall matrix, with gradients that grow and shrink."""
    grads = [random_tree(SHAPES, seed, scale) for seed, scale in enumerate((1.0, 3.0, 0.1, 0.2, 5.0))]
    options = dict(growth=growth, update_proj_gap=GAP, seed=SEED)
    tx = scale_by_apollo(B1, B2, EPS, rank=RANK, scale=0.5, **options)
    expected = dict(rank=RANK, scale=0.5, by_tensor=False, growth=growth)
    if mini:
        tx, expected = (
            scale_by_apollo_mini(B1, B2, EPS, **options),
            dict(rank=1, scale=128**0.5, by_tensor=True, growth=growth),
        )
    *_, (updates, _, _) = each_step(tx, grads[0], grads)
    for path in (("attn", "q_proj"), ("mlp", "down_proj")):
        ours, *seen = (np.asarray(g["layers"][path[0]][path[1]]["kernel"]) for g in (updates, *grads))
        for layer in range(2):
            want = apollo([transposed(path, g[layer].astype(np.float64)) for g in seen], **expected)
            # Sums of up to 9 products in float32, through five steps.
            np.testing.assert_allclose(transposed(path, ours[layer]), want, rtol=5e-6, atol=1e-6)


def test_moments_are_small_and_a_mesh_changes_nothing():
    """A fourth of the short side leaves a fourth of the moments, sharded; no projection is kept."""
    shapes = {"layers": {"mlp": {"up_proj": {"kernel": (2, 32, 64)}}}}
    names = {"layers": {"mlp": {"up_proj": {"kernel": ("layers", "embed", "mlp")}}}}
    tx = scale_by_apollo(rank=8, update_proj_gap=2)
    params, grads = random_tree(shapes, 0), [random_tree(shapes, seed) for seed in range(1, 4)]
    got, state, _ = run_on_mesh(tx, sharding.make_mesh(fsdp=4, tensor=2), names, params, grads)
    # Three steps round parameters of up to 8; sums of 32 products are added in another order.
    assert_trees_close(jax.device_get(got), jax.device_get(run(tx, params, grads)[0]), atol=3e-6)
    large = [x for x in jax.tree.leaves(state) if x.size > 2]
    assert [x.size for x in large] == [2 * 8 * 64] * 2
    assert all(x.addressable_shards[0].data.size * 8 == x.size for x in large)


def test_a_channel_whose_squares_underflow_steps_like_zeros():
    """Its norm is 0 in float32, while Adam's step still has the momentum of the step before."""
    kernel = random_tree((6, 9), 0)

    def steps(size):
        tx = scale_by_apollo(B1, B2, EPS, rank=RANK, growth=float("inf"))
        grads = [{"attn": {"kernel": g}} for g in (kernel, kernel.at[:, 3].multiply(size))]
        *_, (updates, _, _) = each_step(tx, grads[0], grads)
        return updates["attn"]["kernel"]

    np.testing.assert_array_equal(steps(1e-25), steps(0.0))
