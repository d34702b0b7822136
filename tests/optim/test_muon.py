"""Muon by its definition, for the matrices of the layers; Adam for the rest."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp.optim import muon as muon_module
from maxlp.optim.muon import scale_by_muon, scale_by_normuon
from maxlp.optim.tree_utils import find_states
from maxlp.parallel import sharding
from tests.optim.common import assert_trees_close, each_step, jitted_step, random_tree, run, run_on_mesh

B1, B2, EPS, BETA, RMS = 0.5, 0.9, 0.1, 0.8, 0.3
SHAPES = {
    "layers": {"attn": {"q_proj": {"kernel": (3, 8, 24)}}, "mlp": {"down_proj": {"kernel": (3, 24, 8)}}},
    "lm_head": {"kernel": (8, 16)},
}


def newton_schulz(x, steps):
    """Five steps of the quintic iteration with Jordan's coefficients, in float64."""
    x = x / (np.linalg.norm(x) + EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def orthogonal_steps(grads):
    """The orthogonal steps for one matrix: Nesterov's momentum as in Jordan's code, then Newton-Schulz."""
    m, steps = np.zeros_like(grads[0]), []
    for g in grads:
        m = BETA * m + (1 - BETA) * g
        ahead = (1 - BETA) * g + BETA * m
        tall = ahead.shape[0] > ahead.shape[1]
        steps.append(newton_schulz(ahead.T, 5).T if tall else newton_schulz(ahead, 5))
    return steps


def muon(grads):
    """The step after these gradients, with the RMS of Liu et al. 2025."""
    return RMS * max(grads[0].shape) ** 0.5 * orthogonal_steps(grads)[-1]


def normuon(grads):
    """Algorithm 1 of Li et al. 2025, for a matrix whose columns are the neurons."""
    v = np.zeros(grads[0].shape[1])
    for o in orthogonal_steps(grads):
        v = B2 * v + (1 - B2) * (o**2).mean(axis=0)
    even = o / (np.sqrt(v) + EPS)
    return RMS * even.size**0.5 * even / (np.linalg.norm(even) + EPS)


@pytest.mark.parametrize(("scale_by", "definition"), [(scale_by_muon, muon), (scale_by_normuon, normuon)])
def test_three_steps_equal_the_definition_for_each_layer(scale_by, definition):
    params, grads = random_tree(SHAPES, 0), [random_tree(SHAPES, seed) for seed in (1, 2, 3)]
    tx = scale_by(B1, B2, EPS, beta=BETA, rms=RMS, adam_rate=0.25)
    *_, (updates, _, _) = each_step(tx, params, grads)
    adam, heads = optax.scale_by_adam(B1, B2, EPS), [tree["lm_head"] for tree in (params, *grads)]
    *_, (expected_head, _, _) = each_step(adam, heads[0], heads[1:])
    for path in (("attn", "q_proj"), ("mlp", "down_proj")):
        ours = updates["layers"][path[0]][path[1]]["kernel"]
        of_path = [np.asarray(g["layers"][path[0]][path[1]]["kernel"], np.float64) for g in grads]
        for layer in range(3):
            expected = definition([g[layer] for g in of_path])
            # Five iterations in float32 multiply rounding errors by up to 3.4 each.
            np.testing.assert_allclose(ours[layer], expected, atol=3.4**5 * 2.0**-22)
            assert 0.6 * RMS < np.sqrt(np.mean(np.square(ours[layer]))) < 1.3 * RMS
    # The same Adam in another program.
    np.testing.assert_allclose(
        updates["lm_head"]["kernel"], 0.25 * expected_head["kernel"], rtol=1e-5, atol=1e-7
    )


def test_one_device_iterates_on_a_part_of_the_layers_at_a_time(monkeypatch):
    """Two of eight: three quarters of the iterate are gone, and the steps are the same but for rounding."""
    shapes = {"layers": {"mlp": {"up_proj": {"kernel": (8, 64, 256)}}}}
    params = random_tree(shapes, 0)

    def step():
        tx = scale_by_muon()
        compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled(params, tx.init(params), params)[0]

    whole, want = step()
    monkeypatch.setattr(muon_module, "TOGETHER", 2 * 64 * 256 + 1)
    parts, got = step()
    assert whole - parts > 0.75 * 4 * 8 * 64 * 256
    # As above; a step is 0.2 · √256 times an iterate.
    assert_trees_close(got, want, atol=3.4**5 * 2.0**-22 * 0.2 * 256**0.5)


def test_the_state_is_that_of_earlier_checkpoints():
    """Runs of version 0.1, which took Muon's momentum from optax, resume."""
    params = random_tree(SHAPES, 0)

    def dimensions(params):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers((1,), (2,)), params)

    labels = {"layers": {"attn": "muon", "mlp": "muon"}, "lm_head": "adam"}
    optaxs = optax.contrib.scale_by_muon(weight_dimension_numbers=dimensions)
    muon = optax.chain(optaxs, optax.stateless(lambda updates, params: updates))
    earlier = optax.partition({"muon": muon, "adam": optax.scale_by_adam()}, labels)
    got, want = (jax.eval_shape(tx.init, params) for tx in (scale_by_muon(), earlier))
    assert jax.tree.leaves_with_path(got) == jax.tree.leaves_with_path(want)


@pytest.mark.parametrize(
    ("mesh", "layers", "most", "moves"),
    [
        (
            dict(fsdp=4, tensor=2),
            8,
            1.1,
            8,
        ),  # over each axis: one collective for each matrix, and one for its step
        (dict(fsdp=2, context=4), 8, 1.1, 8),  # both axes shard the same dim
        (dict(fsdp=2, context=2, tensor=2), 8, 1.1, 12),
        (dict(fsdp=4), 6, 8 / 6 * 1.1, 4),  # with two layers of zeros
        (dict(fsdp=2, tensor=2, data=2), 3, 4 / 3 * 1.1, 8),
        (dict(fsdp=4), 1, 1.6, 8),  # of a single layer, all split the long side
        (dict(stage=2, fsdp=2), 2, 1.3, 8),  # fsdp splits the long side: two devices square a Gram matrix
    ],
    ids=str,
)
def test_a_mesh_shares_the_work_and_no_device_gathers_a_stack(mesh, layers, most, moves):
    shapes = {"up_proj": {"kernel": (layers, 32, 128)}, "down_proj": {"kernel": (layers, 128, 32)}}
    names = {"up_proj": {"kernel": ("layers", "embed", "mlp")}}
    names |= {"down_proj": {"kernel": ("layers", "mlp", "embed")}}
    shapes, names = ({"layers": {"mlp": tree}} for tree in (shapes, names))
    params, grads = random_tree(shapes, 0), [random_tree(shapes, seed) for seed in (1, 2)]
    tx = optax.chain(scale_by_muon(), optax.add_decayed_weights(0.1), optax.scale(-1e-2))
    devices = jax.devices()[: np.prod(list(mesh.values()))]
    mesh = sharding.make_mesh(**mesh, devices=devices)
    got, _, step = run_on_mesh(tx, mesh, names, params, grads)
    want, _ = run(tx, params, grads)
    # As above, in two steps of 1e-2 · 0.2 · √128 times an iterate.
    assert_trees_close(jax.device_get(got), jax.device_get(want), atol=2e-6)

    alone = jitted_step(tx).lower(grads[0], tx.init(params), params).compile().cost_analysis()["flops"]
    assert step.cost_analysis()["flops"] < most * alone / (len(devices) // mesh.shape["data"])
    moved = re.findall(r" = (.*?) all-(?:gather|reduce)(?:-start)?\(", step.as_text())
    shapes = [shape for result in moved for shape in re.findall(r"\w+\[([\d,]+)\]", result)]
    assert all(np.prod([int(n) for n in shape.split(",")]) < layers * 32 * 128 for shape in shapes)
    assert 0 < len(re.findall(r" all-to-all(?:-start)?\(", step.as_text())) <= moves


def test_the_second_moments_of_neurons_are_float32_of_bfloat16_parameters_too():
    params = optax.tree.cast(random_tree(SHAPES, 0), "bfloat16")
    tx = scale_by_normuon()
    before = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(tx.update, params, before, params)
    for state in (before, after):
        [(_, neurons)] = find_states(state, muon_module.NeuronState)
        assert {leaf.dtype for leaf in jax.tree.leaves(neurons.v)} == {jnp.dtype(jnp.float32)}
