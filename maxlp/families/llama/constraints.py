"""Rules for the settings of a Llama, besides those of `run.constraints`."""

from maxlp.parallel.schedule import PipelineConfig
from maxlp.run.settings import Machine, Settings


def positions_within_range(s: Settings, machine: Machine) -> str | None:
    """Positions stay below max_seq_len, the range of the rotary embedding."""
    if s.data.seq_len <= s.model.max_seq_len:
        return None
    longest = s.model.max_seq_len
    return (
        f"data.seq_len={s.data.seq_len} is above model.max_seq_len={longest}, the range of the rotary "
        f"embedding; set config.data.seq_len={longest} or less, or raise config.model.max_seq_len"
    )


def head_splits_sequence(s: Settings, machine: Machine) -> str | None:
    """Logits are computed in chunks, each of which is split over context and stage."""
    axes, chunks = machine.axes, s.loss.num_chunks
    if s.data.seq_len % (chunks * axes["context"] * axes["stage"]) == 0:
        return None
    return (
        f"data.seq_len={s.data.seq_len} is not a multiple of loss.num_chunks={chunks} × "
        f"mesh.context={axes['context']} × mesh.stage={axes['stage']}, over which the head splits it; use "
        "another number of chunks or another length"
    )


def blocks_split_sequence(s: Settings, machine: Machine) -> str | None:
    """Between matmuls the tensor axis splits the sequence; a balanced ring halves each device's part."""
    axes = machine.axes
    if axes["context"] == 1:
        parts, text = axes["tensor"], f"mesh.tensor={axes['tensor']}"
    else:
        parts = 2 * axes["context"] * axes["stage"] * axes["tensor"]
        text = "2 × " + " × ".join(f"mesh.{name}={axes[name]}" for name in ("context", "stage", "tensor"))
    if s.data.seq_len % parts == 0:
        return None
    return f"data.seq_len={s.data.seq_len} is not a multiple of {text}; use another length or mesh"


def chunked_head_is_not_delayed(s: Settings, machine: Machine) -> str | None:
    """Delayed scaling records one amax per step, but a head in chunks runs several times."""
    if s.loss.num_chunks == 1 or not s.recipe("lm_head").delayed:
        return None
    return (
        f"loss.num_chunks={s.loss.num_chunks} runs lm_head several times per step, but its delayed scaling "
        "records one amax per step; use loss.num_chunks=1 or another recipe for lm_head in precision.rules"
    )


def sampled_sequences_are_whole(s: Settings, machine: Machine) -> str | None:
    """Sampling ranks all tokens of a sequence, which must be on one device."""
    if machine.axes["context"] == 1 or not s.samples_tokens:
        return None
    return (
        f"mesh.context={machine.axes['context']} splits the sequences of which precision.recipe="
        f"{s.precision.recipe} samples tokens; use mesh.context=1 or another recipe"
    )


def pipelines_have_stages(s: Settings, machine: Machine) -> str | None:
    """The schedule of a pipeline would be silently ignored where nothing passes through stages."""
    if s.mesh.get("stage") != 1 or s.model.pipeline == PipelineConfig():  # `evaluate` may choose a mesh
        return None
    given, defaults = vars(s.model.pipeline), vars(PipelineConfig())
    key = next(key for key in given if given[key] != defaults[key])
    value = given[key]
    return f"model.pipeline.{key}={value} has no effect with mesh.stage=1; unset it, or set more stages"


def stages_divide_layers(s: Settings, machine: Machine) -> str | None:
    """Every stage holds the same number of layers in every round."""
    stages, rounds = machine.axes["stage"], s.model.pipeline.rounds
    if stages == 1 or s.model.num_layers % (stages * rounds) == 0:
        return None
    return (
        f"model.num_layers={s.model.num_layers} is not a multiple of mesh.stage={stages} × "
        f"model.pipeline.rounds={rounds}; choose stages and rounds whose product divides it"
    )


def stages_divide_microbatches(s: Settings, machine: Machine) -> str | None:
    """The microbatches that wait for the first stage are spread over all stages."""
    stages = machine.axes["stage"]
    microbatches = s.model.pipeline.schedule(stages).microbatches
    if stages == 1 or microbatches % stages == 0:
        return None
    more = -(-microbatches // stages) * stages
    return (
        f"model.pipeline.microbatches={microbatches} is not a multiple of mesh.stage={stages}; use {more}"
    )


def pipeline_divides_rows(s: Settings, machine: Machine) -> str | None:
    """A pipeline cuts the rows of each device into its microbatches."""
    stages = machine.axes["stage"]
    rows, microbatches = s.device_rows(machine), s.model.pipeline.schedule(stages).microbatches
    if stages == 1 or rows % microbatches == 0:
        return None
    return (
        f"model.pipeline.microbatches={microbatches} does not divide the {rows} rows that a device has in "
        "each of train.microbatches; change it or data.batch_size"
    )


def rounds_are_recomputed(s: Settings, machine: Machine) -> str | None:
    """With several rounds and without remat, every tick would keep a copy of the weights it chose."""
    if machine.axes["stage"] == 1 or s.model.pipeline.rounds == 1 or s.model.remat != "none":
        return None
    return (
        f"model.pipeline.rounds={s.model.pipeline.rounds} with model.remat=none would keep a copy of the "
        "weights for every tick; set model.remat=block or dots"
    )


def stages_are_alike(s: Settings, machine: Machine) -> str | None:
    """All stages run one program, so that no stage can have blocks without quantization."""
    if machine.axes["stage"] == 1 or not any(part.plain for parts in s.parts.values() for part in parts):
        return None
    return (
        f"mesh.stage={machine.axes['stage']} needs stages that are alike; set precision.first_blocks=0 and "
        "precision.last_blocks=0, and name no layer in precision.rules"
    )


def qk_clip_scales_whole_kernels(s: Settings, machine: Machine) -> str | None:
    """QK-clip scales trained kernels by factors near 1; nothing else may keep a copy or a part of them."""
    if s.model.qk_clip is None:
        return None
    from maxlp.families.llama import qk_clip_rule  # few runs need it

    return qk_clip_rule.refusal(s)


RULES = (
    positions_within_range,
    head_splits_sequence,
    blocks_split_sequence,
    chunked_head_is_not_delayed,
    sampled_sequences_are_whole,
    pipelines_have_stages,
    stages_divide_layers,
    stages_divide_microbatches,
    pipeline_divides_rows,
    rounds_are_recomputed,
    stages_are_alike,
    qk_clip_scales_whole_kernels,
)
