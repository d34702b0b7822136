"""Which matmuls to keep in high precision under a budget of FLOPs.

    python -m maxlp.lab choose /tmp/run --budget=0.1

The effect of a matmul in a layer is the sum over its operands of the squared relative error of the
gradients with that operand alone in low precision (`run.attribution`). Rounding errors are nearly
independent, so that these squares add up to nearly the square of the error of the whole, as a budget needs;
changes of the loss have either sign and miss the backward pass.

Which matmuls of which layers leave the least effect is then a knapsack problem. (SNIP, arXiv:2602.01410,
solves an integer program; kernels have few sizes, for which a table of all their sums is small.)
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from flax import nnx

from maxlp.precision import RECIPES
from maxlp.precision.inject import matmuls
from maxlp.run.attribution import Attribution, Switches, SwitchEvaluator
from maxlp.run.settings import Settings

MAX_UNITS = 10_000  # of a budget
HIGH = "bf16"  # the recipe of a rule that keeps the model's own dtype
assert not RECIPES[HIGH].gemms


@dataclasses.dataclass(frozen=True)
class Costs:
    """The matmuls of a stack under a recipe.

    Attributes:
      paths: P of them.
      effects: float64 (layers, P), see the top of this file.
      sizes: int64 (P,), of the kernels in a layer, in proportion to their FLOPs.
    """

    paths: tuple[str, ...]
    effects: np.ndarray
    sizes: np.ndarray

    def flops_share(self, high: np.ndarray) -> float:
        """The share of the FLOPs in high precision, bool (layers, P)."""
        return float((high * self.sizes).sum() / (len(high) * self.sizes.sum()))

    def remaining_error(self, high: np.ndarray) -> float:
        """The relative error of the gradients that is expected to remain."""
        return float(np.sqrt(self.effects[~high].sum()))

    def end_blocks(self, first: int, last: int) -> np.ndarray:
        """bool (layers, P): all matmuls of blocks at either end."""
        layers = np.arange(len(self.effects))[:, None]
        ends = (layers < first) | (layers >= len(layers) - last)
        return np.broadcast_to(ends, self.effects.shape)


def check(s: Settings, budget: float) -> Settings:
    """The settings to measure: the recipe in all blocks, without rules.

    Raises:
      ValueError: an invalid share, or a model without exactly one stack of quantized blocks.
    """
    if not 0 < budget < 1:
        raise ValueError(f"--budget={budget:g} is not a share of the FLOPs; choose one between 0 and 1")
    precision = dataclasses.replace(s.precision, rules=(), first_blocks=0, last_blocks=0)
    s = dataclasses.replace(s, precision=precision)
    stacks = {path.partition("layers/")[0] for path in s.matmuls if "layers/" in path}
    if len(stacks) != 1:
        raise ValueError(
            f"choose needs a model with one stack of blocks, {s.family.name} has {len(stacks)}; "
            "use attribute"
        )
    return s


def costs(evaluate: SwitchEvaluator, found: Attribution) -> Costs:
    """The costs of a model's matmuls inside its stack, from the effects of their operands."""
    model = nnx.merge(evaluate.graphdef, evaluate.state["params"], evaluate.state["model_state"])
    kernels = {path: module.kernel.shape for path, module in matmuls(model)}
    inside = [(site, effect) for site, effect in found.effects.items() if site.layer is not None]
    paths = tuple(sorted({site.path for site, _ in inside}))
    num_layers = kernels[paths[0]][0]
    effects = np.zeros((num_layers, len(paths)))
    for site, effect in inside:
        squared = np.nan_to_num(effect.error_on**2, nan=1e30, posinf=1e30)
        effects[site.layer, paths.index(site.path)] += squared
    return Costs(paths, effects, np.array([math.prod(kernels[path][-2:]) for path in paths]))


def choose(c: Costs, budget: float) -> np.ndarray:
    """What to keep in high precision, bool (layers, P): within a budget, what leaves the least effect.

    Of equal choices it takes the one of the fewest FLOPs. It is exact where the sizes of kernels are
    multiples of one 10,000th of the budget; otherwise they are rounded up to multiples of that.
    """
    capacity = budget * len(c.effects) * float(c.sizes.sum()) * (1 + 1e-9)  # a share is a rounded quotient
    unit = max(math.gcd(*c.sizes.tolist()), math.ceil(capacity / MAX_UNITS))
    weights = np.tile(-(-c.sizes // unit), len(c.effects))
    effects = c.effects.ravel()
    most = np.zeros(int(capacity // unit) + 1)  # the effect that each number of units can take away
    taken = np.zeros((len(weights), len(most)), bool)
    for i, weight in enumerate(weights):
        if weight < len(most):
            with_it = most[: len(most) - weight] + effects[i]
            taken[i, weight:] = with_it > most[weight:]
            most[weight:] = np.maximum(most[weight:], with_it)
    high, units = np.zeros(len(weights), bool), int(np.argmax(most))  # the first of the largest
    for i in reversed(range(len(weights))):
        if taken[i, units]:
            high[i] = True
            units -= weights[i]
    return high.reshape(c.effects.shape)


def rules(c: Costs, high: np.ndarray) -> list[str]:
    """Patterns of `precision.rules` for what is kept in high precision, bool (layers, P)."""
    stack = c.paths[0].partition("layers/")[0] + "layers"
    found = [path for path, kept in zip(c.paths, high.T.tolist(), strict=True) if all(kept)]
    for i, kept in enumerate(high.tolist()):
        if all(kept):
            found.append(f"{stack}/{i}/*")
        else:
            names = (path for path, k in zip(c.paths, kept, strict=True) if k and path not in found)
            found += [f"{stack}/{i}{path.removeprefix(stack)}" for path in names]
    return found


def config(patterns: list[str]) -> str:
    """Lines of a config with these patterns in high precision, and everything else in the recipe."""
    lines = "".join(f'    ("{pattern}", "{HIGH}"),\n' for pattern in patterns)
    value = f"(\n{lines})" if lines else "()"
    return f"c.precision.first_blocks = 0\nc.precision.last_blocks = 0\nc.precision.rules = {value}"


def table(evaluate: SwitchEvaluator, found: Attribution, budget: float) -> Iterator[str]:
    """What the choice and "first and last block" leave, expected and measured, and the choice's config."""
    c = costs(evaluate, found)
    in_high, _ = evaluate(evaluate.off)
    chosen = choose(c, budget)
    rows = {"everything low": np.zeros_like(chosen), f"chosen, at most {budget:.1%}": chosen}
    if len(c.effects) > 2:
        ends = c.end_blocks(1, 1)
        share = c.flops_share(ends)
        rows |= {"first and last block": ends, f"chosen, at most {share:.1%}": choose(c, share)}
    yield f"{'in high precision':<24}{'FLOPs':>8}{'expected error':>16}{'error':>10}{'Δloss':>10}"
    for title, high in rows.items():
        numbers, _ = evaluate(switched(evaluate, c, high))
        change = numbers["loss"] - in_high["loss"]
        line = f"{title:<24}{c.flops_share(high):>8.1%}{c.remaining_error(high):>16.1e}"
        yield f"{line}{numbers['error']:>10.1e}{change:>+10.1e}"
    yield config(rules(c, chosen))


def switched(evaluate: SwitchEvaluator, c: Costs, high: np.ndarray) -> Switches:
    """The switches of a model under the recipe, except for what stays in high precision."""
    on = {path: array.copy() for path, array in evaluate.off.items()}
    for site in evaluate.sites:
        on[site.path][site.index] = site.layer is None or not high[site.layer, c.paths.index(site.path)]
    return on
