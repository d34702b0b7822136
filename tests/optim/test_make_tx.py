import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlp import optim

BASE = dict(
    learning_rate=1e-2,
    schedule="cosine",
    warmup_steps=3,
    total_steps=11,
    final_lr_fraction=0.1,
    clip_norm=1.0,
    weight_decay=0.1,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
)


def is_shape(x):
    return isinstance(x, tuple)


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


def random_tree(shapes, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), shapes, is_leaf=is_shape
    )


def schedule_values(name, **changes):
    _, schedule = optim.make_tx(**(BASE | {"schedule": name, "learning_rate": 1.0} | changes))
    return np.array([schedule(step) for step in range(13)])


def test_warmup_rises_evenly_to_the_peak_and_wastes_no_step():
    for name in optim.SCHEDULES:
        np.testing.assert_allclose(schedule_values(name)[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
        assert schedule_values(name, warmup_steps=0)[0] == 1.0


def test_linear_is_a_line():
    values = schedule_values("linear")[3:12]
    np.testing.assert_allclose(np.diff(values), np.diff(values)[0], rtol=1e-4)


def test_cosine_is_the_closed_form():
    progress = np.minimum(np.arange(3, 13) - 3, 8) / 8
    expected = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * progress))
    np.testing.assert_allclose(schedule_values("cosine")[3:], expected, rtol=1e-5)


def test_wsd_stays_then_falls_linearly():
    # A decay over 4/11 of 11 steps starts at step 7 and ends at step 11.
    values = schedule_values("wsd", decay_fraction=4 / 11)
    np.testing.assert_allclose(values[3:8], 1.0, rtol=1e-6)
    np.testing.assert_allclose(values[7:], [1, 0.775, 0.55, 0.325, 0.1, 0.1], rtol=1e-6)


def test_constant_stays():
    assert (schedule_values("constant")[3:] == 1.0).all()


@pytest.mark.parametrize("stack", [(), (3,)], ids=["one layer", "stacked"])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_mask_goes_by_path_and_not_by_rank(stack, decay_embeddings):
    params = random_tree(llama_shapes(*stack), 0)
    params["layers"]["attn"]["q_proj"]["bias"] = jnp.zeros((*stack, 4))
    mask = optim.decay_mask(params, decay_embeddings)
    flat, _ = jax.tree.flatten_with_path(mask)
    picked = {jax.tree_util.keystr(path, simple=True, separator="/") for path, m in flat if m}
    kernels = {f"layers/attn/{p}_proj/kernel" for p in "qkvo"}
    kernels |= {f"layers/mlp/{p}_proj/kernel" for p in ("gate", "up", "down")} | {"lm_head/kernel"}
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
    params = random_tree(llama_shapes(2), 0)
    # Norms from 0.002 to 60, so that some steps are clipped and some are not.
    scales = np.geomspace(1e-4, 3, 10)
    grads = [
        jax.tree.map(lambda x, s=s: s * x, random_tree(llama_shapes(2), 1 + i))
        for i, s in enumerate(scales)
    ]
    norms = [float(optax.global_norm(g)) for g in grads]
    assert min(norms) < 0.1 and max(norms) > 10

    tx, schedule = optim.make_tx(**BASE)
    state = tx.init(params)
    update = jax.jit(tx.update)
    got = params
    for g in grads:
        updates, state = update(g, state, got)
        got = optax.apply_updates(got, updates)

    expected = numpy_adamw(
        jax.tree.leaves(params),
        [jax.tree.leaves(g) for g in grads],
        jax.tree.leaves(optim.decay_mask(params, False)),
        lr=[float(schedule(i)) for i in range(10)],
        **{k: BASE[k] for k in ("b1", "b2", "eps", "weight_decay", "clip_norm")},
    )
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def first_update(scale, **changes):
    params = {"kernel": jnp.ones((2, 2))}
    tx, _ = optim.make_tx(**(BASE | {"weight_decay": 0.0, "eps": 1.0} | changes))
    grads = {"kernel": scale * jnp.ones((2, 2))}
    return float(tx.update(grads, tx.init(params), params)[0]["kernel"][0, 0])


def test_clipping_scales_down_to_the_norm_and_never_up():
    # With eps 1 Adam is not blind to the scale of its input. The norm of the gradient is 2 * scale.
    assert first_update(40.0) == pytest.approx(first_update(0.5), rel=1e-6)
    assert first_update(0.05) == first_update(0.05, clip_norm=0.0)
    assert abs(first_update(40.0, clip_norm=0.0)) > 2 * abs(first_update(40.0))


def test_stacked_layers_are_updated_like_single_ones():
    stacked = random_tree(llama_shapes(3), 0)["layers"]
    grads = random_tree(llama_shapes(3), 1)["layers"]
    tx, _ = optim.make_tx(**(BASE | {"clip_norm": 0.0}))
    updates, _ = tx.update(grads, tx.init(stacked), stacked)
    for i in range(3):
        layer, g, u = jax.tree.map(lambda x, i=i: x[i], (stacked, grads, updates))
        single, _ = tx.update(g, tx.init(layer), layer)
        jax.tree.map(np.testing.assert_array_equal, single, u)


def test_options_reach_the_optimizer():
    assert first_update(0.1, options={"nesterov": True}) != first_update(0.1)


def test_mu_dtype_holds_only_the_first_moment():
    params = {"kernel": jnp.ones((2, 2))}
    tx, _ = optim.make_tx(**BASE, mu_dtype="bfloat16")
    adam = tx.init(params)[1]
    assert adam.mu["kernel"].dtype == jnp.bfloat16
    assert adam.nu["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "adamww"}, r"'adamww' is unknown, choose one of: adamw, "),
        ({"schedule": "cosin"}, r"schedule='cosin' is unknown, choose one of: cosine, linear, wsd, const"),
        ({"learning_rate": 0.0}, r"learning_rate=0.0 must be positive"),
        ({"warmup_steps": 11}, r"warmup_steps=11 .* below total_steps=11"),
        ({"warmup_steps": -1}, r"warmup_steps=-1"),
        ({"final_lr_fraction": 1.5}, r"final_lr_fraction=1.5"),
        ({"schedule": "wsd", "decay_fraction": 0.9}, r"decay_fraction=0.9 is 10 steps"),
        ({"schedule": "wsd", "decay_fraction": 0.0}, r"decay_fraction=0.0 is 0 steps"),
        ({"clip_norm": -1.0}, r"clip_norm=-1.0"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1"),
        ({"b1": 1.0}, r"b1=1.0"),
        ({"eps": 0.0}, r"eps=0.0"),
        (
            {"options": {"nesterow": True}},
            r"options.nesterow is unknown to optimizer 'adamw', allowed: eps_root, nesterov",
        ),
        ({"options": {"b1": 0.5}}, r"options.b1 is unknown"),
        ({"galore": {"rnk": 4}}, r"galore.rnk is unknown to galore, allowed: rank, update_proj_gap"),
        ({"galore": {}}, r"galore.rank is missing"),
        ({"galore": {"rank": 4, "layer_axes": None}}, r"galore.layer_axes is unknown"),
        ({"low_bit": {"mu": "fp8"}}, r"mu='fp8' is unknown"),
        ({"name": "schedule_free_adamw"}, r"schedule='constant'"),
    ],
)
def test_errors_are_one_line_with_key_and_value(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        optim.make_tx(**(BASE | changes))
    assert "\n" not in str(error.value)


def test_wrappers_are_around_the_optimizer_and_low_bit_outermost():
    tx, _ = optim.make_tx(**BASE, galore={"rank": 2}, low_bit={"min_size": 0})
    params = random_tree(llama_shapes(2), 0)
    rescale = tx.init(params)[1]
    nu = rescale.inner.inner.nu["layers"]["mlp"]["up_proj"]["kernel"]
    assert nu.codes.dtype == jnp.float8_e5m2 and nu.codes.shape == (2, 2, 8)
    assert rescale.inner.subspaces["layers"]["mlp"]["up_proj"]["kernel"].projector.shape == (2, 4, 2)


def test_evaluation_sees_the_average_of_schedule_free_and_the_parameters_of_all_others():
    params, grads = {"kernel": jnp.ones((2, 2))}, {"kernel": jnp.ones((2, 2))}
    for name in optim.OPTIMIZERS:
        if name == "muon":  # has matrices of layers for its own
            continue
        tx, schedule = optim.make_tx(name, **(BASE | {"schedule": "constant", "weight_decay": 0.0}))
        state, trained, iterates = tx.init(params), params, []
        for _ in range(4):
            updates, state = tx.update(grads, state, trained)
            trained = optax.apply_updates(trained, updates)
            if name == "schedule_free_adamw":
                iterates.append(state.z["kernel"])
        seen = optim.eval_params(state, trained)
        if name == "schedule_free_adamw":
            # z weighted by the square of the largest rate so far (Defazio et al. 2024, section 4).
            rates = np.maximum.accumulate([schedule(i + 1) for i in range(4)]) ** 2
            want = sum(w * z for w, z in zip(rates / rates.sum(), iterates, strict=True))
            np.testing.assert_allclose(seen["kernel"], want, rtol=1e-5)
        else:
            assert seen is trained
