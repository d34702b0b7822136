"""One quantized ``dot_general`` for every recipe, with its own backward pass.

Shapes: the input is ``(…, K)``, the kernel ``(K, N)``, the output and its gradient ``(…, N)``.

The dtype that a matmul returns before its scales are applied:

* int8 operands give int32, which is exact for up to 133,144 products (2^31 / 127²). A longer sum, such as
  that of ``int8_all`` over more tokens, is one of shorter sums in int32 that are added in float32, see
  `maxlp.precision.integers`.
* FP8 operands with power-of-two scales give bfloat16 if that is the dtype of the result: applying such
  scales rounds nothing, and XLA folds it into the matmul.
* FP8 operands with other scales give float32, so that the result is rounded only once. An exception is
  the ``drhs`` of bfloat16 training. Its result is summed over data-parallel devices, and where XLA sums
  before it applies the scales (`mesh_product` does not), float32 would double the bytes sent.
* Simulated formats give float32. float16 is never used: a product without its scales could overflow.

Precision: DEFAULT lets GPUs use the fast accumulation of FP8 matmuls (in fewer bits), HIGHEST does not. The
forward pass uses it and the backward pass does not, as in Transformer Engine.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
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

    With delayed scaling it holds an amax history per tensor, float32 ``(…, history)``. The forward pass
    writes ``input_amax_history`` and ``kernel_amax_history``; the backward pass returns the new
    ``output_grad_amax_history`` as that variable's gradient (`delayed.OverwriteWithGradient`).

    Args:
      stack: the leading axes of a stacked kernel, which the histories get too. A call sees the kernel and
        the histories of one layer.
    """

    def __init__(self, recipe: Recipe, stack: tuple[int, ...] = ()):
        self.recipe = recipe
        axes = ("layers",) * len(stack) + (None,)
        for tensor in recipe.delayed:
            kind = delayed.OverwriteWithGradient if tensor == "output_grad" else delayed.AmaxHistory
            zeros = jnp.zeros((*stack, recipe.history), jnp.float32)
            setattr(self, f"{tensor}_amax_history", kind(zeros, out_sharding=axes, eager_sharding=False))

    def share_histories(self, dot: "QuantDot") -> None:
        """Uses another one's recipe and its histories, the variables themselves."""
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
          shared: the same dict for all layers that multiply this ``x``, see `layers.apply_to_same_input`.
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
        """``x @ kernel``, of rotated operands if the recipe says so."""
        if self.recipe.fwd_hadamard:
            if ("rotated", x.dtype) not in shared:
                shared["rotated", x.dtype] = _rotated(x, -1)
            x, kernel = shared["rotated", x.dtype], _rotated(kernel, 0)
        return self._product_of_rotated(x, kernel, static, shared)

    def _product_of_rotated(
        self, x: jax.Array, kernel: jax.Array, static: "Static", shared: dict
    ) -> jax.Array:
        """``x @ kernel``, of operands that `_product` has rotated if need be; subclasses override it."""
        # Layers that share an input have equal histories of it, so that the scale of one serves all.
        if (self.recipe, x.dtype) not in shared:
            shared[self.recipe, x.dtype] = self._input_forms(x)
        forms: InputForms = shared[self.recipe, x.dtype]
        of_kernel = self._amaxes("kernel", kernel)
        if self.recipe.trust_mask and self.recipe.fwd:
            fixed = jax.lax.stop_gradient(kernel)
            q_kernel = quantize_forward(self.recipe, "kernel", fixed, of_kernel.for_scale)
            kernel = _trusted(kernel, q_kernel, self.recipe.fwd[1])
        histories = self.histories
        for tensor, amaxes in (("input", forms.amaxes), ("kernel", of_kernel)):
            if amaxes.current is not None:
                histories[tensor][...] = delayed.push(histories[tensor][...], amaxes.current)
        grad_history = histories["output_grad"][...] if "output_grad" in histories else None
        for_scales = {"input": forms.amaxes.for_scale, "kernel": of_kernel.for_scale}
        return _dot(static, forms.x, kernel, forms.quantized, forms.sampled, for_scales, grad_history)

    def _input_forms(self, x: jax.Array) -> "InputForms":
        fixed, fwd = jax.lax.stop_gradient(x), self.recipe.fwd
        amaxes, sampled = self._amaxes("input", fixed), sampling.sample(fixed, self.recipe.keep)
        if fwd is None:
            return InputForms(x, None, sampled, amaxes)
        q_x = quantize_forward(self.recipe, "input", fixed, amaxes.for_scale)
        x = _trusted(x, q_x, fwd[0]) if self.recipe.trust_mask else x
        return InputForms(x, q_x, sampled, amaxes)

    def _amaxes(self, tensor: str, x: jax.Array) -> "Amaxes":
        history = self.histories[tensor][...] if tensor in self.recipe.delayed else None
        return Amaxes.of(jax.lax.stop_gradient(x), history, self.recipe)


class Amaxes(NamedTuple):
    """The amaxes of a tensor with a history, float32 scalars; None for a tensor without one.

    Attributes:
      for_scale: what this step's scale is computed from, see `delayed.delayed_amax`.
      current: the amax of this step's data, which enters the history.
    """

    for_scale: jax.Array | None = None
    current: jax.Array | None = None

    @classmethod
    def of(cls, x: jax.Array, history: jax.Array | None, recipe: Recipe) -> "Amaxes":
        """Those of ``x``, whose history (H,) is that of earlier steps."""
        if history is None:
            return cls()
        current = amax(x)
        return cls(delayed.delayed_amax(history, current, recipe.cold_start), current)


class InputForms(NamedTuple):
    """An input in the forms that the three matmuls take, made once for all layers that share it.

    Attributes:
      x: the input itself, to which the gradient flows; a trust mask stops it where ``fwd`` clips.
      quantized: the operand of ``fwd``; None if ``fwd`` is not quantized.
      sampled: the tokens that ``drhs`` multiplies; None if it multiplies all.
      amaxes: of the input.
    """

    x: jax.Array
    quantized: Quantized | None
    sampled: Sampled | None
    amaxes: Amaxes


class Static(NamedTuple):
    """The arguments of `_dot` that are constants of the traced program."""

    recipe: Recipe
    in_dtype: Any  # of input, kernel and their gradients
    out_dtype: Any  # of the output and its gradient
    out_sharding: Any
    sum_over_rows: SumOverRows | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(static: Static, x, kernel, q_x, sampled, amaxes, grad_history):
    return forward(static, x, kernel, q_x, sampled, amaxes, grad_history)[0]


def forward(static: Static, x, kernel, q_x, sampled, amaxes, grad_history):
    """The matmul ``fwd``, (…, K) · (K, N) to (…, N), and the residuals of the backward pass.

    Args:
      q_x: the quantized input; None if ``fwd`` is not quantized.
      sampled: the tokens that ``drhs`` multiplies; None if it multiplies all.
      amaxes: "input" and "kernel" to `Amaxes.for_scale`.
      grad_history: the amax history (H,) of the output gradient, or None.
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
    """Input and kernel as they are saved for the backward pass: quantized, or in the layer's dtype."""
    assert recipe.fwd is not None
    all_quantized = recipe.residuals == "quantized"
    # If dlhs can reuse the quantized kernel, it alone is saved: it is smaller, and FSDP gathers it once.
    shared = recipe.dlhs is not None and _serves_both(recipe.fwd[1], recipe.dlhs[1])
    saved_x = q_x if all_quantized else x
    saved_kernel = q_kernel if all_quantized or shared else kernel
    return saved_x, saved_kernel


def _backward(static: Static, residuals, g):
    saved, amaxes, history = residuals
    of_grad = Amaxes.of(g, history, static.recipe)
    new_history = None if of_grad.current is None else delayed.push(history, of_grad.current)
    amaxes_and_grad = amaxes | {"output_grad": of_grad.for_scale, "output_grad_now": of_grad.current}
    g = _quantized_once(static.recipe, g, of_grad.for_scale)
    dx = input_gradient(static, saved, g, amaxes_and_grad)
    dkernel = kernel_gradient(static, saved, g, amaxes_and_grad)
    return dx, dkernel, None, None, None, new_history


_dot.defvjp(forward, _backward)


def _quantized_once(recipe: Recipe, g: jax.Array, delayed_amax) -> Any:
    """The output gradient, quantized here if ``dlhs`` and ``drhs`` take it in the same form.

    On a mesh that one array is gathered once: XLA does not merge the all-gathers of two equal arrays.
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
      saved: input and kernel, from `residuals`.
      g: the output gradient, an array or `Quantized`.
      amaxes: of all three tensors by name, see `Amaxes.for_scale`; ``output_grad_now`` is the current one.
    """
    pair, dtype, sharding = static.recipe.dlhs, static.in_dtype, _sharding(saved[0])
    if pair is None:
        return unquantized(g.astype(dtype), _dequantized(saved[1], dtype), (-1,), (1,), dtype, sharding)
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
        operands = _dequantized(saved[0], dtype), g.astype(dtype)
    else:
        operands = drhs_operands(static.recipe, *over_tokens(static.recipe, saved[0], g), amaxes)
    if static.sum_over_rows is None:
        return product(*operands)
    return static.sum_over_rows(product, *operands)


def over_tokens(recipe: Recipe, saved_x, g: Any) -> tuple[Any, Any]:
    """Input and output gradient, padded to whole blocks of tokens and rotated if the recipe says so."""
    assert recipe.drhs is not None
    of_scales = recipe.drhs[0].block_size if recipe.drhs[0].in_blocks else 1
    size = math.lcm(of_scales, quantized.HADAMARD if recipe.hadamard else 1)
    if size > 1:  # drhs sums over the tokens, whose number blocks need not divide
        saved_x, g = (quantized.pad_to_blocks(a, -2, size) for a in (_dequantized(saved_x, jnp.float32), g))
    if recipe.hadamard:
        saved_x, g = quantized.rotate(saved_x, -2), quantized.rotate(g, -2)
    return saved_x, g


def drhs_operands(recipe: Recipe, saved_x, g: Any, amaxes) -> tuple[Quantized, Quantized]:
    assert recipe.drhs is not None
    tokens, of_x, of_g = tuple(range(g.ndim - 1)), amaxes["input"], amaxes["output_grad"]
    if recipe.hadamard:  # the histories are of unrotated tensors, whose amax it can raise so far
        of_x, of_g = (None if a is None else a * quantized.HADAMARD**0.5 for a in (of_x, of_g))
    q_x = _requantize(recipe, saved_x, 0, recipe.drhs[0], tokens, of_x)
    if not isinstance(g, Quantized):
        g = quantize(recipe, recipe.drhs[1], g, tokens, of_g)
    if (current := amaxes["output_grad_now"]) is not None:
        # A delayed scale would hide a gradient that is not finite, as in `quantize_forward`. Here the scale
        # becomes infinity or NaN: to replace elements would cost XLA on GPUs another pass over the data.
        g = g._replace(scale=jnp.where(jnp.isfinite(current), g.scale, current))
    return q_x, g


# --- parts --------------------------------------------------------------------------------------------


def quantize(recipe: Recipe, operand: Operand, x: jax.Array, contract, delayed_amax) -> Quantized:
    """Quantizes ``x`` as the operand of a matmul that contracts the axes ``contract``.

    Args:
      delayed_amax: from `delayed.delayed_amax`, a scalar; unused if the operand has a current scale.
    """
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
        q = q._replace(codes=quantized.written_once(q.codes))
    if operand.granularity == "row":
        # Otherwise XLA may compute the scales of the input again in the kernel that multiplies a product by
        # them. Such a kernel reads the input once more, and does not compute the amaxes of its own result.
        q = q._replace(scale=jax.lax.optimization_barrier(q.scale))
    return q


def quantize_forward(recipe: Recipe, tensor: str, x: jax.Array, delayed_amax) -> Quantized:
    """Quantizes the ``input`` or the ``kernel`` for ``fwd``; see `quantize`."""
    assert recipe.fwd is not None
    operand = recipe.fwd[GEMMS["fwd"].index(tensor)]
    if operand.delayed:
        # A delayed scale is finite, so that infinity would saturate, and no gate would reject the step.
        x = jnp.where(jnp.isfinite(x), x, jnp.nan)
    if operand.granularity == "tile" and x.dtype == jnp.bfloat16:
        x = quantized.rounded_in_float32(x)
    if tensor == "kernel":
        x = quantized.row_major(x)
    return quantize(recipe, operand, x, (x.ndim - 1,) if tensor == "input" else (0,), delayed_amax)


def _rotated(x: jax.Array, axis: int) -> jax.Array:
    """Rotates an operand of ``fwd`` along its contracted axis, as QuEST does (arXiv:2502.05003)."""
    size = math.gcd(quantized.LARGE_HADAMARD, x.shape[axis])
    return quantized.rotate(x, axis, size, random_signs=False)


def _trusted(x: jax.Array, q: Quantized, operand: Operand) -> jax.Array:
    return quantized.trusted(x, q, formats.get(operand.format))


def _requantize(recipe: Recipe, saved, index: int, operand: Operand, contract, delayed_amax) -> Quantized:
    """Quantizes a saved operand of ``fwd`` for a backward matmul, which may contract another axis.

    Args:
      saved: from `residuals`; if it is quantized, it is reused where that gives the same.
      index: its place in the pair ``recipe.fwd``: 0 for the input, 1 for the kernel.
    """
    if not isinstance(saved, Quantized):
        return quantize(recipe, operand, saved, contract, delayed_amax)
    assert recipe.fwd is not None
    if _serves_both(recipe.fwd[index], operand):
        return saved
    return quantize(recipe, operand, _dequantized(saved, jnp.float32), contract, delayed_amax)


def _serves_both(of_forward: Operand, operand: Operand) -> bool:
    """Whether an operand quantized for ``fwd`` can be reused in a matmul that contracts another axis."""
    return operand == of_forward and operand.granularity in ("tensor", "unscaled", "tile")


def unquantized(
    a: jax.Array, b: jax.Array, contract_a, contract_b, dtype, out_sharding, precision=None
) -> jax.Array:
    """``a · b`` over the contracted axes in ``dtype``, without quantization."""
    numbers = _numbers(contract_a, contract_b, a)
    return jax.lax.dot_general(
        a, b, numbers, precision=precision, preferred_element_type=dtype, out_sharding=out_sharding
    )


def _gemm(
    a: Quantized, b: Quantized, contract_a, contract_b, pair, dtype, precision, out_sharding,
    summed_over_devices=False,
) -> jax.Array:  # fmt: skip
    """``a · b`` over the contracted axes in ``dtype``, of operands with scales.

    Args:
      pair: how they are quantized.
      summed_over_devices: whether data parallelism adds the results of devices, see above.
    """
    numbers = _numbers(contract_a, contract_b, a.codes)
    if pair[0].in_blocks:
        return blocks.dot_general(a, b, pair, numbers, dtype, out_sharding)
    kind = formats.get(pair[0].format).kind
    exact_scales = all(operand.power_of_two for operand in pair)
    narrow = kind == "float" and dtype == jnp.bfloat16 and (exact_scales or summed_over_devices)
    product_dtype = dtype if narrow else jnp.float32

    def multiply(a: Quantized, b: Quantized, _: jax.Array | None) -> jax.Array:
        if kind == "int":
            from maxlp.precision import integers

            product = integers.dot_general(a.codes, b.codes, pair, numbers, out_sharding)
        else:
            product = jax.lax.dot_general(
                a.codes, b.codes, numbers, precision, product_dtype, out_sharding=out_sharding
            )
        axes_a, axes_b = numbers[0]
        free_a, free_b = a.codes.ndim - len(axes_a), b.codes.ndim - len(axes_b)
        scale_a, scale_b = _free(a.scale, axes_a, 0, free_b), _free(b.scale, axes_b, free_a, 0)
        scale = _like(scale_a, product) * _like(scale_b, product)
        multiply_in = dtype if narrow and exact_scales else jnp.float32
        return (product.astype(multiply_in) * scale.astype(multiply_in)).astype(dtype)

    return Product(multiply, numbers[0], in_blocks=False)(a, b)


def _free(scale: jax.Array, contracted, before: int, after: int) -> jax.Array:
    """An operand's scale, shaped to multiply a product: a scalar, or its free axes at their place there.

    Args:
      before, after: how many axes of the product precede and follow those of this operand.
    """
    if scale.size == 1:
        return scale.reshape(())
    scale = jnp.squeeze(scale, contracted)
    return scale.reshape(*(1,) * before, *scale.shape, *(1,) * after)


def _numbers(contract_a, contract_b, a: jax.Array):
    return ((tuple(axis % a.ndim for axis in contract_a), tuple(contract_b)), ((), ()))


def _dequantized(saved, dtype) -> jax.Array:
    """A residual, dequantized to ``dtype`` if it was quantized."""
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
