"""The collectives that are read from a program's text are those that it executes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from maxlp.parallel import sharding
from maxlp.planning import hlo

MESH = {"data": 1, "fsdp": 4, "tensor": 2}

# Cut from two compiled train steps: with the forms that XLA for GPU and the TPU compiler write.
GPU = (Path(__file__).parent / "gpu.hlo").read_text()
TPU = (Path(__file__).parent / "tpu.hlo").read_text()


def test_gpu_loops_groups_and_overlaps():
    found = hlo.collectives(GPU, MESH)
    matrix = 64 * 64 * 2
    assert found == [
        hlo.Collective("all-gather", ("fsdp",), 4, matrix, 32, overlapped=True),
        hlo.Collective("reduce-scatter", ("fsdp",), 4, matrix, 32, overlapped=False),
        hlo.Collective("all-reduce", ("tensor",), 2, 1024, 1, overlapped=False),
        hlo.Collective("all-reduce", ("fsdp", "tensor"), 8, 1024, 1, overlapped=False),
    ]
    assert [one.sent for one in found] == [32 * matrix * 3 / 4, 32 * matrix * 3 / 4, 1024, 2 * 1024 * 7 / 8]


def test_a_loop_in_a_loop_runs_their_product():
    """Layers of a microbatch, and microbatches of a step."""
    head, main = GPU.split("ENTRY ")
    outer = main.replace("%main", "%outer").replace("ROOT %all-reduce.2", "%all-reduce.2")
    body = outer[: outer.index("  %all-reduce.1")] + "  ROOT %u = (s32[]) tuple(%while.1)\n}\n\n"
    main = main.replace("body=%body", "body=%outer").replace('"n":"32"', '"n":"3"')
    found = hlo.collectives(head + body + "ENTRY " + main, MESH)
    assert [one.times for one in found] == [3 * 32, 3 * 32, 1, 1]


def test_the_branch_that_sends_least_is_taken_to_run():
    """Of a refresh every few steps, or of none, which is a condition in a condition."""

    def sum_of(n: int) -> str:
        return f"  %r{n} = f32[{n}]{{0}} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add\n"

    def condition(first: str, second: str) -> str:
        return f"  ROOT %c = f32[] conditional(%p, %x, %x), branch_computations={{%{first}, %{second}}}\n"

    parts = {
        "idle": "  ROOT %t = f32[] parameter(0)\n",
        "refresh": sum_of(8) + condition("idle", "first"),
        "first": sum_of(4),
        "ENTRY main": sum_of(2) + condition("refresh", "idle"),
    }
    text = "".join(f"{name} () -> f32[] {{\n{body}}}\n\n" for name, body in parts.items())
    text = re.sub(r"^(?=\w)(?!ENTRY)", "%", text, flags=re.MULTILINE)
    found = hlo.collectives(text, {"fsdp": 2})
    assert {one.bytes: one.rare for one in found} == {2 * 4: False, 8 * 4: True, 4 * 4: True}


def test_tpu_gathers_in_pieces_count_once_and_trip_counts_come_from_conditions():
    """And a SparseCore runs a reduce-scatter beside a matmul."""
    assert hlo.collectives(TPU, MESH) == [
        hlo.Collective("all-gather", ("fsdp",), 4, 64 * 64 * 2, 1, overlapped=True),
        hlo.Collective("reduce-scatter", ("tensor",), 2, 8 * 64 * 2, 1, overlapped=False),
        hlo.Collective("reduce-scatter", ("fsdp",), 4, 64 * 64 * 2, 1, overlapped=True),
        hlo.Collective("collective-permute", ("fsdp",), 4, 4 * 64 * 2, 2, overlapped=True),
    ]


@pytest.mark.parametrize("text", [GPU, TPU], ids=["gpu", "tpu"])
def test_only_matmuls_hide_a_collective(text):
    """Element-wise kernels are too short, and XLA's own custom calls compute nothing."""
    without = re.sub(r" (convolution|dot)\(", " add(", text)
    assert not any(one.overlapped for one in hlo.collectives(without, MESH))


def test_groups_on_a_permuted_mesh_and_on_a_part_of_an_axis():
    """A transposed device order is undone, and a part of an axis counts as the axis."""
    line = (
        "x), replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0'}, to_apply=%a"
    )
    assert hlo.device_groups(hlo.Instruction("a", "", "all-gather", line), MESH) == (("tensor",), 2)
    line = "x), replica_groups=mesh['axis_0'=8] {'axis_0':(1)4}, dimensions={0}"
    assert hlo.device_groups(hlo.Instruction("a", "", "all-gather", line), MESH) == (("fsdp",), 4)
    with pytest.raises(ValueError, match="replica_groups=<new form>"):
        hlo.device_groups(hlo.Instruction("a", "", "all-gather", "x), replica_groups=<new form>"), MESH)


def test_a_gather_that_a_sparse_core_runs_in_three_parts():
    """As libtpu 0.0.52 writes it; a matmul hides it between the start and the end, by way of the update."""
    text = """HloModule m, is_scheduled=true

%called (p: bf16[8,64]) -> bf16[32,64] {
  %p = bf16[8,64]{1,0} parameter(0)
  ROOT %all = bf16[32,64]{1,0} all-gather(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (w: bf16[8,64], x: bf16[64,64]) -> bf16[32,64] {
  %w = bf16[8,64]{1,0} parameter(0)
  %x = bf16[64,64]{1,0} parameter(1)
  %a.start = ((), (), s32[8]{0}) custom-call-start(), called_computations={%called}
  %a.update = ((bf16[8,64]{1,0}), bf16[32,64]{1,0}, s32[8]{0}) custom-call-update(%a.start, %w)
  WORK
  %a.done = bf16[32,64]{1,0} custom-call-done(%a.update)
  LATER
  ROOT %sum = bf16[32,64]{1,0} copy(%a.done)
}
"""
    matmul = "%y = bf16[64,64]{1,0} convolution(%x, %x), dim_labels=bf_io->bf"
    for work, later, hidden in ((matmul, "", True), ("", matmul, False)):
        [one] = hlo.collectives(text.replace("WORK", work).replace("LATER", later), MESH)
        assert (one.kind, one.axes, one.times) == ("all-gather", ("fsdp",), 1)
        assert (one.bytes, one.overlapped) == (32 * 64 * 2, hidden)


def test_collectives_of_a_program_compiled_here():
    """Five steps of a loop that gathers a matrix over fsdp, and sums once over both axes."""
    mesh = sharding.make_mesh(fsdp=4, tensor=2)

    def loop(w, x):
        def body(x, _):
            whole = jax.lax.with_sharding_constraint(w, P(None, None))
            return jnp.tanh(x @ whole), None

        return jnp.sum(jax.lax.scan(body, x, None, length=5)[0])

    with jax.set_mesh(mesh):
        w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=jax.NamedSharding(mesh, P("fsdp", None)))
        x = jax.ShapeDtypeStruct(
            (16, 64), jnp.float32, sharding=jax.NamedSharding(mesh, P(("fsdp", "tensor")))
        )
        text = jax.jit(loop).lower(w, x).compile().as_text()
        assert text is not None
    found = hlo.collectives(text, dict(mesh.shape))
    gathers = [one for one in found if one.kind == "all-gather"]
    assert {(one.axes, one.participants, one.bytes) for one in gathers} == {(("fsdp",), 4, 64 * 64 * 4)}
    assert sum(one.times for one in gathers) in (1, 5)  # XLA may lift it out of the loop
    sums = [one for one in found if one.kind == "all-reduce"]
    assert {one.axes for one in sums} == {("fsdp", "tensor")} and sum(one.bytes for one in sums) == 4


def test_bytes_of_types():
    """Booleans take a byte; a type of several arrays their sum."""
    assert (
        hlo.num_bytes("f32[2,3]{1,0}") == 24
        and hlo.num_bytes("pred[8]") == 8
        and hlo.num_bytes("s4[8]") == 4
    )
    assert hlo.num_bytes("(bf16[4], f8e4m3fn[4], u32[])") == 8 + 4 + 4
