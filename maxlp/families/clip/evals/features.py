"""Features of held-out batches on the host, and how a class or a match ranks among others."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlp.parallel import sharding

Encode = Callable[[jax.Array], jax.Array]


@jax.jit
def whole(tree: Any) -> Any:
    """Arrays as they are, on every device: what any process can fetch."""
    return jax.tree.map(lambda x: sharding.constrain(x, *[None] * x.ndim), tree)


@jax.jit
def split(x_NS: jax.Array) -> jax.Array:
    """Rows that every process holds, split over the devices like those of a batch."""
    return sharding.constrain(x_NS, "batch", None)


def collect(
    encode: Callable[[dict], dict[str, jax.Array]], batches: Iterable[dict]
) -> dict[str, np.ndarray]:
    """What ``encode`` makes of each batch, for the rows with a true ``mask``, of all batches and processes.

    Raises:
      ValueError: there is no such row.
    """
    parts = []
    for batch in batches:  # one at a time, as in `perplexity`
        rows, mask_B = jax.device_get(whole((encode(batch), batch["mask"])))
        parts.append({key: value[mask_B] for key, value in rows.items()})
    if not any(len(value) for part in parts for value in part.values()):
        raise ValueError("the held-out data has no example that is not padding")
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def ranks(score_BC: jax.Array, label_B: jax.Array) -> jax.Array:
    """How many classes score no less than an example's own (B,): ties, and NaN, count against it."""
    own_BC = label_B[:, None] == jnp.arange(score_BC.shape[1])
    own_B = jnp.sum(jnp.where(own_BC, score_BC, 0.0), axis=1)
    return jnp.sum(~own_BC & ~(score_BC < own_B[:, None]), axis=1)
