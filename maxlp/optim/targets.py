"""Which matrices of a model an optimizer takes, and the rank to which it projects their gradients."""

import inspect
from collections.abc import Mapping
from typing import NamedTuple

import jax
import optax

from maxlp.optim import galore
from maxlp.optim.config import OptimizerConfig
from maxlp.optim.partition import check_matrices
from maxlp.optim.tree_utils import matches, name_of


class Projection(NamedTuple):
    """The projection of GaLore or APOLLO: key of the rank, rank, and the short side of each target."""

    key: str
    rank: int
    sides: dict[str, int]


def check(params: optax.Params, config: OptimizerConfig) -> None:
    """Checks the targets of GaLore and those of an optimizer that takes matrices itself, and a rank.

    Raises:
      ValueError: a target that matches no parameter, or one that is not a matrix; a rank of GaLore that is
        not below the short side of any target, or one of APOLLO that is set, and above all of them.
    """
    if "targets" in config.options:
        check_matrices("options.targets", config.options["targets"], params)
    if config.galore is not None:
        galore.check_targets(params, config.galore)
    found = _projection(params, config)
    has_galore = config.galore is not None
    if found is None or not (has_galore or "rank" in config.options):
        return
    longest = max(found.sides.values())
    # At full rank GaLore only rotates what its inner optimizer sees.
    most = longest - 1 if has_galore else longest
    if found.rank > most:
        remedy = "lower it or set galore.rank=0" if has_galore else "lower it"
        raise ValueError(
            f"{found.key}={found.rank} must be at most {most}, because no target has a short side above "
            f"{longest}; {remedy}"
        )


def warnings(params: optax.Params, config: OptimizerConfig) -> list[str]:
    """A line if an optimizer for matrices finds none, as in adapters, or its rank exceeds a short side."""
    default = _parameters(config).get("targets")
    if default is not None:
        patterns = config.options.get("targets", default.default)
        if not any(matches(path, patterns) for path, _ in jax.tree.leaves_with_path(params)):
            return [f"optimizer.name={config.name} trains everything with Adam: nothing matches {patterns}"]
    found = _projection(params, config)
    if found is None:
        return []
    cut = {name: side for name, side in found.sides.items() if side < found.rank}
    if not cut:
        return []
    name = min(cut, key=cut.__getitem__)
    return [
        f"optimizer.{found.key}={found.rank} is cut to the short side of {len(cut)} of {len(found.sides)} "
        f"targets, such as {cut[name]} of {name}; lower it to project their gradients too"
    ]


def _projection(params: optax.Params, config: OptimizerConfig) -> Projection | None:
    """None if no gradient is projected."""
    parameters = _parameters(config)
    if config.galore is not None:
        key, rank, targets = "galore.rank", config.galore.rank, config.galore.targets
    elif "rank" in parameters:
        key, rank = "options.rank", config.options.get("rank", parameters["rank"].default)
        targets = config.options.get("targets", parameters["targets"].default)
    else:
        return None
    leaves = jax.tree.leaves_with_path(params)
    sides = {name_of(path): min(p.shape[-2:]) for path, p in leaves if matches(path, targets)}
    return Projection(key, rank, sides) if sides else None


def _parameters(config: OptimizerConfig) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(config.kind.scale_by).parameters
