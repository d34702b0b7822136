"""What tests of optimizers share: small Llama-like trees, short runs, meshes and checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from maxlp import optim
from maxlp.parallel import sharding
from maxlp.parallel.opt_state import opt_state_shardings
from maxlp.runtime.checkpoint import Checkpointer, restore

# The keys that have no default: nothing is clipped, and nothing decays.
REQUIRED = dict(
    learning_rate=1e-2,
    warmup_steps=0,
    final_lr_fraction=0.0,
    clip_norm=0.0,
    weight_decay=0.0,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
)


def optimizer_config(**changes):
    """A config with a constant rate and these changes of `REQUIRED`; galore, low_bit, adagc are dicts."""
    kinds = dict(galore=optim.GaloreConfig, low_bit=optim.LowBitConfig, adagc=optim.AdaGCConfig)
    parts = {key: kind(**changes[key]) for key, kind in kinds.items() if changes.get(key) is not None}
    return optim.OptimizerConfig(**REQUIRED | {"schedule": "constant"} | changes | parts)


def make_optimizer(*, total_steps=100, microbatches=1, **changes):
    """`optim.make_tx` of an `optimizer_config`."""
    return optim.make_tx(optimizer_config(**changes), total_steps=total_steps, microbatches=microbatches)


def is_shape(x):
    return isinstance(x, tuple)


# Two layers of a projection, and a head.
LAYERS_AND_HEAD = {"layers": {"attn": {"q_proj": {"kernel": (2, 4, 6)}}}, "lm_head": {"kernel": (4, 8)}}


def tensors_of(tree):
    """The tensors of a tree of `LAYERS_AND_HEAD`: of each layer, and of the head."""
    return [*np.asarray(tree["layers"]["attn"]["q_proj"]["kernel"]), np.asarray(tree["lm_head"]["kernel"])]


def random_tree(shapes, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32), shapes, is_leaf=is_shape
    )


@functools.cache
def jitted_step(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


@functools.cache
def jitted_init(tx):
    return jax.jit(tx.init)


def each_step(tx, params, grads_of_step):
    """Updates, parameters and state after each of a compiled optimizer's steps."""
    state, update = jitted_init(tx)(params), jax.jit(tx.update)
    for grads in grads_of_step:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        yield updates, params, state


def run(tx, params, grads_of_step):
    """Parameters and state after one update for each tree of gradients."""
    state, step = jitted_init(tx)(params), jitted_step(tx)
    for grads in grads_of_step:
        params, state = step(grads, state, params)
    return params, state


def run_on_mesh(tx, mesh, names, params, grads_of_step):
    """As `run`, on a mesh, with the parameters' logical axes in `names`; and the compiled step."""
    places = jax.tree.map(lambda axes: NamedSharding(mesh, sharding.spec(*axes)), names, is_leaf=is_shape)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, places)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
        )
        where = opt_state_shardings(tx, abstract, mesh)
        state = jax.jit(tx.init, out_shardings=where)(params)
        grads_of_step = [jax.device_put(grads, places) for grads in grads_of_step]
        step = jax.jit(jitted_step(tx), out_shardings=(places, where))
        step = step.lower(grads_of_step[0], state, params).compile()
        for grads in grads_of_step:
            params, state = step(grads, state, params)
    return params, state, step


def saved_and_restored(directory, saved, wanted=None):
    """The state, or the part `wanted` of it, after a save and a restore."""
    with Checkpointer(directory, every_steps=1) as checkpointer:
        checkpointer.save(1, saved, {})
    mesh = sharding.make_mesh(fsdp=1, data=1, devices=jax.devices()[:1])
    place, wanted = sharding.replicated(mesh), saved if wanted is None else wanted
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), wanted)
    return restore(directory, abstract).state


def assert_trees_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_trees_close(got, want, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)
