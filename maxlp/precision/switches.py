"""Recipes whose operands are quantized or not by switches, inputs of the program (`run.attribution`).

`replace.replace_quant_dots` puts a `SwitchDot` in the place of each `QuantDot`. It has a boolean, at
first False, for each operand of its three matmuls. A matmul with both operands on is that of the recipe;
with both off, that of `layers.dot_general`; with one on, the quantized operand is multiplied in float32 by
the other one in its own dtype. What has no switch stays on: the smoothing of a gated product
(`smooth_swiglu`) and the rotation of ``fwd``, which by themselves change nothing but rounding.

A trust mask belongs to an operand of ``fwd``: where that is off nothing is clipped, and the whole gradient
passes. Sampling of tokens (``keep`` below 1) has no switch, and `run.attribution` refuses it.

What an operand is quantized to does not depend on the other switches: if the recipe makes the
operand of a backward matmul from the quantized one of the forward pass, so does its switch.
"""

import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlp.numerics import formats
from maxlp.numerics.formats import Quantized
from maxlp.numerics.quantized import dequantize, explicit_sharding, trusted
from maxlp.precision import delayed, dot
from maxlp.precision.dot import QuantDot
from maxlp.precision.health import shares
from maxlp.precision.inject import matmuls
from maxlp.precision.recipes import GEMMS, Operand, Recipe

# Of an operand: the fractions that saturate and underflow (`health`), and the relative error of the
# product, ``‖y - y0‖ / ‖y0‖``, which is measured where only one operand of a matmul is quantized.
STATISTICS = ("saturated", "underflow", "error")


class Switches(nnx.Variable):
    """bool (…, 3 matmuls, 2 operands), in the order of `GEMMS`."""


class Statistics(nnx.Variable):
    """float32 (…, 2 operands, `STATISTICS`) of ``fwd``, written by the forward pass."""


class SwitchDot(QuantDot):
    """A `QuantDot` whose operands are quantized where its switches are on.

    Args:
      dot: the one it replaces; it reads the same histories, and does not write them.
      stack: the leading axes of a stacked kernel.
    """

    def __init__(self, dot: QuantDot, stack: tuple[int, ...]):
        self.share_histories(dot)
        self.on = Switches(jnp.zeros((*stack, 3, 2), bool))
        self.forward_statistics = Statistics(jnp.zeros((*stack, 2, len(STATISTICS)), jnp.float32))
        self.backward_statistics = delayed.OverwriteWithGradient(
            jnp.zeros((*stack, 2, 2, len(STATISTICS)), jnp.float32)
        )

    @property
    def statistics(self) -> jax.Array:
        """float32 (…, 3 matmuls, 2 operands, `STATISTICS`); meaningless where a switch is off."""
        forward = jnp.expand_dims(self.forward_statistics[...], -3)
        return jnp.concatenate([forward, self.backward_statistics[...]], axis=-3)

    def _product_of_rotated(
        self, x: jax.Array, kernel: jax.Array, static: dot.Static, shared: dict
    ) -> jax.Array:
        histories = {tensor: history[...] for tensor, history in self.histories.items()}
        tensors = {"input": x, "kernel": kernel}
        amaxes = {tensor: self._amaxes(tensor, value).for_scale for tensor, value in tensors.items()}
        grad_history, on = histories.get("output_grad"), self.on[...]
        if self.recipe.trust_mask and self.recipe.fwd:
            x, kernel = _trusted_where_on(self.recipe, x, kernel, amaxes, on[0])
        static = static._replace(sum_over_rows=None)  # the rounding of what devices send is not attributed
        out = _dot(static, x, kernel, amaxes, grad_history, on, self.backward_statistics[...])
        y, of_forward = typing.cast(tuple, out)
        self.forward_statistics[...] = jax.lax.stop_gradient(of_forward)
        return y


def switchable(recipe: Recipe) -> dict[tuple[str, str], Operand]:
    """What a recipe quantizes: (matmul, tensor) → how.

    A backward matmul that the recipe leaves in high precision takes the residual of the forward pass, which
    may be quantized.
    """
    found = {
        (gemm, tensor): operand
        for gemm, pair in recipe.gemms.items()
        for tensor, operand in zip(GEMMS[gemm], pair, strict=True)
    }
    if recipe.fwd is not None and recipe.residuals == "quantized":
        for gemm, tensor, operand in (("dlhs", "kernel", recipe.fwd[1]), ("drhs", "input", recipe.fwd[0])):
            if gemm not in recipe.gemms:
                found[gemm, tensor] = operand
    return found


def switch_dots(model: nnx.Module) -> dict[str, SwitchDot]:
    """The `SwitchDot` of each matmul that has one, by path."""
    found = {path: module.dot_general for path, module in matmuls(model)}
    return {path: switching for path, switching in found.items() if isinstance(switching, SwitchDot)}


# --- the three matmuls ----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(static, x, kernel, amaxes, grad_history, on, backward_statistics):
    return _forward(static, x, kernel, amaxes, grad_history, on, backward_statistics)[0]


def _forward(static, x, kernel, amaxes, grad_history, on, backward_statistics):
    recipe = static.recipe

    def quantized() -> tuple[Quantized, Quantized]:
        return _forward_operands(recipe, x, kernel, amaxes)

    def low() -> jax.Array:
        q_x = None if recipe.fwd is None else quantized()[0]
        return dot.forward(static, x, kernel, q_x, None, amaxes, None)[0]

    def high() -> jax.Array:
        return dot.unquantized(x, kernel, (-1,), (0,), static.out_dtype, static.out_sharding)

    how = (-1,), (0,), static.out_dtype, static.out_sharding
    out = _switched(recipe, "fwd", on[0], high, low, quantized, lambda: (x, kernel), how)
    return out, (x, kernel, amaxes, grad_history, on)


def _backward(static, residuals, cotangents):
    x, kernel, amaxes, history, on = residuals
    g, _ = cotangents
    recipe, dtype = static.recipe, static.in_dtype
    of_grad = dot.Amaxes.of(g, history, recipe)
    amaxes = amaxes | {"output_grad": of_grad.for_scale, "output_grad_now": of_grad.current}
    tokens = tuple(range(g.ndim - 1))
    x_sharding, kernel_sharding = explicit_sharding(x), explicit_sharding(kernel)

    def saved() -> tuple[Any, Any]:
        if recipe.fwd is None:
            return x, kernel
        return dot.residuals(recipe, x, kernel, *_forward_operands(recipe, x, kernel, amaxes))

    def of_dlhs() -> tuple[Any, Any]:
        return (g, saved()[1]) if recipe.dlhs is None else dot.dlhs_operands(recipe, saved()[1], g, amaxes)

    def of_drhs() -> tuple[Any, Any]:
        if recipe.drhs is None:
            return saved()[0], g
        return dot.drhs_operands(recipe, *dot.over_tokens(recipe, saved()[0], g), amaxes)

    def exact_drhs() -> tuple[Any, Any]:
        pair = x, g.astype(dtype)
        return pair if recipe.drhs is None else dot.over_tokens(recipe, *pair)

    def dlhs(on: jax.Array) -> tuple[jax.Array, jax.Array]:
        how = (-1,), (1,), dtype, x_sharding
        return _switched(
            recipe, "dlhs", on,
            lambda: dot.unquantized(g.astype(dtype), kernel, *how),
            lambda: dot.input_gradient(static, saved(), g, amaxes),
            of_dlhs, lambda: (g.astype(dtype), kernel), how,
        )  # fmt: skip

    def drhs(on: jax.Array) -> tuple[jax.Array, jax.Array]:
        how = tokens, tokens, dtype, kernel_sharding
        return _switched(
            recipe, "drhs", on,
            lambda: dot.unquantized(x, g.astype(dtype), *how),
            lambda: dot.kernel_gradient(static, saved(), g, amaxes),
            of_drhs, exact_drhs, how,
        )  # fmt: skip

    (dx, of_dlhs_statistics), (dkernel, of_drhs_statistics) = dlhs(on[1]), drhs(on[2])
    return dx, dkernel, None, None, None, jnp.stack([of_dlhs_statistics, of_drhs_statistics])


_dot.defvjp(_forward, _backward)


def _forward_operands(recipe: Recipe, x, kernel, amaxes) -> tuple[Quantized, Quantized]:
    assert recipe.fwd is not None
    return (
        dot.quantize_forward(recipe, "input", x, amaxes["input"]),
        dot.quantize_forward(recipe, "kernel", kernel, amaxes["kernel"]),
    )


def _trusted_where_on(recipe: Recipe, x, kernel, amaxes, on: jax.Array) -> list[jax.Array]:
    """Both operands of ``fwd``, without the gradient of what is clipped where their switches are on."""
    assert recipe.fwd is not None
    fixed = jax.lax.stop_gradient((x, kernel))
    each = zip((x, kernel), _forward_operands(recipe, *fixed, amaxes), recipe.fwd, on, strict=True)
    return [jnp.where(is_on, trusted(a, q, formats.get(o.format)), a) for a, q, o, is_on in each]


def _switched(recipe, gemm, on, high, low, quantized, exact, how) -> tuple[jax.Array, jax.Array]:
    """A matmul with the switches ``on``, bool (2,), and the `STATISTICS` of its operands.

    Args:
      high, low: the matmul with no and with all of the recipe's operands quantized.
      quantized, exact: the operands in both forms.
      how: contracted axes of both operands, dtype and sharding of the result.
    """
    operands = [switchable(recipe).get((gemm, tensor)) for tensor in GEMMS[gemm]]
    if not any(operands):
        return high(), jnp.zeros((2, len(STATISTICS)), jnp.float32)

    contract_a, contract_b, dtype, out_sharding = how

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        highest = jax.lax.Precision.HIGHEST
        return dot.unquantized(a, b, contract_a, contract_b, jnp.float32, out_sharding, highest)

    def both_forms() -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        return [_forms(*each) for each in zip(operands, quantized(), exact(), strict=True)]

    def statistics(forms, error: jax.Array) -> jax.Array:
        return jnp.stack([jnp.append(of_operand, error) for _, _, of_operand in forms])

    def mixed() -> tuple[jax.Array, jax.Array]:
        forms = both_forms()
        a0, b0 = (x for _, x, _ in forms)
        a, b = (jnp.where(on[i], q, x) for i, (q, x, _) in enumerate(forms))
        y0, y = multiply(a0, b0), multiply(a, b)
        # Zeros have no error: an idle stage has no gradient, nor has a microbatch without targets.
        largest = jnp.max(jnp.abs(y0))
        unit = jnp.where(largest == 0, 1.0, largest)  # squares of gradients below 1e-19 would underflow
        difference, size = (jnp.linalg.norm(a.ravel() / unit) for a in (y - y0, y0))
        error = difference / jnp.where(size == 0, 1.0, size)
        return y.astype(dtype), statistics(forms, error)

    def none_on() -> tuple[jax.Array, jax.Array]:
        return high(), jnp.zeros((2, len(STATISTICS)), jnp.float32)

    def all_on() -> tuple[jax.Array, jax.Array]:
        if None in operands:  # only one operand is quantized, so that its error can be measured
            _, measured = mixed()
            return low(), measured
        return low(), statistics(both_forms(), jnp.zeros(()))

    has_no_switch = np.array([operand is None for operand in operands])
    which = jnp.where(jnp.all(on | has_no_switch), 2, jnp.any(on).astype(int))
    return jax.lax.switch(which, [none_on, mixed, all_on])


def _forms(operand: Operand | None, q: Any, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """An operand quantized and not, in float32, and its fractions that saturate and underflow."""
    x = x.astype(jnp.float32)
    if operand is None:
        return x, x, jnp.zeros(2)
    scales = dequantize(q._replace(codes=jnp.ones_like(x)), jnp.float32)
    return dequantize(q, jnp.float32), x, jnp.stack(shares(operand, x, q.codes, scales))
