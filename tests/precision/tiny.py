"""A Llama of two small blocks under any recipe, and its train step on any mesh."""

import jax
import numpy as np
import optax
from flax import nnx

from maxlp import precision
from maxlp.core import gradients
from maxlp.core import train_step as step
from maxlp.families.llama import task as language
from maxlp.families.llama.model import Llama
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch

SIZES = dict(
    vocab_size=64,
    embed_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=96,
    max_seq_len=32,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=0.1,
    param_dtype="float32",
    attention="xla",
)


def batch(seed, rows=8, length=32):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, SIZES["vocab_size"], (rows, length + 1), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "loss_mask": np.ones((rows, length), bool),
    }


def make_model(
    recipe="fp8_delayed", *, scan=True, remat="none", dtype="bfloat16", first=0, last=0, rules=(), **options
):
    def make(rngs):
        model = Llama(**SIZES, scan_layers=scan, remat=remat, dtype=dtype, rngs=rngs)
        made = precision.make_recipe(recipe, **options)
        precision.inject(model, made, first_blocks=first, last_blocks=last, rules=rules)
        return model

    return make


def trainer(make, *, mesh=None, microbatches=1, tx=None, loss_fn=language.next_token_loss):
    """The initial state and the function (state, batch) -> (state, metrics)."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    tx = optax.sgd(0.1) if tx is None else tx
    with jax.set_mesh(mesh):
        graphdef, abstract = step.abstract_state(make, tx, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        state = jax.jit(lambda: step.init_state(make, tx, 0), out_shardings=shardings)()
        train = step.jit_train_step(
            abstract,
            mesh,
            graphdef=graphdef,
            gradients=gradients.of_sums(loss_fn, language.num_targets, microbatches=microbatches),
            tx=tx,
            schedule=optax.constant_schedule(0.1),
        )

    # With excess precision XLA keeps float32 between fused bfloat16 operations; which are fused differs
    # between layouts, and the numbers with it.
    options = {"xla_allow_excess_precision": False}
    compiled = []

    def run(state, batch):
        with jax.set_mesh(mesh):
            batch = global_batch(batch, mesh)
            if not compiled:
                compiled.append(train.lower(state, batch).compile(compiler_options=options))
            return compiled[0](state, batch)

    return state, run


def warm(state, **amax):
    """The state with histories full of an amax for each of input, kernel and output_grad."""

    def fill(path, history):
        (value,) = (value for name, value in amax.items() if f"{name}_amax" in str(path))
        return jax.device_put(np.full(history.shape, value, np.float32), history.sharding)

    return dict(state, model_state=jax.tree_util.tree_map_with_path(fill, state["model_state"]))


def histories(state):
    """Path → float32 history (L, H) as numpy."""
    flat = nnx.traversals.flatten_mapping(state["model_state"])
    return {"/".join(map(str, k)): np.asarray(v) for k, v in flat.items()}
