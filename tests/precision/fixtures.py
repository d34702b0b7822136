"""Small models under any recipe, and their train step on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxlp import precision
from maxlp.core import gradients, train_state, train_step
from maxlp.families.llama import task
from maxlp.families.llama.model import Llama, LlamaConfig
from maxlp.nn import layers, stack
from maxlp.parallel import sharding
from maxlp.parallel.batches import global_batch
from maxlp.precision import QuantDot, delayed, make_recipe

# --- one layer ----------------------------------------------------------------------------------------


class Layer:
    """A `QuantDot` outside of a model: `step` is its forward and backward pass as a pure function."""

    def __init__(self, recipe):
        self.structure, backward, forward = nnx.split(QuantDot(recipe), delayed.OverwriteWithGradient, ...)
        self.state = nnx.to_pure_dict(forward), nnx.to_pure_dict(backward)

    def step(self, state, x, kernel, g, out_sharding=None):
        """Output, gradients of input and kernel, and the new state; the kernel is cast as in `Linear`."""
        forward, backward = state
        numbers = (((x.ndim - 1,), (0,)), ((), ()))

        def product(x, kernel, backward):
            dot = nnx.merge(self.structure, forward, backward, copy=True)
            y = dot(x, kernel.astype(x.dtype), numbers, out_sharding=out_sharding)
            return y, nnx.to_pure_dict(nnx.split(dot, delayed.OverwriteWithGradient, ...)[2])

        y, pull, forward = jax.vjp(product, x, kernel, backward, has_aux=True)
        dx, dkernel, backward = pull(g)
        return y, dx, dkernel, (forward, backward)


# --- a Llama of two small blocks ----------------------------------------------------------------------

SIZES = dict(
    vocab_size=64,
    embed_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=96,
    max_seq_len=128,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=0.1,
    param_dtype="float32",
    attention="xla",
)
GATED_PRODUCTS = ("*/mlp/down_proj",)


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
        config = LlamaConfig(**SIZES, scan_layers=scan, remat=remat, dtype=dtype)
        model = Llama(config, rngs=rngs)
        made = make_recipe(recipe, **options)
        precision.inject(model, made, first_blocks=first, last_blocks=last, rules=rules)
        return model

    return make


# --- a network without rounding: whatever the order of its sums, its numbers are the same to the bit ---


class ExactBlock(stack.Block):
    def __init__(self, rngs):
        sizes = dict(axes=("embed", "mlp"), std=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
        self.up_proj = layers.Linear(8, 16, **sizes)
        self.down_proj = layers.Linear(16, 8, **(sizes | dict(axes=("mlp", "embed"))))

    def __call__(self, x_BSD):
        return x_BSD + self.down_proj(jax.nn.relu(self.up_proj(x_BSD)))


class Exact(nnx.Module):
    """Weights of -1, 0 and 1, most of them 0; the loss weighs outputs by the batch's small integers."""

    def __init__(self, scan, remat, rngs, num_layers=3, **how):
        self.layers = stack.stack(ExactBlock, num_layers, rngs)
        for linear in (self.layers.up_proj, self.layers.down_proj):
            draw = jax.random.randint(rngs.params(), linear.kernel.shape, 0, 8)
            linear.kernel[...] = jnp.where(draw == 0, 1.0, jnp.where(draw == 1, -1.0, 0.0))
        self.how = nnx.static(dict(num_layers=num_layers, scan=scan, remat=remat, **how))

    def __call__(self, x_BSD):
        return stack.apply_stack(self.layers, x_BSD, lambda block, x, *_: (block(x), None), **self.how)[0]


def exact_loss(model, batch):
    x_BSD = batch["x"].reshape(*batch["loss_mask"].shape, 8).astype(jnp.float32)
    y_BSD = model(sharding.constrain(x_BSD, "batch", None, None))
    weight_BSD = batch["weight"].reshape(y_BSD.shape).astype(jnp.float32)
    return {"loss": jnp.sum(y_BSD * weight_BSD), "correct": jnp.zeros((), jnp.float32)}


def exact_batch(seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(-2, 3, (16, 4 * 8), np.int32),
        "weight": rng.integers(-1, 2, (16, 4 * 8), np.int32),
        "loss_mask": np.ones((16, 4), bool),  # 64 tokens: the mean is exact
    }


def exact_model(scan, remat, unquantized_blocks=0, **how):
    def make(rngs):
        model = Exact(scan, remat, rngs, **how)
        recipe = make_recipe("fp8_delayed", history=3)
        precision.inject(model, recipe, first_blocks=unquantized_blocks, last_blocks=unquantized_blocks)
        return model

    return make


# --- training -----------------------------------------------------------------------------------------

# With excess precision XLA keeps float32 between fused bfloat16 operations; which are fused differs
# between layouts, and the numbers with it.
NO_EXCESS_PRECISION = {"xla_allow_excess_precision": False}


def next_token_loss(model, batch):
    return task.next_token_sums(model, batch, task.NextTokenConfig())


def token_gradients(loss_sums=next_token_loss, microbatches=1):
    return gradients.token_gradients(loss_sums, task.num_targets, microbatches=microbatches)


def abstract_step(make, mesh, tx, grads):
    """(structure, abstract state, jitted train step)."""
    with jax.set_mesh(mesh):
        graphdef, abstract = train_state.abstract_state(make, tx, mesh)
        how = dict(gradients=grads, tx=tx, schedule=optax.constant_schedule(0.1))
        step = functools.partial(train_step.train_step, **how)
        return graphdef, abstract, train_step.jit_step(step, graphdef, abstract, mesh)


def trainer(make, *, mesh=None, microbatches=1, tx=None, loss_sums=next_token_loss, params=None):
    """The initial state and the function (state, batch) -> (state, metrics).

    Args:
      params: initial parameters, by default those that `make` draws; to save their compilation.
    """
    mesh = sharding.make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    tx = optax.sgd(0.1) if tx is None else tx
    _, abstract, train = abstract_step(make, mesh, tx, token_gradients(loss_sums, microbatches))
    shardings = train_state.shardings(abstract)
    with jax.set_mesh(mesh):
        if params is None:
            state = jax.jit(lambda: train_state.init_state(make, tx, 0), out_shardings=shardings)()
        else:
            state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
            state = jax.device_put(dict(state, params=params), shardings)

    compiled = []

    def run(state, batch):
        with jax.set_mesh(mesh):
            batch = global_batch(batch, mesh)
            if not compiled:
                compiled.append(train.lower(state, batch).compile(compiler_options=NO_EXCESS_PRECISION))
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
