"""What cannot be combined with ``model.qk_clip``."""

from maxlp.run.settings import Settings


def refusal(s: Settings) -> str | None:
    """The message for the first setting with which kernels cannot be scaled after an update."""
    key = f"model.qk_clip={s.model.qk_clip}"
    if s.precision.scalify != "none":
        return f"{key} needs state of the model, which precision.scalify does not carry; unset one of them"
    if s.train.local is not None:
        return f"{key} is for the logits of all replicas, which train.local leaves alone; unset one of them"
    if s.train.lora is not None:
        return f"{key} would scale kernels that train.lora keeps frozen; unset one of them"
    if s.model.param_dtype != "float32":
        return f"{key} is too small a change for model.param_dtype={s.model.param_dtype}; use float32"
    if s.optimizer.kind.averages:
        return f"{key} does not reach the average of optimizer={s.optimizer.name}; unset it or use adamw"
    return None
