"""The flash kernels: equal to plain attention, interpreted on CPU; lowered and compiled for GPUs.

None of this runs on a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxlp.nn.attention import flash, intervals, ring
from maxlp.nn.attention.dense import dense
from maxlp.parallel import sharding
from maxlp.planning import topologies
from tests.nn.fixtures import (
    abstract,
    assert_close,
    in_natural_order,
    inputs,
    layers_gradient,
    lowered,
    out_and_grads,
)

KERNEL = "xla.gpu.triton"  # a custom call


@pytest.fixture
def interpreted(monkeypatch):
    """Blocks are small, so that a short sequence has several, some of them masked and some not."""
    sizes = dict(forward=(32, 16), dq=(32, 16), dkv=(16, 32))
    blocks = {name: flash.Blocks(own, other, 4, 2) for name, (own, other) in sizes.items()}
    monkeypatch.setattr(flash, "BLOCKS", {False: {flash.FLASH_ROW_BYTES: blocks}})
    monkeypatch.setattr(flash, "INTERPRET", True)


@pytest.mark.parametrize(
    ("S", "N", "K", "H", "causal", "packed"),
    [
        (96, 4, 2, 16, True, True),
        (77, 2, 1, 24, False, True),  # neither is a multiple of a block
        (77, 2, 2, 16, True, False),
        (40, 2, 2, 24, False, False),
    ],
)
def test_equals_dense_attention_and_its_gradients(S, N, K, H, causal, packed, interpreted):
    """float32 sums in another order."""
    *arrays, ids = inputs(1, S, N, K, H)
    args = (*arrays, ids if packed else None, causal)
    assert_close(out_and_grads(flash.flash, *args), out_and_grads(dense, *args))


def test_what_lies_between_documents_is_skipped_in_both_passes(interpreted):
    """A block that is read and masked would turn NaN into NaN, since 0 · NaN is NaN."""
    q, k, v, dout, _ = inputs(1, 96, 2, 1, 16)
    of_second = (jnp.arange(96) >= 32) & (jnp.arange(96) < 64)
    q, k, v, dout = (jnp.where(of_second[None, :, None, None], jnp.nan, x) for x in (q, k, v, dout))
    ids = (1 + jnp.arange(96) // 32)[None]  # each document is one or two blocks
    for x in out_and_grads(flash.flash, q, k, v, dout, ids, causal=False):
        np.testing.assert_array_equal(jnp.isnan(x).any((0, 2, 3)), of_second)


def test_keys_in_two_calls_equal_all_keys_in_one(interpreted):
    """As in a ring, but some queries see none of the first keys: only later ones see the early keys."""
    q, k, v, dout, _ = inputs(1, 48, 2, 1, 16)
    is_late, zeros = jnp.arange(48)[None] >= 24, jnp.zeros((1, 48), jnp.int32)
    none_lo, none_hi = intervals.EMPTY
    late_see_early = (
        (jnp.where(is_late, 0, none_lo), jnp.where(is_late, 24, none_hi)),
        (jnp.where(is_late, none_lo, 24), jnp.where(is_late, none_hi, 48)),
    )
    the_rest = (jnp.where(is_late, 24, 0), zeros + 48), (zeros, jnp.where(is_late, 48, 24))
    everything = (intervals.everything(1, 48, 48),) * 2

    first = flash.forward(q, k, v, late_see_early[0], jnp.float32)
    assert not first[0][:, :24].any()
    out, log_sum = flash.forward(q, k, v, the_rest[0], jnp.float32, first)
    expected_out, expected_log_sum = flash.forward(q, k, v, everything[0], jnp.float32)
    np.testing.assert_allclose(log_sum, expected_log_sum, atol=1e-5, rtol=0)

    rows = log_sum, jnp.einsum("BSNH,BSNH->BNS", out, dout), dout
    dq, *early = flash.backward(q, k, v, *late_see_early, *rows, jnp.float32)
    dq, *others = flash.backward(q, k, v, *the_rest, *rows, jnp.float32, dq)
    expected = flash.backward(q, k, v, *everything, *rows, jnp.float32)
    assert_close((out, dq, *map(jnp.add, early, others)), (expected_out, *expected))


@pytest.mark.full
def test_a_ring_of_four_equals_dense_attention(interpreted, monkeypatch):
    """Devices with keys before and after their own queries, grouped heads, documents across devices."""

    def always_fused(functions, causal, devices, *arrays):
        return functions[1](*arrays, causal=causal, devices=devices)

    monkeypatch.setattr(ring, "_on_platform", always_fused)
    args = inputs(2, 192, 4, 2, 16)
    with jax.set_mesh(sharding.make_mesh(fsdp=2, context=4)):
        actual = out_and_grads(in_natural_order(ring.ring), *args)
    assert_close(actual, out_and_grads(dense, *args))


@pytest.mark.parametrize("devices", [2, 4, 5])
def test_intervals_of_a_ring_are_the_causal_mask_from_both_sides(devices):
    h, last = 3, 2 * devices - 1

    def positions(device):
        return np.concatenate([chunk * h + np.arange(h) for chunk in (device, last - device)])

    for device in range(devices):
        for step in range(1, devices):
            queries, keys = positions(device), positions((device - step) % devices)
            of_queries, of_keys = ring.remote_intervals(1, 2 * h, device < step)
            expected = queries[:, None] >= keys[None]
            np.testing.assert_array_equal(as_mask(of_queries), expected)
            np.testing.assert_array_equal(as_mask(of_keys), expected.T)


def as_mask(interval):
    lo, hi = (np.asarray(x)[0, :, None] for x in interval)
    others = np.arange(len(lo))[None]
    return (lo <= others) & (others < hi)


# --- lowered for GPUs -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def simulated_devices_pass_for_h100s(monkeypatch):
    """JAX 0.12 lowers kernels for one kind of GPU: that of the mesh's devices."""
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:
        return
    h100 = gpu_info.gpu_version_from_device_kind("NVIDIA H100 80GB HBM3")
    monkeypatch.setitem(gpu_info.registry, "cpu", lambda: gpu_info.get_gpu_info_from_version(h100))


@pytest.mark.parametrize(("S", "H", "dtype"), [(257, 80, "bfloat16"), (8192, 128, "bfloat16")])
def test_one_kernel_forward_and_two_backward_on_the_shard_of_each_device(S, H, dtype):
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        text = lowered(out_and_grads, flash.flash, *abstract(8, S, 4, 2, H, dtype)).as_text()
    calls = [line for line in text.splitlines() if KERNEL in line]
    assert len(calls) == 3
    for call in calls:
        assert f"tensor<2x{S}x2x{H}xbf16>, tensor<2x{S}x1x{H}xbf16>" in call  # B 8/4, N 4/2, K 2/2


@pytest.mark.parametrize(("remat", "kernels"), [("block", 4), ("dots", 3)])
@pytest.mark.parametrize("attend", [flash.flash, ring.ring])
def test_remat_dots_runs_the_forward_kernel_once(attend, remat, kernels):
    with jax.set_mesh(sharding.make_mesh(fsdp=4, tensor=2)):
        text = lowered(*layers_gradient(attend, remat, 256)).as_text()
    assert text.count(f"@__gpu${KERNEL}") == kernels


@pytest.mark.parametrize(("S", "H", "kernels"), [(960, 64, 9), (960, 512, 0)])
def test_the_steps_of_a_ring_are_kernels_for_heads_that_fit(S, H, kernels):
    """Three kernels, each of them in three places: the first step, the loop, the last step."""
    with jax.set_mesh(sharding.make_mesh(fsdp=2, context=4)):
        text = lowered(out_and_grads, ring.ring, *abstract(2, S, 4, 2, H)).as_text()
    assert text.count(f"@__gpu${KERNEL}") == kernels


def test_the_steps_of_a_ring_add_up_in_float32():
    with jax.set_mesh(sharding.make_mesh(fsdp=2, context=4)):
        text = lowered(out_and_grads, ring.ring, *abstract(2, 960, 4, 2, 64)).as_text()
    results = [line.rpartition("->")[2] for line in text.splitlines() if f"@__gpu${KERNEL}" in line]
    assert len(results) == 9 and all("xf32>" in types and "bf16" not in types for types in results)


# --- compiled for GPUs ----------------------------------------------------------------------------------


def mesh_of(topology, **sizes):
    return jax.set_mesh(sharding.make_mesh(**sizes, devices=topologies.devices(topologies.parse(topology))))


def temporaries(done):
    return done.memory_analysis().temp_size_in_bytes


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize("chip", ["h100", "b200", "a100", "l4", "rtx5090"])
def test_temporaries_of_8192_packed_tokens_are_4_mib(chip):
    """The sums and the deltas of 32 heads are 2; a square of one head in bfloat16 would be 128."""
    with mesh_of(f"{chip}:1x1"):
        done = lowered(out_and_grads, flash.flash, *abstract(1, 8192, 32, 8, 128)).compile()
    assert done.as_text().count(KERNEL) == 3
    assert temporaries(done) <= 4 * 2**20


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize("chip", ["h100", "l4"])
@pytest.mark.parametrize(
    ("S", "H", "dtype"), [(257, 80, "bfloat16"), (1000, 256, "float16"), (50, 128, "float32")]
)
def test_other_shapes_compile(chip, S, H, dtype):
    with mesh_of(f"{chip}:1x1"):
        done = lowered(out_and_grads, flash.flash, *abstract(2, S, 2, 2, H, dtype, packed=False)).compile()
    assert done.as_text().count(KERNEL) == 3


@pytest.mark.aot("jax_cuda13_plugin")
def test_scanned_layers_run_the_forward_kernel_once_on_eight_gpus():
    with mesh_of("h100:1x8", fsdp=4, tensor=2) as _:
        done = lowered(*layers_gradient(flash.flash, "dots", 8192)).compile()
    assert done.as_text().count(KERNEL) == 3


@pytest.mark.aot("jax_cuda13_plugin")
def test_a_ring_compiles_and_its_memory_is_linear():
    """128 Ki tokens on 8 GPUs: the step holds no square, and no tile of one."""

    def of_ring(S):
        with mesh_of("h200:1x8", fsdp=1, context=8):
            spec = jax.NamedSharding(jax.sharding.get_mesh(), PartitionSpec(None, "context"))
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec), abstract(1, S, 32, 8, 128)
            )
            return temporaries(lowered(out_and_grads, ring.ring, *shapes).compile())

    short, long = of_ring(65536), of_ring(131072)
    of_a_device = 131072 // 8 * 32 * 128  # numbers in q
    assert long < 2.05 * short and long < 20 * of_a_device
