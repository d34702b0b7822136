"""cuDNN's attention: documents as it is told of them, on CPU; the program lowered and compiled for GPUs.

None of this runs on a GPU.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.nn.attention import cudnn
from maxlp.nn.attention.cudnn import MAX_DOCUMENTS
from maxlp.nn.attention.dense import dense
from maxlp.parallel import sharding
from maxlp.planning import topologies
from tests.nn.fixtures import abstract, assert_close, inputs, layers_gradient, lowered, out_and_grads

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"

# Lengths of documents: of one token, of a whole row, as many as there may be; with padding and without.
ROWS = [[3, 5, 4], [12], [1] * MAX_DOCUMENTS, [2, 1], []]


def segment_ids(rows, S):
    """Ids of documents of these lengths, with padding at the end of each row."""
    ids = np.zeros((len(rows), S), np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        row[: sum(lengths)] = np.repeat(1 + np.arange(len(lengths)), lengths)
    return jnp.asarray(ids)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[2:3] * 3, ROWS[1:2] * 2, ROWS[4:], ROWS[::-1]])
@pytest.mark.parametrize("S", [MAX_DOCUMENTS, MAX_DOCUMENTS + 3])
def test_every_document_is_where_cudnn_is_told(rows, S):
    """The numbers of each document, found in an array by its own indices; padding is a document too."""
    B, N, H = len(rows), 3, 2
    documents = jax.jit(cudnn.Documents.of)(segment_ids(rows, S))
    x_BSNH = np.arange(B * S * N * H).reshape(B, S, N, H)
    offsets, lengths = np.asarray(documents.offsets(x_BSNH)), np.asarray(documents.lengths_BM)
    assert offsets.shape == (B, MAX_DOCUMENTS + 2) and lengths.shape == (B, MAX_DOCUMENTS + 1)
    expected = []
    for row, sizes in enumerate(rows):
        sizes = [*sizes, S - sum(sizes)] if sum(sizes) < S else sizes
        starts = np.cumsum([0, *sizes])[:-1]
        expected += [(x_BSNH[row, at, 0, 0], size) for at, size in zip(starts, sizes, strict=True)]
    found = list(zip(offsets.ravel(), lengths.ravel(), strict=False))
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {(x_BSNH.size, 0)} and offsets[-1, -1] == x_BSNH.size


def test_statistics_of_documents_become_those_of_tokens_and_back():
    """Whatever cuDNN leaves behind the end of a document is not used."""
    ids = segment_ids(ROWS, MAX_DOCUMENTS + 3)
    documents = cudnn.Documents.of(ids)
    x_BNS = np.random.default_rng(0).standard_normal((len(ROWS), 2, ids.shape[1]))
    split = np.array(documents.split(jnp.asarray(x_BNS)))
    assert np.isfinite(split).all()
    for document, size in zip(split, np.asarray(documents.lengths_BM).ravel(), strict=True):
        document[:, size:] = np.nan
    np.testing.assert_array_equal(documents.joined(jnp.asarray(split)), jnp.asarray(x_BNS))


# --- with an imitation of cuDNN ---------------------------------------------------------------------------


def of_documents(q, k, lengths, offsets, causal):
    """For each document of ragged arrays: the places of its queries and keys, and its logits."""
    lengths, offsets = ([x.ravel() for x in pair] for pair in (lengths, offsets))
    for d, sizes in enumerate(zip(*lengths, strict=True)):
        assert sizes[0] == sizes[1]
        queries, keys = (
            offset[d] + np.arange(size * x.shape[2] * x.shape[3]).reshape(size, *x.shape[2:])
            for offset, size, x in zip(offsets, sizes, (q, k), strict=True)
        )
        keys = np.repeat(keys, q.shape[2] // k.shape[2], axis=1)
        logits = np.einsum("snh,tnh->nst", q.ravel()[queries], k.ravel()[keys]) * q.shape[-1] ** -0.5
        if sizes[0]:
            mask = np.tri(sizes[0], dtype=bool) if causal else True
            yield d, queries, keys, np.where(mask, logits, -np.inf)


def imitated_forward(causal, q, k, v, *ragged):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    lengths, offsets = ragged[:2], ragged[2:]
    out = np.full(q.size, np.nan)
    log_sum = np.full((lengths[0].size, q.shape[2], q.shape[1]), np.nan)
    for d, queries, keys, logits in of_documents(q, k, lengths, offsets, causal):
        log_sum[d, :, : len(queries)] = np.log(np.exp(logits).sum(-1))
        probs = np.exp(logits - log_sum[d, :, : len(queries), None])
        out[queries] = np.einsum("nst,tnh->snh", probs, v.ravel()[keys])
    return np.float32(out.reshape(q.shape)), np.float32(log_sum)


def imitated_backward(causal, q, k, v, *rest):
    lengths, offsets, (log_sum, out, dout) = rest[:2], rest[2:4], rest[4:]
    q, k, v, out, dout = (np.asarray(x, np.float64) for x in (q, k, v, out, dout))
    dq, dk, dv = np.zeros(q.size), np.zeros(k.size), np.zeros(k.size)
    for d, queries, keys, logits in of_documents(q, k, lengths, offsets, causal):
        probs = np.exp(logits - log_sum[d, :, : len(queries), None])
        o, do = out.ravel()[queries], dout.ravel()[queries]
        dprobs = np.einsum("snh,tnh->nst", do, v.ravel()[keys]) - np.sum(o * do, -1).T[:, :, None]
        dlogits = probs * dprobs * q.shape[-1] ** -0.5
        dq[queries] = np.einsum("nst,tnh->snh", dlogits, k.ravel()[keys])
        np.add.at(dk, keys, np.einsum("nst,snh->tnh", dlogits, q.ravel()[queries]))
        np.add.at(dv, keys, np.einsum("nst,snh->tnh", probs, do))
    return tuple(np.float32(x.reshape(like.shape)) for x, like in ((dq, q), (dk, k), (dv, k)))


class Imitation:
    """A primitive of JAX for cuDNN that finds documents by nothing but their lengths and offsets."""

    def __init__(self, function, results):
        self.function, self.results = function, results

    def bind(self, q, k, v, bias, *operands, mask_type, **parameters):
        ragged, rows = operands[:4], operands[6:]
        function = functools.partial(self.function, mask_type.name == "PADDING_CAUSAL")
        shapes = [jax.ShapeDtypeStruct(shape, q.dtype) for shape in self.results(q, k, ragged[0])]
        return jax.pure_callback(function, shapes, q, k, v, *ragged, *rows)


@pytest.fixture
def imitated(monkeypatch):
    def forward(q, k, lengths):
        return q.shape, (lengths.size, q.shape[2], q.shape[1])

    def backward(q, k, lengths):
        return q.shape, k.shape, k.shape

    for name, imitation in (
        ("_dot_product_attention_fwd_p", Imitation(imitated_forward, forward)),
        ("_dot_product_attention_bwd_p", Imitation(imitated_backward, backward)),
    ):
        monkeypatch.setattr(cudnn._fused(), name, imitation)


@pytest.mark.parametrize(("N", "K", "causal"), [(4, 2, True), (2, 2, False), (3, 1, True)])
def test_packed_rows_equal_dense_attention_and_its_gradients(N, K, causal, imitated):
    """float32 sums in another order. Rows have several documents and padding, and K is less than N."""
    args = *inputs(3, 24, N, K, 8), causal
    assert_close(out_and_grads(cudnn.cudnn, *args), out_and_grads(dense, *args))


# --- lowered for GPUs -------------------------------------------------------------------------------------


def test_operands_are_in_the_order_of_the_installed_jax():
    """It is private. Two pairs of operands have the same types, so that lowering would not notice."""
    names = list(inspect.signature(cudnn._fused()._dot_product_attention_fwd_cuda_lowering).parameters)
    expected = "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v"
    assert tuple(names[4:11]) == ("bias", *expected)


@pytest.mark.parametrize("packed", [False, True])
def test_one_kernel_forward_and_one_backward_on_the_shard_of_each_device(packed):
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        text = lowered(out_and_grads, cudnn.cudnn, *abstract(8, 128, 4, 2, 64, packed=packed)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert [FORWARD in calls[0], BACKWARD in calls[1], len(calls)] == [True, True, 2]
    mask = "PADDING_CAUSAL" if packed else "CAUSAL"
    for call in calls:
        assert "tensor<2x128x2x64xbf16>, tensor<2x128x1x64xbf16>" in call  # q, k: B 8/4, N 4/2, K 2/2
        assert f"mask_type\\22: \\22{mask}\\22" in call
        assert ("tensor<2x17xi32>, tensor<2x17xi32>, tensor<2x18xi32>, tensor<2x18xi32>" in call) == packed
    assert "128x128x" not in text  # no (S, S) array


@pytest.mark.parametrize(("remat", "kernels"), [("block", 2), ("dots", 1)])
def test_remat_dots_runs_the_forward_kernel_once(remat, kernels):
    with jax.set_mesh(sharding.make_mesh(fsdp=4, tensor=2)):
        text = lowered(*layers_gradient(cudnn.cudnn, remat, 256)).as_text()
    assert text.count(f"@{FORWARD}(") == kernels and text.count(f"@{BACKWARD}(") == 1


# --- compiled for GPUs ------------------------------------------------------------------------------------


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize("chip", ["h100", "b200"])
@pytest.mark.parametrize(("packed", "mib"), [(False, 2), (True, MAX_DOCUMENTS + 4)])
def test_temporaries_of_8192_tokens_are_log_sums(chip, packed, mib):
    """1 MiB for 32 heads; of packed rows, 1 MiB for each document that there may be, padding included.

    cuDNN's own memory is not part of it: see `cudnn.workspace`.
    """
    devices = topologies.devices(topologies.parse(f"{chip}:1x1"))
    with jax.set_mesh(sharding.make_mesh(devices=devices)):
        done = lowered(out_and_grads, cudnn.cudnn, *abstract(1, 8192, 32, 8, 128, packed=packed)).compile()
    assert done.memory_analysis().temp_size_in_bytes <= mib * 2**20


@pytest.mark.aot("jax_cuda13_plugin")
def test_scanned_layers_run_the_forward_kernel_once_on_eight_gpus():
    devices = topologies.devices(topologies.parse("h100:1x8"))
    with jax.set_mesh(sharding.make_mesh(devices=devices, fsdp=4, tensor=2)):
        text = lowered(*layers_gradient(cudnn.cudnn, "dots", 8192)).compile().as_text()
    assert text.count(f'custom_call_target="{FORWARD}"') == 1
    assert text.count(f'custom_call_target="{BACKWARD}"') == 1
