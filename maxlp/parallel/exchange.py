"""The sum of gradients over the replicas of the ``data`` axis, exchanged in 8 bits.

Each device cuts its part of its replica's gradient into one piece for each of the R replicas:

    quantize    x = gradient + error, with a float32 scale for each block of values
    all-to-all  piece i of every replica to replica i, in 8 bits
    sum         of R pieces in float32; replica i has not rounded its own
    all-gather  the sums, quantized again

As in an all-reduce, a device sends (R - 1) / R of its values twice. What rounding loses is the replica's
``error`` and is added to its next gradient (error feedback: Seide et al. 2014, "1-bit stochastic gradient
descent"; Karimireddy et al. 2019, arXiv:1901.09847; of both roundings: Tang et al. 2021, arXiv:2102.02888).
The error of a rounded sum goes to the replica that summed, so that after any number of steps, up to the
rounding of float32,

    sum of all results + the replicas' errors = sum of all gradients

Letters: R replicas · B blocks of a piece · E values of a block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxlp.numerics.formats import FORMATS, Format, Quantized
from maxlp.numerics.quantized import dequantize, quantize

AXIS = "data"
BLOCK = 256  # values that share a scale: 8.125 bits a value


def sum_over_replicas(gradients: Any, errors: Any, specs: Any, format_name: str) -> tuple[Any, Any]:
    """The sum of the replicas' gradients, and their errors after it.

    Args:
      gradients: a tree of arrays (R, …); entry r is that of replica r, on its devices.
      errors: the same in float32, from the step before; at first zeros.
      specs: the partition of each parameter (…), which does not have the axis ``data``.
      format_name: a key of `formats.FORMATS`, of 8 bits.

    Returns:
      the sums (…) in the dtypes of ``gradients``, partitioned by ``specs``, and the new errors. A block
      with a value that is not finite becomes NaN.
    """
    to, structure = FORMATS[format_name], jax.tree.structure(gradients)

    def exchange(gradients: Any, errors: Any) -> tuple[Any, Any]:
        done = [
            _exchange(g[0], error[0], to)
            for g, error in zip(jax.tree.leaves(gradients), jax.tree.leaves(errors), strict=True)
        ]
        totals, errors = zip(*done, strict=True)
        return structure.unflatten(totals), structure.unflatten([error[None] for error in errors])

    of_replicas = jax.tree.map(lambda spec: PartitionSpec(AXIS, *spec), specs)
    # check_vma cannot see that all replicas gather the same sums.
    run = jax.shard_map(
        exchange, in_specs=(of_replicas, of_replicas), out_specs=(specs, of_replicas), check_vma=False
    )
    return run(gradients, errors)


def _exchange(gradient: jax.Array, error: jax.Array, to: Format) -> tuple[jax.Array, jax.Array]:
    """`sum_over_replicas` of one array, as one device sees it."""
    replicas, n, shape = jax.lax.axis_size(AXIS), gradient.size, gradient.shape
    x = (gradient.astype(jnp.float32) + error).ravel()
    x_RBE = jnp.pad(x, (0, -n % (replicas * BLOCK))).reshape(replicas, -1, BLOCK)
    sent = quantize(x_RBE, to, "row", (2,))
    swap = functools.partial(jax.lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0)
    received = _send(sent, swap)
    is_mine = jnp.arange(replicas)[:, None, None] == jax.lax.axis_index(AXIS)
    sum_BE = jnp.sum(jnp.where(is_mine, x_RBE, dequantize(received, jnp.float32)), axis=0)
    rounded = quantize(sum_BE, to, "row", (1,))
    sum_RBE = dequantize(_send(rounded, functools.partial(jax.lax.all_gather, axis_name=AXIS)), jnp.float32)
    result_BE = dequantize(rounded, jnp.float32)
    if gradient.dtype != jnp.float32:
        # Without a barrier XLA would drop a cast and its inverse.
        result_BE = jax.lax.optimization_barrier(result_BE.astype(gradient.dtype)).astype(jnp.float32)
    lost_RBE = jnp.where(is_mine, sum_BE - result_BE, x_RBE - dequantize(sent, jnp.float32))
    total, lost = (a.ravel()[:n].reshape(shape) for a in (sum_RBE, lost_RBE))
    return total.astype(gradient.dtype), lost


def _send(q: Quantized, collective: Callable[[jax.Array], jax.Array]) -> Quantized:
    """Values as plain bytes: on devices without 8-bit floats XLA sends these as 16 bits."""
    received = collective(jax.lax.bitcast_convert_type(q.codes, jnp.int8))
    return Quantized(jax.lax.bitcast_convert_type(received, q.codes.dtype), collective(q.scale))


def num_bytes(values: float, format_name: str) -> float:
    """Bytes of values and their scales, as they are sent once."""
    return values * (FORMATS[format_name].bits / 8 + 4 / BLOCK)
