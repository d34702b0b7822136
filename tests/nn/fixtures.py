"""For tests of layers and attention: a block, inputs, comparison of gradients, lowering for GPUs, rings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp.nn import layers, stack
from maxlp.nn.attention import ring


class MlpBlock(stack.Block):
    """x + down_proj(relu(up_proj(x))) in float32: the smallest block of a stack."""

    def __init__(self, rngs: nnx.Rngs, dim: int = 8):
        sizes = dict(std=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
        self.up_proj = layers.Linear(dim, 2 * dim, axes=("embed", "mlp"), **sizes)
        self.down_proj = layers.Linear(2 * dim, dim, axes=("mlp", "embed"), **sizes)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return x_BSD + self.down_proj(jax.nn.relu(self.up_proj(x_BSD)))


def inputs(B: int, S: int, N: int, K: int, H: int, dtype: str = "float32"):
    """q, k, v, the gradient of the output, and segment ids of a few documents with padding at the end."""
    rng = np.random.default_rng(0)

    def normal(heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((B, S, heads, H)), dtype)

    starts = rng.random((B, S)) < 4 / S
    segment_ids = 1 + np.cumsum(starts, axis=1)
    segment_ids[:, S - S // 8 :] = 0
    return normal(N), normal(K), normal(K), normal(N), jnp.asarray(segment_ids, jnp.int32)


@functools.partial(jax.jit, static_argnames=("attend", "causal"))
def out_and_grads(attend, q, k, v, dout, segment_ids, causal=True):
    """The output of attention, and the gradients of q, k and v."""

    def f(q, k, v):
        return attend(q, k, v, causal=causal, segment_ids_BS=segment_ids)

    out, vjp = jax.vjp(f, q, k, v)
    return out, *vjp(dout)


def assert_close(actual, expected):
    """Compares two results of `out_and_grads`: numbers of up to 8, after float32 sums in another order."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0, err_msg=name)


def lowered(function, *args):
    """Lowers a jitted function for NVIDIA GPUs; this machine needs none."""
    return function.trace(*args).lower(lowering_platforms=("cuda",))


def abstract(B, S, N, K, H, dtype="bfloat16", packed=True):
    """The shapes of `inputs`."""
    q, k = (jax.ShapeDtypeStruct((B, S, heads, H), dtype) for heads in (N, K))
    return q, k, k, q, jax.ShapeDtypeStruct((B, S), jnp.int32) if packed else None


def layers_gradient(attend, remat, S):
    """A jitted gradient of four scanned attention layers, and the shapes of its arguments.

    Args:
      remat: a policy of `nn.stack.REMAT_POLICIES`.
    """

    @jax.jit
    def gradient(w_LHH, x_BSNH, ids_BS):
        def layer(x_BSNH, w_HH):
            q_BSNH = x_BSNH @ w_HH
            return x_BSNH + attend(
                q_BSNH, q_BSNH[:, :, ::2], x_BSNH[:, :, ::2], causal=True, segment_ids_BS=ids_BS
            ), None

        body = jax.checkpoint(layer, policy=stack.REMAT_POLICIES[remat], prevent_cse=False)

        def loss(w_LHH):
            return jnp.sum(jax.lax.scan(body, x_BSNH, w_LHH)[0].astype(jnp.float32) ** 2)

        return jax.grad(loss)(w_LHH)

    x, ids = jax.ShapeDtypeStruct((4, S, 4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4, S), jnp.int32)
    return gradient, jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16), x, ids


def in_natural_order(attend):
    """Attention that expects the balanced order of a ring, as a function of arrays in natural order."""

    def run(q_BSNH, k_BSKH, v_BSKH, *, causal, segment_ids_BS):
        B, S = q_BSNH.shape[:2]

        def balance(x):
            return ring.balance(jnp.moveaxis(x, 1, -1).reshape(-1, S)).reshape(B, *x.shape[2:], S)

        q, k, v = (jnp.moveaxis(balance(x), -1, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
        ids = None if segment_ids_BS is None else balance(segment_ids_BS)
        out_BSNH = attend(q, k, v, causal=causal, segment_ids_BS=ids)
        return ring.unbalance(out_BSNH.reshape(B, S, -1)).reshape(out_BSNH.shape)

    return run
