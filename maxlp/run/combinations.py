"""What scalify, released gradients, adapters, exchange, scatter and local steps cannot be combined with.

Each is off in most runs, so `run.constraints` imports these tables only for runs that use one.
"""

import math
from collections.abc import Iterable

from maxlp.run.settings import Machine, Settings

Refused = tuple[bool, str, str]  # whether a setting is refused, its key and value, what to set instead


def first_refusal(feature: str, refused: Iterable[Refused]) -> str | None:
    """The message for the first setting that a feature cannot be combined with; None without one."""
    for is_refused, key, instead in refused:
        if is_refused:
            return f"{key} cannot be combined with {feature}; set {instead}"
    return None


def scalify_refusal(s: Settings, machine: Machine) -> str | None:
    """The message for the first setting with which scale propagation does not work."""
    p, attention, stages = s.precision, s.on(machine).model.attention, machine.axes["stage"]
    devices = math.prod(machine.axes.values())
    refused = (
        (s.model.dtype != "float16", f"model.dtype={s.model.dtype}", "model.dtype=float16"),
        (p.loss_scale is not None, "precision.loss_scale", "no loss scale"),
        (p.recipe != "bf16", f"precision.recipe={p.recipe}", "precision.recipe=bf16"),
        (bool(p.rules), "precision.rules", "no rules"),
        (p.min_dim > 0, f"precision.min_dim={p.min_dim}", "precision.min_dim=0"),
        (
            p.high_precision_from > 0,
            f"precision.high_precision_from={p.high_precision_from}",
            "precision.high_precision_from=0",
        ),
        (p.health_every > 0, f"precision.health_every={p.health_every}", "precision.health_every=0"),
        (
            p.magnitudes_every > 0,
            f"precision.magnitudes_every={p.magnitudes_every}",
            "precision.magnitudes_every=0",
        ),
        (attention != "xla", f"model.attention={attention}", "model.attention=xla"),
        (s.model.remat == "offload", "model.remat=offload", "model.remat=block"),
        (stages > 1, f"mesh.stage={stages}", "mesh.stage=1"),
        (s.train.lora is not None, "train.lora", "no adapters"),
        (s.train.release_gradients, "train.release_gradients=True", "train.release_gradients=False"),
        # On several devices another loss traces a `shard_map`, which has no rule.
        *(
            (
                devices > 1 and getattr(s.loss, key) != plain,
                f"loss.{key}={getattr(s.loss, key)} on {devices} devices",
                f"loss.{key}={plain}",
            )
            for key, plain in s.family.plain_loss.items()
        ),
    )
    return first_refusal(f"precision.scalify={p.scalify}", refused)


def release_refusal(s: Settings, machine: Machine) -> str | None:
    """The message for the first setting that needs more than one layer's gradient."""
    adascale, microbatches, stages = s.optimizer.adascale, s.train.microbatches, machine.axes["stage"]
    clip_norm, loss_scale = s.optimizer.clip_norm, s.precision.loss_scale
    refused = (
        # The global norm needs all gradients before the first update.
        (clip_norm > 0, f"optimizer.clip_norm={clip_norm}", "optimizer.clip_norm=0.0"),
        # A layer's gradient is complete only after the last microbatch.
        (adascale is not None, f"optimizer.adascale={adascale}", "train.release_gradients=False"),
        (microbatches > 1, f"train.microbatches={microbatches}", "train.microbatches=1"),
        # Each layer is computed again, from its input on the device.
        (s.model.remat == "offload", "model.remat=offload", "model.remat=block"),
        # A pipeline's backward pass completes the gradients of all layers of a stage at its end.
        (stages > 1, f"mesh.stage={stages}", "mesh.stage=1"),
        # A gate rejects a step after its gradients are known, when released ones are applied already.
        (s.spikes.guard == "skip", "spikes.guard=skip", "spikes.guard=rollback or off"),
        # Neither gradients nor updates of all tensors are at hand at the end of the step.
        (s.spikes.update_ratios, "spikes.update_ratios=True", "spikes.update_ratios=False"),
        (loss_scale is not None, "precision.loss_scale", "model.dtype=bfloat16 and no loss scale"),
    )
    feature = "train.release_gradients=True, which updates each layer in the backward pass"
    return first_refusal(feature, refused)


def adapter_refusal(s: Settings) -> str | None:
    """The message for the first setting that does not work with adapters."""
    assert s.train.lora is not None
    if s.train.release_gradients:
        return "train.release_gradients=True frees nothing with train.lora; set one of them only"
    if s.samples_tokens:
        return (
            f"train.lora.rank={s.train.lora.rank} freezes the kernels whose gradients precision.recipe="
            f"{s.precision.recipe} takes from a share of the tokens; unset one of them"
        )
    if s.optimizer.galore is not None:
        return (
            "optimizer.galore does not apply to the low-rank matrices of train.lora; set one of them only"
        )
    rounding = s.optimizer.param_rounding
    if rounding is None:
        return None
    return (
        f"optimizer.param_rounding={rounding} is for parameters of 16 bits, and those of train.lora are in "
        "float32; unset one of them"
    )


def low_communication_refusal(s: Settings, machine: Machine) -> str | None:
    """The message for the first setting that exchange, scatter or local steps cannot be combined with."""
    exchange, scatter = s.precision.exchange, s.precision.scatter
    message = None
    if exchange != "none":
        message = first_refusal(f"precision.exchange={exchange}", _refused_by_replicas(s, machine))
    if message is None and scatter != "none":
        message = first_refusal(f"precision.scatter={scatter}", _refused_by_shards(s, machine))
    if message is None and s.train.local is not None:
        message = _local_refusal(s, s.train.local.steps, machine)
    return message


def _local_refusal(s: Settings, steps: int, machine: Machine) -> str | None:
    """The message for the first setting that local steps cannot be combined with."""
    total = s.train.total_steps
    dtype, recipe, optimizer = s.model.param_dtype, s.precision.recipe, s.optimizer
    delayed = any(s.recipe(path).delayed for path in s.matmuls)
    refused = (
        *_refused_by_replicas(s, machine),
        # All replicas would have to wait for one another, to decide on a step together.
        (s.spikes.guard == "skip", "spikes.guard=skip", "spikes.guard=rollback or off"),
        # A history of each replica would have to be joined, and published for evaluation.
        (delayed, f"precision.recipe={recipe}", "a recipe without delayed scales"),
        # An outer update is small, and what rounding has lost is known for the replica's parameters only.
        (dtype != "float32", f"model.param_dtype={dtype}", "model.param_dtype=float32"),
        # Its average, which is evaluated, is that of one replica.
        (optimizer.kind.averages, f"optimizer.name={optimizer.name}", "optimizer.name=adamw"),
        # Not tried: each replica would choose subspaces of its own.
        (optimizer.galore is not None, "optimizer.galore", "optimizer.galore.rank=0"),
    )
    message = first_refusal(f"train.local.steps={steps}", refused)
    if message is None and total % steps:
        message = (
            f"train.total_steps={total} is not a multiple of train.local.steps={steps}, and the last steps "
            f"would not reach the outer parameters; use {-(-total // steps) * steps}"
        )
    return message


def _refused_by_replicas(s: Settings, machine: Machine) -> tuple[Refused, ...]:
    scalify, axes = s.precision.scalify, machine.axes
    return (
        (axes["data"] == 1, "mesh.data=1, a single replica,", "mesh.data=2 or more"),
        # Rows of all replicas pass through one schedule or one ring, inside which none has a gradient.
        (axes["stage"] > 1, f"mesh.stage={axes['stage']}", "mesh.stage=1"),
        (axes["context"] > 1, f"mesh.context={axes['context']}", "mesh.context=1"),
        # XLA's partitioner crashes where it gathers along two axes beside a manual one.
        (
            s.samples_tokens and axes["fsdp"] > 1 and axes["tensor"] > 1,
            f"precision.recipe={s.precision.recipe} on a mesh split over fsdp and tensor",
            "mesh.fsdp=1 or mesh.tensor=1",
        ),
        # What has overflowed must not become an error that is kept.
        (s.precision.loss_scale is not None, "precision.loss_scale", "no loss scale"),
        (scalify != "none", f"precision.scalify={scalify}", "precision.scalify=none"),
        # AdaScale compares the gradients of microbatches, which are not exchanged.
        (s.optimizer.adascale is not None, f"optimizer.adascale={s.optimizer.adascale}", "no AdaScale"),
        (s.train.release_gradients, "train.release_gradients=True", "train.release_gradients=False"),
        # The gradients of adapters are small.
        (s.train.lora is not None, "train.lora", "one of them only"),
    )


def _refused_by_shards(s: Settings, machine: Machine) -> tuple[Refused, ...]:
    scalify, axes = s.precision.scalify, machine.axes
    return (
        (axes["fsdp"] == 1, "mesh.fsdp=1, which splits no gradient,", "mesh.fsdp=2 or more"),
        # Not tried: the sums over a sequence's parts and over the rows of a stage.
        (axes["stage"] > 1, f"mesh.stage={axes['stage']}", "mesh.stage=1"),
        (axes["context"] > 1, f"mesh.context={axes['context']}", "mesh.context=1"),
        (scalify != "none", f"precision.scalify={scalify}", "precision.scalify=none"),
        # The kernels of the blocks, whose gradients are scattered, have none.
        (s.train.lora is not None, "train.lora", "one of them only"),
    )
