"""Attention with norms of queries and keys, against NumPy and under the meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlp.families.llama.model import Attention, rope_table
from maxlp.generate import Sampling, generate
from tests.fixtures import Trainer, batches, llama_config, make_llama, make_mesh

EPS, THETA = 1e-3, 10_000.0
CONFIG = llama_config(qk_norm=True, norm_eps=EPS, rope_theta=THETA, init_std=0.3)


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * scale


def rotated(x_SNH):
    """Each pair (i, i + H/2) as a complex number, turned by position × θ^(-2i/H)."""
    half = x_SNH.shape[-1] // 2
    angles = np.arange(len(x_SNH))[:, None] * THETA ** (-np.arange(half) / half)
    turned = (x_SNH[..., :half] + 1j * x_SNH[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(p: dict, x_SD: np.ndarray) -> np.ndarray:
    """Causal attention in float64, one query and one head after the other."""

    def heads(name):
        return (x_SD @ p[name]["kernel"]).reshape(len(x_SD), -1, CONFIG.head_dim)

    q, k = (rotated(rms_norm(heads(f"{n}_proj"), p[f"{n}_norm"]["scale"])) for n in "qk")
    v, out = heads("v_proj"), np.zeros(q.shape)
    for s in range(len(x_SD)):
        for n in range(CONFIG.num_heads):
            kv = n * CONFIG.num_kv_heads // CONFIG.num_heads
            scores = np.exp(k[: s + 1, kv] @ q[s, n] / np.sqrt(CONFIG.head_dim))
            out[s, n] = scores / scores.sum() @ v[: s + 1, kv]
    return out.reshape(len(x_SD), -1) @ p["o_proj"]["kernel"]


def test_attention_with_norms_equals_numpy():
    S = 12
    module = Attention(CONFIG, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for norm in (module.q_norm, module.k_norm):
        assert norm is not None
        norm.scale[...] = jnp.asarray(rng.uniform(0.5, 1.5, CONFIG.head_dim), jnp.float32)
    x_SD = rng.standard_normal((S, CONFIG.embed_dim), np.float32)
    positions = jnp.arange(S)[None]
    rope = rope_table(positions, CONFIG.head_dim, THETA, None)
    out, _ = jax.jit(module)(x_SD[None], rope, positions, jnp.ones((1, S), jnp.int32), None)
    params = jax.tree.map(
        lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(module, nnx.Param))
    )
    # Outputs are of size 1; sums of 32 to 64 products in float32, each rounded by 6e-8.
    np.testing.assert_allclose(out[0], attention(params, x_SD.astype(np.float64)), atol=2e-5, rtol=0)


@functools.cache
def on_one_device() -> tuple[dict, dict]:
    """Initial parameters with random scales, and the parameters after one step."""
    trainer, rng = Trainer(qk_norm=True), np.random.default_rng(0)
    params = jax.device_get(trainer.init()["params"])
    for norm in ("q_norm", "k_norm"):
        scale = params["layers"]["attn"][norm]["scale"]
        params["layers"]["attn"][norm]["scale"] = rng.uniform(0.5, 1.5, scale.shape).astype(np.float32)
    return params, step(trainer, params)


def step(trainer: Trainer, params: dict) -> dict:
    state, _ = trainer.run(trainer.init(params), batches(1))
    return jax.device_get(state["params"])


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh, model",
    [
        pytest.param(dict(fsdp=2, tensor=2, stage=2), {}, id="fsdp, tensor, stage"),
        pytest.param(dict(context=2), dict(attention="ring"), id="context"),
    ],
)
def test_the_scales_are_trained_alike_on_every_mesh(mesh, model):
    """They are whole on every device, and their gradients are sums over the heads of all devices."""
    params, expected = on_one_device()
    found = step(Trainer(make_mesh(**mesh), qk_norm=True, **model), params)
    # Gradients in float32 are sums in another order; those of a scale have many terms of both signs.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5), found, expected)
    scale = expected["layers"]["attn"]["q_norm"]["scale"]
    assert np.abs(scale - params["layers"]["attn"]["q_norm"]["scale"]).max() > 1e-4, "they are trained"


def test_generation_with_a_cache_norms_keys_once():
    """Greedy tokens equal those that the whole text predicts without a cache."""
    model = make_llama(qk_norm=True, init_std=0.3)(nnx.Rngs(0))
    prompt = [3, 1, 4, 1, 5]
    [row] = generate(model, [prompt], max_new_tokens=4, sampling=Sampling(0.0))
    logits = jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray([prompt + row]))
    assert row == jnp.argmax(logits[0, len(prompt) - 1 : -1], axis=-1).tolist()
