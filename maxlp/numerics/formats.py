"""Number formats by name.

Besides those of the table, matmuls take simulated formats of X exponent and Y mantissa bits, whose values
are stored and multiplied in a wider dtype: ``eXmY`` follows IEEE (the top exponent is for infinity and
NaN), ``eXmYfn`` has no infinity and a single NaN, as OCP's E4M3.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

GRANULARITIES = ("unscaled", "tensor", "row", "block", "tile")
BLOCK_SCALES = ("up", "floor", "float32", "e4m3")  # see `scales.block_scales_for`
MX_BLOCK = 32  # elements that share a scale in the OCP microscaling formats


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
      kind: ``float``, ``int``, ``dynamic`` (a table of values), ``companded`` (equal steps of a function
        of the value) or ``simulated``; the operands of a matmul must be of one kind.
      exponent_bits: 0 unless it is a (simulated) float.
      mantissa_bits: stored ones, without the implicit leading bit; of other kinds, all bits but the sign.
      max: the largest finite magnitude.
      dtype: dtype that holds the values; of int4 before two of them are packed into a byte.
      uses: ``states`` of optimizers (`blockwise`), ``matmuls`` (`quantized`).
      stochastic: whether all optimizer states are rounded stochastically, because their change in a step
        is often less than half the distance between two values; second moments in floats always are.
      odd: only odd integers are values: a mid-rise grid, which has no zero.
      clip: the multiple of the root mean square at which clipping Gaussian data has the least squared
        error on this grid; 0 if unknown.
    """

    name: str
    kind: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    dtype: Any
    uses: tuple[str, ...] = ("matmuls",)
    stochastic: bool = False
    odd: bool = False
    clip: float = 0.0

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def needs_scale(self) -> bool:
        """False if the exponent has the 8 bits of float32's."""
        return self.exponent_bits < 8


_STATES, _BOTH = ("states",), ("states", "matmuls")
FORMATS = {
    f.name: f
    for f in (
        Format("float8_e4m3fn", "float", 4, 3, 448.0, jnp.float8_e4m3fn, _BOTH),  # steps of 6–12 %
        Format("float8_e5m2", "float", 5, 2, 57344.0, jnp.float8_e5m2, _BOTH, stochastic=True),
        Format("float16", "float", 5, 10, 65504.0, jnp.float16, _STATES),
        Format("bfloat16", "float", 8, 7, 2.0**128 - 2**120, jnp.bfloat16, _STATES, stochastic=True),
        # 7 decades: the top one in steps of 1.4 %, each lower one twice as coarse
        Format("dynamic8", "dynamic", 0, 7, 1.0, jnp.uint8, _STATES),
        # 2x / (1 + |x|) of signed numbers, √x of others, in equal steps: 0.4 to 1.6 %, 0.8 % of the largest
        Format("companded8", "companded", 0, 7, 1.0, jnp.uint8, _STATES),
        Format("int8", "int", 0, 7, 127.0, jnp.int8, _BOTH),  # symmetric
        Format("int4", "int", 0, 3, 7.0, jnp.int8, _STATES),
        # OCP's 4-bit float has neither infinity nor NaN. Its values are kept in bfloat16.
        Format("float4_e2m1fn", "simulated", 2, 1, 6.0, jnp.bfloat16),
        # QuEST's grids (arXiv:2502.05003) of 4, 8 and 16 values, multiplied as int8
        Format("midrise2", "int", 0, 1, 3.0, jnp.int8, odd=True, clip=1.494),
        Format("midrise3", "int", 0, 2, 7.0, jnp.int8, odd=True, clip=2.051),
        Format("midrise4", "int", 0, 3, 15.0, jnp.int8, odd=True, clip=2.514),
    )
}
STATES = tuple(f.name for f in FORMATS.values() if "states" in f.uses)
MATMULS = tuple(f.name for f in FORMATS.values() if "matmuls" in f.uses)
UNKNOWN = (
    f"is unknown; one of {', '.join(MATMULS)}, or eXmY or eXmYfn with 2 to 8 exponent and 0 to 23 mantissa "
    "bits for a simulated format"
)


@functools.cache
def get(name: str) -> Format:
    """The format of a matmul's operand: one of `MATMULS`, or a simulated one.

    Raises:
      ValueError: an unknown name, or bits that do not fit a float32.
    """
    if name in MATMULS:
        return FORMATS[name]
    match = re.fullmatch(r"e(\d+)m(\d+)(fn)?", name)
    if match is None:
        raise ValueError(f"format={name!r} {UNKNOWN}")
    e, m, fn = int(match[1]), int(match[2]), match[3] is not None
    # An fn format also has numbers in the highest binade: its NaN takes a mantissa bit, and e = 8 would go
    # beyond float32.
    most_e, least_m = (7, 1) if fn else (8, 0)
    if not (2 <= e <= most_e and least_m <= m <= 23):
        raise ValueError(f"format={name!r} {UNKNOWN}")
    bias = 2 ** (e - 1) - 1
    largest = (2 - 2.0 ** (1 - m)) * 2.0 ** (bias + 1) if fn else (2 - 2.0**-m) * 2.0**bias
    return Format(name, "simulated", e, m, largest, jnp.bfloat16 if m <= 7 else jnp.float32)


class Quantized(NamedTuple):
    """An array as ``codes * scale``, times the tensor's own scale if there is one (a scalar).

    Codes have the format's dtype; of states in 4 bits, two neighbours of the last axis are in a byte. The
    scale is float32 and has size 1 along axes that share it, or ⌈n / block⌉ along those of blocks.
    """

    codes: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None = None

    @property
    def ndim(self) -> int:
        return self.codes.ndim
