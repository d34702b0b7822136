"""Counts the FLOPs of a compiled program's matmuls from its HLO text.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs. The TPU compiler
writes matmuls as convolutions, and those of a collective matmul slide over padding: only products of
entries that exist are counted. Kernels (attention; cuBLAS on GPU) are opaque; their calls are counted.
"""

import collections
import math
import re
from collections.abc import Iterator

from maxlp.planning import hlo
from maxlp.planning.hlo import Instruction

_OPERANDS = re.compile(r"%?([\w.-]+)")


def matmul_flops(text: str) -> float:
    """FLOPs of all dots and convolutions of one execution on one device; a multiply-add counts as two."""
    total = 0.0
    for i, body, times in executed(text):
        if i.opcode in ("dot", "convolution"):
            shapes = {one.name: _dims(one.type) for one in body}
            names = _OPERANDS.findall(i.rest.split("), ")[0])[:2]
            left, right = (shapes[name] for name in names)
            flops = _dot if i.opcode == "dot" else _convolution
            total += times * flops(i, left, right)
    return total


def kernel_calls(text: str) -> dict[str, int]:
    """The number of calls of each Pallas kernel in one execution of a TPU program, by the kernel's name."""
    calls: collections.Counter[str] = collections.Counter()
    for i, _, times in executed(text):
        if i.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in i.rest:
            calls[i.name.rsplit(".", 1)[0]] += times
    return dict(calls)


def executed(text: str) -> Iterator[tuple[Instruction, list[Instruction], int]]:
    """Each instruction, all instructions of its computation, and how often it runs."""
    program, entry = hlo.computations(text)

    def visit(name: str, times: int) -> Iterator[tuple[Instruction, list[Instruction], int]]:
        body = program.get(name, [])
        for i in body:
            yield i, body, times
            inner = times * hlo.trip_count(i, program) if i.opcode == "while" else times
            for called in hlo.called(i):
                yield from visit(called, inner)

    yield from visit(entry, 1)


def _dot(i: Instruction, left: list[int], right: list[int]) -> float:
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
    summed = hlo.ints(match[1]) if match else []
    return 2.0 * math.prod(_dims(i.type)) * math.prod(left[d] for d in summed)


def _convolution(i: Instruction, left: list[int], right: list[int]) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest)
    assert labels is not None, i.rest
    of_left, of_right, of_out = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", i.rest)
    fields = dict(one.split("=") for one in window[1].split()) if window else {}
    out = _dims(i.type)
    flops = 2.0 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    for d in range(len(of_out) - 2):
        name = str(d)
        flops *= _num_products(
            left[of_left.index(name)], right[of_right.index(name)], out[of_out.index(name)], fields, d
        )
    return flops


def _num_products(left: int, right: int, out: int, fields: dict[str, str], d: int) -> int:
    """The number of pairs of entries that a convolution multiplies along its spatial dim ``d``.

    Args:
      left, right, out: sizes of the input, the kernel and the output along that dim.
      fields: the window's attributes.
    """

    def field(name: str, default: str) -> str:
        return fields[name].split("x")[d] if name in fields else default

    stride, padding = int(field("stride", "1")), int(field("pad", "0_0").split("_")[0])
    left_dilation, right_dilation = int(field("lhs_dilate", "1")), int(field("rhs_dilate", "1"))
    last = (left - 1) * left_dilation
    positions = (y * stride + x * right_dilation - padding for y in range(out) for x in range(right))
    return sum(0 <= position <= last and position % left_dilation == 0 for position in positions)


def _dims(type_text: str) -> list[int]:
    """The dims of the first array in an HLO type."""
    match = hlo.SHAPE.search(type_text)
    return hlo.ints(match[2]) if match else []
