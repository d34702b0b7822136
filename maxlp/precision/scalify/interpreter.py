"""`scalify`: an interpreter that runs a program on pairs of data and scale, equation by equation.

A value is `Scaled` if it depends on a `Scaled` input. Everything else is computed as before, except that
scalars get a scale: a mean over a million tokens may begin with the factor 1e-6, which float16 cannot hold
precisely.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from maxlp.precision.scalify.rules import MOVES, RULES
from maxlp.precision.scalify.scaled import Constant, Scaled, Value, array, as_scaled, is_float, shift

LIBRARIES = [pathlib.Path(file).parent for file in (__file__, jax.__file__)]


class MissingRuleError(ValueError):
    """A primitive without a rule met a `Scaled` array.

    Attributes:
      line: ``file:line`` of the program, None until it is known.
    """

    def __init__(self, primitive: str):
        super().__init__()
        self.primitive = primitive
        self.line: str | None = None

    def __str__(self) -> str:
        line = self.line or "an unknown line"
        return (
            f"scalify has no rule for the primitive {self.primitive!r}, used at {line}; add one to "
            "precision.scalify.rules.RULES, or compute this part without scalify"
        )


def scalify(fn: Callable) -> Callable:
    """``fn`` on `Scaled` arrays: the same function, with scales that are propagated beside the data.

    Apply it outside autodiff (to ``jax.grad(loss)``, or to a whole update), so that gradients get scales of
    their own, and inside `jax.jit`. ``fn`` is traced with the shapes and dtypes of the data: with float16
    data it computes in float16, and accumulates sums in float32.

    Args:
      fn: from trees of arrays to a tree of arrays.

    Returns:
      a function that takes `Scaled` leaves (`scale` makes them) in place of any floating-point ones, and
      returns all floating-point ones as `Scaled` (`unscale`).

    Raises:
      MissingRuleError: when called, if a primitive that meets a `Scaled` array has no rule.
    """

    @functools.wraps(fn)
    def scalified(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Scaled))
        data = [x.data if isinstance(x, Scaled) else x for x in leaves]
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.unflatten(tree, data))
        values = [x if isinstance(x, Scaled) else jnp.asarray(x) for x in leaves]
        outputs = map(_scaled_if_float, evaluate(jaxpr.jaxpr, jaxpr.consts, values))
        return jax.tree.unflatten(jax.tree.structure(out), outputs)

    return scalified


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
    """The outputs of a jaxpr for inputs of which some are `Scaled`."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: Any) -> Value:
        return _literal(v) if isinstance(v, Literal) else known[v]

    for eqn in jaxpr.eqns:
        try:
            outputs = _apply(eqn, [read(v) for v in eqn.invars])
        except MissingRuleError as error:  # an equation inside a call may have no line: then the call's
            error.line = error.line or _source(eqn)
            raise
        known |= zip(eqn.outvars, outputs, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _literal(v: Literal) -> Value:
    if is_float(v.aval.dtype) and not v.aval.shape:
        return Constant(float(v.val), (), v.aval.dtype)
    return jnp.asarray(v.val, v.aval.dtype)


def _apply(eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    primitive = eqn.primitive.name
    if primitive in CALLS:
        return CALLS[primitive](eqn, *inputs)
    if any(isinstance(x, Scaled) for x in inputs):
        if primitive not in RULES:
            raise MissingRuleError(primitive)
        return RULES[primitive](eqn, *inputs)
    out = eqn.outvars[0].aval
    if len(inputs) == 1 and isinstance(inputs[0], Constant) and _keeps_number(eqn):
        return [Constant(inputs[0].number, out.shape, out.dtype)]
    outputs = eqn.primitive.bind(*map(array, inputs), **eqn.primitive.get_bind_params(eqn.params))
    outputs = outputs if eqn.primitive.multiple_results else [outputs]
    return [as_scaled(x) if is_float(x.dtype) and x.ndim == 0 else x for x in outputs]


def _keeps_number(eqn: JaxprEqn) -> bool:
    """Whether an equation of one constant returns the same number, in another shape or float dtype."""
    [out, *more] = eqn.outvars
    is_move = eqn.primitive.name in (*MOVES, "convert_element_type", "stop_gradient")
    return is_move and not more and is_float(out.aval.dtype)


def _source(eqn: JaxprEqn) -> str | None:
    """``file:line`` of the innermost frame outside of `LIBRARIES`."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = pathlib.Path(frame.file_name)
        if not any(path.is_relative_to(library) for library in LIBRARIES):
            return f"{path}:{frame.line_num}"
    return None


def _scaled_if_float(x: Value) -> Value:
    dtype = x.data.dtype if isinstance(x, Scaled) else x.dtype
    return as_scaled(x) if is_float(dtype) else array(x)


# --- equations with programs inside ----------------------------------------------------------------------


def _closed(parameter: str) -> Callable:
    """The rule of a call, which interprets the jaxpr in its parameter inline."""

    def call(eqn: JaxprEqn, *inputs: Value) -> list[Value]:
        inner = eqn.params[parameter]
        return evaluate(inner.jaxpr, inner.consts, inputs)

    return call


def _remat(eqn: JaxprEqn, *inputs: Value) -> list[Value]:
    """With JAX's barrier before a recomputation, which XLA would otherwise merge with the original."""
    if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
        arrays = [array(x) if isinstance(x, Constant) else x for x in inputs]
        inputs = jax.lax.optimization_barrier(arrays)
    return evaluate(eqn.params["jaxpr"], (), inputs)


def _scan(eqn: JaxprEqn, *inputs: Value) -> list[Value]:
    """Every float that is carried or stacked is `Scaled`; stacked outputs get one exponent at the end."""
    p = eqn.params
    inner, length = p["jaxpr"], p["length"]
    # Stacked values have one axis more than in the body. (JAX 0.12 does not record how many there are.)
    num_xs = sum(v.aval.ndim > x.ndim for v, x in zip(eqn.invars, inner.in_avals, strict=True))
    num_ys = sum(v.aval.ndim > y.ndim for v, y in zip(eqn.outvars, inner.out_avals, strict=True))
    first_x = len(inputs) - num_xs
    start = first_x - (len(eqn.outvars) - num_ys)
    consts, carry, xs = inputs[:start], inputs[start:first_x], inputs[first_x:]

    def body(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
        outputs = evaluate(inner.jaxpr, inner.consts, (*consts, *carry, *x))
        outputs = list(map(_scaled_if_float, outputs))
        return outputs[: len(carry)], outputs[len(carry) :]

    carry, ys = jax.lax.scan(
        body,
        [_scaled_if_float(x) for x in carry],
        [_stacked(x, length) for x in xs],
        length,
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    return carry + [_joined(y) for y in ys]


def _stacked(x: Value, length: int) -> Value:
    """An input to scan over: each slice along its first axis gets a copy of the exponent."""
    if isinstance(x, Scaled):
        return Scaled(x.data, jnp.broadcast_to(x.exponent, (length,)))
    return array(x)


def _joined(y: Value) -> Value:
    """A stacked output, whose slices have exponents of their own, with their largest exponent for all."""
    if not isinstance(y, Scaled):
        return y
    exponent = jnp.max(y.exponent)
    n = (y.exponent - exponent).reshape(-1, *(1,) * (y.data.ndim - 1))
    return Scaled(shift(y.data, n), exponent)


CALLS: dict[str, Callable[..., list[Value]]] = {
    "closed_call": _closed("call_jaxpr"),
    "custom_jvp_call": _closed("call_jaxpr"),
    "custom_vjp_call": _closed("call_jaxpr"),
    "jit": _closed("jaxpr"),
    "remat2": _remat,
    "scan": _scan,
}
