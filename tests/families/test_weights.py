"""What `to_maxlp` does with any layout; the families' layouts are tested against other libraries."""

import tracemalloc

import jax
import numpy as np

from maxlp.families import weights
from maxlp.runtime.safetensors import Tensors, write_tensors

LAYOUT = weights.Layout(modules={"layers/proj": "blocks.{}.proj"}, leaves={})
ABSTRACT = {"layers": {"proj": {"kernel": jax.ShapeDtypeStruct((16, 256, 512), np.float32)}}}


def test_importing_from_disk_needs_one_copy_of_the_model(tmp_path):
    kernel_LDF = np.random.default_rng(0).standard_normal((16, 256, 512), np.float32)
    tensors = weights.to_other({"layers": {"proj": {"kernel": kernel_LDF}}}, LAYOUT)
    assert np.shares_memory(tensors["blocks.3.proj.weight"], kernel_LDF), "an export copies nothing"
    write_tensors(tmp_path, tensors, dtype="float32", max_shard_bytes=2**20)
    tracemalloc.start()
    try:
        params = weights.to_maxlp(Tensors(tmp_path), ABSTRACT, LAYOUT)
        assert tracemalloc.get_traced_memory()[1] < 1.25 * kernel_LDF.nbytes
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(params["layers"]["proj"]["kernel"], kernel_LDF, strict=True)


def test_importing_to_devices_holds_one_parameter_on_the_host(tmp_path):
    layout = weights.Layout(modules={f"layers/{i}": f"blocks.{{}}.{i}" for i in range(8)}, leaves={})
    kernel_LDF = np.ones((8, 128, 512), np.float32)
    kernels = {"layers": {str(i): {"kernel": kernel_LDF} for i in range(8)}}
    write_tensors(tmp_path, weights.to_other(kernels, layout), dtype="float32", max_shard_bytes=2**20)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kernels)
    tracemalloc.start()
    try:
        sums = weights.to_maxlp(Tensors(tmp_path), abstract, layout, put=lambda array, leaf: array.sum())
        # The stack, one of its eight tensors as it is read, and the small objects of an import.
        assert tracemalloc.get_traced_memory()[1] < 1.5 * kernel_LDF.nbytes
    finally:
        tracemalloc.stop()
    assert set(jax.tree.leaves(sums)) == {kernel_LDF.size}
