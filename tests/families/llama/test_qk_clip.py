"""QK-clip against NumPy, and alike however the batch and the layers are divided."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.families.llama import qk_clip
from tests.fixtures import RejectAll, Trainer, batches, make_mesh, precision_config

TAU = 2.4  # between the logits of the heads of the small Llama


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_largest_logits_are_those_of_visible_pairs(kv_heads, monkeypatch):
    monkeypatch.setattr(qk_clip, "BLOCK", 8)  # three blocks, of which the last is not full
    B, S, N, H = 2, 20, 4, 6
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, S, N, H), np.float32)
    k = rng.standard_normal((B, S, kv_heads, H), np.float32)
    ids = np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], 5, axis=1).astype(np.int32)
    q[ids == 0] *= 10.0  # padding, which does not count
    positions = np.array([[np.sum(row[:s] == row[s]) for s in range(S)] for row in ids], np.int32)
    expected = np.zeros(N)
    for b, s, n in np.ndindex(B, S, N):
        for t in range(s + 1):
            if ids[b, s] == ids[b, t] != 0:
                logit = np.dot(*(np.float64(x) for x in (q[b, s, n], k[b, t, n * kv_heads // N]))) / H**0.5
                expected[n] = max(expected[n], logit)
    # Sums of six products in float32; the largest is below 5.
    check = functools.partial(np.testing.assert_allclose, desired=expected, rtol=2e-6)
    check(qk_clip.max_logits(q, k, positions, ids))
    order = rng.permutation(S)  # as of a ring
    check(qk_clip.max_logits(*(x[:, order] for x in (q, k, positions, ids))))


def test_the_logits_of_all_pairs_never_exist_together():
    B, S = 1, 2048
    shapes = [jax.ShapeDtypeStruct((B, S, heads, 8), jnp.float32) for heads in (4, 2)]
    ints = [jax.ShapeDtypeStruct((B, S), jnp.int32)] * 2
    compiled = jax.jit(qk_clip.max_logits).lower(*shapes, *ints).compile()
    # Logits, masked logits and masks of a block are at most 3 of 16 parts.
    assert compiled.memory_analysis().temp_size_in_bytes < B * 4 * S**2 * 4 / 4


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_kernels_of_large_heads_are_scaled_and_no_others(kv_heads):
    L, D, N, H = 2, 5, 4, 3
    rng = np.random.default_rng(0)
    sizes = dict(q_proj=N, k_proj=kv_heads, v_proj=kv_heads)
    attn = {name: {"kernel": rng.standard_normal((L, D, n * H), np.float32)} for name, n in sizes.items()}
    params = {"layers": {"attn": attn, "mlp": 1}, "head": 2}
    largest_LN = jnp.array([[1, 3, 2, 8], [jnp.nan, 2.5, jnp.inf, 50]])
    state = {"layers": {"attn": {"max_logits": {"largest_N": largest_LN}}}}
    found, metrics = qk_clip.clip(params, state, threshold=2.0)
    gamma_LN = np.array([[1, 2 / 3, 1, 1 / 4], [1, 4 / 5, 1, 1 / 25]])
    factors = {"q_proj": gamma_LN}  # keys that two heads share stay as they are
    if kv_heads == N:
        factors = dict.fromkeys(("q_proj", "k_proj"), gamma_LN**0.5)
    for name, factor_LN in factors.items():
        expected = attn[name]["kernel"] * np.repeat(factor_LN, H, axis=1)[:, None]
        # A quotient, a root and a product in float32.
        np.testing.assert_allclose(found["layers"]["attn"][name]["kernel"], expected, rtol=3e-7, atol=0)
    rest = found["layers"]["attn"] | {name: attn[name] for name in factors}
    assert found | {"layers": found["layers"] | {"attn": rest}} == params
    assert metrics["clipped_heads"] == 4


@functools.cache
def step(**changes: Any) -> tuple[dict, dict]:
    """Parameters and state of attention after one step from the same weights."""
    trainer = Trainer(qk_clip=TAU, **changes)
    state, _ = trainer.run(trainer.init(initial()), batches(1))
    return jax.device_get((state["params"]["layers"]["attn"], state["model_state"]["layers"]["attn"]))


@functools.cache
def initial() -> dict:
    return jax.device_get(Trainer().init()["params"])


@pytest.mark.parametrize("kv_heads", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_same_batch_then_has_no_logit_above_tau(kv_heads):
    trainer = Trainer(num_kv_heads=kv_heads, num_layers=1, qk_clip=TAU, tx=optax.sgd(0.0))
    _, [first, second] = trainer.run(trainer.init(), batches(1) * 2)
    assert first["max_attention_logit"] > 1.1 * TAU
    # In the first layer, whose inputs are the same. Sums of 64 products in float32, and their rotation.
    assert second["max_attention_logit"] == pytest.approx(TAU, rel=1e-5)


DIVIDED = {
    "microbatches": dict(microbatches=2),
    "unrolled": dict(scan_layers=False, remat="dots"),
    "released": dict(released=True),
    "fsdp, tensor": dict(mesh=dict(fsdp=2, tensor=2), remat="block"),
    "context": dict(mesh=dict(context=2, fsdp=2), attention="ring"),
    "stage": dict(mesh=dict(stage=2, data=2)),
}


@pytest.mark.full
@pytest.mark.parametrize("how", DIVIDED)
def test_divided_batches_and_layers_are_clipped_alike(how):
    changes = dict(DIVIDED[how])
    mesh = make_mesh(**changes.pop("mesh", {}))
    expected, expected_state = step()
    is_large = expected_state["max_logits"]["largest_N"] > TAU
    assert is_large.any() and not is_large.all()
    found, state = step(mesh=mesh, **changes)
    # Float32 in another order: gradients are sums over 256 tokens, logits over 64 products.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(close, state, expected_state)
    jax.tree.map(close, found, expected)


@pytest.mark.full
def test_a_rejected_step_is_not_clipped_again():
    trainer = Trainer(qk_clip=TAU, gates={"reject": RejectAll()})
    state = trainer.init()
    before = jax.device_get(state["params"])
    state, [metrics] = trainer.run(state, batches(1))
    assert metrics["skipped"] == 1 and metrics["clipped_heads"] > 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state["params"]), before)


@pytest.mark.full
@pytest.mark.parametrize("released", [False, True])
def test_blocks_without_quantization_are_clipped_too(released):
    recipe = precision_config("fp8_delayed", first_blocks=1, history=4)
    _, attn = step(recipe=recipe, released=released)
    _, expected = step()
    found_LN, expected_LN = attn["max_logits"]["largest_N"], expected["max_logits"]["largest_N"]
    np.testing.assert_allclose(found_LN[0], expected_LN[0], rtol=2e-5)  # float32 in the first block
    np.testing.assert_allclose(found_LN[1], expected_LN[1], rtol=0.2)  # FP8: 2^-4 in each of two operands
    assert (attn["q_proj"]["dot_general"]["input_amax_history"][0] == 0).all()
