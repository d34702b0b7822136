"""The passes over the data that quantization adds, from programs compiled for a GPU without having one.

    pip install 'maxlp[aot]'
    python benchmarks/passes.py

Compiles the forward and backward pass of one Llama 8B block for each recipe and classifies the kernels of
the optimized program: which are matmuls, which others read or write a tensor of the size of an activation,
a weight or a gradient, and how many more bytes they move than the bfloat16 program does. For 8 GPUs with
sharded weights (FSDP) it lists the bytes that are gathered and reduced, by dtype. Prints two Markdown
tables. 3 minutes of CPU time.
"""

import argparse
import math
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp import precision
from maxlp.core.gradients import OVERWRITE_WITH_GRADIENT
from maxlp.families.llama import model as llama
from maxlp.parallel import sharding
from maxlp.planning import hlo, topologies
from maxlp.precision import scatter

SIZES = dict(
    vocab_size=256,
    embed_dim=4096,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14336,
    max_seq_len=8192,
    rope_theta=5e5,
    rope_scaling=None,
    norm_eps=1e-5,
    tie_embeddings=True,
    init_std=0.02,
    dtype="bfloat16",
    param_dtype="float32",
    attention="xla",
    scan_layers=False,
    remat="none",
)
ROWS, LENGTH = 2, 4096  # sequences on the one GPU of the first table, and their tokens
LARGE = 2**20  # elements; no weight matrix and no activation has fewer
# Without the recipes that scale blocks, which an H100 emulates.
RECIPES = {
    name: recipe
    for name, recipe in precision.RECIPES.items()
    if name != "simulate" and not recipe.block_size
}
RECIPES["fp8_delayed, cold_start=False"] = precision.make_recipe("fp8_delayed", cold_start=False)


# --- the program --------------------------------------------------------------------------------------


def compiled(
    name: str, gpus: int, rows: int, length: int, chip: str = "h100", scatter_format: str = "none"
) -> jax.stages.Compiled:
    """One block's forward and backward pass.

    Args:
      rows: sequences on each GPU.
      scatter_format: the config's ``precision.scatter``.
    """
    mesh = sharding.make_mesh(fsdp=gpus, devices=topologies.devices(topologies.parse(f"{chip}:1x{gpus}")))
    recipe = RECIPES[name]

    def make():
        model = llama.Llama(llama.LlamaConfig(**SIZES), rngs=nnx.Rngs(0))
        precision.inject(model, recipe)
        if scatter_format != "none":
            scatter.set_format(model, scatter_format)
        return model.layers

    structure = []

    def split():
        graphdef, params, state = nnx.split(make(), nnx.Param, ...)
        structure.append(graphdef)
        return params, state

    abstract = jax.eval_shape(split)

    def one_layer(leaf, place):
        where = NamedSharding(mesh, P(*place.spec[1:]))
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=where)

    state = tuple(
        jax.tree.map(one_layer, nnx.to_pure_dict(part), sharding.param_shardings(part, mesh))
        for part in abstract
    )
    batch = NamedSharding(mesh, sharding.spec("batch"))
    shape = (rows * gpus, length)
    x = jax.ShapeDtypeStruct((*shape, SIZES["embed_dim"]), jnp.bfloat16, sharding=batch)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch)

    def step(params, state, x, g, positions, segments):
        block = nnx.merge(structure[0], params, state)
        _, _, of_backward, of_forward = nnx.split(block, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)
        rope = llama.rope_table(positions, SIZES["head_dim"], SIZES["rope_theta"], None)

        def run(params, of_backward, x):
            block = nnx.merge(structure[0], params, of_forward, of_backward, copy=True)
            y, _ = block(x, rope, positions, segments, None)
            return y, nnx.to_pure_dict(nnx.split(block, nnx.Param, OVERWRITE_WITH_GRADIENT, ...)[3])

        y, pull, new_forward = jax.vjp(run, params, of_backward, x, has_aux=True)
        return y, pull(g), new_forward

    like_params = jax.tree.map(lambda a: a.sharding, state[0])
    places = (batch, (like_params, sharding.replicated(mesh), batch), sharding.replicated(mesh))
    with jax.set_mesh(mesh):
        program = jax.jit(step, out_shardings=places).lower(*state, x, x, ids, ids)
        return program.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


# --- kernels ------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A kernel that the program launches.

    Attributes:
      opcode: of the HLO instruction.
      target: of a custom call; "" for other instructions.
      operands: HLO type of each operand, and the opcode that produced it.
      results: HLO types of the results.
      read: bytes that it reads: of an operand of which it takes only slices, those of the slices.
    """

    opcode: str
    target: str
    operands: list[tuple[str, str]]
    results: list[str]
    read: float

    @property
    def bytes(self) -> float:
        return self.read + sum(map(hlo.num_bytes, self.results))


def kernels(text: str) -> list[Kernel]:
    """The kernels of a program's entry computation; the program of one block has no loop."""
    program, entry = hlo.computations(text)
    made = {i.name: i for i in program[entry]}

    def origin(name: str) -> tuple[str, str]:
        first = made[name]
        i = first
        while i.opcode in ("bitcast", "get-tuple-element", "copy"):
            i = made[re.findall(r"%([\w.-]+)", i.rest)[0]]
        return first.type, "matmul" if "cublas" in i.rest else i.opcode

    found = []
    for i in program[entry]:
        if i.opcode in ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"):
            continue
        operands = i.rest.split("), ")[0]
        names = [name for name in re.findall(r"%([\w.-]+)", operands) if name in made]
        target = re.search(r'custom_call_target="([^"]*)"', i.rest)
        target = target[1] if target else ""
        results = TYPE.findall(i.type)
        if "cublas" in target:
            results = results[:1]  # the second one is workspace
        kinds = [origin(name) for name in names]
        read = sum(hlo.num_bytes(kind) for kind, _ in kinds) - unread(i, program)
        found.append(Kernel(i.opcode, target, kinds, results, read))
    return found


def unread(fusion: hlo.Instruction, program: dict[str, list[hlo.Instruction]]) -> float:
    """Bytes of operands that a fusion does not read, because it takes only slices of them."""
    if fusion.opcode != "fusion":
        return 0.0
    body = program[hlo.called(fusion)[0]]
    total = 0.0
    for operand in (i for i in body if i.opcode == "parameter"):
        users = [i for i in body if re.search(rf"%{re.escape(operand.name)}\b(?![.-])", i.rest)]
        if users and all(i.opcode == "slice" for i in users):
            slices = {(i.type, re.search(r"slice=\{.*?\}", i.rest)[0]): i.type for i in users}
            read = sum(map(hlo.num_bytes, slices.values()))
            total += max(hlo.num_bytes(operand.type) - read, 0.0)
    return total


def large(kind: str) -> bool:
    """Whether an HLO type has an array as large as an activation, a weight or a gradient."""
    return any(
        math.prod(int(n) for n in dims.split(",") if n) >= LARGE
        for dims in re.findall(r"\[([\d,]*)\]", kind)
    )


def narrow(kind: str) -> bool:
    """Whether an HLO type has 8 bits."""
    return kind.startswith(("f8", "s8"))


def kernel_class(kernel: Kernel) -> str:
    """What a kernel does; the first table counts the kernels of each class.

    "matmul", "small" (no large tensor), "reduce" (no large result), "transpose" (of 8-bit tensors),
    "weight" (quantizes one), "alone" (quantizes one tensor and does nothing else), "fused" (also computes
    what it quantizes), "other" (no 8-bit result).
    """
    if "cublas" in kernel.target:
        return "matmul"
    if not any(map(large, [*kernel.results, *(kind for kind, _ in kernel.operands)])):
        return "small"
    if not any(map(large, kernel.results)):
        return "reduce"
    if not any(large(kind) and narrow(kind) for kind in kernel.results):
        return "other"
    sources = [(kind, maker) for kind, maker in kernel.operands if "," in kind.split("]")[0]]
    big = [(kind, maker) for kind, maker in sources if large(kind)]
    if all(narrow(kind) for kind, _ in big):
        return "transpose"
    if all(maker == "parameter" and kind.startswith("f32") for kind, maker in big):
        return "weight"
    alone = len(big) == 1 and all(
        large(kind) or re.match(r"\w+\[[1,]*\]", kind) for kind, _ in kernel.operands
    )
    return "alone" if alone else "fused"


def gigabytes(found: list[Kernel], matmuls: bool) -> float:
    """GB that the matmuls read and write, or with ``matmuls=False`` the other kernels on large tensors."""
    classes = [(kernel, kernel_class(kernel)) for kernel in found]
    return sum(k.bytes for k, kind in classes if kind != "small" and (kind == "matmul") == matmuls) / 1e9


TYPE = re.compile(r"\b[a-z]\w*\[[\d,]*\]")


def matmuls(found: list[Kernel]) -> str:
    """Number of matmuls by the dtypes of their operands: "2 f8e4m3fn·f8e5m2"."""
    types = Counter(
        "·".join(kind.split("[")[0] for kind, _ in k.operands[:2])
        for k in found
        if kernel_class(k) == "matmul"
    )
    return ", ".join(f"{n} {kind}" for kind, n in sorted(types.items(), reverse=True))


def collective_sizes(text: str) -> dict[str, str]:
    """MiB of the results of each kind of collective, by dtype: {"all-gather": "104.0 bf16"}."""
    sizes: dict[str, Counter] = {
        "all-gather": Counter(),
        "reduce-scatter": Counter(),
        "all-reduce": Counter(),
        "all-to-all": Counter(),
    }
    for body in hlo.computations(text)[0].values():
        for i in body:
            kind = i.opcode.removesuffix("-start")
            if kind in sizes:
                types = TYPE.findall(i.type)
                if i.opcode.endswith("-start") and kind != "all-reduce":
                    types = types[len(types) // 2 :]  # the first half are the operands
                for one in types:
                    sizes[kind][one.split("[")[0]] += hlo.num_bytes(one)
    return {
        kind: ", ".join(f"{size / 2**20:.1f} {dtype}" for dtype, size in counts.items() if size >= 2**20)
        or "–"
        for kind, counts in sizes.items()
    }


# --- tables -------------------------------------------------------------------------------------------


COLUMNS = (
    "recipe", "matmuls", "reductions", "weights quantized", "quantized in the kernel that makes the tensor",
    "quantized alone", "8-bit tensors transposed", "kernels", "GB outside matmuls", "beyond bf16",
    "GB of matmuls", "MiB of temporaries",
)  # fmt: skip


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--recipes", default=";".join(RECIPES), help="separated by ;")
    parser.add_argument("--chip", default="h100", choices=topologies.GPUS)
    parser.add_argument("--scatter", default="none", help="precision.scatter with several GPUs")
    parser.add_argument("--dump", default="", help="folder to write the compiled programs to")
    args = parser.parse_args()
    names = ["bf16", *(name for name in args.recipes.split(";") if name != "bf16")]
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"--recipes={unknown[0]} is unknown; the names: {'; '.join(RECIPES)}")
    print(f"jax {jax.__version__}, {args.chip}, a Llama 8B block on {ROWS} × {LENGTH} tokens\n")
    print("| " + " | ".join(COLUMNS) + " |\n|---|---|" + "---:|" * (len(COLUMNS) - 2))
    if args.dump:
        Path(args.dump).mkdir(parents=True, exist_ok=True)
    base = None
    for name in names:
        program = compiled(name, 1, ROWS, LENGTH, args.chip)
        text = program.as_text()
        if args.dump:
            Path(args.dump, f"{name}.txt").write_text(text, encoding="utf-8")
        found = kernels(text)
        count = Counter(map(kernel_class, found))
        outside, of_matmuls = gigabytes(found, matmuls=False), gigabytes(found, matmuls=True)
        base = base or outside
        passes = sum(n for kind, n in count.items() if kind not in ("matmul", "small"))
        numbers = [*(count[kind] for kind in ("reduce", "weight", "fused", "alone", "transpose")), passes]
        temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
        sizes = f"{outside:.2f} | {outside - base:+.2f} | {of_matmuls:.2f} | {temporaries:.0f}"
        print(f"| {name} | {matmuls(found)} | {' | '.join(map(str, numbers))} | {sizes} |", flush=True)
    print("\nMiB that 8 GPUs with sharded weights (fsdp=8) exchange for one block, forward and backward:\n")
    print("| recipe | gathered | reduced and scattered | reduced | all to all |\n|---|---|---|---|---|")
    for name in names:
        program = compiled(name, 8, 1, LENGTH, args.chip, args.scatter)
        print(f"| {name} | {' | '.join(collective_sizes(program.as_text()).values())} |", flush=True)


if __name__ == "__main__":
    main()
