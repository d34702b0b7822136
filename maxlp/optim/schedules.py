"""Learning-rate schedules: a linear warm-up, then one of `SCHEDULES`.

Steps count finished updates, so the first update uses `schedule(0)` and the last one
`schedule(total_steps - 1)`. The warm-up rises by `learning_rate / (warmup_steps + 1)` an update:
the first update is not wasted on a rate of zero, and the peak is reached at `warmup_steps`.
"""

import optax


def cosine(peak: float, final: float, steps: int, decay_steps: int) -> optax.Schedule:
    """Half a cosine from `peak` to `final` over all `steps` (Loshchilov & Hutter 2017, eq. 5)."""
    del decay_steps
    return optax.cosine_decay_schedule(peak, steps, alpha=final / peak)


def linear(peak: float, final: float, steps: int, decay_steps: int) -> optax.Schedule:
    """A straight line from `peak` to `final` over all `steps`."""
    del decay_steps
    return optax.linear_schedule(peak, final, steps)


def wsd(peak: float, final: float, steps: int, decay_steps: int) -> optax.Schedule:
    """Stays at `peak`, then falls linearly to `final` over the last `decay_steps`.

    Warm-up, stable, decay (Hu et al. 2024, "MiniCPM", section 4), with the linear decay of
    Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Durations".
    """
    stable, decay = optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay_steps)
    return optax.join_schedules([stable, decay], [steps - decay_steps])


def constant(peak: float, final: float, steps: int, decay_steps: int) -> optax.Schedule:
    """Stays at `peak`."""
    del final, steps, decay_steps
    return optax.constant_schedule(peak)


SCHEDULES = {"cosine": cosine, "linear": linear, "wsd": wsd, "constant": constant}


def make_schedule(
    name: str,
    *,
    learning_rate: float,
    warmup_steps: int,
    total_steps: int,
    final_lr_fraction: float,
    decay_fraction: float,
) -> optax.Schedule:
    """Builds warm-up plus `SCHEDULES[name]`; the arguments are those of `optim.make_tx`.

    Returns:
        A function from the number of finished updates to the learning rate (float32 scalar).

    Raises:
        ValueError: an unknown name or a value out of range, named with its value.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} is unknown, choose one of: {', '.join(SCHEDULES)}")
    if not learning_rate > 0:
        raise ValueError(f"learning_rate={learning_rate} must be positive")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"{warmup_steps=} must be at least 0 and below {total_steps=}")
    if not 0 <= final_lr_fraction <= 1:
        raise ValueError(f"{final_lr_fraction=} must be between 0 and 1")
    decay_steps = round(decay_fraction * total_steps)
    if name == "wsd" and not 0 < decay_steps <= total_steps - warmup_steps:
        raise ValueError(
            f"{decay_fraction=} is {decay_steps} steps of decay, which must be at least 1 and "
            f"fit between {warmup_steps=} and {total_steps=}"
        )
    body = SCHEDULES[name](
        learning_rate, final_lr_fraction * learning_rate, total_steps - warmup_steps, decay_steps
    )
    if warmup_steps == 0:
        return body
    first = learning_rate / (warmup_steps + 1)
    warmup = optax.linear_schedule(first, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, body], [warmup_steps])
