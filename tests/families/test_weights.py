"""What `to_maxlp` does with any layout; the families' layouts are tested against other libraries."""

import tracemalloc

import jax
import numpy as np
import pytest

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


@pytest.mark.parametrize("transform", [weights.TRANSPOSED, weights.SAME], ids=["(out, in)", "(in, out)"])
def test_one_tensor_holds_the_outputs_of_three_kernels(transform):
    """PyTorch's MultiheadAttention has (3 out, in), the Conv1D of GPT-2 has (in, 3 out)."""
    layout = weights.Layout(
        modules={},
        leaves={f"layers/{p}/kernel": weights.Place("{}.qkv", transform, i) for i, p in enumerate("qkv")},
    )
    rng = np.random.default_rng(0)
    params = {"layers": {p: {"kernel": rng.standard_normal((2, 6, 4), np.float32)} for p in "qkv"}}
    tensors = weights.to_other(params, layout)
    for layer in range(2):
        joint = np.concatenate([params["layers"][p]["kernel"][layer] for p in "qkv"], axis=1)
        np.testing.assert_array_equal(tensors[f"{layer}.qkv"], transform.to_other(joint), strict=True)
    back = weights.to_maxlp(tensors, params, layout)
    jax.tree.map(np.testing.assert_array_equal, back, params)
