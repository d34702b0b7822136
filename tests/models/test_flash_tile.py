"""The fused tiles of ring attention: the numbers of plain ones, interpreted on CPU; and lowered for TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.nn import attention
from maxlp.nn.attention import flash_tile, ring, tiles
from maxlp.parallel import sharding
from tests.models.test_attention import assert_close, inputs, out_and_grads
from tests.models.test_ring import balanced


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(flash_tile, "INTERPRET", True)
    monkeypatch.setattr(flash_tile, "TILE", 128)


# --- one device's part of a ring ------------------------------------------------------------------------

n, B, K, G, t, H = 4, 2, 2, 2, 128, 16


@functools.partial(jax.jit, static_argnames=("kind", "causal", "packed"))
def a_turn_after_the_first(kind, arrays, later, causal, packed):
    """The output and the gradients of q, and of k and v of the second turn, whose keys are others."""
    q, dout, k, v, other_k, other_v, log_sum, product, ids, other_ids = arrays
    own, other = ((ids, ids), (ids, other_ids)) if packed else ((None, None),) * 2
    near = np.tril_indices(n) if causal else np.indices((n, n)).reshape(2, -1)
    near, far = tuple(jnp.asarray(x) for x in near), ring.far_pairs(n, later)
    sums = kind.forward(near, causal, q, k, v, own, None)
    out, log_sums = kind.attended(kind.forward(far, False, q, other_k, other_v, other, sums))
    rows = log_sum, product, dout
    dq, *_ = kind.backward(near, causal, q, k, v, own, *rows, None)
    dq, dk, dv = kind.backward(far, False, q, other_k, other_v, other, *rows, dq)
    return out, log_sums, kind.upright(dq), dk, dv


@pytest.mark.parametrize(
    ("causal", "packed", "later", "dtype", "atol"),
    [
        (True, True, 0, "float32", 1e-5),
        (True, True, 1, "bfloat16", 2e-2),
        (False, False, 1, "float32", 1e-5),
    ],
)
def test_sums_over_two_turns_equal_those_of_plain_tiles(causal, packed, later, dtype, atol, interpreted):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    queries = [normal(n, B, K, G, t, H) for _ in range(2)]
    keys = [normal(n, B, K, t, H) for _ in range(4)]
    log_sum, product = (jnp.asarray(rng.uniform(5, 7, (n, B, K, G, t, 1)), jnp.float32) for _ in range(2))
    ids = [jnp.sort(jnp.asarray(rng.integers(0, 3, (n, B, t)), jnp.int32), axis=-1) for _ in range(2)]
    arrays = *queries, *keys, log_sum, product, *ids
    got, want = (
        a_turn_after_the_first(kind, arrays, later, causal, packed) for kind in (flash_tile, tiles)
    )
    for name, a, b in zip(("out", "log_sum", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=0, err_msg=name)


# --- in the ring ----------------------------------------------------------------------------------------


def test_a_ring_of_four_equals_plain_attention(interpreted, monkeypatch):
    """Two tiles in a device's chunk, grouped heads, packed rows."""
    monkeypatch.setattr(ring, "_on_platform", lambda function, _, *arrays: function(flash_tile, *arrays))
    args = inputs(2, 1024, 4, 2, 16)
    with jax.set_mesh(sharding.make_mesh(fsdp=2, context=4)):
        actual = out_and_grads(balanced(ring.ring), *args)
    assert_close(actual, out_and_grads(attention.xla, *args), atol=1e-5)


def lowered(S: int, platform: str) -> str:
    *arrays, ids = inputs(2, S, 4, 2, 64, "bfloat16")
    with jax.set_mesh(sharding.make_mesh(fsdp=2, context=4)):
        return out_and_grads.trace(ring.ring, *arrays, ids).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("S", "platform", "fused"), [(1024, "tpu", True), (1024, "cpu", False), (960, "tpu", False)]
)
def test_the_kernels_are_of_tpu_and_of_lengths_that_fit(S, platform, fused):
    """Three kernels, in a program three times: the first turn, those between, the last."""
    assert lowered(S, platform).count("@tpu_custom_call") == (9 if fused else 0)
