import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim.float16_params import float16_params
from tests.optim.common import make_optimizer, random_tree, run
from tests.optim.test_pure_bf16 import CLIPPED, SHAPES


def halves(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float16), tree)


def test_an_update_is_computed_in_float32_and_rounded_once():
    """Updates of 1e-5 to 1e-3 of parameters of 0.5 to 4, and decay: NumPy rounds the same float32 sums."""
    rng = np.random.default_rng(0)
    p = rng.uniform(0.5, 4, 1024).astype(np.float16)
    u = (rng.uniform(1e-5, 1e-3, 1024) * p).astype(np.float32)
    tx = float16_params(optax.add_decayed_weights(1e-4))
    ours, state = {"p": jnp.asarray(p)}, tx.init({"p": jnp.asarray(p)})
    for _ in range(100):
        updates, state = tx.update({"p": jnp.asarray(u)}, state, ours)
        ours = optax.apply_updates(ours, updates)
        wide = p.astype(np.float32)
        p = (wide + (u + np.float32(1e-4) * wide)).astype(np.float16)
    np.testing.assert_array_equal(ours["p"], p, strict=True)
    assert float16_params(optax.scale_by_adam()).init(ours).nu["p"].dtype == jnp.float32


@pytest.mark.full
def test_adamw_stays_near_float32_where_gradients_and_moments_are_below_float16():
    """Gradients of 1e-9 have second moments of 1e-18, and an epsilon of 1e-12 is zero in float16."""
    low_bit = dict(mu="float16", nu="float16", min_size=1)
    base = CLIPPED | {"eps": 1e-12, "learning_rate": 1e-2}
    start, grads = halves(random_tree(SHAPES, 100)), [random_tree(SHAPES, i, 1e-9) for i in range(20)]
    tx = make_optimizer(param_rounding="nearest", low_bit=low_bit, **base).tx
    ours, state = run(tx, start, grads)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), start)
    exact, _ = run(make_optimizer(**base).tx, wide, grads)
    stored = {str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.size >= 512}
    assert stored == {"float16"}  # the moments of every tensor
    for a, b, before in zip(*map(jax.tree.leaves, (ours, exact, start)), strict=True):
        assert a.dtype == jnp.float16
        moved = np.abs(np.asarray(b) - np.asarray(before, np.float32))
        # 20 roundings of half a step of 2^-10, moments with 11 bits.
        assert np.max(np.abs(np.asarray(a, np.float32) - b)) < 20 * 2.0**-11 * np.max(np.abs(b))
        assert np.median(moved) > 0.01
