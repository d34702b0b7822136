"""Features of whole data sets, and the rank of a score among others.

Shape letters: B batch · C classes · N examples of a data set · S text length.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlp.parallel import sharding

Encode = Callable[[jax.Array], jax.Array]


@jax.jit
def replicate(tree: Any) -> Any:
    """The same arrays replicated over all devices, so that every process can fetch them."""
    return jax.tree.map(lambda x: sharding.constrain(x, *[None] * x.ndim), tree)


@jax.jit
def split_rows(x_NS: jax.Array) -> jax.Array:
    """Rows that every process holds, split over the devices like the rows of a batch."""
    return sharding.constrain(x_NS, "batch", None)


def collect(
    encode: Callable[[dict], dict[str, jax.Array]], batches: Iterable[dict]
) -> dict[str, np.ndarray]:
    """Encodes batches and concatenates the rows of all batches and processes.

    Args:
      encode: a batch to arrays whose first dim is the batch.
      batches: with `mask` bool (B,); rows with a false mask are left out.

    Raises:
      ValueError: there is no row with a true mask.
    """
    parts = []
    # One at a time: on CPUs the collectives of two batches could run in different orders.
    for batch in batches:
        rows, mask_B = jax.device_get(replicate((encode(batch), batch["mask"])))
        parts.append({key: value[mask_B] for key, value in rows.items()})
    if not any(len(value) for part in parts for value in part.values()):
        raise ValueError("the data has no example: all rows are padding; check the source of the data")
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def ranks(score_BC: jax.Array, label_B: jax.Array) -> jax.Array:
    """The number of other classes whose score is not below an example's own (B,).

    Ties and NaN therefore count against the example.
    """
    is_own_BC = label_B[:, None] == jnp.arange(score_BC.shape[1])[None, :]
    own_B = jnp.sum(jnp.where(is_own_BC, score_BC, 0.0), axis=1)
    return jnp.sum(~is_own_BC & ~(score_BC < own_B[:, None]), axis=1)
