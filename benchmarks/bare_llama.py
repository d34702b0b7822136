"""A Llama train step written by hand in one file: the baseline for maxlp's tokens per second.

    python benchmarks/bare_llama.py --embed_dim=256 --num_layers=6 --dtype=bfloat16 --steps=20

15 seconds of CPU time, most of it to compile.

No Flax, no Optax, no config, no mesh: a dict of arrays, `lax.scan` over stacked layers, AdamW in ten
lines, one jitted function with donated state. The model is that of `maxlp/families/llama/model.py`
(RMSNorm, rotary embeddings, grouped-query attention, SwiGLU), so the difference in speed is that of the
stack, and of its settings for CPUs (`maxlp.runtime.cpu`), which this file does without. Trains on random
tokens and prints one line of JSON.

Shape letters: B batch · S/T query/key length · D embed · F mlp · N query heads · K kv heads ·
G = N/K · H head dim · V vocab · L layers.
"""

import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import llama_args

ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model; `dtype` is that of matmul operands, and parameters are always float32."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with a global-norm clip; matrices decay, norm scales do not."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


def init_params(key: jax.Array, sizes: Sizes) -> dict:
    """Normal kernels with std 1 / sqrt(fan-in); output projections are smaller by sqrt(2 L)."""
    D, F, V, L = sizes.embed_dim, sizes.mlp_dim, sizes.vocab_size, sizes.num_layers
    NH, KH = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    keys = iter(jax.random.split(key, 16))

    def normal(shape, std):
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    return {
        "tok_embed": normal((V, D), 1.0),
        "layers": {
            "attn_norm": jnp.ones((L, D)),
            "q": normal((L, D, NH), D**-0.5),
            "k": normal((L, D, KH), D**-0.5),
            "v": normal((L, D, KH), D**-0.5),
            "o": normal((L, NH, D), (2 * L * NH) ** -0.5),
            "mlp_norm": jnp.ones((L, D)),
            "gate": normal((L, D, F), D**-0.5),
            "up": normal((L, D, F), D**-0.5),
            "down": normal((L, F, D), (2 * L * F) ** -0.5),
        },
        "final_norm": jnp.ones(D),
        "lm_head": normal((D, V), D**-0.5),
    }


def matmul(x, kernel, dtype):
    """x @ kernel with operands in `dtype` and a float32 result, in the backward pass too."""
    return _matmul(x, kernel, jnp.dtype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x, kernel, dtype):
    return _matmul_forward(x, kernel, dtype)[0]


def _dot(a, b, contract):
    dims = ((contract[0], contract[1]), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _matmul_forward(x, kernel, dtype):
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    return _dot(x, kernel, ((x.ndim - 1,), (0,))), (x, kernel)


def _matmul_backward(dtype, residuals, grad):
    x, kernel = residuals
    grad = grad.astype(dtype)
    rows = tuple(range(x.ndim - 1))
    return _dot(grad, kernel, ((x.ndim - 1,), (1,))), _dot(x, grad, (rows, rows))


_matmul.defvjp(_matmul_forward, _matmul_backward)


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS) * scale


def rotate(x_BSNH, sin_SH, cos_SH):
    """Rotary position embedding, halves rotated against each other (Su et al., 2021)."""
    x1, x2 = jnp.split(x_BSNH, 2, axis=-1)
    sin, cos = sin_SH[:, None, :], cos_SH[:, None, :]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def attention(q_BSNH, k_BTKH, v_BTKH, dtype):
    """Causal grouped-query attention; softmax in float32."""
    B, S, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
    # The head axes are moved to the front once: XLA's CPU matmul is twice as slow on strided operands.
    q = jnp.moveaxis((q_BSNH * H**-0.5).astype(dtype).reshape(B, S, K, N // K, H), 1, 3)
    k = jnp.moveaxis(k_BTKH.astype(dtype), 1, 2)
    v = jnp.moveaxis(v_BTKH.astype(dtype), 1, 2)
    scores = einsum("BKGSH,BKTH->BKGST", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e30)
    probs = jax.nn.softmax(scores, axis=-1)
    out_BKGSH = einsum("BKGST,BKTH->BKGSH", probs.astype(dtype), v)
    return jnp.moveaxis(out_BKGSH, 3, 1).reshape(B, S, N * H)


def forward(params: dict, tokens_BS: jax.Array, sizes: Sizes) -> jax.Array:
    """Logits [B, S, V], float32."""
    B, S = tokens_BS.shape
    half = sizes.head_dim // 2
    angles = jnp.arange(S)[:, None] * ROPE_THETA ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    dot = partial(matmul, dtype=sizes.dtype)

    def layer(x, p):
        y = rms_norm(x, p["attn_norm"])
        q = rotate(dot(y, p["q"]).reshape(B, S, sizes.num_heads, sizes.head_dim), sin, cos)
        k = rotate(dot(y, p["k"]).reshape(B, S, sizes.num_kv_heads, sizes.head_dim), sin, cos)
        v = dot(y, p["v"]).reshape(B, S, sizes.num_kv_heads, sizes.head_dim)
        x = x + dot(attention(q, k, v, sizes.dtype), p["o"])
        y = rms_norm(x, p["mlp_norm"])
        x = x + dot(jax.nn.silu(dot(y, p["gate"])) * dot(y, p["up"]), p["down"])
        return x, None

    x, _ = jax.lax.scan(layer, params["tok_embed"][tokens_BS], params["layers"])
    return dot(rms_norm(x, params["final_norm"]), params["lm_head"])


def loss_fn(params: dict, tokens: jax.Array, sizes: Sizes) -> jax.Array:
    """Mean next-token cross-entropy in nats; `tokens` is [B, S + 1]."""
    logits = forward(params, tokens[:, :-1], sizes)
    label_logits = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label_logits)


def init_state(key: jax.Array, sizes: Sizes) -> dict:
    params = init_params(key, sizes)
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return {"params": params, "mu": zeros(params), "nu": zeros(params), "step": jnp.int32(0)}


@partial(jax.jit, static_argnames=("sizes", "adamw"), donate_argnums=0)
def train_step(state: dict, tokens: jax.Array, learning_rate, sizes: Sizes, adamw: AdamW):
    """One step; returns the new state, the loss in nats per token and the gradient's norm."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens, sizes)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    clip = jnp.minimum(1.0, adamw.clip_norm / norm)
    step = state["step"] + 1
    bias1, bias2 = 1 - adamw.b1**step, 1 - adamw.b2**step

    def update(path, p, g, mu, nu):
        g = g * clip
        mu = adamw.b1 * mu + (1 - adamw.b1) * g
        nu = adamw.b2 * nu + (1 - adamw.b2) * g * g
        decay = 0.0 if "norm" in path[-1].key else adamw.weight_decay
        delta = mu / bias1 / (jnp.sqrt(nu / bias2) + adamw.eps) + decay * p
        return p - learning_rate * delta, mu, nu

    updated = jax.tree.map_with_path(update, state["params"], grads, state["mu"], state["nu"])
    params, mu, nu = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), updated)
    return {"params": params, "mu": mu, "nu": nu, "step": step}, loss, norm


def main() -> None:
    args = llama_args.make_parser(__doc__.splitlines()[0]).parse_args()
    names = {field.name for field in dataclasses.fields(Sizes)}
    sizes = Sizes(**{name: value for name, value in vars(args).items() if name in names})
    state, tokens = init_state(jax.random.key(0), sizes), llama_args.random_tokens(args)
    num_params = sum(p.size for p in jax.tree.leaves(state["params"]))

    seconds = []
    for _ in range(1 + args.steps):
        start = time.perf_counter()
        state, loss, _ = jax.block_until_ready(train_step(state, tokens, 1e-3, sizes, AdamW()))
        seconds.append(time.perf_counter() - start)
    llama_args.print_result(
        "bare_jax",
        args,
        num_params=num_params,
        compile_seconds=seconds[0],
        step_seconds=seconds[1:],
        loss=float(loss),
    )


if __name__ == "__main__":
    main()
