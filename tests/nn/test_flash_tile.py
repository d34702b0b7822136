"""The fused tiles of ring attention: equal to the plain ones, interpreted on CPU; and lowered for TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxlp.nn.attention import flash_tile, ring, tiles
from maxlp.nn.attention.dense import dense
from maxlp.parallel import sharding
from tests.nn.fixtures import assert_close, in_natural_order, inputs, out_and_grads


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(flash_tile, "INTERPRET", True)
    monkeypatch.setattr(flash_tile, "MAX_TILE_SIZE", 128)


# --- two steps of a ring on one device ------------------------------------------------------------------

n, B, K, G, t, H = 4, 2, 2, 2, 128, 16


@functools.partial(jax.jit, static_argnames=("kernels", "causal", "packed"))
def two_steps(kernels, arrays, wrapped, causal, packed):
    """The output and the gradient of q over both steps, and those of k and v of the second step."""
    q, dout, k, v, other_k, other_v, log_sum, delta, ids, other_ids = arrays
    own_ids, remote_ids = ((ids, ids), (ids, other_ids)) if packed else ((None, None),) * 2
    own = np.tril_indices(n) if causal else np.indices((n, n)).reshape(2, -1)
    own, remote = tuple(jnp.asarray(x) for x in own), ring.remote_pairs(n, wrapped)
    accumulator = kernels.forward(own, causal, q, k, v, own_ids, None)
    accumulator = kernels.forward(remote, False, q, other_k, other_v, remote_ids, accumulator)
    out, log_sums = kernels.finish_forward(accumulator)
    rows = log_sum, delta, dout
    dq, *_ = kernels.backward(own, causal, q, k, v, own_ids, *rows, None)
    dq, dk, dv = kernels.backward(remote, False, q, other_k, other_v, remote_ids, *rows, dq)
    return out, log_sums, kernels.finish_dq(dq), dk, dv


@pytest.mark.parametrize(
    ("causal", "packed", "wrapped", "dtype", "atol"),
    [
        # A probability that differs in its last bit may round to another bfloat16, 2^-8 away, and is
        # multiplied by a value of up to 4. The ring below does the same in float32.
        (True, True, 1, "bfloat16", 2e-2),
        (False, False, 1, "float32", 1e-5),  # sums in another order
    ],
)
def test_two_steps_equal_those_of_plain_tiles(causal, packed, wrapped, dtype, atol, interpreted):
    assert_equal_plain_tiles(B, K, wrapped, causal, packed, dtype, atol)


@pytest.mark.full
def test_kernels_read_nothing_that_is_not_initialized(interpreted, monkeypatch):
    """Simulated with NaN in the memory of a new block, where plain interpretation has what is aliased."""
    monkeypatch.setattr(flash_tile, "INTERPRET", pltpu.InterpretParams(uninitialized_memory="nan"))
    assert_equal_plain_tiles(1, 1, 1, True, False, "float32", 1e-5)


def assert_equal_plain_tiles(B, K, wrapped, causal, packed, dtype, atol):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    queries = [normal(n, B, K, G, t, H) for _ in range(2)]
    keys = [normal(n, B, K, t, H) for _ in range(4)]
    log_sum, delta = (jnp.asarray(rng.uniform(5, 7, (n, B, K, G, t, 1)), jnp.float32) for _ in range(2))
    ids = [jnp.sort(jnp.asarray(rng.integers(0, 3, (n, B, t)), jnp.int32), axis=-1) for _ in range(2)]
    arrays = *queries, *keys, log_sum, delta, *ids
    got, want = (two_steps(kernels, arrays, wrapped, causal, packed) for kernels in (flash_tile, tiles))
    for name, a, b in zip(("out", "log_sum", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=0, err_msg=name)


def test_steps_of_a_grid_that_share_an_accumulator_run_in_sequence():
    """A TPU with two cores divides the parallel dims of the grid among them; an interpreter has one."""
    queries, keys = jnp.zeros((n, B, K, G, t, H)), jnp.zeros((n, B, K, t, H))
    pairs = tuple(jnp.asarray(x, jnp.int32) for x in np.tril_indices(n))
    arrays = pairs, True, queries, keys, keys, (None, None)

    def both_passes(sums):
        return (
            flash_tile.forward(*arrays, None),
            flash_tile.backward(*arrays, sums, sums, queries, None),
        )

    kernels = [
        equation.params
        for equation in jax.make_jaxpr(both_passes)(queries[..., :1]).eqns
        if equation.primitive.name == "pallas_call"
    ]
    assert len(kernels) == 3
    for params in kernels:
        semantics = params["compiler_params"].dimension_semantics
        for block in params["grid_mapping"].block_mappings_output:
            index_map = block.index_map_jaxpr.jaxpr
            place = dict(zip(index_map.invars, semantics, strict=False))  # then come the tables of pairs
            owners = [semantic for step, semantic in place.items() if step in index_map.outvars]
            others = [semantic for step, semantic in place.items() if step not in index_map.outvars]
            assert {*owners} == {"parallel"} and {*others} == {"arbitrary"}


# --- in the ring ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_ring_of_four_equals_dense_attention(interpreted, monkeypatch):
    """One tile in each chunk of a device, grouped heads, packed rows."""

    def always_fused(functions, causal, devices, *arrays):
        return functions[0](ring.TPU_TILES, *arrays, causal=causal, devices=devices)

    monkeypatch.setattr(ring, "_on_platform", always_fused)
    args = inputs(2, 1024, 4, 2, 16)
    with jax.set_mesh(sharding.make_mesh(fsdp=2, context=4)):
        actual = out_and_grads(in_natural_order(ring.ring), *args)
    assert_close(actual, out_and_grads(dense, *args))


@pytest.mark.parametrize(
    ("length", "size"),
    [(8192, 1024), (1152, 384), (960, 0), (179 * 128, 128), (181 * 128, 0)],
)
def test_a_length_has_few_tiles_of_multiples_of_128(length, size):
    assert flash_tile.tile_size(length) == size


@pytest.mark.parametrize(
    ("S", "platform", "fused"), [(1024, "tpu", True), (1024, "cpu", False), (960, "tpu", False)]
)
def test_fused_tiles_run_on_tpu_for_lengths_that_fit(S, platform, fused):
    """Three kernels, each of them in three places: the first step, the loop, the last step."""
    *arrays, ids = inputs(2, S, 4, 2, 64, "bfloat16")
    with jax.set_mesh(sharding.make_mesh(fsdp=2, context=4)):
        traced = out_and_grads.trace(ring.ring, *arrays, ids)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@tpu_custom_call") == (9 if fused else 0)
