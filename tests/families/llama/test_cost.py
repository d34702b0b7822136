"""The closed form of a Llama step on meshes that no compiler's record covers."""

import pytest

from configs.llama import debug
from maxlp.families.llama import cost
from maxlp.planning.cost_model import state_shapes
from maxlp.run import settings


def test_the_bubbles_of_a_pipeline_count_as_work():
    c = debug.get_config()
    c.data.tokenizer, c.data.batch_size = "bytes", 16

    def flops(**mesh):
        c.mesh.update(mesh)
        read = settings.read(c)
        machine = read.machine(8, "tpu")
        return cost.work(read, machine, state_shapes(read, machine)).flops["bfloat16"]

    # 4 stages and 4 microbatches: 7 ticks, of which each stage works in 4.
    assert flops(stage=4, fsdp=2) == pytest.approx(flops(stage=1, fsdp=8) * 7 / 4)
