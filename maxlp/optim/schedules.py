"""Learning-rate schedules: a linear warm-up, then one of `SCHEDULES`.

A schedule is a function of the number of finished updates: the first update uses `schedule(0)`, the last
one `schedule(total_steps - 1)`. The warm-up rises by `learning_rate / (warmup_steps + 1)` per update, so
that no update has a rate of zero and the peak is reached at `warmup_steps`. In a run that is not longer
than its warm-up, the warm-up is shortened (`fitting_warmup`).
"""

from collections.abc import Callable
from inspect import signature

import optax


def cosine(peak: float, final: float, steps: int) -> optax.Schedule:
    """Half a cosine from `peak` to `final` over all `steps` (SGDR, arXiv:1608.03983, eq. 5)."""
    return optax.cosine_decay_schedule(peak, steps, alpha=final / peak)


def linear(peak: float, final: float, steps: int) -> optax.Schedule:
    """A straight line from `peak` to `final` over all `steps`."""
    return optax.linear_schedule(peak, final, steps)


def wsd(peak: float, final: float, steps: int, decay_steps: int) -> optax.Schedule:
    """Warm-up, stable, decay: `peak`, then a linear fall to `final` over the last `decay_steps`.

    MiniCPM (Hu et al. 2024, arXiv:2404.06395, section 4), with the linear decay of Hägele et al. 2024
    (arXiv:2405.18392).
    """
    stable, decay = optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay_steps)
    return optax.join_schedules([stable, decay], [steps - decay_steps])


def constant(peak: float) -> optax.Schedule:
    """`peak` at every step."""
    return optax.constant_schedule(peak)


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
    "constant": constant,
}


def takes(name: str, argument: str) -> bool:
    """Whether a schedule has this argument: ``final``, or ``decay_steps``, which `decay_fraction` sets."""
    return argument in signature(SCHEDULES[name]).parameters


def fitting_warmup(warmup_steps: int, total_steps: int) -> int:
    """The steps of the warm-up: `warmup_steps`, or a tenth of a run that would end before the peak."""
    return warmup_steps if warmup_steps < total_steps else total_steps // 10


def make_schedule(
    name: str,
    *,
    learning_rate: float,
    warmup_steps: int,
    total_steps: int,
    final_lr_fraction: float,
    decay_fraction: float,
) -> optax.Schedule:
    """Builds a linear warm-up followed by `SCHEDULES[name]`; for the arguments see `OptimizerConfig`.

    Returns:
      The learning rate (float32 scalar) as a function of the number of finished updates.

    Raises:
      ValueError: the decay does not fit into `total_steps`.
    """
    given, warmup_steps = warmup_steps, fitting_warmup(warmup_steps, total_steps)
    decay_steps = round(decay_fraction * total_steps)
    if takes(name, "decay_steps") and not 0 < decay_steps <= total_steps - warmup_steps:
        shortened = f" (shortened to {warmup_steps})" if warmup_steps < given else ""
        raise ValueError(
            f"{decay_fraction=} is {decay_steps} steps of decay, which must be at least 1 and "
            f"fit between warmup_steps={given}{shortened} and {total_steps=}"
        )
    known = dict(
        peak=learning_rate,
        final=final_lr_fraction * learning_rate,
        steps=total_steps - warmup_steps,
        decay_steps=decay_steps,
    )
    body = SCHEDULES[name](**{key: known[key] for key in signature(SCHEDULES[name]).parameters})
    if warmup_steps == 0:
        return body
    first = learning_rate / (warmup_steps + 1)
    warmup = optax.linear_schedule(first, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, body], [warmup_steps])
