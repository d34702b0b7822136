"""One rule for each primitive: what it does to data and exponents.

A rule takes the equation and its inputs, of which at least one is `Scaled`, and returns its outputs. The
rules are those of Balança et al. 2024 (arXiv:2407.17353), appendix A, except where one says otherwise.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from maxlp.numerics import formats, rounding
from maxlp.precision.scalify import markers
from maxlp.precision.scalify.scaled import (
    Scaled,
    Value,
    align,
    array,
    as_scaled,
    is_float,
    rescale,
    shift,
    value,
)

Rule = Callable[..., list[Value]]


def bind(eqn: JaxprEqn, *inputs: jax.Array, **changes: Any) -> list[jax.Array]:
    """The outputs of an equation's primitive for other inputs, and with changed parameters."""
    out = eqn.primitive.bind(*inputs, **eqn.params | changes)
    return list(out) if eqn.primitive.multiple_results else [out]


def _with(exponent: jax.Array, outputs: list[jax.Array]) -> list[Value]:
    """Outputs under an exponent, except for integers."""
    return [Scaled(x, exponent) if is_float(x.dtype) else x for x in outputs]


# --- data and exponent separately
# -----------------------------------------------------------------------------


def keep(eqn: JaxprEqn, x: Value, *rest: Value) -> list[Value]:
    """For primitives that move, negate or select elements of the first input: the exponent stays."""
    x = as_scaled(x)
    return _with(x.exponent, bind(eqn, x.data, *map(array, rest)))


def keep_each(eqn: JaxprEqn, *inputs: Value) -> list[Value]:
    """For primitives with an output for each input, which keeps the exponent of that input."""
    outputs = bind(eqn, *(x.data if isinstance(x, Scaled) else array(x) for x in inputs))
    return [
        Scaled(y, x.exponent) if isinstance(x, Scaled) else y for x, y in zip(inputs, outputs, strict=True)
    ]


def mul(eqn: JaxprEqn, x: Value, y: Value) -> list[Value]:
    x, y = as_scaled(x), as_scaled(y)
    return _with(x.exponent + y.exponent, bind(eqn, x.data, y.data))


def div(eqn: JaxprEqn, x: Value, y: Value) -> list[Value]:
    x, y = as_scaled(x), as_scaled(y)
    return _with(x.exponent - y.exponent, bind(eqn, x.data, y.data))


def square(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    return _with(2 * x.exponent, bind(eqn, x.data))


def integer_pow(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    return _with(eqn.params["y"] * x.exponent, bind(eqn, x.data))


def sqrt(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    """An odd exponent has no half: one power of two moves to the data."""
    odd = x.exponent & 1
    return _with((x.exponent - odd) >> 1, bind(eqn, shift(x.data, odd)))


def rsqrt(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    odd = x.exponent & 1
    return _with(-((x.exponent - odd) >> 1), bind(eqn, shift(x.data, odd)))


def sign(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    return _with(jnp.int32(0), bind(eqn, x.data))


def convert(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    """Between floats only the data changes its dtype: nothing is rescaled."""
    return keep(eqn, x) if is_float(eqn.params["new_dtype"]) else [*bind(eqn, value(x))]


def bitcast(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    """The bits of the values, not of the data; JAX 0.12 uses them in the derivative of erfc."""
    return [*bind(eqn, value(x).astype(x.data.dtype))]


def name(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    marker = eqn.params["name"]
    if marker == markers.RESCALE:
        return [rescale(x)]
    if marker in markers.FP8:
        return [Scaled(rounding.cast(x.data, formats.get(markers.FP8[marker])), x.exponent)]
    return keep(eqn, x)


# --- sums ------------------------------------------------------------------------------------------------
# N independent terms of size 1 add up to √N. That factor, as a power of two, moves to the exponent. Sums
# accumulate in float32, as matmuls do, so that none overflows before it is divided.


def _root(terms: int) -> int:
    """``floor(log2(√terms))``"""
    return (max(terms, 1).bit_length() - 1) // 2


def _summed(eqn: JaxprEqn, total: jax.Array, exponent: jax.Array, terms: int) -> list[Value]:
    n = _root(terms)
    return [Scaled(shift(total, -n).astype(eqn.outvars[0].aval.dtype), exponent + n)]


def reduce_sum(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    terms = math.prod(x.data.shape[axis] for axis in eqn.params["axes"])
    [total] = bind(eqn, x.data.astype(jnp.float32))
    return _summed(eqn, total, x.exponent, terms)


def cumsum(eqn: JaxprEqn, x: Scaled) -> list[Value]:
    [totals] = bind(eqn, x.data.astype(jnp.float32))
    return _summed(eqn, totals, x.exponent, x.data.shape[eqn.params["axis"]])


def dot_general(eqn: JaxprEqn, x: Value, y: Value) -> list[Value]:
    x, y = as_scaled(x), as_scaled(y)
    (contracted, _), _ = eqn.params["dimension_numbers"]
    terms = math.prod(x.data.shape[axis] for axis in contracted)
    [total] = bind(eqn, x.data, y.data, preferred_element_type=jnp.dtype(jnp.float32))
    return _summed(eqn, total, x.exponent + y.exponent, terms)


def scatter_add(eqn: JaxprEqn, x: Value, indices: jax.Array, updates: Value) -> list[Value]:
    """How many terms are added depends on the indices, so no power of two moves to the exponent."""
    (x_data, updates_data), exponent = align(x, updates)
    params = {key: eqn.params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
    total = jax.lax.scatter_add(
        x_data.astype(jnp.float32),
        indices,
        updates_data.astype(jnp.float32),
        eqn.params["dimension_numbers"],
        **params,
    )
    return [Scaled(total.astype(x_data.dtype), exponent)]


# --- one common exponent ---------------------------------------------------------------------------------


def aligned(eqn: JaxprEqn, *inputs: Value) -> list[Value]:
    """For primitives that add, compare or join their inputs."""
    data, exponent = align(*inputs)
    return _with(exponent, bind(eqn, *data))


def select_n(eqn: JaxprEqn, which: jax.Array, *cases: Value) -> list[Value]:
    data, exponent = align(*cases)
    return _with(exponent, bind(eqn, which, *data))


def update_slice(eqn: JaxprEqn, x: Value, update: Value, *starts: jax.Array) -> list[Value]:
    data, exponent = align(x, update)
    return _with(exponent, bind(eqn, *data, *starts))


# --- without a scale -------------------------------------------------------------------------------------


def by_value(eqn: JaxprEqn, *inputs: Value) -> list[Value]:
    """For functions that no scale passes through: of the values in float32; the result has the scale 1."""
    dtypes = [v.aval.dtype for v in eqn.outvars]
    outputs = bind(eqn, *map(value, inputs))
    return _with(jnp.int32(0), [y.astype(dtype) for y, dtype in zip(outputs, dtypes, strict=True)])


MOVES = (
    *("broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "gather", "reshape", "rev", "slice"),
    *("sharding_constraint", "split", "squeeze", "tile", "transpose", "unstack"),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVES, keep),
    **dict.fromkeys(("abs", "neg", "stop_gradient", "reduce_precision", "is_finite"), keep),
    **dict.fromkeys(("reduce_max", "reduce_min", "argmax", "argmin", "top_k", "cummax"), keep),
    **dict.fromkeys(("optimization_barrier", "sort"), keep_each),
    **dict.fromkeys(
        ("add", "add_any", "sub", "max", "min", "clamp", "concatenate", "pad", "stack"), aligned
    ),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), by_value),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "pow", "round", "floor", "ceil"), by_value),
    **dict.fromkeys(("sin", "cos", "tanh", "one_minus_square", "erf", "erfc"), by_value),
    **dict.fromkeys(("logistic", "polynomial"), by_value),
    "bitcast_convert_type": bitcast,
    "convert_element_type": convert,
    "cumsum": cumsum,
    "div": div,
    "dot_general": dot_general,
    "dynamic_update_slice": update_slice,
    "integer_pow": integer_pow,
    "mul": mul,
    "name": name,
    "reduce_sum": reduce_sum,
    "rsqrt": rsqrt,
    "scatter-add": scatter_add,
    "select_n": select_n,
    "sign": sign,
    "sqrt": sqrt,
    "square": square,
}
