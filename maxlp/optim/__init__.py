"""Optimizers: a config section becomes one optax chain (`make_tx`).

A new optimizer is a file with a `scale_by_<x>` function, which takes those of `b1, b2, eps, mu_dtype` that
it needs and its own options as keywords, and with its `config.OptimizerKind`, and an entry in
`config.OPTIMIZERS`. On a mesh, states are sharded like their parameters: see `parallel.opt_state`.
"""

from maxlp.optim.config import OPTIMIZERS, AdaGCConfig, GaloreConfig, LowBitConfig, OptimizerConfig
from maxlp.optim.make_tx import decay_mask, eval_params, make_tx
from maxlp.optim.tree_utils import state_bytes

__all__ = [
    "OPTIMIZERS",
    "AdaGCConfig",
    "GaloreConfig",
    "LowBitConfig",
    "OptimizerConfig",
    "decay_mask",
    "eval_params",
    "make_tx",
    "state_bytes",
]
