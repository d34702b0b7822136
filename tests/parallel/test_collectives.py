"""The communication of the compiled train step over each mesh axis, read from one device's program."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from maxlp.families.llama.task import NextTokenConfig
from maxlp.nn.layers import Embed
from maxlp.parallel.schedule import PipelineConfig
from maxlp.parallel.sharding import constrain, spec
from maxlp.planning import hlo
from tests.fixtures import LLAMA, Trainer, batch, make_mesh

ROWS, LENGTH = 8, 64
V, D = 64, 32


def compiled(attention: str = "xla", **mesh: int) -> tuple[str, dict[str, int]]:
    """The text of the compiled step, and the sizes of all mesh axes."""
    trainer = Trainer(make_mesh(**mesh), remat="block", attention=attention)
    return trainer.compile(batch(0, ROWS, LENGTH)).as_text(), dict(trainer.mesh.shape)


@pytest.mark.full
def test_norms_between_the_matmuls_hold_a_part_of_the_sequence():
    """Megatron's sequence parallelism: with ``tensor`` T, a norm has S/T positions of a row and not S."""
    text, _ = compiled(fsdp=2, tensor=4)
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* rsqrt\([^\n]*op_name=\"[^\"]*(?:attn|mlp)/", text)
    assert shapes, "no norm was found in the layers"
    elements = {tuple(int(n) for n in shape.split(",") if n != "1") for shape in shapes}
    assert elements == {(ROWS // 2, LENGTH // 4)}


def test_data_gathers_no_weights_between_replicas():
    """``data`` spans the slow network: it carries sums of gradients, and no weight is gathered over it."""
    text, mesh = compiled(data=2, fsdp=4)
    found = hlo.collectives(text, mesh)
    assert {one.axes for one in found if one.kind == "all-gather" and one.bytes > 1024} == {("fsdp",)}
    over_data = [one for one in found if "data" in one.axes]
    assert over_data
    assert all(one.kind in ("all-reduce", "reduce-scatter") for one in over_data)


@pytest.mark.parametrize("replicas", ["data", "stage"])
def test_the_heads_gradient_is_scattered_before_replicas_add_it(replicas):
    """Over ``data`` and ``stage``, a device sends the gradients of its own part of embedding and head."""
    model = dict(vocab_size=1024, remat="block", pipeline=PipelineConfig(microbatches=2))
    trainer = Trainer(make_mesh(**{replicas: 2}, fsdp=4), loss=NextTokenConfig(num_chunks=4), **model)
    found = hlo.collectives(trainer.compile(batch(0, ROWS, LENGTH)).as_text(), dict(trainer.mesh.shape))
    ours = [one for one in found if one.kind == "all-reduce" and one.axes == (replicas,)]
    added = sum(one.bytes * one.times for one in ours)
    tables = 2 * 4 * model["vocab_size"] * LLAMA["embed_dim"]  # of the embedding and the head, in float32
    blocks = 4 * LLAMA["num_layers"] * LLAMA["embed_dim"] * (3 * LLAMA["mlp_dim"] + 3 * LLAMA["embed_dim"])
    expected = tables / 4 + (blocks / 4 if replicas == "data" else 0)
    assert added == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("axes", [dict(context=4, tensor=2), dict(fsdp=2, context=2, tensor=2)], ids=str)
def test_context_gathers_weights_and_no_positions(axes):
    """Matmuls and their gradients work on a device's own tokens; what is gathered is at most a kernel."""
    text, mesh = compiled("ring", **({"fsdp": 1} | axes))
    over_context = [
        one for one in hlo.collectives(text, mesh) if one.kind == "all-gather" and "context" in one.axes
    ]
    largest = 4 * LLAMA["embed_dim"] * LLAMA["mlp_dim"] // mesh["tensor"]
    in_blocks = [one.bytes for one in over_context if one.times > 1]
    assert in_blocks and max(in_blocks) == largest


@pytest.mark.parametrize("axes", [dict(fsdp=2, context=4), dict(context=4, tensor=2)], ids=str)
def test_no_device_gets_the_looked_up_vectors_of_all_rows(axes):
    """Nor their gradients: an operation moves at most a device's part before ``tensor`` splits it."""
    mesh, ids_BS = make_mesh(**({"fsdp": 1} | axes)), jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    embed = Embed(V, D, std=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(embed)

    def total(params, ids_BS):
        x_BSD = nnx.merge(graphdef, params)(ids_BS)
        return jnp.sum(constrain(x_BSD, "batch", "embed_seq", "act_embed") ** 2)

    with jax.set_mesh(mesh):
        of_table, of_ids = (
            NamedSharding(mesh, spec(*names)) for names in (("vocab", "embed"), ("batch", "seq"))
        )
        gradient = jax.jit(jax.grad(total), in_shardings=(of_table, of_ids), out_shardings=of_table)
        text = gradient.lower(params, ids_BS).compile().as_text()
    sizes = dict(mesh.shape)
    moved = [one for one in hlo.collectives(text, sizes) if one.kind != "all-reduce"]
    part = 4 * ROWS * LENGTH * D // (sizes["stage"] * sizes["fsdp"] * sizes["context"])
    assert max(one.bytes for one in moved) == part
