"""What cannot be combined with ``precision.exchange``."""

from maxlp.run.settings import Machine, Settings


def refusal(s: Settings, machine: Machine) -> str | None:
    """The message for the first setting with which replicas do not exchange gradients in 8 bits."""
    exchange, scalify, axes = s.precision.exchange, s.precision.scalify, machine.axes
    if axes["data"] == 1:
        return (
            f"precision.exchange={exchange} is for gradients of replicas, and mesh.data=1 is a single one; "
            "use mesh.data=2 or more, or set precision.exchange=none"
        )
    refused = (
        # Rows of all replicas pass through one schedule or one ring, inside which none has a gradient.
        (axes["stage"] > 1, f"mesh.stage={axes['stage']}", "mesh.stage=1"),
        (axes["context"] > 1, f"mesh.context={axes['context']}", "mesh.context=1"),
        # What has overflowed must not become an error that is kept.
        (s.precision.loss_scale is not None, "precision.loss_scale", "no loss scale"),
        (scalify != "none", f"precision.scalify={scalify}", "precision.scalify=none"),
        # AdaScale compares the gradients of microbatches, which are not exchanged.
        (s.optimizer.adascale is not None, f"optimizer.adascale={s.optimizer.adascale}", "no AdaScale"),
        (s.train.release_gradients, "train.release_gradients=True", "train.release_gradients=False"),
        # The gradients of adapters are small.
        (s.train.lora is not None, "train.lora", "precision.exchange=none"),
    )
    for is_refused, key, instead in refused:
        if is_refused:
            return f"{key} cannot be combined with precision.exchange={exchange}; set {instead}"
    return None
