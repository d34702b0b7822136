"""Which settings can be combined: the one table of rules.

`train`, its ``--dry_run``, `plan`, its closed form and its search accept the same configs because all of
them call `check`. What a single section must fulfil is checked by its dataclass; here are the rules that
relate sections to each other, to the mesh and to the platform. A family adds rules of its own
(`families.Family.rules`).

A rule is a function of (settings, machine) to a message, or None if it is fulfilled. The message starts
with a config key, names the values, and ends with the fix. The rule's docstring is its reason;
`docs/composition.md` prints it.
"""

from flax import nnx

from maxlp import precision
from maxlp.nn.attention import refusal
from maxlp.parallel import sharding
from maxlp.run.config import ConfigError, errors_of
from maxlp.run.settings import Machine, Settings
from maxlp.runtime.messages import counted


def check(s: Settings, machine: Machine) -> None:
    """Raises a ConfigError with the message of the first rule that is not fulfilled."""
    for rule in (*s.family.rules, *RULES):
        if message := rule(s, machine):
            raise ConfigError(f"config.{message}")


# --- batch and mesh -------------------------------------------------------------------------------------


def batch_divides(s: Settings, machine: Machine) -> str | None:
    """Every device has the same number of rows in every microbatch."""
    shards, microbatches = machine.batch_shards, s.train.microbatches
    if s.data.batch_size % (shards * microbatches) == 0:
        return None
    return (
        f"data.batch_size={s.data.batch_size} is not a multiple of {counted(shards, 'data shard')} × "
        f"train.microbatches={microbatches}; use a multiple of {shards * microbatches}"
    )


def attention_runs(s: Settings, machine: Machine) -> str | None:
    """Each attention kernel supports only some platforms, lengths, dtypes and numbers of heads."""
    kernel, uses = s.on(machine).model.attention, s.attention_uses(machine)
    for use in uses:
        if message := refusal(kernel, use, *machine):
            return message
    return None


# --- precision ------------------------------------------------------------------------------------------


def float16_is_scaled(s: Settings, machine: Machine) -> str | None:
    """Gradients underflow in float16 unless the loss is scaled (Micikevicius et al. 2018)."""
    if s.model.dtype != "float16" or s.precision.loss_scale is not None or s.precision.scalify != "none":
        return None
    return "model.dtype=float16 needs precision.loss_scale or scalify; use --config=FILE:precision=fp16"


def scalify_is_compatible(s: Settings, machine: Machine) -> str | None:
    """Scale propagation replaces all other scales, and needs the whole gradient in plain XLA operations."""
    if s.precision.scalify == "none":
        return None
    from maxlp.run import combinations  # few runs need it

    return combinations.scalify_refusal(s, machine)


def low_communication_is_compatible(s: Settings, machine: Machine) -> str | None:
    """Gradients in 8 bits are sums over rows; replicas that train alone share parameters in float32."""
    if s.precision.exchange == s.precision.scatter == "none" and s.train.local is None:
        return None
    from maxlp.run import combinations  # few runs need it

    return combinations.low_communication_refusal(s, machine)


def both_phases_have_the_same_state(s: Settings, machine: Machine) -> str | None:
    """A run that ends in high precision keeps its state, which must not contain amax histories."""
    if not s.precision.high_precision_from:
        return None
    from maxlp.run import late_phase  # few runs need it

    return late_phase.refusal(s)


def skipped_tensors_have_moments(s: Settings, machine: Machine) -> str | None:
    """A tensor that skips a step keeps its moments, which have its shape. The guard skips whole steps."""
    if s.precision.loss_scale is None or not s.precision.loss_scale.per_tensor:
        return None
    from maxlp.optim import skip_tensors

    return skip_tensors.refusal(s.optimizer, s.spikes.guard)


def float16_params_have_scales(s: Settings, machine: Machine) -> str | None:
    """Gradients in float16 underflow, and Adam's epsilon and small second moments round to 0 there."""
    scaled = s.precision.scalify != "none" and s.optimizer.param_rounding == "nearest"
    if s.model.param_dtype != "float16" or scaled:
        return None
    return (
        "model.param_dtype=float16 needs precision.scalify and optimizer.param_rounding=nearest "
        "(--config=FILE:precision=scalify_fp16_params); or use float32 or bfloat16"
    )


def rounded_params_have_16_bits(s: Settings, machine: Machine) -> str | None:
    """Each rounding replaces the float32 copy of the parameters of one dtype."""
    dtype = "float16" if s.optimizer.param_rounding == "nearest" else "bfloat16"
    if s.optimizer.param_rounding is None or s.model.param_dtype == dtype:
        return None
    return (
        f"optimizer.param_rounding={s.optimizer.param_rounding} is for model.param_dtype={dtype}, not for "
        f"{s.model.param_dtype}; change one of them"
    )


def averages_are_in_float32(s: Settings, machine: Machine) -> str | None:
    """An average over t steps moves by 1/t of a difference, which a parameter in bfloat16 rounds away."""
    if not s.optimizer.kind.averages or s.model.param_dtype == "float32" or s.train.lora is not None:
        return None
    return f"model.param_dtype={s.model.param_dtype} loses the average of {s.optimizer.name}; set float32"


def precision_fits_model(s: Settings, machine: Machine) -> str | None:
    """Every rule names a matmul, blocks remain to be quantized, and block scales divide the kernels."""
    _ = s.matmuls  # raises a ConfigError
    return None


def recipe_uses_its_options(s: Settings, machine: Machine) -> str | None:
    """A recipe or an option that changes nothing would be silently ignored."""
    p = s.precision
    unset = p.options == precision.RecipeOptions() and not p.min_dim and not p.rules
    if p.recipe == "bf16" and unset and p.smooth_swiglu == "none":
        return None
    from maxlp.precision import unused  # runs without a recipe do not need it

    return unused.refusal(p, s.matmuls)


def magnitudes_are_not_pipelined(s: Settings, machine: Machine) -> str | None:
    """The mean is over the whole batch, whose microbatches pass through a pipeline one by one."""
    if not s.precision.magnitudes_every or machine.axes["stage"] == 1:
        return None
    every, stages = s.precision.magnitudes_every, machine.axes["stage"]
    return f"precision.magnitudes_every={every} does not work with mesh.stage={stages}; set it to 0"


# --- parameters and vocabulary --------------------------------------------------------------------------


def mesh_divides_params(s: Settings, machine: Machine) -> str | None:
    """Every device holds an equal part of every parameter, also of frozen ones."""
    try:
        sharding.param_shardings(s.weights, sharding.abstract_mesh(machine.axes))
    except ValueError as error:
        return str(error)
    return None


def trained_tokenizer_fits_model(s: Settings, machine: Machine) -> str | None:
    """Every token has an embedding. (A tokenizer from a file is read, and checked, when the run starts.)"""
    spec = s.data.tokenizer
    if not spec.startswith("bpe:"):
        return None
    size = spec.removeprefix("bpe:")
    if not size.isdecimal():
        return f"data.tokenizer={spec} must be bpe: and a number of tokens, as in bpe:4096, without options"
    return too_many_tokens(s, int(size))


def too_many_tokens(s: Settings, size: int) -> str | None:
    """The message for the tokenizer, of ``size`` tokens, if the model has room for fewer."""
    spec, (key, room) = s.data.tokenizer, s.family.vocabulary(s.model)
    if size <= room:
        return None
    remedy = f"set config.{key}={size}"
    if s.train.init_from and not s.train.swap_tokenizer:  # whose vocabulary is what it is
        remedy = "give that of the weights"
        if s.family.generates_text:
            remedy += f", or exchange it: --from={s.train.init_from} --swap_tokenizer={spec}"
    return f"data.tokenizer={spec} has {size:,} tokens, but config.{key}={room:,}; {remedy}"


# --- optimizer ------------------------------------------------------------------------------------------


def targets_are_matrices(s: Settings, machine: Machine) -> str | None:
    """GaLore, Muon, SOAP and APOLLO take matrices; a rank above all sides would be silently reduced."""
    if {"targets", "rank"} & {*s.optimizer.options} or s.optimizer.galore is not None:
        from maxlp.optim import targets

        with errors_of("optimizer"):
            targets.check(nnx.to_pure_dict(s.params), s.optimizer)
    return None


def adascale_has_microbatches(s: Settings, machine: Machine) -> str | None:
    """AdaScale compares the gradients of microbatches, and counts steps of a batch of at least one row."""
    if s.optimizer.adascale is None:
        return None
    from maxlp.optim import adascale  # few runs need it

    return adascale.refusal(s.optimizer.adascale, s.data.batch_size, s.train.microbatches)


# --- adapters -------------------------------------------------------------------------------------------


def adapters_start_from_weights(s: Settings, machine: Machine) -> str | None:
    """Adapters change a trained model."""
    if s.train.lora is None or s.train.init_from:
        return None
    return f"train.lora.rank={s.train.lora.rank} needs train.init_from (--from), whose weights stay frozen"


def swapped_vocabularies_are_trained(s: Settings, machine: Machine) -> str | None:
    """Rows of new tokens start from those of other tokens, and have to be learned."""
    if not s.train.swap_tokenizer:
        return None
    from maxlp.run import tokenizer_swap  # few runs need it

    return tokenizer_swap.refusal(s.train)


def adapters_are_compatible(s: Settings, machine: Machine) -> str | None:
    """Adapters are small and in float32: releasing, sampling, projecting or rounding saves nothing."""
    if s.train.lora is None:
        return None
    from maxlp.run import combinations  # few runs need it

    return combinations.adapter_refusal(s)


# --- released gradients ---------------------------------------------------------------------------------


def released_gradients_are_compatible(s: Settings, machine: Machine) -> str | None:
    """A layer is updated as soon as its own gradient is complete, before those of other layers are."""
    if not s.train.release_gradients:
        return None
    from maxlp.run import combinations  # few runs need it

    return combinations.release_refusal(s, machine)


def offloading_needs_released_gradients(s: Settings, machine: Machine) -> str | None:
    """An ordinary step fetches the state of all layers at once, and saves no memory on the device."""
    if not s.optimizer.offload or s.train.release_gradients:
        return None
    return (
        "optimizer.offload=True saves memory only where one layer after the other is updated; set "
        "train.release_gradients=True"
    )


# --- outputs --------------------------------------------------------------------------------------------


def outputs_can_be_made(s: Settings, machine: Machine) -> str | None:
    """A trace or checkpoint that cannot be made would be silently left out."""
    start, steps = s.profile.keywords.get("start", 0), s.train.total_steps
    if start > steps:
        return f"profile.start={start} is after train.total_steps={steps}; lower it, or set 0 for no trace"
    saves = s.checkpoint.keywords
    kept = saves.get("keep_every")
    if not kept or kept % saves["every_steps"] == 0:
        return None
    every = f"checkpoint.every_steps={saves['every_steps']}"
    return f"checkpoint.keep_every={kept} is not a multiple of {every}; change one of them"


RULES = (
    batch_divides,
    attention_runs,
    float16_is_scaled,
    scalify_is_compatible,
    low_communication_is_compatible,
    both_phases_have_the_same_state,
    skipped_tensors_have_moments,
    float16_params_have_scales,
    rounded_params_have_16_bits,
    averages_are_in_float32,
    adascale_has_microbatches,
    magnitudes_are_not_pipelined,
    released_gradients_are_compatible,
    offloading_needs_released_gradients,
    precision_fits_model,
    recipe_uses_its_options,
    trained_tokenizer_fits_model,
    mesh_divides_params,
    adapters_start_from_weights,
    swapped_vocabularies_are_trained,
    adapters_are_compatible,
    targets_are_matrices,
    outputs_can_be_made,
)
