"""Reads the instructions and the collectives of a compiled program from its HLO text.

The body of a loop is in the text once and runs many times. Its trip count is in the text too: as
``known_trip_count`` (GPU, CPU), or as the constant that the loop's condition compares with (TPU).

A collective is overlapped if a matmul or a kernel runs while it does. There are three forms:

* a ``-start`` and a ``-done`` with other work between them;
* on TPUs with SparseCores, a ``call-start`` and a ``call-done`` of a computation with the collective;
* on TPUs without, a fusion that starts it, fusions that execute steps of it along with their own work, and
  one that ends it; each contains the same collective.
"""

import dataclasses
import itertools
import math
import re

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
)
XLA_CALLS = {  # custom calls that are not kernels
    *("AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "ConcatBitcast", "Sharding"),
    *("PrepareAsyncCallStart", "PrepareAsyncCallDone"),
}

# The line that begins a computation, as in "ENTRY %main.4 (x: f32[8]) -> f32[8] {".
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+)[ (](?!= ).*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation|called_computations)=(?:\{)?%?([\w.-]+)"
)
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a train step.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes over which it runs.
      participants: the number of devices in a group.
      bytes: the size of its result on one device (for a reduce-scatter, of its operand), per execution.
      times: executions per step.
      overlapped: whether a matmul or a kernel runs between its start and its end.
      rare: whether it is in a branch that does not run in every step, such as a refresh of an optimizer's
        bases. Of a condition's branches, the one that sends least is taken to run.
    """

    kind: str
    axes: tuple[str, ...]
    participants: int
    bytes: int
    times: int
    overlapped: bool
    rare: bool = False

    @property
    def sent(self) -> float:
        """Bytes that one device sends per step with ring algorithms."""
        n = self.participants
        factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.times * self.bytes * factor.get(self.kind, (n - 1) / n)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of the text: ``%name = type opcode(rest``."""

    name: str
    type: str
    opcode: str
    rest: str


def collectives(text: str, mesh: dict[str, int]) -> list[Collective]:
    """All collectives of a program.

    Args:
      text: the optimized HLO of a program for ``mesh``, from ``compiled.as_text()``.
      mesh: axis sizes in the order of the mesh.

    Raises:
      ValueError: device groups in an unknown form.
    """
    program, entry = computations(text)
    works = _computations_with_matmuls(program)
    fused = _fused_with_work(program, works)

    def visit(name: str, times: int, overlapped: bool) -> list[Collective]:
        found: list[Collective] = []
        body = program.get(name, [])
        for index, i in enumerate(body):
            kind = i.opcode.removesuffix("-start")
            if kind in KINDS:
                start, hidden = fused.get(channel(i), (name, False))
                if start != name:
                    continue
                hidden |= overlapped or overlaps_work(body, index, works)
                if (one := _collective(i, kind, name, body, mesh, times, hidden)) is not None:
                    found.append(one)
            else:
                hidden = overlapped or overlaps_work(body, index, works)
                inner = times * trip_count(i, program) if i.opcode == "while" else times
                parts = [visit(computation, inner, hidden) for computation in called(i)]
                found += _of_condition(parts) if i.opcode == "conditional" else itertools.chain(*parts)
        return found

    return visit(entry, 1, False)


def _of_condition(branches: list[list[Collective]]) -> list[Collective]:
    """All collectives of a condition; those of branches that send more than another one are rare."""
    least, *others = sorted(branches, key=lambda found: sum(one.sent for one in found if not one.rare))
    return least + [dataclasses.replace(one, rare=True) for found in others for one in found]


def _computations_with_matmuls(program: dict[str, list[Instruction]]) -> set[str]:
    """Names of the computations that run a matmul or a kernel, themselves or in one that they call."""
    found: set[str] = set()
    for name, body in program.items():  # a computation comes after those that it calls
        if any(_is_matmul(i) or any(c in found for c in called(i)) for i in body):
            found.add(name)
    return found


def _is_matmul(i: Instruction) -> bool:
    if i.opcode != "custom-call":
        return i.opcode in ("convolution", "dot")
    target = re.search(r'custom_call_target="([^"]+)"', i.rest)
    return target is not None and is_kernel(target[1])


def is_kernel(target: str) -> bool:
    """Whether custom calls of this target are kernels, not a part of XLA's own programs."""
    return target not in XLA_CALLS and not target.startswith("Assume")


def _fused_with_work(program: dict[str, list[Instruction]], works: set[str]) -> dict[str, tuple[str, bool]]:
    """For each collective that runs in several fusions, by its channel: the computation that starts it, and
    whether any of them contains a matmul."""
    starts: dict[str, str] = {}
    parts: dict[str, set[str]] = {}
    for name, body in program.items():
        for i in body:
            if i.opcode in KINDS:
                parts.setdefault(channel(i), set()).add(name)
                if any("AsyncCollectiveStart" in j.rest for j in body):
                    starts[channel(i)] = name
    return {c: (name, bool(parts[c] & works)) for c, name in starts.items()}


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation by its name, and the name of the entry computation."""
    program: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = program.setdefault(header[2], [])
            if header[1]:
                entry = header[2]
        elif line == "}":
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(*match.groups()))
    return program, entry


def called(i: Instruction) -> list[str]:
    """Names of the computations that an instruction runs; for a loop, its body."""
    if i.opcode == "while":
        body = re.search(r"body=%?([\w.-]+)", i.rest)
        assert body is not None, i.rest
        return [body[1]]
    if i.opcode.removesuffix("-start") not in ("fusion", "call", "async", "custom-call", "conditional"):
        return []
    branches = re.search(r"branch_computations=\{(.*?)\}", i.rest)
    return re.findall(r"[\w.-]+", branches[1]) if branches else _CALLED.findall(i.rest)


def channel(i: Instruction) -> str:
    """The channel of a collective; its own name if it has none."""
    match = re.search(r"channel_id=(\d+)", i.rest)
    return match[1] if match else i.name


def overlaps_work(body: list[Instruction], index: int, works: set[str]) -> bool:
    """Whether a matmul or a kernel runs between the ``-start`` at this index and its ``-done``.

    An ``-update`` between the two stands for the start.

    Args:
      works: the computations that contain one.
    """
    start = body[index]
    if not start.opcode.endswith("-start") or '"is_sync":true' in start.rest:
        return False
    operand = _operand(start)
    for later in body[index + 1 :]:
        if later.opcode.endswith(("-done", "-update")) and operand.search(later.rest):
            if later.opcode.endswith("-done"):
                return False
            operand = _operand(later)
        if _is_matmul(later) or any(name in works for name in called(later)):
            return True
    return True  # it ends in the next iteration of the loop


def _operand(i: Instruction) -> re.Pattern[str]:
    """What the rest of an instruction contains that reads this one."""
    return re.compile(rf"%?{re.escape(i.name)}[,)]")


def _collective(
    i: Instruction,
    kind: str,
    computation: str,
    body: list[Instruction],
    mesh: dict[str, int],
    times: int,
    overlapped: bool,
) -> Collective | None:
    """The collective of an instruction; None if its groups have one device.

    Args:
      computation: name of the computation that the instruction is in.
      body: all instructions of that computation.
    """
    axes, n = device_groups(i, mesh)
    if n < 2:
        return None
    operand = _operand(i)
    done = next((j for j in body if j.opcode == f"{kind}-done" and operand.search(j.rest)), None)
    if done is not None:
        size = num_bytes(done.type)
    else:  # the type of a start includes its operands
        result = {"all-gather": n / (n + 1), "reduce-scatter": 1 / (n + 1), "collective-permute": 0.5}
        size = num_bytes(i.type) * (result.get(kind, 1.0) if i.opcode.endswith("-start") else 1.0)
    if kind == "all-reduce" and "all-reduce-scatter" in computation:  # TPU's reduce-scatter
        kind = "reduce-scatter"
    elif kind == "reduce-scatter":
        size *= n
    return Collective(kind, axes, n, int(size), times, overlapped)


def num_bytes(type_text: str) -> float:
    """Bytes of all arrays in an HLO type."""
    total = 0.0
    for dtype, dims in SHAPE.findall(type_text):
        match = _BITS.search(dtype)
        bits = 8 if match is None else int(match[0])  # pred
        total += bits / 8 * math.prod(ints(dims))
    return total


def trip_count(loop: Instruction, program: dict[str, list[Instruction]]) -> int:
    """How often the body of a loop runs; 1 if the text does not contain the number."""
    if match := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(match[1])
    names = dict(re.findall(r"(condition|body)=%?([\w.-]+)", loop.rest))
    condition = {i.name: i for i in program.get(names["condition"], [])}
    test = next((i for i in condition.values() if i.opcode == "compare" and "direction=LT" in i.rest), None)
    if test is None:
        return 1
    left, right = (condition.get(name) for name in re.findall(r"%([\w.-]+)", test.rest)[:2])
    limit = _constant(right)
    index = re.search(r"index=(\d+)", left.rest) if left is not None else None
    if limit is None or index is None:
        return 1
    return math.ceil(limit / _increment(program.get(names["body"], []), int(index[1])))


def _constant(i: Instruction | None) -> int | None:
    """The value of a constant that is a natural number; None for any other instruction."""
    match = re.match(r"(\d+)\)", i.rest) if i is not None and i.opcode == "constant" else None
    return int(match[1]) if match else None


def _increment(body: list[Instruction], index: int) -> int:
    """What each iteration adds to the counter at ``index`` of the loop's tuple."""
    by_name = {i.name: i for i in body}
    operands = re.findall(r"%([\w.-]+)", body[-1].rest.split("), ")[0]) if body else []
    add = by_name.get(operands[index]) if index < len(operands) else None
    if add is None or add.opcode != "add":
        return 1
    steps = [_constant(by_name.get(name)) for name in re.findall(r"%([\w.-]+)", add.rest)[:2]]
    return next((step for step in steps if step), 1)


# --- groups of devices ----------------------------------------------------------------------------------


def device_groups(i: Instruction, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which the devices of a group differ, and the number of devices in a group.

    A program numbers its devices in the order of the mesh. The pairs of a permutation can form many rings;
    its group is taken to be a whole axis.
    """
    sizes = tuple(mesh.values())
    if match := re.search(r"source_target_pairs=\{(.*?)\}\}", i.rest):
        members = np.array([[int(n) for n in re.findall(r"\d+", pair)] for pair in match[1].split("},")])
    else:
        members = _members(i.rest, math.prod(sizes))
    coordinates = np.array(np.unravel_index(members, sizes))  # (axes, groups, members)
    moved = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    axes = tuple(name for name, m in zip(mesh, moved, strict=True) if m)
    return axes, math.prod(mesh[a] for a in axes) if match else members.shape[1]


def _members(rest: str, num_devices: int) -> np.ndarray:
    """The devices of each group, (groups, members)."""
    _, _, text = rest.partition("replica_groups=")
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(iota[2], iota[3]).reshape(ints(iota[1]))
    if named := re.match(r"mesh\[(.*?)\]([^{]*)\{([^}]*)\}", text):
        return _named(*named.groups())
    if not text or text.startswith("{}"):
        return np.arange(num_devices)[None]
    if listed := re.match(r"\{(\{[\d,]+\},?)+\}", text):
        return np.array([ints(group) for group in re.findall(r"\{([\d,]+)\}", listed[0])])
    raise ValueError(f"replica_groups={text[:80]} is in an unknown form; plan with --estimate_only")


def _named(axes: str, order: str, chosen: str) -> np.ndarray:
    """``mesh['x'=8,'y'=2] {'y'}``: groups along named axes of the compiler's own mesh."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    devices = np.arange(math.prod(sizes.values()))
    if iota := re.search(r"\[([\d,]+)\]T\(([\d,]+)\)", order):
        devices = _iota(iota[1], iota[2]).ravel()
    elif listed := re.search(r"device_ids=\(?\[?([\d,]+)", order):
        devices = np.array(ints(listed[1]))
    parts: list[int] = []  # dims of the grid; an axis is split where the group spans a part of it
    picked: list[int] = []  # the dims that a group spans
    wanted = {m[0]: (m[1], m[2]) for m in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)}
    for name, size in sizes.items():
        if name in wanted and wanted[name][0]:
            before, taken = (int(n) for n in wanted[name])
            picked.append(len(parts) + 1)
            parts += [before, taken, size // before // taken]
        else:
            if name in wanted:
                picked.append(len(parts))
            parts.append(size)
    grid = np.moveaxis(devices.reshape(parts), picked, range(len(parts) - len(picked), len(parts)))
    return grid.reshape(-1, math.prod(parts[p] for p in picked))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    grid = np.arange(math.prod(ints(dims))).reshape(ints(dims))
    return grid.transpose(ints(permutation)) if permutation else grid


def ints(text: str) -> list[int]:
    """The numbers of a list such as ``8,16``, which may be empty."""
    return [int(n) for n in text.split(",") if n]
