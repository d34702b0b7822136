"""Which matmuls to keep in high precision under a budget of FLOPs.

    python -m maxlp.lab choose /tmp/run --budget=0.1

The effect of a matmul in a layer is the sum over its operands of the squared relative error of the
gradients with that operand alone in low precision (`run.attribution`). Rounding errors are nearly
independent, so that these squares add up to nearly the square of the error of the whole, as a budget
needs; changes of the loss have either sign and do not see the backward pass. A config can keep blocks at
either end of the stack in high precision, and a matmul in all blocks (a rule); of all such choices this
takes the one that leaves the least effect. (SNIP chooses precisions per layer by an integer program.)
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from flax import nnx

from maxlp.precision import RECIPES
from maxlp.precision.inject import matmuls
from maxlp.run.attribution import Attribution, Evaluate, Switches
from maxlp.run.settings import Settings

HIGH = "bf16"  # the recipe of a rule that keeps the model's own dtype
assert not RECIPES[HIGH].gemms


class Choice(NamedTuple):
    """What stays in high precision.

    Attributes:
      first, last: blocks at either end of the stack.
      paths: matmuls of all blocks.
    """

    first: int = 0
    last: int = 0
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Lines of a config."""
        rules = "".join(f'("{path}", "{HIGH}"), ' for path in self.paths)
        return (
            f"c.precision.first_blocks = {self.first}\nc.precision.last_blocks = {self.last}\n"
            f"c.precision.rules = ({rules.rstrip()})"
        )


@dataclasses.dataclass(frozen=True)
class Costs:
    """The matmuls of a stack under a recipe.

    Attributes:
      paths: P of them.
      effects: float64 (layers, P), see the top of this file.
      flops: float64 (P,), of a layer, as shares of those of all layers.
    """

    paths: tuple[str, ...]
    effects: np.ndarray
    flops: np.ndarray

    def mask(self, choice: Choice) -> np.ndarray:
        """bool (layers, P): what a choice keeps in high precision."""
        layers = np.arange(len(self.effects))[:, None]
        ends = (layers < choice.first) | (layers >= len(layers) - choice.last)
        return ends | np.isin(self.paths, choice.paths)

    def share(self, choice: Choice) -> float:
        """The share of the FLOPs that a choice keeps in high precision."""
        return float((self.mask(choice) * self.flops).sum())

    def left(self, choice: Choice) -> float:
        """The relative error of the gradients that is expected to remain."""
        return float(np.sqrt(self.effects[~self.mask(choice)].sum()))


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


def costs(evaluate: Evaluate, found: Attribution) -> Costs:
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
    flops = np.array([float(np.prod(kernels[path][-2:])) for path in paths])
    return Costs(paths, effects, flops / (num_layers * flops.sum()))


def choose(c: Costs, budget: float) -> Choice:
    """The choice within a budget that leaves the least effect; of equal ones, that of the fewest FLOPs."""
    num_layers, num_paths = c.effects.shape
    subsets = (np.arange(2**num_paths)[:, None] >> np.arange(num_paths)) & 1  # (2^P, P)
    best, least = Choice(), (np.inf, np.inf)
    for first in range(num_layers):
        for last in range(num_layers - first):
            middle = slice(first, num_layers - last)
            left = (1 - subsets) @ c.effects[middle].sum(0)
            share = (first + last + subsets * (num_layers - first - last)) @ c.flops
            left[share > budget * (1 + 1e-9)] = np.inf  # sums of shares are rounded
            i = np.lexsort((share, left))[0]
            if (left[i], share[i]) < least:
                paths = tuple(np.array(c.paths)[subsets[i] == 1].tolist())
                best, least = Choice(first, last, paths), (left[i], share[i])
    return best


def table(evaluate: Evaluate, found: Attribution, budget: float) -> Iterator[str]:
    """What the choice and "first and last block" leave, expected and measured, and the choice's config."""
    c = costs(evaluate, found)
    high, _ = evaluate(evaluate.off)
    chosen, ends = choose(c, budget), Choice(1, 1)
    rows = {"everything low": Choice(), f"chosen, at most {budget:.1%}": chosen}
    if len(c.effects) > 2:
        share = c.share(ends)
        rows |= {"first and last block": ends, f"chosen, at most {share:.1%}": choose(c, share)}
    yield f"{'in high precision':<24}{'FLOPs':>8}{'expected error':>16}{'error':>10}{'Δloss':>10}"
    for title, choice in rows.items():
        numbers, _ = evaluate(switched(evaluate, c, choice))
        change = numbers["loss"] - high["loss"]
        line = f"{title:<24}{c.share(choice):>8.1%}{c.left(choice):>16.1e}"
        yield f"{line}{numbers['error']:>10.1e}{change:>+10.1e}"
    yield str(chosen)


def switched(evaluate: Evaluate, c: Costs, choice: Choice) -> Switches:
    """The switches of a model under the recipe, except for what a choice keeps in high precision."""
    on = {path: array.copy() for path, array in evaluate.off.items()}
    mask = c.mask(choice)
    for site in evaluate.sites:
        on[site.path][site.index] = site.layer is None or not mask[site.layer, c.paths.index(site.path)]
    return on
