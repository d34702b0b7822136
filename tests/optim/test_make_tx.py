"""The chain that `make_tx` builds: clipping, rescaling, weight decay and learning rate."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlp import optim
from maxlp.optim.tree_utils import name_of
from tests import fixtures
from tests.families.clip.fixtures import SIGLIP, make_clip
from tests.optim.common import each_step, is_shape, make_optimizer, random_tree

COSINE = dict(schedule="cosine", warmup_steps=3, total_steps=11, final_lr_fraction=0.1)


def llama_shapes(*stack):
    """Paths and shapes of a Llama; `stack` is the leading layer axis, or nothing for one layer."""
    layer = {
        "attn_norm": {"scale": (4,)},
        "attn": {f"{p}_proj": {"kernel": (4, 4)} for p in "qkvo"},
        "mlp_norm": {"scale": (4,)},
        "mlp": {f"{p}_proj": {"kernel": (4, 8)} for p in ("gate", "up")},
    }
    layer["mlp"]["down_proj"] = {"kernel": (8, 4)}
    return {
        "tok_embed": {"embedding": (16, 4)},
        "layers": jax.tree.map(lambda s: (*stack, *s), layer, is_leaf=is_shape),
        "final_norm": {"scale": (4,)},
        "lm_head": {"kernel": (4, 16)},
    }


@pytest.mark.parametrize("stack", [(), (3,)], ids=["one layer", "stacked"])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_the_mask_depends_on_the_path_and_not_on_the_rank(stack, decay_embeddings):
    params = random_tree(llama_shapes(*stack), 0)
    params["layers"]["attn"]["q_proj"]["bias"] = jnp.zeros((*stack, 4))
    params["layers"]["attn"]["q_proj"]["adapter"] = {
        "a": jnp.zeros((*stack, 4, 2)),
        "b": jnp.zeros((*stack, 2, 4)),
    }
    mask = optim.decay_mask(params, decay_embeddings)
    flat, _ = jax.tree.flatten_with_path(mask)
    picked = {jax.tree_util.keystr(path, simple=True, separator="/") for path, m in flat if m}
    kernels = {f"layers/attn/{p}_proj/kernel" for p in "qkvo"}
    kernels |= {f"layers/mlp/{p}_proj/kernel" for p in ("gate", "up", "down")} | {"lm_head/kernel"}
    kernels |= {f"layers/attn/q_proj/adapter/{name}" for name in "ab"}
    assert picked == kernels | ({"tok_embed/embedding"} if decay_embeddings else set())


def numpy_adamw(params, grads_of_step, decayed, *, lr, b1, b2, eps, weight_decay, clip_norm):
    """Algorithm 2 of Loshchilov & Hutter 2019 after a global-norm clip, in float64."""
    p = [np.asarray(x, np.float64) for x in params]
    m, v = [0.0] * len(p), [0.0] * len(p)
    for step, grads in enumerate(grads_of_step):
        g = [np.asarray(x, np.float64) for x in grads]
        norm = np.sqrt(sum((x**2).sum() for x in g))
        g = [x * min(1.0, clip_norm / norm) for x in g]
        for i in range(len(p)):
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            v[i] = b2 * v[i] + (1 - b2) * g[i] ** 2
            m_hat, v_hat = m[i] / (1 - b1 ** (step + 1)), v[i] / (1 - b2 ** (step + 1))
            update = m_hat / (np.sqrt(v_hat) + eps) + weight_decay * decayed[i] * p[i]
            p[i] = p[i] - lr[step] * update
    return p


def test_ten_steps_equal_adamw_in_numpy():
    shapes = {"kernel": (8, 16), "scale": (16,)}
    params = random_tree(shapes, 0)
    # Norms from 0.001 to 36, so that some steps are clipped and some are not.
    grads = [random_tree(shapes, 1 + i, scale) for i, scale in enumerate(np.geomspace(1e-4, 3, 10))]
    norms = [float(optax.global_norm(g)) for g in grads]
    assert min(norms) < 0.1 and max(norms) > 10

    keys = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    made = make_optimizer(**COSINE, **keys)
    *_, (_, got, _) = each_step(made.tx, params, grads)
    expected = numpy_adamw(
        jax.tree.leaves(params),
        [jax.tree.leaves(g) for g in grads],
        jax.tree.leaves(optim.decay_mask(params, False)),
        lr=[float(made.schedule(i)) for i in range(10)],
        **keys,
    )
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        # Ten steps round parameters of up to 4, by up to 1.2e-7 each.
        np.testing.assert_allclose(a, b, atol=2e-6)


def first_update(scale, **changes):
    params = {"kernel": jnp.ones((2, 2))}
    tx = make_optimizer(**dict(clip_norm=1.0, eps=1.0) | changes).tx
    grads = {"kernel": scale * jnp.ones((2, 2))}
    return float(tx.update(grads, tx.init(params), params)[0]["kernel"][0, 0])


def test_clipping_scales_down_to_the_norm_and_never_up():
    # With eps=1, Adam's step depends on the scale of its input. The norm of the gradient is 2 * scale.
    assert first_update(40.0) == pytest.approx(first_update(0.5), rel=1e-6)
    assert first_update(0.05) == first_update(0.05, clip_norm=0.0)
    assert abs(first_update(40.0, clip_norm=0.0)) > 2 * abs(first_update(40.0))


def test_clipping_sums_gradients_in_16_bits_in_float32():
    """In bfloat16 no small tensor would count beside a large one; the parameters' own dtype is bfloat16."""
    grads = {f"w{i}": jnp.ones(64 if i else 2**16, jnp.bfloat16) for i in range(40)}
    tx = make_optimizer(name="sgd", b1=0.0, learning_rate=1.0, clip_norm=1.0).tx
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert {u.dtype for u in updates.values()} == {jnp.dtype("bfloat16")}
    norm = optax.tree.norm(optax.tree.cast(updates, jnp.float32))
    np.testing.assert_allclose(norm, 1.0, rtol=2**-8)  # an element is rounded by at most 2^-9


def test_options_reach_the_optimizer():
    assert first_update(0.1, options={"nesterov": True}) != first_update(0.1)


def test_mu_dtype_holds_only_the_first_moment():
    state = make_optimizer(mu_dtype="bfloat16").tx.init({"kernel": jnp.ones((2, 2))})
    assert optax.tree.get(state, "mu")["kernel"].dtype == jnp.bfloat16
    assert optax.tree.get(state, "nu")["kernel"].dtype == jnp.float32


def test_low_bit_goes_around_galore_and_galore_around_the_optimizer():
    formats = {"mu": "float8_e4m3fn", "nu": "float8_e5m2", "min_size": 0}
    tx = make_optimizer(clip_norm=1.0, galore={"rank": 2}, low_bit=formats).tx
    rescale = jax.eval_shape(tx.init, random_tree(llama_shapes(2), 0))[1]
    nu = rescale.inner.inner.nu["layers"]["mlp"]["up_proj"]["kernel"]
    assert nu.codes.dtype == jnp.float8_e5m2 and nu.codes.shape == (2, 2, 8)
    assert rescale.inner.subspaces["layers"]["mlp"]["up_proj"]["kernel"].projector.shape == (2, 4, 2)


def test_an_optimizer_is_imported_only_when_a_config_names_it():
    """AdamW's own code: the files that the package imports at its top, and what those import."""
    root, files = Path(optim.__file__).parent, {"__init__"}
    for _ in range(5):
        for name in list(files):
            for node in ast.parse((root / f"{name}.py").read_text()).body:
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("maxlp.optim."):
                    files.add(str(node.module).rpartition(".")[2])
    assert files == {
        "__init__",
        "config",
        "make_tx",
        "rms",
        "schedules",
        "tree_utils",
    }


@pytest.mark.parametrize(
    "options",
    [
        *({"name": name} for name in ("adamw", "muon", "soap", "schedule_free_adamw")),
        dict(galore=dict(rank=2), low_bit=dict(mu="dynamic8", nu="dynamic8", block_size=32)),
        dict(param_rounding="stochastic"),
    ],
    ids=str,
)
def test_the_rate_of_the_last_update_is_that_of_the_schedule(options):
    """The metric of runs whose steps may be rejected: a rejected one leaves the state as it was."""
    schedule = {"schedule": "constant"} if options.get("name") == "schedule_free_adamw" else {}
    optimizer = make_optimizer(**COSINE | schedule | options)
    params = random_tree({"layers": {"mlp": {"up_proj": {"kernel": (2, 4, 8)}}}}, 0)
    if "param_rounding" in options:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    rate = optimizer.rate_of_last_update(optimizer.tx.init(params))
    assert rate["learning_rate"] == optimizer.schedule(0)
    for step, (*_, state) in enumerate(each_step(optimizer.tx, params, [params] * 3)):
        found = optimizer.rate_of_last_update(state)["learning_rate"]
        np.testing.assert_array_equal(found, jnp.float32(optimizer.schedule(step)))


def decayed_and_not(make_model):
    """The last parts of the names of a model's parameters that decay, and of those that do not."""
    params = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(make_model(), nnx.Param)))
    flat = [(name_of(path), m) for path, m in jax.tree.leaves_with_path(optim.decay_mask(params, False))]
    return tuple({name.rpartition("/")[2] for name, m in flat if m == decays} for decays in (True, False))


def test_kernels_decay_and_nothing_else_of_any_model():
    """Neither norms, gains and biases, nor CLIP's class token, positions, query and logit scale."""
    assert decayed_and_not(lambda: fixtures.make_llama()(nnx.Rngs(0))) == (
        {"kernel"},
        {"embedding", "scale"},
    )
    tables = {"embedding", "scale", "bias", "pos_embed", "logit_scale"}
    assert decayed_and_not(lambda: make_clip(layer_scale=0.1)) == ({"kernel"}, tables | {"class_embed"})
    assert decayed_and_not(lambda: make_clip(**SIGLIP)) == ({"kernel"}, tables | {"probe", "logit_bias"})
