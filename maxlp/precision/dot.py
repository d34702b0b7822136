"""One quantized ``dot_general`` for every recipe, with its own backward pass.

Shapes: the input is ``(…, K)``, the kernel ``(K, N)``, the output and its gradient ``(…, N)``.

The dtype of a product before scales are applied: int8 gives int32, exactly. FP8 gives bfloat16
where that is the result's dtype and the scales are powers of two: multiplying by them is exact, and
XLA folds it into the matmul. Other scales are applied in float32, so that nothing rounds twice;
except in ``drhs``, the one matmul whose result is summed over data-parallel devices: in float32
that would move twice the bytes of bfloat16 training, where `mesh_product` does not scale it before.
(In float16 unscaled products could overflow, so they are never in float16.)

Precision: DEFAULT lets GPUs accumulate FP8 products fast (with fewer bits), HIGHEST does not;
forward is fast and backward precise, as in Transformer Engine.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import Precision
from jax.sharding import NamedSharding, PartitionSpec

from maxlp.nn.layers import SumOverRows
from maxlp.numerics import formats, quantized
from maxlp.numerics.formats import Quantized
from maxlp.numerics.scales import amax
from maxlp.precision import blocks, delayed, sampling, smooth_swiglu
from maxlp.precision.mesh_product import Product
from maxlp.precision.recipes import GEMMS, Operand, Recipe
from maxlp.precision.sampling import Sampled


class QuantDot(nnx.Module):
    """Replaces ``jax.lax.dot_general`` where an input's last axis is contracted with a kernel's first.

    Delayed scaling keeps a history per tensor here, float32 ``(…, history)``:
    ``input_amax_history`` and ``kernel_amax_history`` are written by the forward pass,
    ``output_grad_amax_history`` is the gradient of itself (`delayed.OverwriteWithGradient`).

    Args:
      stack: the leading axes of a stacked kernel; the histories get the same. A call takes one
        slice of them.
    """

    def __init__(self, recipe: Recipe, stack: tuple[int, ...] = ()):
        self.recipe = recipe
        axes = ("layers",) * len(stack) + (None,)
        for tensor in recipe.delayed:
            kind = delayed.OverwriteWithGradient if tensor == "output_grad" else delayed.AmaxHistory
            zeros = jnp.zeros((*stack, recipe.history), jnp.float32)
            setattr(self, f"{tensor}_amax_history", kind(zeros, out_sharding=axes, eager_sharding=False))

    def share_histories(self, dot: "QuantDot") -> None:
        """Takes over the recipe of another one, and shares its histories."""
        self.recipe = dot.recipe
        for tensor, history in dot.histories.items():
            setattr(self, f"{tensor}_amax_history", history)

    @property
    def histories(self) -> dict[str, nnx.Variable]:
        """The amax history of each tensor that has one."""
        return {tensor: getattr(self, f"{tensor}_amax_history") for tensor in self.recipe.delayed}

    def __call__(
        self,
        x: jax.Array,
        kernel: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        shared: dict | None = None,
        sum_over_rows: SumOverRows | None = None,
    ) -> jax.Array:
        """``x @ kernel`` in ``preferred_element_type`` (default: that of ``x``).

        Args:
          shared: the same dict for all layers that multiply this ``x``, see `layers.of_same_input`.
          sum_over_rows: see `layers.Linear`.
        """
        assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), "QuantDot multiplies by a kernel"
        assert x.dtype == kernel.dtype
        dtype = jnp.dtype(preferred_element_type or x.dtype)
        static = Static(self.recipe, x.dtype, dtype, out_sharding, sum_over_rows)
        if self.recipe.smooth == "none":
            return self._product(x, kernel, static, {} if shared is None else shared)
        s = smooth_swiglu.factors(x, kernel, self.recipe.smooth)
        if self.recipe.smooth == "token":
            static = static._replace(out_dtype=jnp.dtype(jnp.float32))
            y = self._product(x / s.astype(x.dtype), kernel, static, {})
            return (y * s).astype(dtype)
        s = s.astype(x.dtype)
        x = x / jnp.expand_dims(s, range(x.ndim - 1))
        return self._product(x, kernel * s[:, None], static, {})

    def _product(self, x: jax.Array, kernel: jax.Array, static: "Static", shared: dict) -> jax.Array:
        if self.recipe.fwd_hadamard:
            if ("rotated", x.dtype) not in shared:
                shared["rotated", x.dtype] = _rotated(x, -1)
            x, kernel = shared["rotated", x.dtype], _rotated(kernel, 0)
        return self._product_of_rotated(x, kernel, static, shared)

    def _product_of_rotated(
        self, x: jax.Array, kernel: jax.Array, static: "Static", shared: dict
    ) -> jax.Array:
        # The input's history is the same in all layers that share it; one of them gives the scale.
        if (self.recipe, x.dtype) not in shared:
            shared[self.recipe, x.dtype] = self._input_forms(x)
        x, q_x, sampled, input_amax, of_input = shared[self.recipe, x.dtype]
        kernel = _row_major(kernel)
        kernel_amax, of_kernel = self._amax("kernel", kernel)
        if self.recipe.trust_mask and self.recipe.fwd:
            fixed = jax.lax.stop_gradient(kernel)
            q_kernel = quantize_forward(self.recipe, "kernel", fixed, kernel_amax)
            kernel = _trusted(kernel, q_kernel, self.recipe.fwd[1])
        histories = self.histories
        for tensor, current in (("input", of_input), ("kernel", of_kernel)):
            if current is not None:
                histories[tensor][...] = delayed.push(histories[tensor][...], current)
        grad_history = histories["output_grad"][...] if "output_grad" in histories else None
        amaxes = {"input": input_amax, "kernel": kernel_amax}
        return _dot(static, x, kernel, q_x, sampled, amaxes, grad_history)

    def _input_forms(self, x: jax.Array) -> tuple[jax.Array, Quantized | None, Sampled | None, Any, Any]:
        """The input that gets the gradient, the operands of ``fwd`` and ``drhs``, the result of `_amax`.

        An operand of None stands for the input itself.
        """
        fixed, fwd = jax.lax.stop_gradient(x), self.recipe.fwd
        amaxes, sampled = self._amax("input", fixed), sampling.sample(fixed, self.recipe.keep)
        if fwd is None:
            return x, None, sampled, *amaxes
        q_x = quantize_forward(self.recipe, "input", fixed, amaxes[0])
        return _trusted(x, q_x, fwd[0]) if self.recipe.trust_mask else x, q_x, sampled, *amaxes

    def _amax(self, tensor: str, x: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """The amax that the scale of a tensor comes from, and that of its data; None without a history."""
        if tensor not in self.recipe.delayed:
            return None, None
        current = amax(jax.lax.stop_gradient(x))
        return delayed.delayed_amax(self.histories[tensor][...], current, self.recipe.cold_start), current


class Static(NamedTuple):
    """What is fixed when a program is traced."""

    recipe: Recipe
    in_dtype: Any  # of input, kernel and their gradients
    out_dtype: Any  # of the output and its gradient
    out_sharding: Any
    sum_over_rows: SumOverRows | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(static: Static, x, kernel, q_x, sampled, amaxes, grad_history):
    return forward(static, x, kernel, q_x, sampled, amaxes, grad_history)[0]


def forward(static: Static, x, kernel, q_x, sampled, amaxes, grad_history):
    """The matmul ``fwd``, (…, K) · (K, N) to (…, N), and what the backward pass needs.

    Args:
      q_x: the quantized input; None if ``fwd`` is not quantized.
      sampled: what ``drhs`` multiplies in place of the input, or None.
      amaxes: of input and kernel, see `delayed.delayed_amax`; None without a history.
    """
    recipe, dtype, out_sharding = static.recipe, static.out_dtype, static.out_sharding
    if recipe.fwd is None:
        saved = (x, kernel)
        y = unquantized(x, kernel, (-1,), (0,), dtype, out_sharding)
    else:
        q_kernel = quantize_forward(recipe, "kernel", kernel, amaxes["kernel"])
        y = _gemm(q_x, q_kernel, (-1,), (0,), recipe.fwd, dtype, Precision.DEFAULT, out_sharding)
        saved = residuals(recipe, x, kernel, q_x, q_kernel)
    if sampled is not None:
        saved = sampled, saved[1]
    return y, (saved, amaxes, grad_history)


def residuals(recipe: Recipe, x, kernel, q_x, q_kernel) -> tuple[Any, Any]:
    """The forms of input and kernel that the backward pass starts from."""
    assert recipe.fwd is not None
    all_quantized = recipe.residuals == "quantized"
    # If dlhs takes the kernel in this form, only this form is saved: it is smaller, and FSDP
    # gathers it only once.
    shared = recipe.dlhs is not None and _serves_both(recipe.fwd[1], recipe.dlhs[1])
    return q_x if all_quantized else x, q_kernel if all_quantized or shared else kernel


def _backward(static: Static, residuals, g):
    saved, amaxes, history = residuals
    current, grad_amax, new_history = None, None, None
    if history is not None:
        current = amax(g)
        grad_amax = delayed.delayed_amax(history, current, static.recipe.cold_start)
        new_history = delayed.push(history, current)
    amaxes_and_grad = amaxes | {"output_grad": grad_amax, "output_grad_now": current}
    g = _quantized_once(static.recipe, g, grad_amax)
    dx = input_gradient(static, saved, g, amaxes_and_grad)
    dkernel = kernel_gradient(static, saved, g, amaxes_and_grad)
    return dx, dkernel, None, None, None, new_history


_dot.defvjp(forward, _backward)


def _quantized_once(recipe: Recipe, g: jax.Array, delayed_amax) -> Any:
    """The output's gradient as both matmuls take it; as it is where they take different forms.

    As one array, it is sent to the devices of a mesh once. XLA does not join two gathers of equal arrays.
    """
    if recipe.dlhs is None or recipe.drhs is None or recipe.hadamard:
        return g
    of_dlhs, of_drhs = recipe.dlhs[0], recipe.drhs[1]
    if of_drhs.in_blocks or not _serves_both(of_dlhs, of_drhs):
        return g
    return quantize(recipe, of_dlhs, g, (g.ndim - 1,), delayed_amax)


def input_gradient(static: Static, saved, g: Any, amaxes) -> jax.Array:
    """The matmul ``dlhs``: (…, N) · (K, N) to (…, K).

    Args:
      g: the output's gradient, an array or its quantized form.
    """
    pair, dtype, sharding = static.recipe.dlhs, static.in_dtype, _sharding(saved[0])
    if pair is None:
        return unquantized(g.astype(dtype), _as(saved[1], dtype), (-1,), (1,), dtype, sharding)
    q_g, q_kernel = dlhs_operands(static.recipe, saved[1], g, amaxes)
    return _gemm(q_g, q_kernel, (-1,), (1,), pair, dtype, Precision.HIGHEST, sharding)


def dlhs_operands(recipe: Recipe, saved_kernel, g: Any, amaxes) -> tuple[Quantized, Quantized]:
    assert recipe.dlhs is not None
    q_kernel = _requantize(recipe, saved_kernel, 1, recipe.dlhs[1], (1,), amaxes["kernel"])
    if not isinstance(g, Quantized):
        g = quantize(recipe, recipe.dlhs[0], g, (g.ndim - 1,), amaxes["output_grad"])
    return g, q_kernel


def kernel_gradient(static: Static, saved, g: Any, amaxes) -> jax.Array:
    """The matmul ``drhs``: (…, K) · (…, N) to (K, N), summed over all tokens; see `input_gradient`."""
    pair, dtype, sharding = static.recipe.drhs, static.in_dtype, _sharding(saved[1])
    tokens = tuple(range(g.ndim - 1))

    def product(x: Any, g: Any) -> jax.Array:
        if pair is None:
            return unquantized(x, g, tokens, tokens, dtype, sharding)
        return _gemm(
            x, g, tokens, tokens, pair, dtype, Precision.HIGHEST, sharding, summed_over_devices=True
        )

    if isinstance(saved[0], Sampled):
        rows, index = saved[0]
        operands: Any = rows, sampling.take(g, index).astype(dtype)
    elif pair is None:
        operands = _as(saved[0], dtype), g.astype(dtype)
    else:
        operands = drhs_operands(static.recipe, *over_tokens(static.recipe, saved[0], g), amaxes)
    if static.sum_over_rows is None:
        return product(*operands)
    return static.sum_over_rows(product, *operands)


def over_tokens(recipe: Recipe, saved_x, g: Any) -> tuple[Any, Any]:
    """Input and output gradient in whole blocks of tokens, rotated if the recipe says so."""
    assert recipe.drhs is not None
    of_scales = recipe.drhs[0].block_size if recipe.drhs[0].in_blocks else 1
    size = math.lcm(of_scales, quantized.HADAMARD if recipe.hadamard else 1)
    if size > 1:  # blocks are of tokens, and their number is arbitrary
        saved_x, g = (quantized.pad_to_blocks(a, -2, size) for a in (_as(saved_x, jnp.float32), g))
    if recipe.hadamard:
        saved_x, g = quantized.rotate(saved_x, -2), quantized.rotate(g, -2)
    return saved_x, g


def drhs_operands(recipe: Recipe, saved_x, g: Any, amaxes) -> tuple[Quantized, Quantized]:
    assert recipe.drhs is not None
    tokens = tuple(range(g.ndim - 1))
    q_x = _requantize(recipe, saved_x, 0, recipe.drhs[0], tokens, amaxes["input"])
    if not isinstance(g, Quantized):
        g = quantize(recipe, recipe.drhs[1], g, tokens, amaxes["output_grad"])
    if (current := amaxes["output_grad_now"]) is not None:
        # As in `quantize_forward`, but where NaN in its place would cost XLA for GPUs a pass over the data.
        g = g._replace(scale=jnp.where(jnp.isfinite(current), g.scale, current))
    return q_x, g


# --- parts --------------------------------------------------------------------------------------------


def quantize(recipe: Recipe, operand: Operand, x: jax.Array, contract, delayed_amax) -> Quantized:
    """An operand of a matmul that sums over the axes ``contract``; see `delayed.delayed_amax`."""
    q = quantized.quantize(
        x,
        formats.get(operand.format),
        operand.granularity,
        contract,
        delayed_amax=delayed_amax if operand.delayed else None,
        margin=recipe.margin if operand.delayed else 0.0,
        power_of_two=operand.power_of_two,
        clipping=operand.clipping,
        rounding=operand.rounding,
        block_size=operand.block_size,
        block_scales=operand.block_scales,
    )
    if operand.delayed and not recipe.cold_start:
        q = q._replace(codes=_written_once(q.codes))
    return q


def quantize_forward(recipe: Recipe, tensor: str, x: jax.Array, delayed_amax) -> Quantized:
    """Input or kernel as an operand of ``fwd``; see `delayed.delayed_amax`."""
    assert recipe.fwd is not None
    operand = recipe.fwd[GEMMS["fwd"].index(tensor)]
    if operand.delayed:  # with a scale older than the data infinity saturates, and no gate would see it
        x = jnp.where(jnp.isfinite(x), x, jnp.nan)
    return quantize(recipe, operand, x, (x.ndim - 1,) if tensor == "input" else (0,), delayed_amax)


def _row_major(x: jax.Array) -> jax.Array:
    """The array in row-major layout, which 8-bit matmuls cannot change; on several devices, as it is.

    A kernel's layout would spread to the whole stack of layers, which copies all weights in float32 in each
    step. (The SPMD partitioner gathers what is constrained.)
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _rotated(x: jax.Array, axis: int) -> jax.Array:
    """An operand of the forward pass, which sums over this axis, in QuEST's rotation (arXiv:2502.05003)."""
    size = math.gcd(quantized.LARGE_HADAMARD, x.shape[axis])
    return quantized.rotate(x, axis, size, random_signs=False)


def _trusted(x: jax.Array, q: Quantized, operand: Operand) -> jax.Array:
    return quantized.trusted(x, q, formats.get(operand.format))


def _written_once(values: jax.Array) -> jax.Array:
    """Quantized values that XLA writes in one layout only; it makes other layouts from the 8 bits.

    The pass over the data then also computes the amax, which XLA does not fuse with a transposing write.
    With a scale that needs this amax, two passes read the data in any case.
    """
    return jax.lax.optimization_barrier(_row_major(values))


def _requantize(recipe: Recipe, saved, index: int, operand: Operand, contract, delayed_amax) -> Quantized:
    """A saved operand of the forward pass for a backward matmul, which may sum over another axis.

    Args:
      index: of the operand in the pair ``recipe.fwd``.
    """
    if not isinstance(saved, Quantized):
        return quantize(recipe, operand, saved, contract, delayed_amax)
    assert recipe.fwd is not None
    if _serves_both(recipe.fwd[index], operand):
        return saved
    return quantize(recipe, operand, _as(saved, jnp.float32), contract, delayed_amax)


def _serves_both(of_forward: Operand, operand: Operand) -> bool:
    """Whether what the forward pass quantized also serves a matmul that sums over another axis."""
    return operand == of_forward and operand.granularity in ("tensor", "unscaled", "tile")


def unquantized(
    a: jax.Array, b: jax.Array, contract_a, contract_b, dtype, out_sharding, precision=None
) -> jax.Array:
    """``a · b`` over the contracted axes in ``dtype``, as it is without a recipe."""
    numbers = _numbers(contract_a, contract_b, a)
    return jax.lax.dot_general(
        a, b, numbers, precision=precision, preferred_element_type=dtype, out_sharding=out_sharding
    )


def _gemm(
    a: Quantized, b: Quantized, contract_a, contract_b, pair, dtype, precision, out_sharding,
    summed_over_devices=False,
) -> jax.Array:  # fmt: skip
    """``a · b`` over the contracted axes in ``dtype``."""
    numbers = _numbers(contract_a, contract_b, a.codes)
    if pair[0].in_blocks:
        return blocks.dot_general(a, b, pair, numbers, dtype, out_sharding)
    kind = formats.get(pair[0].format).kind
    exact_scales = all(operand.power_of_two for operand in pair)
    narrow = kind == "float" and dtype == jnp.bfloat16 and (exact_scales or summed_over_devices)

    def multiply(a: Quantized, b: Quantized, _: jax.Array | None) -> jax.Array:
        product = jax.lax.dot_general(
            a.codes,
            b.codes,
            numbers,
            precision=precision if kind == "float" else None,
            preferred_element_type=jnp.int32 if kind == "int" else dtype if narrow else jnp.float32,
            out_sharding=out_sharding,
        )
        axes_a, axes_b = numbers[0]
        free_a, free_b = a.codes.ndim - len(axes_a), b.codes.ndim - len(axes_b)
        scale_a, scale_b = _free(a.scale, axes_a, 0, free_b), _free(b.scale, axes_b, free_a, 0)
        scale = _like(scale_a, product) * _like(scale_b, product)
        multiply_in = dtype if narrow and exact_scales else jnp.float32
        return (product.astype(multiply_in) * scale.astype(multiply_in)).astype(dtype)

    return Product(multiply, numbers[0], in_blocks=False)(a, b)


def _free(scale: jax.Array, contracted, before: int, after: int) -> jax.Array:
    """A scale in the shape that multiplies a product: a scalar, or with axes before and after it."""
    if scale.size == 1:
        return scale.reshape(())
    scale = jnp.squeeze(scale, contracted)
    return scale.reshape(*(1,) * before, *scale.shape, *(1,) * after)


def _numbers(contract_a, contract_b, a: jax.Array):
    return ((tuple(axis % a.ndim for axis in contract_a), tuple(contract_b)), ((), ()))


def _as(saved, dtype) -> jax.Array:
    return quantized.dequantize(saved, dtype) if isinstance(saved, Quantized) else saved


def _sharding(saved) -> Any:
    """The sharding of a residual (an array or its quantized form) on explicit mesh axes, else None."""
    return quantized.explicit_sharding(jax.tree.leaves(saved)[0])


def _like(scale: jax.Array, product: jax.Array) -> jax.Array:
    """A scale, on explicit mesh axes sharded like the product that it multiplies."""
    sharding = quantized.explicit_sharding(product)
    if sharding is None or scale.ndim == 0:
        return scale
    axes = (None if n == 1 else axis for n, axis in zip(scale.shape, sharding.spec, strict=True))
    return jax.sharding.reshard(scale, NamedSharding(sharding.mesh, PartitionSpec(*axes)))
