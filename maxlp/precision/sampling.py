"""Winner-take-all column-row sampling: the gradient of a kernel from a share of the tokens.

    dW = Σ_s x_s g_sᵀ  ≈  Σ_{s in C} x_s g_sᵀ + Σ_i x_{s_i} g_{s_i}ᵀ / ((k - |C|) q_{s_i})

Of the S tokens of a sequence k remain, the only ones that the backward pass needs: the winners C, which
have the largest probabilities p, and k - |C| tokens drawn from the others with the probabilities
q = p / (1 - Σ_C p). For each C the estimate is unbiased; |C| is chosen to minimize the factor of its
variance, (1 - Σ_C p) / (k - |C|). Without winners (C empty) it is column-row sampling.

Liu et al. 2023 (arXiv:2305.15265), with three choices of our own:

* The probabilities are proportional to ‖x_s‖, which the forward pass knows. The best ones, proportional to
  ‖x_s‖ ‖g_s‖, need the gradient. The paper takes ‖g_s‖ from the last step that had the same sample; in
  pretraining there is none. The estimate is unbiased with any probabilities; with these its variance is
  larger where the norms of gradients differ much.
* Each sequence is sampled by itself, and not the batch as one: no device needs tokens of another, and the
  sample of the same values depends neither on the mesh nor on the microbatches. (Values that differ in the
  last bit may give another sample: behind a norm with equal gains all ‖x_s‖ are equal but for rounding. And
  a tensor axis may join the rows of a CLIP to longer ones, see `families.clip.encoder.join_rows`.)
* One token is drawn from each of k - |C| intervals of equal probability (stratified sampling): also
  unbiased, with a variance that is never larger than that of independent draws.

Shape letters: S tokens of a sequence · K features · k tokens that remain.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxlp.numerics import quantized
from maxlp.numerics.scales import amax, ceil_power_of_two


class Sampled(NamedTuple):
    """Tokens of an input (…, S, K).

    Attributes:
      rows: (…, k, K), each times its weight in the sum over the tokens, in the dtype of the input.
      index: int32 (…, k), the position of each in its sequence.
    """

    rows: jax.Array
    index: jax.Array


def sample(x: jax.Array, keep: float) -> Sampled | None:
    """A sample of the tokens of each sequence; None if it would have all of them.

    The key is made from the data, as in `quantized.quantize`, so that recomputing gives the same sample.

    Args:
      x: (…, S, K), or the features of one token, (K,).
      keep: the share of the tokens that remain, at least one.

    Raises:
      ValueError: on explicit mesh axes, tokens of a sequence that are on different devices.
    """
    length = x.shape[-2] if x.ndim > 1 else 1
    num = max(1, round(keep * length))
    if num == length:
        return None

    def of_sequence(x_SK: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, index = sample_sequence(x_SK, num, quantized.key_from(x_SK))
        return rows, index

    of_sequences = jnp.vectorize(of_sequence, signature="(s,f)->(k,f),(k)")
    if (sharding := quantized.explicit_sharding(x)) is None:
        return Sampled(*of_sequences(x))
    *batch, tokens, features = sharding.spec
    if tokens is not None:
        raise ValueError(
            f"keep={keep} samples tokens of whole sequences, and the mesh axis {tokens!r} splits them; "
            "shard the batch instead, or use keep=1"
        )
    out = (PartitionSpec(*batch, None, features), PartitionSpec(*batch, None))
    return Sampled(*_automatic(of_sequences, sharding, out)(x))


def sample_sequence(x_SK: jax.Array, num: int, key: jax.Array) -> Sampled:
    """A sample of ``num`` tokens of one sequence; it may contain a token more than once."""
    # Rounds nothing, and the squares of very large and very small elements do not over- or underflow.
    scale = ceil_power_of_two(jnp.nan_to_num(amax(x_SK), nan=1.0, posinf=1.0), 4.0)
    norm_S = jnp.linalg.norm(x_SK.astype(jnp.float32) / scale, axis=-1)
    order_S = jnp.argsort(norm_S, descending=True)
    p_S = norm_S[order_S]  # times a constant, which cancels
    rest_S = jnp.cumsum(p_S[::-1])[::-1]  # the sum of these and of all later ones; its end is exact
    slot = jnp.arange(num)
    winners = jnp.argmin(rest_S[:num] / (num - slot))
    interval = rest_S[winners] / (num - winners)
    target = (slot - winners + jax.random.uniform(key, (num,))) * interval
    drawn = jnp.searchsorted(-rest_S, -target) - 1  # rest_S[drawn] > target >= rest_S[drawn + 1]
    place = jnp.where(slot < winners, slot, jnp.maximum(drawn, winners))  # without others, `drawn` is -1
    p = p_S[place]
    weight = jnp.where(slot < winners, 1.0, jnp.where(p > 0, interval / p, 0.0))
    index = order_S[place].astype(jnp.int32)
    return Sampled((x_SK[index].astype(jnp.float32) * weight[:, None]).astype(x_SK.dtype), index)


def take(g: jax.Array, index: jax.Array) -> jax.Array:
    """The tokens of an output gradient (…, S, N) at the positions (…, k): (…, k, N)."""

    def of_sequences(g: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(g, index[..., None], axis=-2)

    if (sharding := quantized.explicit_sharding(g)) is None:
        return of_sequences(g, index)
    *batch, _, features = sharding.spec
    return _automatic(of_sequences, sharding, PartitionSpec(*batch, None, features))(g, index)


def _automatic(fn: Callable, sharding: NamedSharding, out_specs: Any) -> Callable[..., Any]:
    """``fn`` with automatic mesh axes, for operations that JAX does not shard on explicit ones."""
    out = jax.tree.map(functools.partial(NamedSharding, sharding.mesh), out_specs)
    return cast(Callable, jax.sharding.auto_axes(fn, out_sharding=out))
