import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.llama import model as llama
from maxlp.nn import attention
from maxlp.parallel import sharding


def inputs(B: int, S: int, N: int, K: int, H: int, dtype: str = "float32"):
    """q, k, v, the gradient of the output, and segment ids of a few documents with padding at the end."""
    rng = np.random.default_rng(0)
    normal = lambda heads: jnp.asarray(rng.standard_normal((B, S, heads, H)), dtype)  # noqa: E731
    starts = rng.random((B, S)) < 4 / S
    segment_ids = 1 + np.cumsum(starts, axis=1)
    segment_ids[:, S - S // 8 :] = 0
    return normal(N), normal(K), normal(K), normal(N), jnp.asarray(segment_ids, jnp.int32)


@functools.partial(jax.jit, static_argnames=("attend", "causal"))
def out_and_grads(attend, q, k, v, dout, segment_ids, causal=True):
    f = lambda q, k, v: attend(q, k, v, causal=causal, segment_ids_BS=segment_ids)  # noqa: E731
    out, vjp = jax.vjp(f, q, k, v)
    return out, *vjp(dout)


def assert_close(actual, expected, atol):
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=0, err_msg=name)


# --- xla ----------------------------------------------------------------------------------------------


def softmax_by_hand(q, k, v, *, causal, segment_ids):
    """One query at a time, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, S, N, H = q.shape
    out = np.zeros_like(q)
    for b, i, n in np.ndindex(B, S, N):
        seen = np.arange(S) <= i if causal else np.ones(S, bool)
        if segment_ids is not None:
            seen &= segment_ids[b] == segment_ids[b, i]
        kv = n // (N // k.shape[2])
        weights = np.exp(k[b, seen, kv] @ q[b, i, n] / np.sqrt(H))
        out[b, i, n] = weights @ v[b, seen, kv] / weights.sum()
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("S, N, K", [(40, 4, 2), (128, 4, 1), (256, 2, 2)])
def test_xla_equals_the_definition(S, N, K, packed, causal):
    q, k, v, dout, segment_ids = inputs(2, S, N, K, 16)
    segment_ids = segment_ids if packed else None
    actual = out_and_grads(attention.xla, q, k, v, dout, segment_ids, causal)
    expected = softmax_by_hand(
        q, k, v, causal=causal, segment_ids=None if segment_ids is None else np.asarray(segment_ids)
    )
    np.testing.assert_allclose(actual[0], expected, atol=2e-6, rtol=0)


def jax_nn(q, k, v, *, causal, segment_ids_BS):
    mask = segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation="xla")


@pytest.mark.parametrize("S", [40, 128, 256])
def test_xla_gradients_equal_those_of_jax_nn(S):
    args = inputs(2, S, 4, 2, 16)
    assert_close(out_and_grads(attention.xla, *args), out_and_grads(jax_nn, *args), atol=1e-5)


# --- splash -------------------------------------------------------------------------------------------

interpreted = functools.partial(attention.splash, interpret=True)


@pytest.mark.parametrize("causal, N, K", [(True, 4, 2), (False, 2, 2)])
def test_splash_equals_xla(causal, N, K):
    args = inputs(2, 256, N, K, 16)
    actual = out_and_grads(interpreted, *args, causal)
    assert_close(actual, out_and_grads(attention.xla, *args, causal), atol=1e-5)


def test_splash_on_a_mesh_equals_xla_on_one_device():
    args = inputs(4, 128, 4, 2, 16)
    expected = out_and_grads(attention.xla, *args)
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        actual = out_and_grads(interpreted, *args)
    assert_close(actual, expected, atol=1e-5)


def test_splash_names_a_length_that_does_not_fit():
    q, k, v, _, ids = inputs(1, 192, 2, 2, 16)
    with pytest.raises(ValueError, match="sequence length that 128 divides, not 192"):
        attention.splash(q, k, v, causal=True, segment_ids_BS=ids)


def test_heads_that_do_not_divide_are_named():
    q, k, v, _, ids = inputs(8, 128, 4, 1, 16)
    mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"head_dim\)=\(8, 128, 1, 16\) does not split"),
    ):
        attention.splash(q, k, v, causal=True, segment_ids_BS=ids)


# --- cudnn --------------------------------------------------------------------------------------------


@pytest.fixture
def any_cudnn(monkeypatch):
    """Lowering asks the installed cuDNN for its version; there is none here."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)


def lowered_for_cuda(packed: bool) -> str:
    *arrays, ids = inputs(8, 128, 4, 2, 64, "bfloat16")
    traced = out_and_grads.trace(attention.cudnn, *arrays, ids if packed else None)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_cudnn_is_one_kernel_forward_and_one_backward(any_cudnn):
    text = lowered_for_cuda(packed=False)
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert "128x128x" not in text  # no square of the sequence


def test_cudnn_takes_segments_as_a_bias_that_all_heads_share(any_cudnn):
    text = lowered_for_cuda(packed=True)
    assert text.count("@__cudnn$fmhaScaleBiasSoftmax(") == 1
    assert text.count("@__cudnn$fmhaScaleBiasSoftmaxBackward(") == 1
    assert "8x1x128x128xbf16" in text
    assert "8x4x128x128x" not in text


def test_cudnn_sees_the_shard_of_a_device(any_cudnn):
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        text = lowered_for_cuda(packed=True)
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 2
    for call in calls:
        assert "tensor<2x128x2x64xbf16>, tensor<2x128x1x64xbf16>" in call  # q, k: B 8/4, N 4/2, K 2/2


def test_cudnn_names_what_it_cannot_do():
    q, k, v, _, ids = inputs(1, 16, 2, 2, 64)
    with pytest.raises(ValueError, match=r"bfloat16 or float16, not float32; set model\.dtype"):
        attention.cudnn(q, k, v, causal=True, segment_ids_BS=ids)
    q, k, v, _, ids = inputs(1, 16, 2, 2, 12, "bfloat16")
    with pytest.raises(ValueError, match=r"model\.head_dim=12"):
        attention.cudnn(q, k, v, causal=True, segment_ids_BS=ids)


# --- names --------------------------------------------------------------------------------------------


def test_check_names_the_platform():
    with pytest.raises(ValueError, match="attention='splash' runs on tpu, and this is cpu"):
        attention.check("splash", "cpu")
    with pytest.raises(ValueError, match="attention='cudnn' runs on gpu, and this is tpu"):
        attention.check("cudnn", "tpu")
    for name, platform in [("xla", "cpu"), ("xla", "tpu"), ("cudnn", "gpu"), ("splash", "tpu")]:
        attention.check(name, platform)


# --- in the model -------------------------------------------------------------------------------------

CONFIG = dict(
    vocab_size=64,
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    max_seq_len=64,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    tie_embeddings=True,
    init_std=0.3,
    dtype="float32",
    param_dtype="float32",
    attention="xla",
    scan_layers=True,
    remat="none",
)


@pytest.fixture(scope="module")
def model() -> llama.Llama:
    return jax.jit(lambda: llama.Llama(**CONFIG, rngs=nnx.Rngs(0)))()


def test_packed_documents_do_not_see_each_other(model):
    rng = np.random.default_rng(0)
    first, second = rng.integers(64, size=23), rng.integers(64, size=17)
    padding = np.zeros(24, int)
    row = lambda *parts: np.concatenate(parts)[None]  # noqa: E731
    tokens, positions = row(first, second, padding), row(np.arange(23), np.arange(17), padding)
    segment_ids = row(np.full(23, 1), np.full(17, 2), padding)
    logits_of = jax.jit(lambda model, *args: model(*args))
    packed = logits_of(model, tokens, positions, segment_ids)
    np.testing.assert_allclose(packed[0, :23], logits_of(model, first[None])[0], atol=3e-5, rtol=0)
    np.testing.assert_allclose(packed[0, 23:40], logits_of(model, second[None])[0], atol=3e-5, rtol=0)
    # … and would, without segment ids.
    assert np.abs(logits_of(model, tokens, positions) - packed)[0, 23:40].max() > 0.1


def test_cache_equals_no_cache_for_rows_of_different_lengths(model):
    """Prompts of 9 and 4 tokens at once (the short one padded), then five more of each, one by one."""
    rng = np.random.default_rng(0)
    rows, prompt, more = rng.integers(64, size=(2, 14)), np.array([9, 4]), 5
    expected = jax.jit(lambda model, tokens: model(tokens))(model, rows)

    @jax.jit
    def step(model, tokens, positions, cache):
        x_BSD, cache = model.hidden(tokens, positions, cache=cache)
        return model.logits(x_BSD), cache

    tokens = np.where(np.arange(9) < prompt[:, None], rows[:, :9], 0)
    positions = np.broadcast_to(np.arange(9), (2, 9))
    logits, cache = step(model, tokens, positions, model.init_cache(2, 14))
    for row in (0, 1):
        length = prompt[row]
        np.testing.assert_allclose(logits[row, :length], expected[row, :length], atol=3e-5, rtol=0)
    for i in range(more):
        at = prompt + i
        logits, cache = step(model, rows[[0, 1], at][:, None], at[:, None], cache)
        np.testing.assert_allclose(logits[:, 0], expected[[0, 1], at], atol=3e-5, rtol=0)
