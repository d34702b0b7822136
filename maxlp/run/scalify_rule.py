"""What cannot be combined with ``precision.scalify``."""

import math

from maxlp.run.settings import Machine, Settings


def refusal(s: Settings, machine: Machine) -> str | None:
    """The message for the first setting with which scale propagation does not work; None without one."""
    p, attention, stages = s.precision, s.on(machine).model.attention, machine.axes["stage"]
    loss, devices = vars(s.loss), math.prod(machine.axes.values())
    where = f"on {devices} devices"
    chunks, method = loss.get("num_chunks", 1), loss.get("method", "plain")  # of a Llama, of a CLIP
    refused = (
        (s.model.dtype != "float16", f"model.dtype={s.model.dtype}", "model.dtype=float16"),
        (p.loss_scale is not None, "precision.loss_scale", "no loss scale"),
        (p.recipe != "bf16", f"precision.recipe={p.recipe}", "precision.recipe=bf16"),
        (bool(p.rules), "precision.rules", "no rules"),
        (p.health_every > 0, f"precision.health_every={p.health_every}", "precision.health_every=0"),
        (
            p.magnitudes_every > 0,
            f"precision.magnitudes_every={p.magnitudes_every}",
            "precision.magnitudes_every=0",
        ),
        (attention != "xla", f"model.attention={attention}", "model.attention=xla"),
        (stages > 1, f"mesh.stage={stages}", "mesh.stage=1"),
        (s.train.lora is not None, "train.lora", "no adapters"),
        (s.train.release_gradients, "train.release_gradients=True", "train.release_gradients=False"),
        # On several devices these trace a `shard_map`, which has no rule.
        (devices > 1 and chunks > 1, f"loss.num_chunks={chunks} {where}", "loss.num_chunks=1"),
        (devices > 1 and method != "plain", f"loss.method={method} {where}", "loss.method=plain"),
    )
    for is_refused, key, instead in refused:
        if is_refused:
            return f"{key} cannot be combined with precision.scalify={p.scalify}; set {instead}"
    return None
