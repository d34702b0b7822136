"""FLOPs of published models, and the MFU of published runs."""

from types import SimpleNamespace

import pytest

from maxlp.families.llama import task
from maxlp.runtime import hardware, throughput
from tests import fixtures

# Llama 3.1: name, embed, layers, query heads, mlp; 8 kv heads of 128, vocabulary 128256, untied.
LLAMA = {"8B": (4096, 32, 32, 14336), "70B": (8192, 80, 64, 28672), "405B": (16384, 126, 128, 53248)}


def llama_flops(name, seq_len=8192):
    d, layers, heads, mlp = LLAMA[name]
    layer = 2 * d * heads * 128 + 2 * d * 8 * 128 + 3 * d * mlp + 2 * d
    sizes = dict(vocab_size=128256, embed_dim=d, num_layers=layers, num_heads=heads, head_dim=128)
    model = fixtures.llama_config(**sizes, tie_embeddings=False)
    num_params = layers * layer + d + 2 * 128256 * d
    return task.flops_per_unit(model, SimpleNamespace(seq_len=seq_len), num_params)


@pytest.mark.parametrize(
    ("name", "full", "causal"),
    [
        ("8B", "5.791445e+10", "5.147200e+10"),
        ("70B", "4.814427e+11", "4.492305e+11"),
        ("405B", "2.625449e+12", "2.523981e+12"),
    ],
)
def test_flops_per_token_of_llama_3_1(name, full, causal):
    assert tuple(f"{x:.6e}" for x in llama_flops(name)) == (full, causal)


@pytest.mark.parametrize(
    ("name", "kind", "tokens_per_sec", "full", "causal"),
    [
        # MaxText's published runs on v6e-256, whose own MFU (45.46 %, 50.33 %) is the full one.
        ("8B", "TPU v6 lite", 7207, 0.4547, 0.4041),
        ("70B", "TPU v6 lite", 960, 0.5035, 0.4698),
        # NVIDIA's DGX Cloud benchmark of 70B in MaxText: 506.6 TFLOP/s for each H100.
        ("70B", "NVIDIA H100 80GB HBM3", 1052.266, 506.6 / 989, None),
    ],
)
def test_mfu_of_published_runs(name, kind, tokens_per_sec, full, causal):
    now = iter([0.0, 1.0])
    meter = throughput.Throughput(
        units_per_step=round(256 * tokens_per_sec),
        flops_per_unit=llama_flops(name),
        peak_flops=hardware.published_flops(kind),
        num_devices=256,
        total_steps=10,
        clock=lambda: next(now),
    )
    meter.tick(1)
    meter.tick(2)
    report = meter.report()
    assert report["perf/mfu"] == pytest.approx(full, abs=1e-4)  # given with four digits
    if causal:
        assert report["perf/mfu_causal"] == pytest.approx(causal, abs=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_is_only_looked_up_does_no_work(tied):
    """A tied one does the work of the head."""
    model = fixtures.llama_config(tie_embeddings=tied)
    table, blocks = model.vocab_size * model.embed_dim, 1000
    data = SimpleNamespace(seq_len=32)
    found = task.flops_per_unit(model, data, blocks + (table if tied else 2 * table))
    attention = 12 * 2 * 4 * 16 * 32
    assert found == (6 * (blocks + table) + attention, 6 * (blocks + table) + attention / 2)
