"""Updating each layer in the backward pass equals updating all of them after it, and takes less memory."""

from collections import Counter

import jax
import jax.extend
import numpy as np
import optax
import pytest

from maxlp.core.train_state import num_params
from maxlp.optim import state_bytes
from maxlp.optim.offload import move, offload
from maxlp.parallel import sharding
from maxlp.planning import topologies
from maxlp.runtime.checkpoint import Checkpointer, restore
from tests.fixtures import Trainer, batch, batches, histories, make_mesh, precision_config
from tests.optim.common import make_optimizer

ROWS, LENGTH, STEPS = 8, 16, 3


def make_tx(**changes) -> optax.GradientTransformation:
    """An optimizer whose learning rate differs from step to step."""
    rates = dict(schedule="linear", warmup_steps=1, total_steps=10)
    return make_optimizer(**rates | dict(weight_decay=0.1, eps=1e-6) | changes).tx


# --- equality -------------------------------------------------------------------------------------------

GALORE = dict(rank=4, update_proj_gap=2, scale=1.0, basis="randomized")
DYNAMIC8 = dict(mu="dynamic8", nu="dynamic8", block_size=16, min_size=64)
COMPANDED8 = DYNAMIC8 | dict(mu="companded8", nu="companded8")
FP8 = precision_config("fp8_delayed", first_blocks=2, last_blocks=1, history=STEPS + 1)
QUANTIZED = slice(2, 4)  # the quantized ones of five layers
BFLOAT16 = dict(dtype="bfloat16", param_dtype="bfloat16")
CASES = {  # optimizer, mesh, model
    "tied_on_four_devices": (
        dict(),
        dict(fsdp=2, tensor=2),
        dict(tie_embeddings=True, qk_clip=0.5),  # which corrects parameters, and has metrics of its own
    ),
    "galore_on_a_ring": (dict(name="stable_adamw", galore=GALORE), dict(context=2), dict(attention="ring")),
    "fp8_delayed": (dict(name="sgd"), {}, dict(recipe=FP8, num_layers=5, dtype="bfloat16")),
    "unrolled": (dict(), {}, dict(scan_layers=False)),
    "schedule_free": (dict(name="schedule_free_adamw", schedule="constant"), {}, {}),
    "muon": (dict(name="muon"), {}, {}),
    "adafactor": (dict(name="adafactor", options=dict(min_dim_size_to_factor=3, momentum=0.9)), {}, {}),
    "kahan": (dict(param_rounding="kahan"), {}, BFLOAT16),
    "float16_master": (dict(param_rounding="float16_master"), {}, BFLOAT16),
    "flash": (dict(param_rounding="residual", low_bit=COMPANDED8), {}, BFLOAT16),
    "eight_bit_moments": (dict(galore=GALORE, low_bit=DYNAMIC8), {}, {}),
}
QUICK, SLOW = ("tied_on_four_devices",), ("galore_on_a_ring", "adafactor", "schedule_free")
# As a fraction of the largest change of a tensor. Where the input of a rounding differs in its last bit,
# the result may be rounded the other way. In E5M2 that changes it by 2^-2: one of the 128 terms of a
# kernel's gradient (8 rows of 16) then changes it by 2^-2 / sqrt(128) of its size, and a few terms do.
# (Adam's normalized step would turn around where the gradient is nearly zero.)
TOLERANCE = {"fp8_delayed": 0.05, "kahan": 0.01, "flash": 0.05, "eight_bit_moments": 0.05}


def num_updates(opt_state) -> dict[str, jax.Array]:
    return {"updates": optax.tree.get_all_with_path(opt_state, "count")[0][1]}


def train(released, optimizer, mesh, model, params=None, steps=STEPS):
    """The initial parameters, the last state, and the metrics of each step."""
    how = dict(num_layers=3, remat="block") | model
    how |= dict(tx=make_tx(**optimizer), optimizer_metrics=num_updates)
    trainer = Trainer(make_mesh(**mesh), released=released, **how)
    state = trainer.init(params)
    params = jax.device_get(state["params"])
    state, metrics = trainer.run(state, batches(steps, ROWS, LENGTH))
    return params, jax.device_get(state), metrics


def assert_close(got, want, tolerance, before=None):
    """Compares trees of tensors.

    Args:
      tolerance: as a fraction of each tensor's largest change since ``before``, or of its largest value.
    """
    before = jax.tree.map(np.zeros_like, want) if before is None else before
    assert jax.tree.structure(got) == jax.tree.structure(want), "checkpoints of one resume the other"
    leaves = zip(
        jax.tree.leaves_with_path(want), jax.tree.leaves(got), jax.tree.leaves(before), strict=True
    )
    for (path, b), a, old in leaves:
        a, b, old = (np.asarray(x, np.float64) for x in (a, b, old))
        size = np.abs(b - old).max(initial=0.0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    "case",
    [
        *QUICK,
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(case, marks=pytest.mark.full) for case in CASES if case not in QUICK + SLOW),
    ],
)
def test_steps_equal_the_ordinary_ones(case):
    # Without roundings to fewer bits, float32 sums in another order, which Adam divides by small numbers.
    tolerance = TOLERANCE.get(case, 1e-3)
    params, want, want_metrics = train(False, *CASES[case])
    _, got, metrics = train(True, *CASES[case], params)
    for ours, expected in zip(metrics, want_metrics, strict=True):
        assert ours == pytest.approx(expected, rel=1e-4)  # float32 losses and norms
    assert_close(got["params"], want["params"], tolerance, params)
    if case not in ("eight_bit_moments", "flash"):  # whose state is codes
        assert_close(got["opt_state"], want["opt_state"], tolerance)
    assert got["step"] == want["step"] == STEPS
    counts = [count for _, count in optax.tree.get_all_with_path(got["opt_state"], "count")]
    assert counts and set(map(int, counts)) == {STEPS}, "every counter counts a step once"
    assert_close(got["model_state"], want["model_state"], 1e-3)
    of_scales = {k: v for k, v in histories(got).items() if k.endswith("_amax_history")}
    assert bool(of_scales) == (case == "fp8_delayed")
    for path, history in of_scales.items():
        assert np.all(history[QUANTIZED, :STEPS] > 0), path
        assert not np.any(np.delete(history, QUANTIZED, axis=0)), path


@pytest.mark.full
def test_released_flash_is_the_same_on_a_mesh_and_goes_on_to_the_bit(tmp_path):
    """Parameters in bfloat16, residuals in int8, companded moments with scales of 16 codes: 5.5 bytes."""
    optimizer, model = CASES["flash"][0], dict(param_dtype="bfloat16")
    params, want, want_metrics = train(True, optimizer, {}, model)
    how = dict(released=True, tx=make_tx(**optimizer), optimizer_metrics=num_updates)
    how |= dict(num_layers=3, remat="block") | model
    trainer, data = Trainer(make_mesh(fsdp=2, tensor=2), **how), batches(STEPS, ROWS, LENGTH)
    state, metrics = trainer.run(trainer.init(params), data[:2])
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(2, state, {})
    restored = restore(tmp_path, trainer.abstract).state
    straight, again = (jax.device_get(trainer.run(one, data[2:])) for one in (state, restored))
    jax.tree.map(np.testing.assert_array_equal, again, straight)
    for ours, expected in zip([*metrics, *straight[1]], want_metrics, strict=True):
        assert ours == pytest.approx(expected, rel=1e-3)  # parameters in bfloat16 are rounded by 2^-9
    assert_close(straight[0]["params"], want["params"], TOLERANCE["flash"], params)
    parts = trainer.abstract["params"], trainer.abstract["opt_state"]
    counters = 4 * 4
    assert state_bytes(parts) == (2 + 1 + 2 * (1 + 4 / 16)) * num_params(parts[0]) + counters


@pytest.mark.full
def test_stochastic_rounding_differs_only_by_its_noise():
    """Both steps round the same sums up or down, but a layer draws other random bits."""
    how = dict(param_rounding="stochastic", warmup_steps=0), {}, BFLOAT16
    params, want, _ = train(False, *how, steps=1)
    _, got, _ = train(True, *how, params, steps=1)
    equal = []
    for a, b in zip(jax.tree.leaves(got["params"]), jax.tree.leaves(want["params"]), strict=True):
        a, b = a.astype(np.float32), b.astype(np.float32)
        spacing = 2.0**-7 * np.exp2(np.floor(np.log2(np.maximum(np.abs(a), np.abs(b)))))
        assert np.all(np.abs(a - b) <= spacing)
        equal.append(np.mean(a == b))
    assert 0.2 < min(equal) < 0.9


# --- memory ---------------------------------------------------------------------------------------------


def of_layers(released):
    """Sizes of arrays with the shape of a stacked parameter: those that loops carry, those that they stack.

    Read before compilation: what the CPU's compiler copies depends on its options.
    """
    trainer = Trainer(released=released, tx=optax.sgd(1.0), remat="block", num_layers=16)
    shapes = {leaf.shape for leaf in jax.tree.leaves(trainer.abstract["params"]["layers"])}
    carried, collected = Counter(), Counter()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                (body,) = jax.extend.core.jaxprs_in_params(eqn.params)
                for out, of_a_turn in zip(eqn.outvars, body.outvars, strict=True):
                    found = carried if out.aval.shape == of_a_turn.aval.shape else collected
                    found.update([out.aval.size * out.aval.dtype.itemsize] * (out.aval.shape in shapes))
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                walk(inner)

    walk(trainer.trace(batch(0, rows=1, length=LENGTH)).jaxpr.jaxpr)
    stacked = jax.tree.leaves(trainer.abstract["params"]["layers"])
    layers = Counter(x.size * x.dtype.itemsize for x in stacked)
    return carried, collected, layers


def test_the_gradients_of_all_layers_never_exist_together():
    """Ordinary loops collect them; with released ones, parameters are carried and updated in place."""
    _, collected, layers = of_layers(released=False)
    assert collected >= layers
    carried, collected, layers = of_layers(released=True)
    assert carried == layers and not collected


@pytest.mark.aot("jax_cuda13_plugin")
def test_the_optimizer_state_is_not_copied_on_a_gpu():
    """Temporary memory has no room for a copy of any array of the state, nor for all gradients."""
    mesh = sharding.make_mesh(devices=topologies.devices(topologies.parse("h100:1x1")))
    for released in (False, True):
        how = dict(tx=make_tx(), remat="block", num_layers=16, embed_dim=256, mlp_dim=1024)
        trainer = Trainer(mesh, released=released, **how)
        # Not `Trainer.compile`, whose option only the compiler for CPUs accepts.
        compiled = trainer.lower(batch(0, rows=1, length=LENGTH)).compile()
        stacked = jax.tree.leaves(trainer.abstract["params"]["layers"])
        layers = sum(x.size * x.dtype.itemsize for x in stacked)
        assert (compiled.memory_analysis().temp_size_in_bytes < layers) == released


# --- offloaded state ------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.default_emitters
def test_offloaded_steps_equal_the_others_and_go_on_from_their_checkpoint(tmp_path):
    """Two steps without offloading, a checkpoint, and two with it, on four devices: bit for bit."""
    how = dict(released=True, remat="block", num_layers=3)
    trainer = Trainer(mesh := make_mesh(fsdp=2, tensor=2), tx=make_tx(), **how)
    data = batches(4, ROWS, LENGTH)
    state, _ = trainer.run(trainer.init(), data[:2])
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(2, state, {})
    want, _ = trainer.run(state, data[2:])
    ours = Trainer(mesh, tx=offload(make_tx()), **how)
    got, _ = ours.run(restore(tmp_path, ours.abstract).state, data[2:])
    for path, leaf in jax.tree.leaves_with_path(got["opt_state"]):
        assert leaf.sharding.memory_kind == ("pinned_host" if leaf.ndim else "device"), path
    for part in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(got[part]), jax.device_get(want[part]))


def test_scalars_stay_on_the_device():
    """On a CPU the compiled steps above keep them there in any case."""
    space = jax.memory.Space
    moved = jax.make_jaxpr(lambda state: move(state, space.Host))({"count": 0, "mu": np.ones(3)})
    assert [leaf.memory_space for leaf in moved.out_avals] == [space.Device, space.Host]


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("h100:1x1", marks=pytest.mark.aot("jax_cuda13_plugin")),
        pytest.param("v5e:2x2", marks=[pytest.mark.aot("libtpu"), pytest.mark.slow]),
    ],
)
def test_offloaded_state_takes_no_memory_of_the_device(topology):
    """Except for one layer's part: arguments shrink by all moments, and temporaries grow little."""
    saved, on_host, moments = saved_by_offloading(topology, released=True)
    assert on_host == pytest.approx(moments, rel=0.05)
    assert saved > 0.8 * moments


@pytest.mark.aot("jax_cuda13_plugin")
def test_an_ordinary_step_gains_nothing_from_offloading():
    """It fetches the state of all layers at once."""
    saved, _, _ = saved_by_offloading("h100:1x1", released=False)
    assert saved <= 0


def saved_by_offloading(topology, *, released):
    """Bytes per device: of its memory that offloading saves, on the host, and of the moments."""
    found = topologies.parse(topology)
    mesh = sharding.make_mesh(fsdp=found.size, devices=topologies.devices(found))
    how = dict(released=released, remat="block", num_layers=16, embed_dim=512, mlp_dim=2048)
    memory, data = [], batch(0, rows=8, length=128)
    for tx in (make_tx(), offload(make_tx())):
        trainer = Trainer(mesh, tx=tx, **how)
        memory.append(trainer.lower(data).compile().memory_analysis())
    on_device, offloaded = (m.argument_size_in_bytes + m.temp_size_in_bytes for m in memory)
    moments = 2 * 4 * num_params(trainer.abstract["params"]) / found.size
    return on_device - offloaded, memory[1].host_argument_size_in_bytes, moments


@pytest.mark.full
def test_a_quantized_head_has_the_history_of_the_ordinary_step():
    """The head is outside of the stacks of layers, so its state is updated elsewhere than theirs."""
    recipe = precision_config(rules=(("lm_head", "fp8_delayed"),))
    of_step = []
    for released in (False, True):
        trainer = Trainer(released=released, recipe=recipe, num_layers=2, tx=optax.sgd(0.1))
        state, _ = trainer.run(trainer.init(), batches(2, ROWS, LENGTH))
        of_step.append(histories(jax.device_get(state)))
    ordinary, ours = of_step
    assert any(name.startswith("lm_head") for name in ordinary) and ours.keys() == ordinary.keys()
    for name, history in ordinary.items():
        assert np.all(history[:2] > 0)
        # The two programs differ in the last bits of sums, and may round to neighbouring numbers of FP8.
        np.testing.assert_allclose(ours[name], history, rtol=2**-3, err_msg=name)
