"""Text from a language model: prompts are continued a token at a time, with a cache of keys and values.

Shape letters: B rows · S prompt length · N new tokens · V vocabulary · D features.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp import schema
from maxlp.schema import CountOrZero, NotNegative, PositiveFraction


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keeps the k most likely tokens; 0 keeps all.
      top_p: keeps the fewest tokens with this total probability, after temperature and top_k (nucleus
        sampling, Holtzman et al. 2019, arXiv:1904.09751).
    """

    temperature: NotNegative
    top_k: CountOrZero = 0
    top_p: PositiveFraction = 1.0

    def __post_init__(self):
        schema.check(self)


def generate(
    model: nnx.Module,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    eos_id: int | None = None,
    allowed_first: np.ndarray | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, up to but excluding ``eos_id``.

    Args:
      prompts: token ids, at least one each; they may differ in length.
      seed: modulo 2**32; row i draws with its own key, so its text does not depend on other rows.
      allowed_first: bool (B, V), the tokens that may come first; None allows all.
    """
    lengths_B = np.array([len(p) for p in prompts], np.int32)
    width = padded_length(int(lengths_B.max()))  # prompts of similar length share a compilation
    tokens_BS = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens_BS, prompts, strict=True):
        row[: len(prompt)] = prompt
    stop = -1 if eos_id is None else eos_id
    graphdef, state = nnx.split(model)
    new_BN = _generate(
        graphdef,
        nnx.to_pure_dict(state),
        tokens_BS,
        lengths_B,
        allowed_first,
        np.uint32(seed % 2**32),
        stop,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
    )
    rows = np.asarray(new_BN).tolist()
    return [row[: row.index(stop)] if stop in row else row for row in rows]


@functools.partial(jax.jit, static_argnames=("graphdef", "sampling", "max_new_tokens"))
def _generate(
    graphdef: nnx.GraphDef,
    state: dict,
    tokens_BS: jax.Array,
    lengths_B: jax.Array,
    allowed_first_BV: jax.Array | None,
    seed: np.uint32,
    stop: int,
    *,
    sampling: Sampling,
    max_new_tokens: int,
) -> jax.Array:
    """The new tokens (B, N) of padded prompts; ``stop`` in place of those after the end of a row."""

    def model() -> Any:
        # Each call uses a fresh model, so that none changes the amax histories from training.
        return nnx.merge(graphdef, state)

    B, S = tokens_BS.shape
    keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(B))

    def draw(i: Any, x_B1D: jax.Array, allowed_BV: jax.Array | None = None) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, i)
        logits_BV = model().logits(x_B1D)[:, 0]
        if allowed_BV is not None:
            logits_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
        return jax.vmap(functools.partial(sample, sampling=sampling))(keys, logits_BV)

    # All prompts run at once. Behind a short prompt the cache holds keys of padding, which nothing attends
    # to: slot t belongs to position t, and a new token overwrites its slot before attending to it.
    positions_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
    cache = model().init_cache(B, S + max_new_tokens)
    x_BSD, cache = model().hidden(tokens_BS, positions_BS, cache=cache)
    last_B1D = jnp.take_along_axis(x_BSD, (lengths_B - 1)[:, None, None], axis=1)
    first_B = draw(0, last_B1D, allowed_first_BV)
    out_BN = jnp.full((B, max_new_tokens), stop, jnp.int32).at[:, 0].set(first_B)

    def is_unfinished(carry: tuple) -> jax.Array:
        i, token_B, ended_B, _, _ = carry
        return (i < max_new_tokens) & ~jnp.all(ended_B | (token_B == stop))

    def add_token(carry: tuple) -> tuple:
        i, token_B, ended_B, cache, out_BN = carry
        ended_B |= token_B == stop
        x_B1D, cache = model().hidden(token_B[:, None], (lengths_B + i - 1)[:, None], cache=cache)
        token_B = jnp.where(ended_B, stop, draw(i, x_B1D))
        return i + 1, token_B, ended_B, cache, out_BN.at[:, i].set(token_B)

    start = (1, first_B, jnp.zeros(B, bool), cache, out_BN)
    return jax.lax.while_loop(is_unfinished, add_token, start)[-1]


def sample(key: jax.Array, logits_V: jax.Array, sampling: Sampling) -> jax.Array:
    """One token id from float32 logits."""
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    logits_V = logits_V / temperature
    if 0 < top_k < logits_V.size:
        largest, _ = jax.lax.top_k(logits_V, top_k)
        logits_V = jnp.where(logits_V < largest[-1], -jnp.inf, logits_V)
    if top_p < 1:
        sorted_V = jnp.sort(logits_V, descending=True)
        probability_V = jax.nn.softmax(sorted_V)
        larger_V = jnp.cumsum(probability_V) - probability_V  # total probability of all larger logits
        least = jnp.min(jnp.where(larger_V < top_p, sorted_V, jnp.inf))
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)


def padded_length(length: int, step: int = 32) -> int:
    """Rounds up to few lengths: multiples of `step`, and beyond eight steps at most a quarter longer."""
    step = max(step, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step
