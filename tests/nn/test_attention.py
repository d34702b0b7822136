"""Attention kernels against the definition and against each other, and the table of refusals."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.nn import attention
from maxlp.nn.attention.cudnn import cudnn
from maxlp.nn.attention.dense import dense
from maxlp.nn.attention.per_device import on_each_device
from maxlp.nn.attention.splash import splash
from maxlp.parallel import sharding
from tests.fixtures import matmul_types
from tests.nn.fixtures import assert_close, inputs, out_and_grads

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
    np.testing.assert_allclose(actual[0], expected, atol=2e-6, rtol=0)
    assert_close(actual, out_and_grads(jax_nn, q, k, v, dout, segment_ids, causal), atol=1e-5)


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
    np.testing.assert_allclose(out, whole[rows_B1, positions_BS], atol=2e-6, rtol=0)


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
    np.testing.assert_allclose(out.reshape(expected.shape), expected, atol=2e-6, rtol=0)
    assert shapes[-1] == (2, 16, 2, 8)  # rows / (stage × fsdp), heads / tensor


# --- splash ---------------------------------------------------------------------------------------------

interpreted = functools.partial(splash, interpret=True)


def test_splash_equals_dense():
    args = inputs(2, 128, 2, 2, 16)
    actual = out_and_grads(interpreted, *args, causal=False)
    assert_close(actual, out_and_grads(dense, *args, causal=False), atol=1e-5)


def test_causal_splash_on_a_mesh_equals_dense_on_one_device():
    args = inputs(4, 128, 4, 2, 16)
    expected = out_and_grads(dense, *args)
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        actual = out_and_grads(interpreted, *args)
    assert_close(actual, expected, atol=1e-5)


# --- cudnn ----------------------------------------------------------------------------------------------


@pytest.fixture
def any_cudnn(monkeypatch):
    """Lowering reads the version of the installed cuDNN; there may be none."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)


def lowered_for_cuda() -> str:
    *arrays, _ = inputs(8, 128, 4, 2, 64, "bfloat16")
    return out_and_grads.trace(cudnn, *arrays, None).lower(lowering_platforms=("cuda",)).as_text()


def test_cudnn_is_one_kernel_forward_and_one_backward(any_cudnn):
    text = lowered_for_cuda()
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert "128x128x" not in text  # no (S, S) array


def test_cudnn_runs_on_the_shard_of_each_device(any_cudnn):
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        text = lowered_for_cuda()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 2
    for call in calls:
        assert "tensor<2x128x2x64xbf16>, tensor<2x128x1x64xbf16>" in call  # q, k: B 8/4, N 4/2, K 2/2


# --- what each kernel supports --------------------------------------------------------------------------

USE = attention.Use(seq_len=256, kv_heads=4, head_dim=64, dtype="bfloat16", packed=False)


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
        ("cudnn", dict(head_dim=256, dtype="float16", seq_len=2), {}, "cuda"),
        ("splash", dict(seq_len=128, dtype="float32"), dict(tensor=2), "tpu"),
        ("ring", {}, dict(context=8, tensor=2), "cpu"),
        ("ring", dict(seq_len=255, dtype="float32", head_dim=7), {}, "gpu"),
    ],
)
def test_kernels_run_where_they_can(name, use, axes, platform):
    use = dataclasses.replace(USE, **use)
    assert attention.refusal(name, use, {"context": 1, "tensor": 1} | axes, platform) is None
    assert callable(attention.kernel(name))


@pytest.mark.parametrize(
    ("name", "use", "axes", "platform", "message"),
    [
        (
            "splash",
            {},
            {},
            "cpu",
            "model.attention=splash runs on tpu, not on cpu; use model.attention=xla",
        ),
        ("cudnn", {}, {}, "tpu", "model.attention=cudnn runs on gpu, not on tpu; use model.attention=xla"),
        ("flash", {}, {}, "cpu", "model.attention=flash runs on gpu, not on cpu; use model.attention=xla"),
        ("xla", {}, dict(context=2), "cpu", "over mesh.context=2; use model.attention=ring"),
        ("cudnn", {}, dict(context=4), "gpu", "over mesh.context=4; use model.attention=ring"),
        ("ring", {}, dict(tensor=8), "cpu", "a multiple of mesh.tensor=8, not 4; use"),
        ("cudnn", {}, dict(tensor=3), "gpu", "a multiple of mesh.tensor=3, not 4; use"),
        ("splash", dict(kv_heads=1), dict(tensor=2), "tpu", "a multiple of mesh.tensor=2, not 1; use"),
        ("splash", dict(seq_len=192), {}, "tpu", "a multiple of 128, not 192; use"),
        (
            "flash",
            dict(head_dim=320),
            {},
            "gpu",
            "at most 256 in bfloat16, not 320; use model.attention=xla",
        ),
        ("flash", dict(head_dim=136, dtype="float32"), {}, "gpu", "at most 128 in float32, not 136; use"),
        (
            "cudnn",
            dict(packed=True),
            {},
            "gpu",
            "documents of a packed row apart; use model.attention=flash",
        ),
        ("cudnn", dict(seq_len=255), {}, "gpu", "an even sequence length, not 255; use"),
        ("cudnn", dict(dtype="float32"), {}, "gpu", "bfloat16 or float16, not float32; set model.dtype"),
        ("cudnn", dict(head_dim=12), {}, "gpu", "a multiple of 8 and at most 256, not 12; use"),
        ("cudnn", dict(head_dim=264), {}, "gpu", "a multiple of 8 and at most 256, not 264; use"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_in_one_line(name, use, axes, platform, message):
    use = dataclasses.replace(USE, **use)
    refusal = attention.refusal(name, use, {"context": 1, "tensor": 1} | axes, platform)
    assert refusal is not None and message in refusal and "\n" not in refusal
    assert re.match(r"model\.attention='?" + name, refusal)


@pytest.mark.parametrize(
    ("use", "axes", "platform", "kernel"),
    [
        ({}, {}, "cpu", "xla"),
        ({}, {}, "gpu", "cudnn"),
        ({}, {}, "cuda", "cudnn"),
        ({}, {}, "tpu", "splash"),
        (dict(packed=True), {}, "gpu", "flash"),
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
    assert attention.choose(uses, {"context": 1, "tensor": 1} | axes, platform) == kernel


def test_only_the_ring_reorders_the_sequence():
    assert {name for name in attention.KERNELS if attention.sequence_order(name) is not None} == {"ring"}
