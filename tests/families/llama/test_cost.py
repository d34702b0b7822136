"""The closed form of a Llama step: work, and the memory traffic of attention."""

import pytest

from maxlp.families.llama.cost import COST, of_block, sizes
from maxlp.families.llama.presets import llama
from maxlp.planning.cost_model import state_shapes
from maxlp.run.settings import read

SIZES = dict(
    embed_dim=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=1024, vocab_size=2048
)


def work(platform="cuda", **changes):
    """The work of one of 8 devices."""
    c = llama(**SIZES)
    c.data.update(source="unread", tokenizer="bytes", seq_len=256, batch_size=64)
    c.loss.num_chunks = 4
    c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    s = read(c)
    machine = s.machine(8, platform)
    return s, COST.work(s, machine, state_shapes(s, machine))


def test_eight_bits_use_the_eight_bit_units():
    """FP8 moves matmuls to other units and changes none of their FLOPs."""
    _, plain = work()
    _, low = work(precision__recipe="fp8_current")
    assert plain.flops.keys() == {"bfloat16"} and low.flops.keys() == {"bfloat16", "float8"}
    assert sum(low.flops.values()) == pytest.approx(sum(plain.flops.values()))
    assert 0 < low.flops["bfloat16"] < plain.flops["bfloat16"]


def test_a_block_has_as_many_weights_as_its_matmuls():
    """q and o of 4 heads, k and v of 2, gate, up and down."""
    c = llama(**SIZES)
    c.data.update(source="unread", tokenizer="bytes", seq_len=256, batch_size=64)
    s = read(c)
    assert sizes(s, s.machine(8, "cuda")).block_params == 256 * 64 * (2 * 4 + 2 * 2) + 3 * 256 * 1024


def test_cudnn_takes_a_float32_gradient_of_q_for_every_document_that_may_be():
    c = llama(**SIZES)
    c.data.update(source="unread", tokenizer="bytes", seq_len=256, batch_size=64, max_documents=16)
    blocks = {}
    for attention in ("flash", "cudnn"):
        c.model.attention = attention
        s = read(c)
        blocks[attention] = of_block(sizes(s, s.machine(8, "cuda")))["a block's activations"]
    q = 64 // 8 * 256 * 4 * 64  # numbers: rows of a device, tokens, heads, head dim
    assert blocks["cudnn"] > (16 + 1) * 4 * q > blocks["flash"]


def test_float16_computes_the_logits_of_chunks_twice():
    """The backward pass computes them again, because its gradients need the loss scale."""

    def flops(dtype, chunks):
        s, done = work(model__dtype=dtype, loss__num_chunks=chunks)
        logits = (
            2 * s.family.units_per_step(s.data) * s.model.embed_dim * s.model.vocab_size / 8
        )  # a device
        return done.flops["bfloat16"], logits

    (plain, logits), (twice, _) = flops("bfloat16", 8), flops("float16", 8)
    assert twice - plain == pytest.approx(logits)
    assert flops("float16", 1) == flops("bfloat16", 1) == (plain, logits)


def test_qk_clip_computes_every_logit_once_more():
    """Those of tokens that do not attend to each other too, and in the forward pass alone."""
    (s, plain), (_, clipped) = work(), work(model__qk_clip=100.0)
    m, tokens = s.model, s.family.units_per_step(s.data)
    product = 2 * tokens * s.data.seq_len * m.num_layers * m.num_heads * m.head_dim / 8  # a device
    assert clipped.flops["bfloat16"] - plain.flops["bfloat16"] == pytest.approx(product)


def test_qk_clip_gathers_the_keys_of_the_context():
    def gathered(**changes):
        s, _ = work(mesh__fsdp=2, mesh__context=4, **changes)
        found = COST.collectives(s, s.machine(8, "cuda"))
        return s, sum(one.sent for one in found if one.kind == "all-gather" and one.axes == ("context",))

    (s, clipped), (_, plain) = gathered(model__qk_clip=100.0), gathered()
    m, tokens = s.model, s.family.units_per_step(s.data)
    keys = 2 * tokens / 2 * m.num_kv_heads * m.head_dim  # bytes, in bfloat16
    assert clipped - plain == pytest.approx(m.num_layers * keys * 3 / 4)


def test_replicas_send_8_bits_and_a_scale_for_256_values_once_a_step():
    def sent(**changes):
        s, _ = work(mesh__data=2, model__param_dtype="float32", **changes)
        found = COST.collectives(s, s.machine(8, "cuda"))
        return {c.kind: c.sent for c in found if c.axes == ("data",)}

    [in_step] = sent().values()
    s, _ = work(mesh__data=2)
    plain = in_step - 2 * s.model.vocab_size * s.model.embed_dim / 4  # the embedding's is in float32
    for microbatches in (1, 4):
        run = dict(precision__exchange="int8", train__microbatches=microbatches)
        assert sum(sent(**run).values()) == pytest.approx(plain / 2 * (1 + 4 / 256))
    assert sent(train__microbatches=4) == {"all-reduce": 4 * in_step}
    # Local steps send an outer gradient in float32, or the same 8 bits, once in 10 steps.
    local = dict(train__local__steps=10, train__total_steps=100, train__microbatches=4)
    assert sent(**local) == {"all-reduce": pytest.approx(2 * plain / 10, rel=1e-5)}  # and some scalars
    found = sum(sent(precision__exchange="int8", **local).values())
    assert found == pytest.approx(plain / 20 * (1 + 4 / 256))


def test_model_flops_are_bounded_by_the_work():
    """Recomputation is counted in the work and not in the model's FLOPs, so MFU stays below one."""
    s, done = work(model__remat="none", loss__num_chunks=1)
    num_params = state_shapes(s, s.machine(8, "cuda")).num_params
    _, causal = s.family.flops_per_unit(s.model, s.data, num_params)
    flops, tokens = sum(done.flops.values()) * 8, s.family.units_per_step(s.data)
    assert causal * tokens <= flops <= 1.2 * causal * tokens


def test_squares_pass_through_memory_unless_a_kernel_holds_them():
    """Ring attention is a kernel on TPU, for lengths that fit it, and on GPU, for heads that fit it."""

    def moved(platform, length=4096, **changes):
        run = dict(model__attention="ring", mesh__context=2, model__max_seq_len=8192, data__seq_len=length)
        return work(platform, **run, **changes)[1].bytes

    wide = dict(model__head_dim=512)
    assert moved("tpu", length=8192) < 2.01 * moved("tpu") < 2.01 * moved("cpu")
    assert moved("cpu", length=8192) > 3 * moved("cpu")
    assert moved("tpu", length=4096 + 64) == moved("cpu", length=4096 + 64)
    assert moved("cuda") == moved("tpu") and moved("cuda", **wide) == moved("cpu", **wide)


def test_the_bubbles_of_a_pipeline_count_as_work_of_the_blocks():
    def flops(num_layers=8, **mesh):
        return work("tpu", model__num_layers=num_layers, **mesh)[1].flops["bfloat16"]

    blocks = flops(16) - flops(8)
    # 4 stages and 4 microbatches: 7 ticks, of which each stage works in 4.
    assert flops(mesh__stage=4, mesh__fsdp=2) == pytest.approx(flops() + blocks * 3 / 4)
