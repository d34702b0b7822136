"""What cannot be combined with ``train.release_gradients``."""

from maxlp.run.settings import Machine, Settings


def refusal(s: Settings, machine: Machine) -> str | None:
    """The message for the first setting that needs more than one layer's gradient, or None."""
    adascale, microbatches, stages = s.optimizer.adascale, s.train.microbatches, machine.axes["stage"]
    clip_norm, loss_scale = s.optimizer.clip_norm, s.precision.loss_scale
    refused = (
        # The global norm needs all gradients before the first update.
        (clip_norm > 0, f"optimizer.clip_norm={clip_norm}", "optimizer.clip_norm=0.0"),
        # A layer's gradient is complete only after the last microbatch.
        (adascale is not None, f"optimizer.adascale={adascale}", "train.release_gradients=False"),
        (microbatches > 1, f"train.microbatches={microbatches}", "train.microbatches=1"),
        # A pipeline's backward pass completes the gradients of all layers of a stage at its end.
        (stages > 1, f"mesh.stage={stages}", "mesh.stage=1"),
        # A gate rejects a step after its gradients are known, when released ones are applied already.
        (s.spikes.guard == "skip", "spikes.guard=skip", "spikes.guard=rollback or off"),
        (loss_scale is not None, "precision.loss_scale", "model.dtype=bfloat16 and no loss scale"),
    )
    for is_refused, key, instead in refused:
        if is_refused:
            return (
                f"{key} cannot be combined with train.release_gradients=True, which updates each layer in "
                f"the backward pass; set {instead}"
            )
    return None
