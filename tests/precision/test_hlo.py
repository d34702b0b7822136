"""The programs that compilers get and produce, without a GPU or a TPU.

The first half reads StableHLO. The second half compiles ahead of time for H100 and TPUs, which needs only
their compilers (extra ``aot``; no driver, no CUDA library).
"""

import functools
import importlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import passes
from maxlp.parallel import sharding
from maxlp.planning import topologies
from maxlp.planning.compiled import compile_step
from maxlp.precision import make_recipe
from maxlp.run.experiment import resolve_settings
from maxlp.run.settings import read
from tests.fixtures import LLAMA, Trainer, batch, exchanged_bytes, precision_config
from tests.precision.fixtures import Layer

E4, E5, BF16, I8 = "f8E4M3FN", "f8E5M2", "bf16", "i8"
PLAIN = (BF16, BF16, "bf16")
MATMULS = {  # operand and result types of the matmul, for fwd, dlhs and drhs
    "bf16": (PLAIN, PLAIN, PLAIN),
    "fp8_delayed": ((E4, E4, "bf16"), (E5, E4, "bf16"), (E4, E5, "bf16")),
    "fp8_current": ((E4, E4, "bf16"), (E5, E4, "bf16"), (E4, E5, "bf16")),
    "fp8_rowwise": ((E4, E4, "bf16"), (E4, E4, "bf16"), (E4, E4, "bf16")),
    "fp8_rowwise_with_gw_hp": ((E4, E4, "bf16"), (E4, E4, "bf16"), PLAIN),
    "fp8_switchback": ((E4, E4, "bf16"), (E5, E4, "bf16"), PLAIN),
    "int8_switchback": ((I8, I8, "i32"), (I8, I8, "i32"), PLAIN),
    "int8_switchback_m": ((I8, I8, "i32"), (I8, I8, "i32"), PLAIN),
    "int8_switchback_q": ((I8, I8, "i32"), (I8, I8, "i32"), PLAIN),
    "int8_all": ((I8, I8, "i32"), (I8, I8, "i32"), (I8, I8, "i32")),
}
HALF = [name for name in MATMULS if MATMULS[name][2] == PLAIN and name != "bf16"]


def layer(name):
    """Forward and backward of one matmul with a float32 kernel, as a function, and its abstract state."""
    made = Layer(make_recipe(name, **(dict(history=4) if name == "fp8_delayed" else {})))
    return made.step, jax.eval_shape(lambda: made.state)


def arguments(shardings=(None, None, None), K=512, N=256, length=128):
    shapes = ((8, length, K), jnp.bfloat16), ((K, N), jnp.float32), ((8, length, N), jnp.bfloat16)
    return [jax.ShapeDtypeStruct(*s, sharding=h) for s, h in zip(shapes, shardings, strict=True)]


@functools.cache
def traced(name, length):
    both, state = layer(name)
    return jax.jit(both).trace(state, *arguments(length=length))


def lowered(name, platform, length=128):
    return traced(name, length).lower(lowering_platforms=(platform,)).as_text()


def unordered(a, b, out):
    return (*sorted((a, b)), out)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", MATMULS)
def test_stablehlo_multiplies_in_the_format(name, platform):
    pattern = (
        r"dot_general.*precision = \[(\w+), \w+\].*: "
        r"\(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\) -> tensor<[\dx]+x(\w+)>"
    )
    found = re.findall(pattern, lowered(name, platform))
    assert Counter(unordered(*types) for _, *types in found) == Counter(
        unordered(*types) for types in MATMULS[name]
    )
    if name.startswith("fp8"):  # fast accumulation forward, precise backward
        fp8 = [precision for precision, a, *_ in found if a != BF16]
        assert fp8 == ["DEFAULT"] + ["HIGHEST"] * (len(fp8) - 1)


@pytest.mark.parametrize("length", [128, 20])
def test_stablehlo_of_mxfp8_is_the_block_scaled_matmul_on_cuda_and_bf16_elsewhere(length):
    cuda, tpu = lowered("mxfp8", "cuda", length), lowered("mxfp8", "tpu", length)
    assert len(re.findall(r"custom_call @__op\$block_scaled_dot", cuda)) == 3
    assert "block_scaled" not in tpu and len(re.findall("dot_general", tpu)) == 3


# --- ahead of time ------------------------------------------------------------------------------------


EIGHT_LAYERS = {
    "data.source": "text:unused",
    "data.tokenizer": "bytes",
    "model.num_layers": 8,
    "model.vocab_size": 1024,
    "data.batch_size": 1,
    "data.seq_len": 4096,
    "precision.first_blocks": 0,
    "precision.last_blocks": 0,
}
h100, tpu = pytest.mark.aot("jax_cuda13_plugin"), pytest.mark.aot("libtpu")


@functools.cache
def compiled(name, where="h100:1x1", **shape):
    """Optimized HLO for all devices of a topology: tokens and the kernel's rows are split (FSDP)."""
    topology = topologies.parse(where)
    mesh = Mesh(topologies.devices(topology), ("fsdp",), axis_types=(AxisType.Auto,))
    both, state = layer(name)
    split, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), state)
    outputs = (split, split, split, jax.tree.map(lambda _: whole, state))
    options = {"xla_gpu_enable_triton_gemm": False} if topology.chip.platform == "cuda" else {}
    with jax.set_mesh(mesh):
        inputs = arguments((split, split, split), **shape)
        program = jax.jit(both, out_shardings=outputs).lower(state, *inputs)
        return program.compile(compiler_options=options).as_text()


def calls(hlo):
    return Counter(re.findall(r'custom_call_target="(__cublas[^"]*)"', hlo))


@h100
@pytest.mark.parametrize("name", [n for n in MATMULS if n.startswith("fp8")])
def test_h100_multiplies_fp8_in_cublaslt(name):
    fp8 = 2 if name in HALF else 3
    expected = {"__cublas$lt$matmul$f8": fp8} | ({"__cublas$lt$matmul": 3 - fp8} if fp8 < 3 else {})
    assert calls(compiled(name)) == expected


@h100
@pytest.mark.parametrize("name", ["int8_switchback", "int8_all"])
def test_h100_multiplies_int8_in_cublaslt(name):
    hlo = compiled(name)
    assert calls(hlo) == {"__cublas$lt$matmul": 3}
    operands = re.findall(r"= \(?(\w+)\[.*custom-call\(.*__cublas\$lt\$matmul", hlo)
    assert Counter(operands)["s32"] == (3 if name == "int8_all" else 2)


@h100
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current"])
def test_h100_applies_power_of_two_scales_inside_the_matmul(name):
    """Output and input gradient leave the matmul in bfloat16 and scaled, without a pass after it."""
    results = re.findall(
        r"= \(?(\w+)\[[\d,]*\][^=]*custom-call\(.*__cublas\$lt\$matmul\$f8", compiled(name)
    )
    assert results == ["bf16"] * 3
    behind = re.findall(r"(bf16|f32)\[(?:1024|8,128),(?:512|256)\]\S* fusion\(", compiled(name))
    assert not behind


@h100
def test_b200_transposes_the_4_bits_of_a_kernel_of_nvfp4():
    """It is quantized as it lies, not straight into the other layout, which takes several passes."""
    assert re.search(r"= f4e2m1fn\[256,512\]\S* fusion\(", compiled("nvfp4", "b200:1x1"))


@h100
def test_b200_quantizes_a_large_kernel_of_nvfp4_from_float32():
    """No kernel writes it in bfloat16 first, to be read twice: for its amaxes and for its codes."""
    hlo = compiled("nvfp4", "b200:1x1", K=4096, N=14336, length=1024)
    assert "f4e2m1fn[14336,4096]" in hlo
    assert not re.search(r"= bf16\[4096,14336\]\S* fusion\(", hlo)


GATHERED = {"bf16": "bf16", "fp8_current": "f8e4m3fn", "fp8_delayed": "f8e4m3fn", "int8_switchback": "s8"}


@pytest.mark.parametrize(
    "name, where",
    [pytest.param(name, "h100:1x8", marks=h100) for name in GATHERED]
    + [pytest.param("int8_switchback", "v5e:2x4", marks=tpu)],
)
def test_fsdp_gathers_weights_in_the_format_and_reduces_their_gradient_in_16_bits(name, where):
    lines = compiled(name, where).splitlines()

    def types(op):
        return {
            dtype
            for line in lines
            if re.search(rf" {op}(-start)?\(", line)
            for dtype in re.findall(r"(\w+)\[\d+,\d+\]", line.split(f" {op}")[0])
        }

    assert types("all-gather") == {GATHERED[name]}
    assert types("reduce-scatter") | types("all-reduce") == {"bf16"}


@h100
@pytest.mark.parametrize("name", ["bf16", "fp8_delayed"])
def test_a_block_on_gpus_scatters_its_gradients_in_8_bits(name):
    program = passes.compiled(name, 8, 1, 1024, scatter_format="int8")
    sizes = passes.collective_sizes(program.as_text())
    assert sizes["reduce-scatter"] == sizes["all-reduce"] == "–"
    # 8 pieces of 26 MiB, and a float32 scale for each 256 values
    assert sizes["all-to-all"] == "3.2 f32, 208.0 s8"


@tpu
def test_tpus_scatter_gradients_in_8_bits(tmp_path):
    values = {"model.num_layers": 2, "precision.scatter": "int8", "data.batch_size": 8}
    values |= {"data.source": "text:unused", "data.tokenizer": "bytes", "mesh.fsdp": -1}
    config = importlib.import_module("configs.llama.debug").get_config()
    config.update_from_flattened_dict(values)
    run = resolve_settings(read(config), topologies.devices(topologies.parse("v5e:2x4")))
    compile_step(run, str(tmp_path / "program.txt"))
    sent = exchanged_bytes((tmp_path / "program.txt").read_text())
    kernels = sum(p.size for p in jax.tree.leaves(run.settings.params["layers"]) if p.ndim == 3)
    assert sent["all-to-all", "s8"] == kernels


# On TPUs a matmul is a convolution. Types prove that its operands are not widened before it; whether the
# chip has FP8 hardware (TPU7x has, v5e and v6e have not) is not in the program.
TPU_TYPES = {E4: "f8e4m3fn", E5: "f8e5m2", BF16: "bf16", I8: "s8", "i32": "s32"}


@tpu
@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("name", ["int8_switchback", "int8_all", "fp8_delayed"])
def test_tpus_multiply_in_the_format(name, chip):
    hlo = compiled(name, chip)
    types = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", hlo))
    found = re.findall(r"= (\w+)\[.* convolution\(%([\w.-]+), %([\w.-]+)\)", hlo)
    matmuls = {(*sorted((types[a], types[b])), out) for out, a, b in found}
    expected = {(*sorted((TPU_TYPES[a], TPU_TYPES[b])), TPU_TYPES[out]) for a, b, out in MATMULS[name]}
    assert matmuls == expected


@h100
@pytest.mark.parametrize("remat", ["none", "block"])
def test_a_scanned_llama_gathers_its_kernels_in_fp8(remat):
    """The whole training step on 8 GPUs: forward, rematerialization and backward."""
    mesh = sharding.make_mesh(fsdp=8, devices=topologies.devices(topologies.parse("h100:1x8")))
    recipe = precision_config("fp8_delayed", history=4)
    program = Trainer(mesh, recipe=recipe, dtype="bfloat16", remat=remat).lower(batch(0))
    hlo = program.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    mlp = {str(LLAMA["mlp_dim"])}  # a dim that only kernels of the MLP have
    gathered = [
        (dtype, dims)
        for line in hlo.splitlines()
        if " all-gather-start(" in line or " all-gather(" in line
        for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", line.split(" all-gather")[0])
        if mlp & set(dims.split(","))
    ]
    assert {dtype for dtype, _ in gathered} == {"f8e4m3fn"}


@h100
@pytest.mark.parametrize("chip, beyond", [("h100", 1.4), ("b200", 0.4)])
def test_known_scales_save_passes(chip, beyond):
    """One Llama 8B block on 2 × 4,096 tokens; the limits are those of docs/low_precision.md, rounded up."""
    programs = {
        name: passes.compiled(name, 1, 2, 4096, chip) for name in ("bf16", "fp8_delayed, cold_start=False")
    }
    bf16, fp8 = (passes.kernels(program.as_text()) for program in programs.values())
    matmuls = [k for k in fp8 if k.target == "__cublas$lt$matmul$f8"]
    assert len(matmuls) == 3 * 7 - 2 * 2  # q, k and v are one matmul forward, and one for their gradients
    assert {k.results[0].split("[")[0] for k in matmuls} == {"bf16"}
    beside = [passes.gigabytes(found, matmuls=False) for found in (fp8, bf16)]
    assert beside[0] - beside[1] < beyond
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in programs.values()]
    assert temporaries[1] < temporaries[0]


@h100
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_rowwise", "int8_switchback"])
def test_no_stack_of_kernels_is_copied_to_another_layout(recipe, tmp_path):
    """8-bit matmuls want another layout; for a stack it would be a copy of all kernels, in float32."""
    c = importlib.import_module("configs.llama.8b").get_config()
    c.update_from_flattened_dict(EIGHT_LAYERS | {"precision.recipe": recipe})
    run = resolve_settings(read(c), topologies.devices(topologies.parse("h100:1x1")))
    compile_step(run, str(tmp_path / "step.txt"))
    stacks = re.findall(r"f32\[8,\d{4,},\d{4,}\]\{([\d,]+)", (tmp_path / "step.txt").read_text())
    assert set(stacks) == {"2,1,0"}
