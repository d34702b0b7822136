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


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("all-gather", 3 * 800 * 3 / 4),
        ("reduce-scatter", 3 * 800 * 3 / 4),
        ("all-to-all", 3 * 800 * 3 / 4),
        ("all-reduce", 2 * 3 * 800 * 3 / 4),
        ("collective-permute", 3 * 800),
        ("collective-broadcast", 3 * 800),
    ],
)
def test_rings_send_all_parts_but_their_own(kind, sent):
    """An all-reduce is a reduce-scatter and an all-gather; a permutation sends all bytes."""
    assert hlo.Collective(kind, ("fsdp",), 4, 800, 3, overlapped=False).sent == sent


GROUPS = "replica_groups={{0,2,4,6},{1,3,5,7}}"


@pytest.mark.parametrize(
    "start, num_bytes",
    [
        (f"(bf16[16,64], bf16[64,64]) all-gather-start(%w), {GROUPS}", 64 * 64 * 2),
        (f"((bf16[64,64]), bf16[16,64]) reduce-scatter-start(%w), {GROUPS}", 64 * 64 * 2),
        (f"bf16[16,64] all-reduce-start(%w), {GROUPS}", 16 * 64 * 2),
        (
            "(bf16[16,64], bf16[16,64]) collective-permute-start(%w), "
            "source_target_pairs={{0,2},{2,4},{4,6},{6,0}}",
            16 * 64 * 2,
        ),
    ],
    ids=lambda value: value.split("-start")[0].split()[-1] if isinstance(value, str) else None,
)
def test_a_collective_that_ends_in_the_next_iteration_is_hidden_and_has_the_size_of_its_result(
    start, num_bytes
):
    """Its end is not in the text behind its start, whose type has the operand too."""
    text = f"ENTRY %main (w: bf16[16,64]) -> () {{\n  %start = {start}\n}}\n"
    [one] = hlo.collectives(text, MESH)
    assert (one.bytes, one.overlapped) == (num_bytes, True)


def test_the_end_of_a_collective_is_not_that_of_one_whose_name_begins_alike():
    text = f"""
ENTRY %main (w: bf16[16,64]) -> f32[8,8] {{
  %w = bf16[16,64] parameter(0)
  %gather.1 = (bf16[16,64], bf16[64,64]) all-gather-start(%w), {GROUPS}
  %gather.10 = (bf16[2,64], bf16[8,64]) all-gather-start(%w), {GROUPS}
  %done.10 = bf16[8,64] all-gather-done(%gather.10)
  %work = f32[8,8] dot(%done.10, %done.10)
  %done.1 = bf16[64,64] all-gather-done(%gather.1)
}}
"""
    found = hlo.collectives(text, MESH)
    assert [(one.bytes, one.overlapped) for one in found] == [(64 * 64 * 2, True), (8 * 64 * 2, False)]


def test_a_synchronous_collective_is_not_hidden_by_the_work_behind_its_start():
    text = GPU.replace("calls=%nothing", "calls=%matmul")
    hidden = {
        sync: [one.overlapped for one in hlo.collectives(text.replace("true}}", f"{sync}}}}}"), MESH)]
        for sync in ("true", "false")
    }
    assert hidden == {"true": [True, False, False, False], "false": [True, True, False, False]}


def test_a_matmul_in_a_computation_that_another_one_calls_hides_a_collective():
    """And all that is called at the same time is hidden: a gather in a call within an asynchronous one."""
    text = GPU.replace("calls=%matmul", "calls=%outer").replace(
        "%body (p",
        "%outer (w: bf16[16,64]) -> f32[8] {\n  ROOT %c = f32[8] call(%w), to_apply=%matmul\n}\n\n%body (p",
    )
    assert hlo.collectives(text, MESH) == hlo.collectives(GPU, MESH)
    text = f"""
%inner (w: bf16[16,64]) -> bf16[64,64] {{
  ROOT %all = bf16[64,64] all-gather(%w), {GROUPS}
}}

%async (w: bf16[16,64]) -> bf16[64,64] {{
  ROOT %call = bf16[64,64] call(%w), to_apply=%inner
}}

ENTRY %main (w: bf16[16,64]) -> f32[8,8] {{
  %start = ((bf16[16,64]), bf16[64,64]) call-start(%w), to_apply=%async
  %work = f32[8,8] dot(%w, %w)
  %done = bf16[64,64] call-done(%start)
}}
"""
    [one] = hlo.collectives(text, MESH)
    assert (one.kind, one.overlapped) == ("all-gather", True)


def test_a_loop_whose_condition_is_no_upper_bound_counts_once():
    text = TPU.replace("direction=LT", "direction=NE")
    assert max(one.times for one in hlo.collectives(TPU, MESH)) == 2
    assert max(one.times for one in hlo.collectives(text, MESH)) == 1


def test_assumptions_of_xla_are_no_kernels():
    assert hlo.is_kernel("tpu_custom_call") and not hlo.is_kernel("AssumeGatherIndicesInBound")


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
        "warm": sum_of(16) + condition("idle", "once"),
        "once": sum_of(64),
        "cold": sum_of(32),
        "ENTRY main": sum_of(2) + condition("refresh", "idle") + condition("cold", "warm"),
    }
    text = "".join(f"{name} () -> f32[] {{\n{body}}}\n\n" for name, body in parts.items())
    text = re.sub(r"^(?=\w)(?!ENTRY)", "%", text, flags=re.MULTILINE)
    found = hlo.collectives(text, {"fsdp": 2})
    rare = {8: True, 4: True, 64: True, 32: True}  # of 16 and a rare 64, or of 32, the first sends less
    assert {one.bytes // 4: one.rare for one in found} == rare | {2: False, 16: False}


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
