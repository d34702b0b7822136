"""The quantization error of a recipe's formats on Gaussian numbers, independent of model and data."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from maxlp.numerics.quantized import dequantize
from maxlp.precision import dot
from maxlp.precision.recipes import Operand, Recipe
from maxlp.precision.switches import switchable

OPERANDS = 6  # of a layer: two in each of its three matmuls


def gaussian_mse(recipe: Recipe) -> float:
    """The mean over a layer's operands of ``E (x - q(x))² / E x²``, for Gaussian x.

    An operand in high precision counts as 0, a delayed scale as a current one.
    """
    return sum(_operand_mse(o) for o in switchable(recipe).values()) / OPERANDS


@functools.cache
def _operand_mse(operand: Operand) -> float:
    x = jax.random.normal(jax.random.key(0), (1024, 1024))
    q = dot.quantize(Recipe("bf16"), dataclasses.replace(operand, delayed=False), x, (1,), None)
    return float(jnp.sum(jnp.square(dequantize(q, jnp.float32) - x)) / jnp.sum(jnp.square(x)))
