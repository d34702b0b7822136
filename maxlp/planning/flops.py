"""The FLOPs of a compiled program's matmuls, read from its HLO text.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs. On TPU matmuls
are convolutions, and those of a collective matmul slide over padding: only products of two entries that
exist are counted. Kernels (attention; cuBLAS on GPU) are opaque to XLA and here: they are counted in calls.
"""

import collections
import math
import re
from collections.abc import Iterator

from maxlp.planning import hlo
from maxlp.planning.hlo import Instruction

_OPERANDS = re.compile(r"%?([\w.-]+)")


def matmul_flops(text: str) -> float:
    """FLOPs of all dots and convolutions of one execution, on one device; an addition counts as one."""
    found = 0.0
    for i, body, times in executed(text):
        if i.opcode in ("dot", "convolution"):
            shapes = {one.name: _dims(one.type) for one in body}
            names = _OPERANDS.findall(i.rest.split("), ")[0])[:2]
            left, right = (shapes[name] for name in names)
            found += times * (_dot if i.opcode == "dot" else _convolution)(i, left, right)
    return found


def kernel_calls(text: str, target: str = "tpu_custom_call") -> dict[str, int]:
    """How often kernels run in one execution, by the name that each was given."""
    calls: collections.Counter[str] = collections.Counter()
    for i, _, times in executed(text):
        if i.opcode == "custom-call" and f'custom_call_target="{target}"' in i.rest:
            calls[i.name.rsplit(".", 1)[0]] += times
    return dict(calls)


def executed(text: str) -> Iterator[tuple[Instruction, list[Instruction], int]]:
    """Each instruction with those beside it, and how often it runs."""
    program, entry = hlo.computations(text)

    def visit(name: str, times: int) -> Iterator[tuple[Instruction, list[Instruction], int]]:
        body = program.get(name, [])
        for i in body:
            yield i, body, times
            inner = times * (hlo.trip_count(i, program) if i.opcode == "while" else 1)
            for called in hlo.called(i):
                yield from visit(called, inner)

    yield from visit(entry, 1)


def _dot(i: Instruction, left: list[int], right: list[int]) -> float:
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
    summed = [int(d) for d in match[1].split(",") if d] if match else []
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
        field = lambda name, default, d=d: fields[name].split("x")[d] if name in fields else default  # noqa: E731
        stride, before = int(field("stride", "1")), int(field("pad", "0_0").split("_")[0])
        apart, wide = int(field("lhs_dilate", "1")), int(field("rhs_dilate", "1"))
        end = (left[of_left.index(str(d))] - 1) * apart
        places = [
            y * stride + x * wide - before
            for y in range(out[of_out.index(str(d))])
            for x in range(right[of_right.index(str(d))])
        ]
        flops *= sum(0 <= place <= end and place % apart == 0 for place in places)
    return flops


def _dims(type_text: str) -> list[int]:
    """Of the first array of an HLO type."""
    match = re.search(r"\b[a-z]\w*\[([\d,]*)\]", type_text)
    return [int(d) for d in match[1].split(",") if d] if match else []
