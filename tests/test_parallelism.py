"""What each mesh axis promises of the compiled step, read from the program of one of eight devices."""

import re

import jax

from configs.llama import debug
from maxlp.core import train_step as step
from maxlp.planning import hlo
from maxlp.run import build

ROWS, LENGTH = 8, 64


def program(**sizes: int) -> tuple[str, dict[str, int]]:
    """The compiled text of the debug run's step, and the mesh's sizes."""
    c = debug.get_config()
    c.update(dict(mesh=sizes))
    c.model.update(
        dict(vocab_size=256, num_heads=4, num_kv_heads=4, head_dim=16, embed_dim=64, mlp_dim=128)
    )
    c.data.update(dict(seq_len=LENGTH, batch_size=ROWS))
    mesh = build.mesh(c)
    with jax.set_mesh(mesh):
        graphdef, abstract = step.abstract_state(build.model(c), build.tx(c)[0], mesh, build.judges(c))
        train_step = build.train_step(c, graphdef, abstract, mesh)
        return train_step.lower(abstract, build.task(c).abstract_batch(c, mesh)).compile(
            {"xla_backend_optimization_level": 0}
        ).as_text(), dict(mesh.shape)


def test_norms_between_the_matmuls_hold_a_part_of_the_sequence():
    """Megatron's sequence parallelism: with ``tensor`` T, a norm has S/T rows of a sequence and not S."""
    text, _ = program(fsdp=2, tensor=4)
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* rsqrt\([^\n]*op_name=\"[^\"]*(?:attn|mlp)/", text)
    assert shapes, "no norm was found in the layers"
    elements = {tuple(int(n) for n in shape.split(",") if n != "1") for shape in shapes}
    assert elements == {(ROWS // 2, LENGTH // 4)}


def test_hybrid_gathers_no_weights_between_replicas():
    """``data`` is for the slow network: over it go sums of gradients, and no weight is gathered."""
    text, mesh = program(data=2, fsdp=4)
    found = hlo.collectives(text, mesh)
    assert {one.axes for one in found if one.kind == "all-gather" and one.bytes > 1024} == {("fsdp",)}
    over_data = [one for one in found if "data" in one.axes]
    assert over_data
    assert all(one.kind in ("all-reduce", "reduce-scatter") for one in over_data)
