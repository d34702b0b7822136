"""A step compiled here: its memory and its collectives are those of the closed form."""

import functools
import re
import types
from typing import Any

import jax
import pytest

from maxlp.families.clip.presets import CLIP_SIZES, clip
from maxlp.families.llama.cost import COST
from maxlp.families.llama.presets import llama
from maxlp.parallel import sharding
from maxlp.planning import compiled, hlo, topologies
from maxlp.planning.cost_model import cost_of, state_shapes
from maxlp.run.experiment import assemble
from maxlp.run.settings import Settings
from tests.planning import hlo_flops, peaks

SMALL = dict(
    embed_dim=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=1024, vocab_size=2048
)
KINDS = "all-gather", "reduce-scatter", "all-reduce"
RUN = {"data.seq_len": 256, "data.batch_size": 64, "model.dtype": "float32", "loss.num_chunks": 4}


def gathered(found) -> float:
    """Bytes sent to gather parameters that fsdp shards."""
    return sum(one.sent for one in found if one.kind == "all-gather" and one.axes == ("fsdp",))


def added(found) -> float:
    """Bytes sent to sum gradients over replicas, or over stages for parameters that all of them hold."""
    axes = ("data",), ("stage",)
    return sum(one.sent for one in found if one.kind == "all-reduce" and one.axes in axes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="fsdp"),
        pytest.param({"mesh.tensor": 2, "train.microbatches": 2}, id="tensor", marks=pytest.mark.full),
        pytest.param({"mesh.data": 2}, id="data", marks=pytest.mark.full),
        pytest.param({"mesh.stage": 2}, id="stage", marks=pytest.mark.full),
    ],
)
def test_the_closed_form_agrees_with_a_compilation_here(changes, tmp_path):
    """The state, the peak within a tenth, FLOPs, and the bytes that fsdp gathers and replicas add.

    The new state is in the memory of the old one, so that metrics are the only further results.
    """
    s = peaks.settings_of(llama(**SMALL), RUN | changes)
    machine = s.machine_of(jax.devices())
    mesh = sharding.make_mesh(**s.mesh)
    done = compiled.compile_step(assemble(s, machine, mesh), str(tmp_path / "step.txt"))
    text = (tmp_path / "step.txt").read_text()
    assert done.memory is not None and "ENTRY" in text
    assert done.memory.outputs < 1e-3 * done.memory.arguments
    state = state_shapes(s, machine)
    flops = sum(COST.work(s, machine, state).flops.values())
    assert flops == pytest.approx(hlo_flops.matmul_flops(text))
    parts = COST.memory(s, machine, state)
    held = sum(parts[name] for name in ("parameters", "optimizer", "batch"))
    assert held == pytest.approx(done.memory.arguments, rel=1e-5)  # which have counters too
    assert sum(parts.values()) == pytest.approx(done.peak, rel=0.10)
    ours = COST.collectives(s, machine)
    # XLA gathers and adds some small arrays more.
    assert gathered(done.collectives) == pytest.approx(gathered(ours), rel=0.01)
    assert added(done.collectives) == pytest.approx(added(ours), rel=0.01)


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "bf16"),
        ("llama", "fp8_delayed"),
        ("llama", "int8_switchback"),
        pytest.param("clip", "fp8_delayed", marks=pytest.mark.slow),
        pytest.param("clip", "bf16", marks=pytest.mark.slow),
        pytest.param("clip", "int8_switchback", marks=pytest.mark.slow),
    ],
)
def test_the_closed_form_gathers_kernels_as_the_program_does(family, recipe):
    """In 8 bits where a tensor has one scale; the first and the last block are not quantized."""
    config = llama(**peaks.LLAMA_SIZES) if family == "llama" else clip(**CLIP_SIZES["b32"])
    s = peaks.settings_of(config, {"data.batch_size": 32, "mesh.fsdp": 8, "precision.recipe": recipe})
    ours, theirs = collectives_on(s, "h100:1x8")
    assert gathered(ours) == pytest.approx(gathered(theirs), rel=0.1)  # 2 % less at most


def collectives_on(s: Settings, name: str) -> tuple[list[hlo.Collective], list[hlo.Collective]]:
    """The collectives of the closed form and of the compiled step on a topology."""
    topology = topologies.parse(name)
    machine = topology.machine(s)
    mesh = sharding.make_mesh(**s.mesh, devices=topologies.devices(topology))
    theirs = compiled.compile_step(assemble(s, machine, mesh)).collectives
    return cost_of(s).collectives(s, machine), theirs


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize(
    ("family", "recipe", "changes"),
    [
        ("llama", "bf16", {}),
        ("llama", "fp8_delayed", {}),
        ("llama", "int8_switchback", {}),
        ("llama", "mxfp8", {}),
        ("clip", "bf16", {}),
        ("llama", "bf16", peaks.LORA),
        pytest.param("llama", "fp8_delayed", peaks.LORA, marks=pytest.mark.slow),
        pytest.param("clip", "fp8_delayed", {}, marks=pytest.mark.slow),
    ],
)
def test_tensor_sends_each_residual_stream_once(family, recipe, changes):
    """A norm's output in the dtype of activations where it is recomputed too, and one sum for the gradients
    of an input that matmuls share, quantized or not.

    The towers of the CLIP have 77 and 257 positions, which tensor does not divide.
    """
    changes = changes | {"data.batch_size": 8, "mesh.tensor": 2, "mesh.fsdp": 2, "precision.recipe": recipe}
    config = llama(**peaks.LLAMA_SIZES)
    if family == "clip":
        config, changes = clip(**CLIP_SIZES["l14"]), changes | {"data.batch_size": 512}

    def sent(found) -> dict[str, float]:
        return {k: sum(c.sent for c in found if (c.kind, c.axes) == (k, ("tensor",))) for k in KINDS}

    chip = "b200" if recipe == "mxfp8" else "h100"
    ours, theirs = map(sent, collectives_on(peaks.settings_of(config, changes), f"{chip}:1x4"))
    rel = 0.05 if "train.lora.rank" in changes else 0.01  # the sums of adapters are not counted
    assert ours["reduce-scatter"] == pytest.approx(theirs["reduce-scatter"], rel=rel)
    # Row-wise scales are gathered too, and the embedding's and the head's sums are counted once.
    assert ours["all-gather"] == pytest.approx(theirs["all-gather"], rel=0.15)
    assert theirs["all-reduce"] - ours["all-reduce"] < 0.1 * theirs["reduce-scatter"]


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize(
    ("optimizer", "layers"),
    [("muon", 8), ("soap", 8), ("muon", 6)],  # eight devices do not divide six layers
)
def test_gradients_are_scattered_before_they_are_spread_by_layers(optimizer, layers):
    changes = {"data.batch_size": 8, "mesh.fsdp": 4, "mesh.tensor": 2, "optimizer.name": optimizer}
    changes["model.num_layers"] = layers
    ours, found = collectives_on(peaks.settings_of(llama(**peaks.LLAMA_SIZES), changes), "h100:1x8")
    over_fsdp = [one for one in found if "fsdp" in one.axes]
    largest = {kind: max(one.bytes for one in over_fsdp if one.kind == kind) for kind in KINDS}
    sizes = peaks.LLAMA_SIZES
    assert largest["reduce-scatter"] >= 2 * sizes["embed_dim"] * sizes["mlp_dim"] / 2
    assert (
        largest["all-reduce"] <= 4 * sizes["num_layers"] * sizes["embed_dim"]
    )  # at most the gradients of all norms

    def moved(collectives) -> float:
        return sum(one.sent for one in collectives if one.kind == "all-to-all")

    assert moved(found) == pytest.approx(moved(ours))


@pytest.mark.aot("jax_cuda13_plugin")
def test_blocks_of_replicas_that_are_apart_compile_for_a_b200():
    """XLA cannot split the product of blocks in a `jax.shard_map` over ``data``."""
    replicas = {"mesh.data": 2, "mesh.fsdp": 2, "data.batch_size": 4, "precision.exchange": "int8"}
    s = peaks.settings_of(llama(**peaks.LLAMA_SIZES), replicas | {"precision.recipe": "mxfp8"})
    _, found = collectives_on(s, "b200:1x4")
    assert any((one.kind, one.axes) == ("all-to-all", ("data",)) for one in found)


@pytest.mark.aot("jax_cuda13_plugin")
def test_texts_travel_around_the_ring_while_logits_are_computed():
    """Their sums follow when they are complete; XLA for GPUs would send both then, in one permute."""
    changes = {"model.visual.num_layers": 1, "model.text.num_layers": 1, "mesh.fsdp": 4}
    changes |= {"data.batch_size": 4096, "loss.method": "tiled", "loss.tile_size": 512}
    s = peaks.settings_of(clip(**CLIP_SIZES["b32"]), changes)
    _, found = collectives_on(s, "h100:1x4")
    texts = 4096 / 4 * s.model.embed_dim * 4
    sent = [one.overlapped for one in found if one.kind == "collective-permute" and one.bytes >= texts]
    assert len(sent) == 3  # texts forward, and texts and their gradients backward
    assert sum(sent) >= 2


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize("tensor", [1, 2])
def test_galore_gathers_gradients_at_a_refresh_alone(tensor):
    """In all other steps, only weights and the residual stream are gathered."""
    changes = {"data.batch_size": 8, "mesh.fsdp": 8 // tensor, "mesh.tensor": tensor} | peaks.GALORE
    ours, found = collectives_on(peaks.settings_of(llama(**peaks.LLAMA_SIZES), changes), "h100:1x8")
    usual = [one for one in found if not one.rare]
    assert gathered(usual) == pytest.approx(gathered(ours), rel=0.1)  # and the projectors
    at_refresh = sum(one.sent for one in found if one.rare and one.kind == "all-gather")
    assert at_refresh > 0.2 * gathered(ours)  # over both axes
    of_tensor = ("all-gather", ("tensor",))
    sent = [sum(c.sent for c in each if (c.kind, c.axes) == of_tensor) for each in (usual, ours)]
    assert sent[0] <= 1.15 * sent[1]


@functools.cache
def temporaries_of_adamw() -> float:
    return compiled_for("h100:1x1", {}).temporaries


def compiled_for(name, changes, hlo_file=None) -> compiled.Memory:
    one_row = {"data.batch_size": 1, "data.seq_len": 2048, "model.attention": "flash"}
    s = peaks.settings_of(llama(**peaks.LLAMA_SIZES), one_row | changes)
    topology = topologies.parse(name)
    mesh = sharding.make_mesh(devices=topologies.devices(topology))
    memory = compiled.compile_step(assemble(s, topology.machine(s), mesh), hlo_file).memory
    assert memory is not None
    return memory


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize("name", ["Stable-SPAM", "skipped tensors", "float8 moments"])
def test_an_update_keeps_no_zeros_in_memory(name):
    """It needs less than half of the gradients more than that of AdamW; with zeros it needed more.

    XLA merges the zeros that an optimizer compares or selects with those that the backward pass adds the
    gradients of the layers to, and then keeps them as arrays.
    """
    memory = compiled_for("h100:1x1", peaks.LLAMA[f"one row, {name}"])
    s = peaks.recorded(f"one row, {name}", "cuda")
    gradients = 4 * state_shapes(s, s.machine(1, "cuda")).num_params
    more = (memory.temporaries - temporaries_of_adamw()) / gradients
    assert more < 0.5, more


@pytest.mark.aot("jax_cuda13_plugin")
def test_rounded_parameters_are_updated_in_place(tmp_path):
    """Of the stacks of kernels of gate and up, only the moments are in float32, and none is copied.

    With their norm in the step, XLA kept the sums of all parameters and their updates in float32.
    Where the stochastic rounding of both stacks used the same counters, it updated both in one loop, and
    copied moments.
    """
    compiled_for("h100:1x1", peaks.PURE, str(tmp_path / "step.txt"))
    _, _, program = (tmp_path / "step.txt").read_text().partition("\nENTRY ")
    results = " ".join(re.findall(r" = (.*?) (?:fusion|copy)\(", program))
    assert results.count("f32[8,1024,4096]") == 4


@pytest.mark.aot("jax_cuda13_plugin")
def test_one_kernel_updates_moments_and_parameters(tmp_path):
    """Those of the stacks of gate and up: a second kernel would read the moments again."""
    compiled_for("h100:1x1", {}, str(tmp_path / "step.txt"))
    _, _, program = (tmp_path / "step.txt").read_text().partition("\nENTRY ")
    stacks = [results.count("f32[8,1024,4096]") for results in re.findall(r" = (.*?) fusion\(", program)]
    assert stacks.count(3) == 2


@pytest.mark.aot("jax_cuda13_plugin")
def test_xla_computes_nothing_again_by_itself(tmp_path):
    """Not even if a step takes nine tenths of a GPU's memory; XLA would start at about three quarters."""
    changes = {"data.batch_size": 40, "model.remat": "dots", "precision.recipe": "fp8_delayed"}
    memory = compiled_for("rtx4090:1x1", changes, str(tmp_path / "step.txt"))
    assert memory.peak > 0.9 * topologies.parse("rtx4090:1x1").chip.memory
    assert not re.findall(r"%[\w.-]*\.remat[\w.]* = ", (tmp_path / "step.txt").read_text())


@pytest.mark.slow
@pytest.mark.aot("jax_cuda13_plugin")
def test_the_gradient_of_a_bias_stores_no_further_arrays(tmp_path):
    """Beside its matmuls, the backward pass of CLIP's MLP stores an activation and a gradient."""
    layers = {"model.visual.num_layers": 2, "model.text.num_layers": 1}
    changes = {"data.batch_size": 256, "model.attention": "xla"} | layers
    s = peaks.settings_of(clip(**CLIP_SIZES["b32"]), changes)
    topology = topologies.parse("h100:1x1")
    mesh = sharding.make_mesh(devices=topologies.devices(topology))
    compiled.compile_step(assemble(s, topology.machine(s), mesh), str(tmp_path / "step.txt"))
    fusions = r" = (.*) fusion\(.*kind=k(?:Loop|Input).*transpose\(jvp\(visual\)\).*/mlp/"
    results = " ".join(re.findall(fusions, (tmp_path / "step.txt").read_text()))
    assert len(re.findall(r"bf16\[(?:256,50|12800),3072\]", results)) == 2


def test_a_gpu_allocates_gaps_between_temporaries_too():
    """Its temporaries are one block; for TPUs, the compiler refuses what does not fit."""
    zero = dict.fromkeys(("generated_code", "host_argument", "host_temp"), 0)
    sizes = dict(argument=60, output=61, alias=60, temp=75) | zero
    stats = {f"{name}_size_in_bytes": n for name, n in sizes.items()}
    analysis = types.SimpleNamespace(**stats, peak_memory_in_bytes=128)
    done: Any = types.SimpleNamespace(memory_analysis=lambda: analysis)
    for platform, needs in (("cuda", 136), ("gpu", 136), ("tpu", 128)):
        memory = compiled.read_memory(done, platform)
        step = compiled.Compiled(memory, memory.peak, [], {}, 1.0, 0.0)
        assert (memory.peak, step.needs) == (128, needs)
        assert step.fits(needs) and not step.fits(needs - 1)


def test_the_size_of_a_refused_program_is_read():
    def needed(message: str) -> float:
        return compiled._needed(jax.errors.JaxRuntimeError(message))

    assert needed("Ran out of memory: Used 21.50G of 15.75G hbm. Exceeded by 5.75G") == 21.5 * 2**30
    assert needed("program (512.00M) exceeds available HBM") == 512 * 2**20
    with pytest.raises(jax.errors.JaxRuntimeError, match="another"):
        needed("another error")


def test_kernels_are_counted_without_those_of_xla():
    text = "\n".join(f'custom_call_target="{name}"' for name in ("Sharding", "AssumeGather", "a", "b", "a"))
    assert compiled.kernels(text) == {"a": 2, "b": 1}
