"""What outliers cost a quantized matmul, depending on which elements share a scale.

    python benchmarks/matmul_outliers.py

One layer of 1,024 × 512, 4 sequences of 256 tokens, normally distributed values in bfloat16, and the error
of its three matmuls (`maxlp.precision.recipes.GEMMS`) against float64. Outliers are `OUTLIERS` channels or
tokens, `SIZES` times as large as the others:

    channels   of the input
    tokens     of the input, and as many other ones of the output's gradient

An outlier multiplies zeros: the kernel's rows of those channels are zero, the gradient is zero at those
tokens, and the input where the gradient is large. So the results are what all other elements contribute,
which is what a scale that is too large destroys; where an outlier multiplies something, its own product is
most of the result and hides that ("whole"). The error is relative, of a row of the result (the output of a
token, the gradients of a token's input or of an input channel's kernel): the root mean square of the rows
that are not zero. Prints two Markdown tables of the mean of `SEEDS`, and the criteria. A minute of CPU
time.

Criteria, written before the first run; each is of the means:

1. Channels × 10,000: the error of fwd with `fp8_blocks` and with `mxfp8` is at most half that of
   `fp8_current`; that of `fp8_rowwise`, whose row of a token has the outlier too, is at least 0.8 times.
2. Tokens × 10,000: the errors of fwd with `fp8_rowwise`, `fp8_blocks`, `mxfp8` and `nvfp4` are at most 1.1
   times those of Gaussian data, that of `fp8_current` at least twice.
3. × 100 costs FP8 nothing: each error of each of the four recipes is at most 1.1 times the Gaussian one.
4. Channels × 100 cost int8: the error of fwd is at least 10 times the Gaussian one.
5. × 10,000, drhs: blocks along the tokens help against a token, a scale for a channel does not: the error
   with `fp8_blocks` is at most half that with `fp8_current`, that with `fp8_rowwise` at least 0.8 times.

`PARTS`, `nvfp4` without its rotation and also without stochastic rounding, and the errors of each seed were
added after the first run, to see what causes its error in drhs.
"""

import argparse
import functools
import itertools
from collections.abc import Callable

import fidelity_figures
import jax
import jax.numpy as jnp
import numpy as np

from maxlp.precision import make_recipe
from maxlp.precision.dot import QuantDot
from maxlp.precision.recipes import GEMMS

FP8 = ("fp8_current", "fp8_rowwise", "fp8_blocks", "mxfp8")
RECIPES = {name: make_recipe(name) for name in (*FP8, "nvfp4", "int8_switchback")}
PARTS = {
    "nvfp4, not rotated": make_recipe("nvfp4", hadamard=False),
    "nvfp4, not rotated, nearest": make_recipe("nvfp4", hadamard=False, grad_rounding="nearest"),
}
RECIPES |= PARTS
B, S, K, N = 4, 256, 1024, 512
OUTLIERS = 4
SIZES = (100, 10_000, 1_000_000)
SEEDS = range(5)

Data = tuple[np.ndarray, np.ndarray, np.ndarray]
Errors = dict[tuple[str, str, str], float]  # (data, matmul, recipe) → error


def make_data(kind: str, size: float, seed: int, whole: bool) -> Data:
    """Input (B S, K), kernel (K, N) and output gradient (B S, N), values of bfloat16.

    Args:
      kind: "Gaussian", "channels" or "tokens".
      whole: outliers multiply random values, not zeros.
    """
    rng = np.random.default_rng(seed)
    x_TK, w_KN, g_TN = (rng.standard_normal(shape) for shape in ((B * S, K), (K, N), (B * S, N)))
    w_KN /= K**0.5
    if kind == "channels":
        channels = rng.choice(K, OUTLIERS, replace=False)
        x_TK[:, channels] *= size
        w_KN[channels] *= whole
    if kind == "tokens":
        of_x, of_g = rng.choice(B * S, (2, OUTLIERS), replace=False)
        x_TK[of_x] *= size
        g_TN[of_g] *= size
        g_TN[of_x] *= whole
        x_TK[of_g] *= whole
    return tuple(np.float64(jnp.bfloat16(a)) for a in (x_TK, w_KN, g_TN))


@functools.cache
def compiled(recipe: str) -> Callable[..., tuple[jax.Array, ...]]:
    """Forward and backward pass of a layer as a function of input, kernel and output gradient."""
    dot = QuantDot(RECIPES[recipe])

    def step(x_BSK: jax.Array, w_KN: jax.Array, g_BSN: jax.Array) -> tuple[jax.Array, ...]:
        y_BSN, pull = jax.vjp(lambda x, w: dot(x, w, (((2,), (0,)), ((), ()))), x_BSK, w_KN)
        return y_BSN, *pull(g_BSN)

    return jax.jit(step)


def matmuls(recipe: str, x_TK: np.ndarray, w_KN: np.ndarray, g_TN: np.ndarray) -> Data:
    """Output (B S, N), gradients of the input (B S, K) and of the kernel (K, N) under a recipe."""
    arrays = (x_TK.reshape(B, S, K), w_KN, g_TN.reshape(B, S, N))
    y, dx, dw = compiled(recipe)(*map(jnp.bfloat16, arrays))
    return np.float64(y).reshape(-1, N), np.float64(dx).reshape(-1, K), np.float64(dw)


def error(ours: np.ndarray, exact: np.ndarray) -> float:
    """The root mean square of the relative errors of the rows that are not zero."""
    size = np.linalg.norm(exact, axis=1)
    rows = size > 0
    return float(np.sqrt(np.mean((np.linalg.norm(ours - exact, axis=1)[rows] / size[rows]) ** 2)))


def label(kind: str, size: int) -> str:
    return f"{kind} × {size:,}" if size > 1 else kind


def of_seeds(recipe: str, kind: str, size: float, whole: bool) -> np.ndarray:
    """The errors of the three matmuls with each seed, (seeds, 3)."""

    def of_seed(seed: int) -> list[float]:
        x, w, g = make_data(kind, size, seed, whole)
        exact = x @ w, g @ w.T, x.T @ g
        return [error(a, b) for a, b in zip(matmuls(recipe, x, w, g), exact, strict=True)]

    return np.array([of_seed(seed) for seed in SEEDS])


def measure(whole: bool, cases: list[tuple[str, int]]) -> Errors:
    """The mean errors over the seeds, of cases (kind, size)."""
    errors: Errors = {}
    for (kind, size), recipe in itertools.product(cases, RECIPES):
        means = np.mean(of_seeds(recipe, kind, size, whole), axis=0)
        errors |= {(label(kind, size), gemm, recipe): e for gemm, e in zip(GEMMS, means, strict=True)}
    return errors


def table(errors: Errors) -> None:
    """Prints a line for each case and matmul; a column is a recipe."""
    rows = dict.fromkeys((data, gemm) for data, gemm, _ in errors)
    cells = [[data, gemm, *(f"{errors[data, gemm, name]:.2g}" for name in RECIPES)] for data, gemm in rows]
    fidelity_figures.print_table(["data", "matmul", *(f"`{name}`" for name in RECIPES)], cells)


def criteria(errors: Errors) -> list[str]:
    """A line for each criterion: the ratios of the recipes, with "(no)" where one does not meet it."""

    def against(data: str, gemm: str, other: str, names: tuple[str, ...]) -> dict[str, float]:
        return {name: errors[data, gemm, name] / errors[data, gemm, other] for name in names}

    def growth(data: str, gemm: str, names: tuple[str, ...]) -> dict[str, float]:
        return {name: errors[data, gemm, name] / errors["Gaussian", gemm, name] for name in names}

    def line(text: str, ratios: dict[str, float], at_most: float = np.inf, at_least: float = 0) -> str:
        bound = f"at most {at_most:g}" if at_most < np.inf else f"at least {at_least:g}"
        cells = (f"{name} {r:.2f}" + " (no)" * (not at_least <= r <= at_most) for name, r in ratios.items())
        return f"* {text}, {bound}: {', '.join(cells)}"

    large, blocks = 10_000, ("fp8_blocks", "mxfp8")
    channels, tokens = label("channels", large), label("tokens", large)
    lines = [
        line(f"1. {channels}, fwd / fp8_current", against(channels, "fwd", "fp8_current", blocks), 0.5),
        line("1. the same", against(channels, "fwd", "fp8_current", ("fp8_rowwise",)), at_least=0.8),
        line(f"2. {tokens}, fwd / Gaussian", growth(tokens, "fwd", ("fp8_rowwise", *blocks, "nvfp4")), 1.1),
        line("2. the same", growth(tokens, "fwd", ("fp8_current",)), at_least=2),
    ]
    for data, gemm in itertools.product((label("channels", 100), label("tokens", 100)), GEMMS):
        lines.append(line(f"3. {data}, {gemm} / Gaussian", growth(data, gemm, FP8), 1.1))
    of_int8 = growth(label("channels", 100), "fwd", ("int8_switchback",))
    lines += [
        line("4. channels × 100, fwd / Gaussian", of_int8, at_least=10),
        line(f"5. {tokens}, drhs / fp8_current", against(tokens, "drhs", "fp8_current", blocks[:1]), 0.5),
        line("5. the same", against(tokens, "drhs", "fp8_current", ("fp8_rowwise",)), at_least=0.8),
    ]
    return lines


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=how).parse_args()
    cases = [(kind, size) for size in SIZES for kind in ("channels", "tokens")]
    errors = measure(False, [("Gaussian", 1), *sorted(cases)])
    table(errors)
    print("\nwhole:\n")
    table(measure(True, [(kind, size) for kind, size in sorted(cases) if size == SIZES[1]]))
    print("\n" + "\n".join(criteria(errors)) + "\n\ndrhs with tokens × 10,000, each seed:")
    for name, whole in itertools.product(("nvfp4", *PARTS), (False, True)):
        cells = (f"{e:.2g}" for e in of_seeds(name, "tokens", 10_000, whole)[:, 2])
        print(f"* {name}{', whole' * whole}: {', '.join(cells)}")


if __name__ == "__main__":
    main()
