"""Which settings can be combined: the one table of rules.

`train`, its ``--dry_run``, `plan`, its closed form and its search accept the same configs because all of
them call `check`. What a single section must fulfil is checked by its dataclass; here are the rules that
relate sections to each other, to the mesh and to the platform. A family adds rules of its own
(`families.Family.rules`).

A rule is a function of (settings, machine) to a message, or None if it is fulfilled. The message starts
with a config key, names the values, and ends with the way out. The rule's docstring is its reason;
`docs/composition.md` prints it.
"""

import jax.numpy as jnp
from flax import nnx

from maxlp.nn.attention import refusal
from maxlp.nn.stack import REMAT_POLICIES
from maxlp.parallel import sharding
from maxlp.run.config import ConfigError, errors_of
from maxlp.run.settings import Machine, Settings

DTYPES = ("float32", "bfloat16", "float16")


def check(s: Settings, machine: Machine) -> None:
    """Raises a ConfigError with the message of the first rule that is not fulfilled."""
    for rule in (*s.family.rules, *RULES):
        if message := rule(s, machine):
            raise ConfigError(f"config.{message}")


# --- names ----------------------------------------------------------------------------------------------


def dtypes_are_known(s: Settings, machine: Machine) -> str | None:
    """Models compute in three dtypes."""
    for key in ("dtype", "param_dtype"):
        if (value := getattr(s.model, key)) not in DTYPES:
            return f"model.{key}={value!r} is unknown; one of {', '.join(DTYPES)}"
    return None


def remat_is_known(s: Settings, machine: Machine) -> str | None:
    """A remat policy is chosen by name."""
    if s.model.remat in REMAT_POLICIES:
        return None
    return f"model.remat={s.model.remat!r} is unknown; one of {', '.join(REMAT_POLICIES)}"


# --- batch and mesh -------------------------------------------------------------------------------------


def batch_divides(s: Settings, machine: Machine) -> str | None:
    """Every device has the same number of rows in every microbatch."""
    shards, microbatches = machine.batch_shards, s.train.microbatches
    if s.data.batch_size % (shards * microbatches) == 0:
        return None
    return (
        f"data.batch_size={s.data.batch_size} is not a multiple of {shards} data shards × "
        f"train.microbatches={microbatches}; use a multiple of {shards * microbatches}"
    )


def attention_runs(s: Settings, machine: Machine) -> str | None:
    """Each attention kernel supports only some platforms, lengths, dtypes and numbers of heads."""
    uses = s.family.attention_uses(s.model, s.data)
    found = (refusal(s.on(machine).model.attention, use, machine.axes, machine.platform) for use in uses)
    return next(filter(None, found), None)


# --- precision ------------------------------------------------------------------------------------------


def float16_is_scaled(s: Settings, machine: Machine) -> str | None:
    """Gradients underflow in float16 unless the loss is scaled (Micikevicius et al. 2018)."""
    if s.model.dtype != "float16" or s.precision.loss_scale is not None:
        return None
    return (
        "model.dtype=float16 needs precision.loss_scale, or its gradients underflow; choose both with "
        "--config=FILE:precision=fp16"
    )


def params_are_not_float16(s: Settings, machine: Machine) -> str | None:
    """Adam's epsilon and small second moments round to 0 in float16, and the update becomes 0 / 0."""
    if s.model.param_dtype != "float16":
        return None
    return (
        "model.param_dtype=float16 cannot hold the optimizer's epsilon and second moments; use float32 "
        "(also with model.dtype=float16) or bfloat16"
    )


def rounded_params_are_bfloat16(s: Settings, machine: Machine) -> str | None:
    """Stochastic and Kahan rounding replace the float32 copy of bfloat16 parameters."""
    if s.optimizer.param_rounding is None or jnp.dtype(s.model.param_dtype) == jnp.bfloat16:
        return None
    return (
        f"optimizer.param_rounding={s.optimizer.param_rounding} is for model.param_dtype=bfloat16, not for "
        f"{s.model.param_dtype}; change one of them"
    )


def precision_fits_model(s: Settings, machine: Machine) -> str | None:
    """Every rule names a matmul, blocks remain to be quantized, and block scales divide the kernels."""
    _ = s.matmuls  # raises a ConfigError
    return None


def mesh_divides_params(s: Settings, machine: Machine) -> str | None:
    """Every device holds an equal part of every parameter."""
    try:
        sharding.param_shardings(s.params, sharding.abstract_mesh(machine.axes))
    except ValueError as error:
        return str(error)
    return None


def learned_tokenizer_fits_model(s: Settings, machine: Machine) -> str | None:
    """Every token has an embedding. (A tokenizer from a file is read, and checked, when the run starts.)"""
    spec, (key, room) = s.data.tokenizer, s.family.vocabulary(s.model)
    if not spec.startswith("bpe:"):
        return None
    size = spec.removeprefix("bpe:")
    if not size.isdecimal():
        return f"data.tokenizer={spec} does not give a number of tokens; write one, as in bpe:4096"
    return too_many_tokens(spec, int(size), key, room)


def too_many_tokens(spec: str, size: int, key: str, room: int) -> str | None:
    """The message for a tokenizer of ``size`` tokens if the model's ``key`` has room for fewer."""
    if size <= room:
        return None
    return f"data.tokenizer={spec} has {size:,} tokens, but config.{key}={room:,}; set config.{key}={size}"


# --- optimizer ------------------------------------------------------------------------------------------


def galore_targets_are_matrices(s: Settings, machine: Machine) -> str | None:
    """GaLore projects matrices."""
    if s.optimizer.galore is None or not s.optimizer.has_galore:
        return None
    from maxlp.optim.galore import check_targets

    with errors_of("optimizer"):
        check_targets(nnx.to_pure_dict(s.params), s.optimizer.galore)
    return None


# --- released gradients ---------------------------------------------------------------------------------


def released_gradients_are_not_clipped(s: Settings, machine: Machine) -> str | None:
    """The global norm needs all gradients before the first update."""
    if not s.train.release_gradients or s.optimizer.clip_norm == 0:
        return None
    return _released(f"optimizer.clip_norm={s.optimizer.clip_norm}", "optimizer.clip_norm=0.0")


def released_gradients_are_not_accumulated(s: Settings, machine: Machine) -> str | None:
    """A layer's gradient is complete only after the last microbatch."""
    if not s.train.release_gradients or s.train.microbatches == 1:
        return None
    return _released(f"train.microbatches={s.train.microbatches}", "train.microbatches=1")


def released_gradients_are_not_pipelined(s: Settings, machine: Machine) -> str | None:
    """A pipeline's backward pass completes the gradients of all layers of a stage at its end."""
    if not s.train.release_gradients or machine.axes["stage"] == 1:
        return None
    return _released(f"mesh.stage={machine.axes['stage']}", "mesh.stage=1")


def released_gradients_are_not_gated(s: Settings, machine: Machine) -> str | None:
    """A gate rejects a step after its gradients are known, when released ones are applied already."""
    if not s.train.release_gradients:
        return None
    if s.spikes.guard == "skip":
        return _released("spikes.guard=skip", "spikes.guard=rollback or off")
    if s.precision.loss_scale is not None:
        return _released("precision.loss_scale", "model.dtype=bfloat16 and no loss scale")
    return None


def _released(key: str, instead: str) -> str:
    return (
        f"{key} cannot be combined with train.release_gradients=True, which updates each layer in the "
        f"backward pass; set {instead}"
    )


RULES = (
    dtypes_are_known,
    remat_is_known,
    batch_divides,
    attention_runs,
    float16_is_scaled,
    params_are_not_float16,
    rounded_params_are_bfloat16,
    released_gradients_are_not_clipped,
    released_gradients_are_not_accumulated,
    released_gradients_are_not_pipelined,
    released_gradients_are_not_gated,
    precision_fits_model,
    learned_tokenizer_fits_model,
    mesh_divides_params,
    galore_targets_are_matrices,
)
