"""The project's configs, with changes, for tests of runs."""

import importlib

import jax
import numpy as np
from ml_collections import ConfigDict

from tests import fixtures


def load(name: str, arg: str = "", family: str = "llama") -> ConfigDict:
    """A preset, with placeholders for an unset source and tokenizer."""
    c = importlib.import_module(f"configs.{family}.{name}").get_config(arg)
    if c.data.source is None:
        c.data.source = c.data.tokenizer = "unread"
    return c


def changed(c: ConfigDict, values: dict) -> ConfigDict:
    """Changes a config in place by the full names of keys ("model.dtype"), and returns it."""
    with c.unlocked():
        c.update_from_flattened_dict(values)
    return c


def zeros(abstract: dict) -> dict:
    """A state of zeros with these shapes: `initial_state` would have to be compiled."""
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)


# The model of `tests.fixtures`, as values of a config.
SMALL = {f"model.{k}": v for k, v in fixtures.LLAMA.items() if k not in ("init_std", "rope_scaling")}
# Values of a config whose Llama compiles in seconds.
TINY = {
    **{f"model.{key}": 2 for key in ("num_layers", "num_heads", "num_kv_heads")},
    **{"model.embed_dim": 32, "model.head_dim": 16, "model.mlp_dim": 64, "model.vocab_size": 512},
    "data.source": "stdlib?validation=0.002",
    "data.tokenizer": "bytes",
    "data.seq_len": 32,
    "data.shuffle_tokens": 4096,
}
