"""Attention kernels against the definition and against each other, and the table of refusals."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.nn import attention
from maxlp.nn.attention.dense import dense
from maxlp.nn.attention.per_device import on_each_device
from maxlp.nn.attention.splash import splash
from maxlp.parallel import sharding
from tests.fixtures import matmul_types
from tests.nn.fixtures import assert_close, inputs, out_and_grads

ROUNDING = 2e-6  # of weighted means of values of up to 4, in float32

# --- dense ----------------------------------------------------------------------------------------------


def by_definition(q, k, v, *, causal, segment_ids):
    """The softmax of all logits at once, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    S, N, H = q.shape[1:]
    k, v = (np.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    visible = np.tri(S, dtype=bool) if causal else np.ones((S, S), bool)
    visible = visible[None, None]
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        visible = visible & (ids[:, None, :, None] == ids[:, None, None])
    weights = np.where(visible, np.exp(np.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(H)), 0.0)
    return np.einsum("bnst,btnh->bsnh", weights / weights.sum(-1, keepdims=True), v)


def jax_nn(q, k, v, *, causal, segment_ids_BS):
    ids, mask = segment_ids_BS, None
    if ids is not None:
        mask = ids[:, None, :, None] == ids[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation="xla")


@pytest.mark.parametrize(
    ("S", "N", "K", "packed", "causal"),
    [
        (40, 4, 2, True, True),  # one block of queries
        (128, 4, 1, False, True),  # two
        (256, 2, 2, True, True),  # four
        (256, 4, 2, True, False),
        (40, 4, 1, False, False),
    ],
)
def test_dense_equals_the_definition_and_its_gradients_those_of_jax_nn(S, N, K, packed, causal):
    q, k, v, dout, segment_ids = inputs(2, S, N, K, 16)
    segment_ids = segment_ids if packed else None
    actual = out_and_grads(dense, q, k, v, dout, segment_ids, causal)
    expected = by_definition(q, k, v, causal=causal, segment_ids=segment_ids)
    np.testing.assert_allclose(actual[0], expected, atol=ROUNDING, rtol=0)
    assert_close(actual, out_and_grads(jax_nn, q, k, v, dout, segment_ids, causal))


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_dense_multiplies_only_operands_of_16_bits(dtype, name):
    lowered = out_and_grads.lower(dense, *inputs(2, 128, 4, 2, 16, dtype))
    # In each of two blocks: logits in float32, then the output and the gradients of all four operands.
    assert sorted(matmul_types(lowered)) == [(name,) * 3] * 10 + [(name, name, "f32")] * 2


def test_dense_gradients_in_bfloat16_equal_float64_within_their_roundings():
    """Three roundings of 2^-9 each: of dprobs, of their gradient dlogits, and of the result."""
    S, N, H = 128, 2, 16
    q, k, v, dout, _ = inputs(2, S, N, N, H, "bfloat16")
    actual = out_and_grads(dense, q, k, v, dout, None)
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    weights = np.where(np.tri(S, dtype=bool), np.exp(np.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(H)), 0.0)
    probs = weights / weights.sum(-1, keepdims=True)
    dprobs = np.einsum("bsnh,btnh->bnst", dout, v)

    def to_logits(dprobs, sign):
        return probs * (dprobs + sign * np.sum(probs * dprobs, -1, keepdims=True)) / np.sqrt(H)

    dlogits, rounded = to_logits(dprobs, -1), to_logits(np.abs(dprobs), +1)
    for got, subscripts, other in ((actual[1], "bnst,btnh->bsnh", k), (actual[2], "bnst,bsnh->btnh", q)):
        exact = np.einsum(subscripts, dlogits, other)
        terms = np.einsum(subscripts, np.abs(dlogits) + rounded, np.abs(other))
        assert np.all(np.abs(np.float64(got) - exact) <= 2.0**-9 * (terms + np.abs(exact)) * (1 + 2.0**-6))


def test_attention_to_a_cache_equals_attention_to_the_whole_sequence():
    """Rows of different lengths: slots behind a token's own position are garbage."""
    q, k, v, _, _ = inputs(2, 16, 4, 2, 16)
    whole = jax.jit(functools.partial(dense, causal=True, segment_ids_BS=None))(q, k, v)
    positions_BS = jnp.array([[7, 8], [12, 13]])
    rows_B1 = jnp.arange(2)[:, None]
    stale = jnp.arange(16)[None, :, None, None] > positions_BS[:, -1:, None, None]
    k, v = (jnp.where(stale, 1e6, x) for x in (k, v))
    out = jax.jit(attention.cached)(q[rows_B1, positions_BS], k, v, positions_BS)
    np.testing.assert_allclose(out, whole[rows_B1, positions_BS], atol=ROUNDING, rtol=0)


# --- on every device ------------------------------------------------------------------------------------


def test_stages_of_a_pipeline_become_rows():
    """A kernel below `jax.vmap` over the stages runs once, on each device's rows of all stages."""
    shapes = []

    def attend(q, k, v, segment_ids):
        shapes.append(q.shape)
        return dense(q, k, v, causal=True, segment_ids_BS=segment_ids)

    q, k, v, _, ids = inputs(8, 16, 4, 2, 8)
    staged = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), (q, k, v, ids))
    with jax.set_mesh(sharding.make_mesh(stage=2, fsdp=2, tensor=2)):
        stages = jax.jit(jax.vmap(functools.partial(on_each_device, attend), spmd_axis_name="stage"))
        out = stages(*staged)
    expected = jax.jit(functools.partial(dense, causal=True))(q, k, v, segment_ids_BS=ids)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, atol=ROUNDING, rtol=0)
    assert shapes[-1] == (2, 16, 2, 8)  # rows / (stage × fsdp), heads / tensor


# --- splash ---------------------------------------------------------------------------------------------

interpreted = functools.partial(splash, interpret=True)


def test_splash_equals_dense():
    args = inputs(2, 128, 2, 2, 16)
    actual = out_and_grads(interpreted, *args, causal=False)
    assert_close(actual, out_and_grads(dense, *args, causal=False))


def test_causal_splash_on_a_mesh_equals_dense_on_one_device():
    args = inputs(4, 128, 4, 2, 16)
    expected = out_and_grads(dense, *args)
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        actual = out_and_grads(interpreted, *args)
    assert_close(actual, expected)


# --- what each kernel supports --------------------------------------------------------------------------

USE = attention.Use(seq_len=256, num_heads=8, kv_heads=4, head_dim=64, dtype="bfloat16", packed=False)
PACKED = dict(packed=True, max_documents=16)
ONE = dict(context=1, tensor=1)
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def refusal(name, use, axes, platform, device_kind=H100):
    return attention.refusal(name, dataclasses.replace(USE, **use), ONE | axes, platform, device_kind)


@pytest.mark.parametrize(
    ("name", "use", "axes", "platform"),
    [
        ("xla", {}, {}, "cpu"),
        ("xla", {}, {}, "tpu"),
        ("xla", dict(seq_len=255, kv_heads=3, head_dim=7, dtype="float32"), dict(tensor=2), "gpu"),
        ("cudnn", {}, dict(tensor=4), "gpu"),
        ("flash", dict(seq_len=257, head_dim=80, packed=True), dict(tensor=4), "gpu"),
        ("flash", dict(head_dim=256, dtype="float16"), {}, "cuda"),
        ("flash", dict(head_dim=128, dtype="float32"), {}, "cuda"),
        ("flash", dict(seq_len=1, head_dim=40, kv_heads=1), {}, "cuda"),
        ("cudnn", dict(head_dim=256, dtype="float16", seq_len=2), {}, "cuda"),
        ("cudnn", dict(head_dim=40), {}, "cuda"),
        ("cudnn", PACKED, {}, "gpu"),
        ("cudnn", PACKED | dict(rows=2**14), dict(tensor=2), "gpu"),
        ("cudnn", dict(rows=2**14), {}, "gpu"),
        ("splash", dict(seq_len=128, dtype="float32"), dict(tensor=2), "tpu"),
        ("splash", dict(head_dim=40, packed=True), {}, "tpu"),
        ("ring", {}, dict(context=8, tensor=2), "cpu"),
        ("ring", dict(seq_len=255, dtype="float32", head_dim=7), {}, "gpu"),
        ("ring", dict(packed=True, head_dim=512), dict(context=2), "gpu"),
    ],
)
def test_kernels_run_where_they_can(name, use, axes, platform):
    assert refusal(name, use, axes, platform) is None
    assert callable(attention.kernel(name))


@pytest.mark.parametrize("device_kind", [A100, "NVIDIA L4"])
def test_before_hopper_cudnn_takes_rows_of_one_document_and_heads_up_to_128(device_kind):
    assert refusal("cudnn", dict(head_dim=128), {}, "gpu", device_kind) is None
    wide = refusal("cudnn", dict(head_dim=256), {}, "gpu", device_kind)
    assert wide is not None and f"at most 128 on {device_kind}, not 256; use" in wide
    assert refusal("cudnn", PACKED, {}, "gpu", device_kind) == (
        "model.attention=cudnn keeps the documents of a packed row apart on H100, H200, B200, B300, not on "
        f"{device_kind}; use model.attention=flash"
    )


@pytest.mark.parametrize(
    ("name", "use", "axes", "platform", "message"),
    [
        ("splash", {}, {}, "cpu", "attention=splash runs on tpu, not on cpu; use model.attention=xla"),
        ("splash", {}, {}, "gpu", "attention=splash runs on tpu, not on gpu; use model.attention=xla"),
        ("cudnn", {}, {}, "tpu", "attention=cudnn runs on gpu, not on tpu; use model.attention=xla"),
        ("cudnn", {}, {}, "cpu", "attention=cudnn runs on gpu, not on cpu; use model.attention=xla"),
        ("flash", {}, {}, "cpu", "attention=flash runs on gpu, not on cpu; use model.attention=xla"),
        ("flash", {}, {}, "tpu", "attention=flash runs on gpu, not on tpu; use model.attention=xla"),
        ("xla", {}, dict(context=2), "cpu", "over mesh.context=2; use model.attention=ring"),
        ("cudnn", {}, dict(context=4), "gpu", "over mesh.context=4; use model.attention=ring"),
        ("flash", {}, dict(context=4), "gpu", "over mesh.context=4; use model.attention=ring"),
        ("splash", {}, dict(context=2), "tpu", "over mesh.context=2; use model.attention=ring"),
        ("ring", {}, dict(tensor=8), "cpu", "a multiple of mesh.tensor=8, not 4; use"),
        ("cudnn", {}, dict(tensor=3), "gpu", "a multiple of mesh.tensor=3, not 4; use"),
        ("flash", {}, dict(tensor=8), "gpu", "a multiple of mesh.tensor=8, not 4; use"),
        ("splash", dict(kv_heads=1), dict(tensor=2), "tpu", "a multiple of mesh.tensor=2, not 1; use"),
        ("splash", dict(seq_len=192), {}, "tpu", "a multiple of 128, not 192; use"),
        ("splash", dict(seq_len=257), {}, "tpu", "a multiple of 128, not 257; use model.attention=xla"),
        (
            "flash",
            dict(head_dim=320),
            {},
            "gpu",
            "at most 256 in bfloat16, not 320; use model",
        ),
        ("flash", dict(head_dim=136, dtype="float32"), {}, "gpu", "at most 128 in float32, not 136; use"),
        (
            "cudnn",
            dict(packed=True),
            {},
            "gpu",
            "data.max_documents=None; set data.max_documents=16 or",
        ),
        ("cudnn", PACKED | dict(max_documents=17), {}, "gpu", "but data.max_documents=17; set"),
        ("cudnn", PACKED | dict(rows=2**14), {}, "gpu", "not 16384 rows × 256 × 8 heads × 64; raise"),
        ("cudnn", dict(seq_len=255), {}, "gpu", "an even sequence length, not 255; use"),
        ("cudnn", dict(seq_len=257), {}, "gpu", "not 257; use model.attention=flash"),
        ("cudnn", dict(dtype="float32"), {}, "gpu", "bfloat16 or float16, not float32; set model.dtype"),
        (
            "cudnn",
            dict(head_dim=12),
            {},
            "gpu",
            "a multiple of 8 and at most 256 on NVIDIA H100",
        ),
        ("cudnn", dict(head_dim=264), {}, "gpu", "not 264; use model.attention=flash or xla"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_in_one_line(name, use, axes, platform, message):
    text = refusal(name, use, axes, platform)
    assert text is not None and message in text and "\n" not in text
    assert re.match(r"model\.attention='?" + name, text)


@pytest.mark.parametrize(
    ("use", "axes", "platform", "kernel"),
    [
        ({}, {}, "cpu", "xla"),
        ({}, {}, "gpu", "cudnn"),
        ({}, {}, "cuda", "cudnn"),
        ({}, {}, "tpu", "splash"),
        (dict(packed=True), {}, "gpu", "flash"),
        (dict(packed=True, max_documents=17), {}, "gpu", "flash"),
        (PACKED, {}, "gpu", "cudnn"),
        (dict(seq_len=257), {}, "cuda", "flash"),
        (dict(dtype="float32"), {}, "gpu", "flash"),
        (dict(head_dim=512), {}, "gpu", "xla"),
        (dict(seq_len=50), {}, "tpu", "xla"),
        ({}, dict(tensor=8), "gpu", "xla"),  # of 4 kv heads
        ({}, dict(context=2), "cpu", "ring"),
        ({}, dict(context=2), "tpu", "ring"),
    ],
)
def test_auto_is_the_platforms_kernel_where_it_accepts_the_shape(use, axes, platform, kernel):
    uses = (USE, dataclasses.replace(USE, **use))
    assert attention.choose(uses, ONE | axes, platform, H100) == kernel


@pytest.mark.parametrize("use", [PACKED, dict(head_dim=256)])
def test_auto_before_hopper_is_the_kernel_that_has_no_such_limit(use):
    assert attention.choose([dataclasses.replace(USE, **use)], ONE, "gpu", A100) == "flash"


def test_only_the_ring_reorders_the_sequence():
    assert {name for name in attention.KERNELS if attention.sequence_order(name) is not None} == {"ring"}
