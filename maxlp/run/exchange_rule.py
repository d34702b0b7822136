"""What cannot be combined with ``precision.exchange``, ``precision.scatter`` and ``train.local``."""

from maxlp.run.settings import Machine, Settings

Refused = tuple[bool, str, str]  # whether it is, its key and value, and what to set instead


def refusal(s: Settings, machine: Machine) -> str | None:
    """The message for the first setting that exchange, scatter or local steps cannot be combined with."""
    exchange, scatter = s.precision.exchange, s.precision.scatter
    message = None
    if exchange != "none":
        message = _first(_of_replicas(s, machine), f"precision.exchange={exchange}")
    if message is None and scatter != "none":
        message = _first(_of_shards(s, machine), f"precision.scatter={scatter}")
    if message is None and s.train.local is not None:
        message = _local_refusal(s, s.train.local.steps, machine)
    return message


def _local_refusal(s: Settings, steps: int, machine: Machine) -> str | None:
    """The message for the first setting that local steps cannot be combined with."""
    total = s.train.total_steps
    dtype, recipe, name = s.model.param_dtype, s.precision.recipe, s.optimizer.name
    delayed = any(s.recipe(path).delayed for path in s.matmuls)
    refused = (
        *_of_replicas(s, machine),
        # All replicas would have to wait for one another, to decide on a step together.
        (s.spikes.guard == "skip", "spikes.guard=skip", "spikes.guard=rollback or off"),
        # A history of each replica would have to be joined, and published for evaluation.
        (delayed, f"precision.recipe={recipe}", "a recipe without delayed scales"),
        # An outer update is small, and what rounding has lost is known for the replica's parameters only.
        (dtype != "float32", f"model.param_dtype={dtype}", "model.param_dtype=float32"),
        # Its average, which is evaluated, is that of one replica.
        (name == "schedule_free_adamw", f"optimizer.name={name}", "optimizer.name=adamw"),
        # Not tried: each replica would choose subspaces of its own.
        (s.optimizer.has_galore, "optimizer.galore", "optimizer.galore.rank=0"),
    )
    if (message := _first(refused, f"train.local.steps={steps}")) or total % steps == 0:
        return message
    return (
        f"train.total_steps={total} is not a multiple of train.local.steps={steps}, and the last steps "
        f"would not reach the outer parameters; use {-(-total // steps) * steps}"
    )


def _of_replicas(s: Settings, machine: Machine) -> tuple[Refused, ...]:
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


def _of_shards(s: Settings, machine: Machine) -> tuple[Refused, ...]:
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


def _first(refused: tuple[Refused, ...], feature: str) -> str | None:
    for is_refused, key, instead in refused:
        if is_refused:
            return f"{key} cannot be combined with {feature}; set {instead}"
    return None
