"""What cannot be combined with ``model.qk_clip``."""

from maxlp.run.settings import Settings


def refusal(s: Settings) -> str | None:
    """The message for the first setting with which kernels cannot be scaled after an update."""
    key = f"model.qk_clip={s.model.qk_clip}"
    if s.precision.scalify != "none":
        return f"{key} records logits in model state, which precision.scalify drops; unset one of them"
    if s.train.local is not None:
        return f"{key} needs the logits of all replicas, but with train.local each trains alone; unset one"
    if s.train.lora is not None:
        return f"{key} would scale kernels that train.lora keeps frozen; unset one of them"
    if s.model.param_dtype != "float32":
        return f"{key} is a change that model.param_dtype={s.model.param_dtype} may round away; use float32"
    if s.optimizer.kind.averages:
        return f"{key} does not clip the averaged weights of {s.optimizer.name}; unset it or use adamw"
    return None
