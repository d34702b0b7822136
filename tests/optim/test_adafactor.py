"""Adafactor by its definition: factored second moments, and steps clipped for each layer's tensor."""

import functools

import jax
import numpy as np

from maxlp.optim.adafactor import scale_by_adafactor
from tests.optim.common import each_step, random_tree

DECAY, THRESHOLD = 0.7, 0.5
LAYERS = 9  # more than a matrix has rows
SHAPES = {"layers": {"mlp": {"up_proj": {"kernel": (LAYERS, 6, 8)}}, "mlp_norm": {"scale": (LAYERS, 8)}}}
EPS = 1e-30  # Adafactor's ε₁


def adafactor(grads):
    """Algorithm 4 of Shazeer & Stern 2018 for one tensor, without its learning rate; in float64."""
    row = column = whole = 0.0
    for t, g in enumerate(grads, 1):
        keep = 1 - t**-DECAY
        square = g**2 + EPS
        if g.ndim == 1:
            whole = keep * whole + (1 - keep) * square
            v = whole
        else:
            row = keep * row + (1 - keep) * square.mean(axis=1)
            column = keep * column + (1 - keep) * square.mean(axis=0)
            v = np.outer(row, column) / row.mean()
        u = g / np.sqrt(v)
    return u / max(1.0, np.sqrt(np.mean(u**2)) / THRESHOLD)


def test_three_steps_equal_the_definition_for_each_layer():
    params = random_tree(SHAPES, 0)
    # One layer of larger gradients: a common RMS would clip both layers alike.
    sizes = np.array([1.0] * (LAYERS - 1) + [30.0], np.float32)
    grads = [random_tree(SHAPES, seed) for seed in (1, 2, 3)]
    grads[-1] = jax.tree.map(lambda g: g * sizes.reshape(-1, *(1,) * (g.ndim - 1)), grads[-1])
    tx = scale_by_adafactor(decay_rate=DECAY, min_dim_size_to_factor=4, clipping_threshold=THRESHOLD)
    *_, (updates, _, _) = each_step(tx, params, grads)
    kernels = [np.asarray(g["layers"]["mlp"]["up_proj"]["kernel"], np.float64) for g in grads]
    scales = [np.asarray(g["layers"]["mlp_norm"]["scale"], np.float64) for g in grads]
    # Means of up to 9 squares in float32, and their roots, in three steps.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    for layer in range(LAYERS):
        ours = updates["layers"]["mlp"]["up_proj"]["kernel"][layer]
        close(ours, adafactor([g[layer] for g in kernels]))
        ours = updates["layers"]["mlp_norm"]["scale"][layer]
        # A stack of vectors is a matrix of layers and entries: it is not factored.
        close(ours, adafactor([g[layer] for g in scales]))
