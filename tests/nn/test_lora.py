"""Adapters: their gradients are those of the merged kernels, and nothing else is trained."""

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp.core.train_state import MakeModel, State
from maxlp.families.llama.task import NextTokenConfig
from maxlp.nn import lora
from maxlp.planning import hlo
from maxlp.precision import PrecisionConfig
from tests import fixtures
from tests.fixtures import Trainer

SCALE = 2.0


def with_adapters(recipe: PrecisionConfig | None = None, **model) -> MakeModel:
    def make(rngs: nnx.Rngs) -> nnx.Module:
        made = fixtures.make_llama(recipe, **model)(rngs)
        lora.add_adapters(made, rngs, rank=4, scale=SCALE)
        return made

    return make


def with_random_b(state: State) -> State:
    """The state after some training, when B is not zero and A has a gradient."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: jax.device_put((0.1 * rng.standard_normal(p.shape)).astype(np.float32), p.sharding),
        state["params"],
    )
    return state | {"params": params}


def model_of(trainer: Trainer, state: State) -> nnx.Module:
    return nnx.merge(trainer.graphdef, state["params"], state["model_state"])


def flat(tree: dict) -> dict[str, np.ndarray]:
    return {k: np.asarray(v) for k, v in nnx.traversals.flatten_mapping(tree, sep="/").items()}


def step(trainer: Trainer, state: State, rows: int = 8) -> tuple[dict, dict, dict]:
    """Params before and after one step of gradient descent, and the model's state after it."""
    before = flat(jax.device_get(state["params"]))
    state, _ = trainer.run(state, fixtures.batches(1, rows=rows))
    return before, flat(jax.device_get(state["params"])), flat(jax.device_get(state["model_state"]))


def assert_close(found: dict, expected: dict, rtol: float) -> None:
    """Equal up to a share of each tensor's largest value: sums are taken in another order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=0, atol=rtol * np.abs(value).max(), err_msg=name
        )


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(make_model=with_adapters())


@pytest.fixture(scope="module")
def plain() -> Trainer:
    """Of the model without adapters."""
    return Trainer()


def test_training_starts_from_the_model_itself(trainer, plain):
    adapted = trainer.init()
    batch = fixtures.batch(0)
    inputs = [batch[name] for name in ("tokens", "positions", "segment_ids")]
    expected = nnx.merge(plain.graphdef, plain.init()["params"], {}).hidden(*inputs)[0]
    np.testing.assert_array_equal(model_of(trainer, adapted).hidden(*inputs)[0], expected)


def test_gradients_are_those_of_the_merged_kernels(trainer, plain):
    """d/dA = s dW Bᵀ and d/dB = s Aᵀ dW, where dW is the gradient of the kernel W + s A B."""
    state = with_random_b(trainer.init())
    merged = jax.device_get(lora.merged_params(model_of(trainer, state)))
    before, after, _ = step(trainer, state)
    whole_before, whole_after, _ = step(plain, plain.init(merged))
    expected = {}
    for name in before:
        kernel, _, matrix = name.rpartition("/adapter/")
        dw = whole_before[f"{kernel}/kernel"] - whole_after[f"{kernel}/kernel"]
        a, b = before[f"{kernel}/adapter/a"], before[f"{kernel}/adapter/b"]
        product = dw @ b.swapaxes(-1, -2) if matrix == "a" else a.swapaxes(-1, -2) @ dw
        expected[name] = SCALE * product
    # dW is a difference of float32 kernels of about 0.5: each entry has an error of 2**-25, which adds up
    # like a random walk over 96 products, beside the rounding of about 100 operations in the backward pass.
    assert_close({name: before[name] - after[name] for name in before}, expected, rtol=1e-4)


def test_frozen_weights_do_not_change(trainer, plain):
    state = with_random_b(trainer.init())
    weights = flat(jax.device_get(state["model_state"]))
    _, _, after = step(trainer, state)
    assert weights.keys() == flat(plain.abstract["params"]).keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_no_gradient_of_a_frozen_kernel_is_computed(trainer, plain):
    """Of the three matmuls with a kernel the one for its gradient is left out."""
    flops = {}
    for name, one in {"adapters": trainer, "all": plain}.items():
        flops[name] = one.compile(fixtures.batch(0)).cost_analysis()["flops"]
    attention = 12 * 2 * 4 * 16 * 32 * 8 * 32  # the two products of attention, in both
    # Adapters of rank 4 beside kernels of 64 x 64 to 64 x 96 add 3 * 4 * (64 + 64) / (64 * 64) = 0.3 of the
    # remaining two thirds at most.
    assert flops["adapters"] - attention < (0.67 + 0.2) * (flops["all"] - attention)


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2},
        pytest.param({"fsdp": 2, "tensor": 2, "data": 2}, marks=pytest.mark.full),
        pytest.param({"stage": 2}, marks=pytest.mark.full),
        pytest.param({"context": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_adapters_train_alike_on_every_mesh(trainer, sizes):
    """There with a loss in chunks, which share a gathered head."""
    changes = {"attention": "ring"} if "context" in sizes else {}
    loss = NextTokenConfig(num_chunks=4)
    other = Trainer(fixtures.make_mesh(**sizes), make_model=with_adapters(**changes), loss=loss)
    found = []
    for one in (trainer, other):
        before, after, _ = step(one, with_random_b(one.init()))
        found.append({name: before[name] - after[name] for name in before})
    assert_close(*found, rtol=1e-4)  # as above


def test_the_chunks_of_the_loss_share_a_gathered_head():
    make_model, loss = with_adapters(vocab_size=1024), NextTokenConfig(num_chunks=4)
    trainer = Trainer(fixtures.make_mesh(fsdp=4, tensor=2), make_model=make_model, loss=loss)
    found = hlo.collectives(trainer.compile(fixtures.batch(0)).as_text(), dict(trainer.mesh.shape))
    gathers = [one for one in found if one.kind == "all-gather" and one.axes == ("fsdp",)]
    head = 4 * 64 * 1024 / 2
    assert [one.times for one in gathers if one.bytes >= head] == [1]


@pytest.mark.parametrize(
    "remat", [pytest.param("none", marks=pytest.mark.slow), pytest.param("block", marks=pytest.mark.full)]
)
def test_scanned_and_unrolled_blocks_train_alike_in_fp8(remat):
    recipe = fixtures.precision_config("fp8_current", first_blocks=1)
    found = []
    for scan in (True, False):
        one = Trainer(make_model=with_adapters(recipe, num_layers=3, scan_layers=scan, remat=remat))
        before, after, _ = step(one, with_random_b(one.init()))
        found.append({name: before[name] - after[name] for name in before})
    # An input that lies between two FP8 values may be rounded either way, by 2**-4 of it; few are.
    assert_close(*found, rtol=2e-2)


@pytest.mark.full
def test_fp8_histories_advance_beside_frozen_weights():
    recipe = fixtures.precision_config("fp8_delayed", history=4)
    one = Trainer(make_model=with_adapters(recipe))
    _, _, after = step(one, with_random_b(one.init()))
    histories = {name: value for name, value in after.items() if "amax_history" in name}
    assert histories
    assert all((value[:, 0] > 0).all() for value in histories.values())


def test_the_merged_model_computes_the_same(trainer, plain):
    state = with_random_b(trainer.init())
    batch = fixtures.batch(0)
    inputs = [batch[name] for name in ("tokens", "positions", "segment_ids")]
    found = model_of(trainer, state).hidden(*inputs)[0]
    merged = lora.merged_params(model_of(trainer, state))
    expected = np.asarray(nnx.merge(plain.graphdef, merged, {}).hidden(*inputs)[0])
    # Normed to about 1; the rounding of about 100 float32 operations.
    np.testing.assert_allclose(found, expected, atol=1e-4)


def adapted(**config) -> list[str]:
    """The matmuls of a model of shapes that get adapters; its weights would take programs to compile."""
    found = []

    def build():
        found.extend(
            lora.add_adapters(fixtures.make_llama()(nnx.Rngs(0)), nnx.Rngs(0), scale=1.0, **config)
        )

    nnx.eval_shape(build)
    return found


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(rank=64), r"lora.rank=64 must be below the dims \(64, 32\) of layers/attn/k_proj"),
        (dict(rank=4, targets=("q_proj",)), "pattern 'q_proj' matches no matmul; use one of .*attn/q_proj"),
    ],
)
def test_wrong_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        adapted(**config)


def test_targets_choose_the_matmuls():
    assert adapted(rank=4, targets=("*/q_proj", "lm_head")) == ["layers/attn/q_proj", "lm_head"]
