"""Which features can be combined: every pair runs (in at least one row of `rows`) or is refused by a rule.

`tools/composition.py` prints `docs/composition.md`, with the rows, and `tests/matrix.py` runs the rows of
that page.
"""

import dataclasses
import functools
import importlib
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlp.run import constraints
from maxlp.run.config import ConfigError
from maxlp.run.settings import Machine, Settings, read

DEVICES = 8  # simulated
PAGE = Path(__file__).parent.parent / "docs/composition.md"


@dataclasses.dataclass(frozen=True)
class Feature:
    """A set of config values that a run switches on.

    Attributes:
      dimension: a run has at most one feature of each dimension.
      neutral: whether it changes only the order of sums, so that losses stay equal to rounding.
      slow: whether the slow tier runs all of its pairs.
    """

    name: str
    dimension: str
    values: dict[str, Any]
    neutral: bool = False
    slow: bool = False

    def __hash__(self):
        return hash(self.name)


QUANTIZED = {"precision.first_blocks": 0, "precision.last_blocks": 0}
FEATURES = [
    Feature(
        "fp8_delayed",
        "precision",
        QUANTIZED | {"precision.recipe": "fp8_delayed", "precision.options.history": 4},
    ),
    Feature("int8_switchback", "precision", QUANTIZED | {"precision.recipe": "int8_switchback"}),
    Feature("mxfp8", "precision", QUANTIZED | {"precision.recipe": "mxfp8"}),
    Feature(  # rounds to nearest, because random rounding differs where the last bit of a gradient does
        "nvfp4",
        "precision",
        QUANTIZED | {"precision.recipe": "nvfp4", "precision.options.grad_rounding": "nearest"},
    ),
    Feature("quest", "precision", QUANTIZED | {"precision.recipe": "quest"}, slow=True),
    Feature(
        "wta_crs",
        "precision",
        QUANTIZED | {"precision.recipe": "wta_crs", "precision.options.keep": 0.9},
        slow=True,
    ),
    Feature(
        "fp8_blocks",
        "precision",
        QUANTIZED | {"precision.recipe": "fp8_blocks", "precision.options.block_size": 16},
        slow=True,
    ),
    Feature(  # rounds to nearest, as nvfp4 does here
        "fp8_gaudi",
        "precision",
        QUANTIZED
        | {
            "precision.recipe": "fp8_gaudi",
            "precision.options.history": 4,
            "precision.options.grad_rounding": "nearest",
        },
        slow=True,
    ),
    Feature("unquantized blocks", "ends", {"precision.first_blocks": 1, "precision.last_blocks": 0}),
    Feature(
        "pure_bf16",
        "dtype",
        {
            "model.dtype": "bfloat16",
            "model.param_dtype": "bfloat16",
            "optimizer.param_rounding": "stochastic",
        },
    ),
    Feature(
        "residual_bf16",
        "dtype",
        {
            "model.dtype": "bfloat16",
            "model.param_dtype": "bfloat16",
            "optimizer.param_rounding": "residual",
        },
        slow=True,
    ),
    Feature("fp16", "dtype", {"model.dtype": "float16", "precision.loss_scale.initial": 256.0}),
    Feature("scalify_fp16", "dtype", {"model.dtype": "float16", "precision.scalify": "fp16"}),
    Feature(
        "scalify_fp8",
        "dtype",
        QUANTIZED | {"model.dtype": "float16", "precision.scalify": "fp8"},
        slow=True,
    ),
    Feature(
        "scalify_fp16_params",
        "dtype",
        {
            "model.dtype": "float16",
            "model.param_dtype": "float16",
            "precision.scalify": "fp16",
            "optimizer.param_rounding": "nearest",
            "optimizer.low_bit.mu": "float16",
            "optimizer.low_bit.nu": "float16",
        },
        slow=True,
    ),
    Feature(  # before the optimizers, which replace its own
        "adascale",
        "adascale",
        {"optimizer.name": "sgd", "optimizer.adascale": 2.0, "train.microbatches": 2},
    ),
    Feature("sgd", "optimizer", {"optimizer.name": "sgd"}),
    Feature("stable_adamw", "optimizer", {"optimizer.name": "stable_adamw"}),
    Feature(  # resets its moments in the third step
        "stable_spam",
        "optimizer",
        {"optimizer.name": "stable_spam", "optimizer.options": {"reset_every": 2}},
        slow=True,
    ),
    Feature("adafactor", "optimizer", {"optimizer.name": "adafactor"}, slow=True),
    Feature("lion", "optimizer", {"optimizer.name": "lion"}, slow=True),
    Feature("muon", "optimizer", {"optimizer.name": "muon"}),
    Feature("normuon", "optimizer", {"optimizer.name": "normuon"}, slow=True),
    Feature(  # with 64 pooled tokens, the gradients of CLIP's last layers span the 32 columns of a basis
        "soap",
        "optimizer",
        {"optimizer.name": "soap", "optimizer.options": {"one_sided": True}, "data.batch_size": 64},
    ),
    Feature("apollo", "optimizer", {"optimizer.name": "apollo", "optimizer.options": {"rank": 4}}),
    Feature("apollo_mini", "optimizer", {"optimizer.name": "apollo_mini"}, slow=True),
    Feature("adamp", "optimizer", {"optimizer.name": "adamp"}, slow=True),
    Feature(
        "schedule_free_adamw",
        "optimizer",
        {"optimizer.name": "schedule_free_adamw", "optimizer.schedule": "constant"},
        slow=True,
    ),
    Feature(  # bounds the global norm in the first step, and each tensor in the others
        "adagc",
        "adagc",
        {"optimizer.adagc.ratio": 1.05, "optimizer.adagc.warmup_steps": 1},
        slow=True,
    ),
    Feature("galore", "galore", {"optimizer.galore.rank": 4}),
    Feature(
        "low_bit",
        "low_bit",
        {
            "optimizer.low_bit.mu": "dynamic8",
            "optimizer.low_bit.nu": "dynamic8",
            "optimizer.low_bit.block_size": 16,
            "optimizer.low_bit.min_size": 64,
        },
    ),
    Feature("lora", "lora", {"train.lora.rank": 4, "train.init_from": "weights"}),
    Feature(
        "release_gradients", "release", {"train.release_gradients": True, "optimizer.clip_norm": 0.0}, True
    ),
    Feature(
        "offload",
        "release",
        {"train.release_gradients": True, "optimizer.clip_norm": 0.0, "optimizer.offload": True},
        neutral=True,
        slow=True,
    ),
    Feature("exchange", "exchange", {"mesh.data": 2, "precision.exchange": "int8"}),
    Feature("local steps", "local", {"mesh.data": 2, "train.local.steps": 3}),
    Feature("microbatches", "microbatches", {"train.microbatches": 2}, True),
    Feature("guard=skip", "guard", {"spikes.guard": "skip"}, True),
    Feature("guard=rollback", "guard", {"spikes.guard": "rollback"}, True),
    Feature("remat=block", "remat", {"model.remat": "block"}, True),
    Feature("remat=dots", "remat", {"model.remat": "dots"}, True),
    Feature("qk_norm", "qk_norm", {"model.qk_norm": True}),
    Feature("qk_clip", "qk_norm", {"model.qk_clip": 0.05}),
    Feature("fsdp", "fsdp", {"mesh.fsdp": 2}, True),
    Feature("scatter", "fsdp", {"mesh.fsdp": 2, "precision.scatter": "int8"}, slow=True),
    Feature("tensor", "tensor", {"mesh.tensor": 2}, True),
    Feature("context", "context", {"mesh.context": 2, "model.attention": "ring"}, True),
    Feature("stage", "stage", {"mesh.stage": 2}, True),
]
# In the place of released gradients in a row's reference: what is released cannot be clipped.
UNCLIPPED = Feature("unclipped", "clipping", {"optimizer.clip_norm": 0.0})
FAMILIES = ("llama", "clip")
BASE = {
    "mesh.fsdp": 1,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 0,
    "train.total_steps": 3,
    "data.tokenizer": "bytes",
    "data.batch_size": 8,
}
SMALL = {
    "llama": {
        "model.vocab_size": 64,
        "model.embed_dim": 32,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.head_dim": 16,
        "model.mlp_dim": 64,
        "model.max_seq_len": 32,
        "data.seq_len": 32,
    },
    "clip": {
        "optimizer.learning_rate": 1e-4,
        "model.logit_scale": 1.0,  # sharp logits of few pairs amplify rounding
        "model.embed_dim": 32,
        **{
            f"model.{tower}.{key}": value
            for tower in ("visual", "text")
            for key, value in dict(width=32, num_layers=2, num_heads=2, mlp_dim=64).items()
        },
        "model.visual.image_size": 16,
        "model.visual.patch_size": 4,
        "model.text.vocab_size": 64,
        "model.text.max_len": 12,
        "data.image_size": 16,
        "data.text_len": 12,
    },
}

Row = tuple[str, ...]  # names of features


def feature(name: str) -> Feature:
    return next(f for f in (*FEATURES, UNCLIPPED) if f.name == name)


@functools.cache
def settings(family: str, names: Row) -> Settings:
    """The settings of a small run with these features.

    Raises:
      ConfigError: values that a section refuses.
    """
    c = importlib.import_module(f"configs.{family}.debug").get_config()
    with c.unlocked():
        for values in (BASE, SMALL[family], *(feature(name).values for name in names)):
            c.update_from_flattened_dict(values)
    return read(c)


def num_devices(names: Row) -> int:
    values = {key: value for name in names for key, value in feature(name).values.items()}
    return math.prod(value for key, value in values.items() if key.startswith("mesh."))


def machine(family: str, names: Row) -> Machine:
    return settings(family, names).machine(num_devices(names), "cpu")


@functools.cache
def refusal(family: str, names: Row) -> str | None:
    """The message with which these features are refused; None if they can be combined."""
    try:
        constraints.check(settings(family, names), machine(family, names))
    except ConfigError as error:
        return str(error)
    return None


@functools.cache
def pairs(family: str) -> dict[Row, str | None]:
    """Every pair of features of different dimensions, with its refusal."""
    found = {}
    for a, b in itertools.combinations(FEATURES, 2):
        if a.dimension != b.dimension:
            found[a.name, b.name] = refusal(family, (a.name, b.name))
    return found


# A CLIP splits pairs of images and texts in code of its own, and compares all pairs of a batch.
OF_CLIP = {"fsdp", "tensor", "microbatches"}
# Formats of activations whose parameters are in float32: as the recipes, they change gradients only.
OF_GRADIENTS = {"fp16", "scalify_fp16"}


def is_slow(family: str, pair: Row) -> bool:
    """Whether a pair is left to the slow tier: those of slow features, and two kinds of others.

    What an optimizer gets is gradients, in whichever format they were computed; these pairs alone would be
    half of the rows. And the full tier runs with Llama what CLIP does in the same code.
    Features that share most of their code with one of the full tier are slow themselves, and those that
    few runs use.
    """
    dimensions = {feature(name).dimension for name in pair}
    if any(feature(name).slow for name in pair):
        return True
    if "optimizer" in dimensions and ("precision" in dimensions or OF_GRADIENTS & set(pair)):
        return True
    return family == "clip" and ("optimizer" in dimensions or not dimensions & OF_CLIP)


@functools.cache
def rows(family: str, tier: str) -> tuple[Row, ...]:
    """Combinations of features on at most `DEVICES` devices; both tiers together cover all pairs that run.

    Each row starts with a missing pair, and grows by the feature that adds most of the missing pairs.

    Args:
      tier: ``full``, or ``slow`` for the pairs that `is_slow` leaves.
    """
    missing = {
        pair
        for pair, message in pairs(family).items()
        if message is None and is_slow(family, pair) == (tier == "slow")
    }
    if tier == "slow":
        missing -= set(itertools.chain(*(itertools.combinations(row, 2) for row in rows(family, "full"))))
    found = []
    while missing:
        row: Row = min(missing)
        while longer := _grown(family, row, missing):
            row = longer
        missing -= set(itertools.combinations(row, 2))
        found.append(row)
    return tuple(found)


def _grown(family: str, row: Row, missing: set[Row]) -> Row | None:
    """The row with one feature more, which adds most of the missing pairs; None if no feature adds any."""
    best, most = None, 0
    taken = {feature(name).dimension for name in row}
    for f in FEATURES:
        if f.dimension in taken:
            continue
        longer = tuple(g.name for g in FEATURES if g.name in (*row, f.name))
        gained = sum(pair in missing for pair in itertools.combinations(longer, 2) if f.name in pair)
        if gained > most and num_devices(longer) <= DEVICES and refusal(family, longer) is None:
            best, most = longer, gained
    return best


def rows_on_page() -> Iterator[tuple[str, str, Row]]:
    """Family, tier and features of the rows listed in docs/composition.md; `rows` takes half a minute."""
    family = tier = ""
    for line in PAGE.read_text().splitlines():
        if heading := re.fullmatch(r"### (\w+), (\w+) tier, \d+ runs", line):
            family, tier = heading.groups()
        elif family in FAMILIES and line.startswith("- "):
            yield family, tier, tuple(line.removeprefix("- ").split(", "))


def reference(names: Row) -> Row:
    """The row without its neutral features, which runs on one device."""
    kept = tuple(name for name in names if not feature(name).neutral)
    is_released = any(feature(name).dimension == "release" for name in names)
    return (*kept, UNCLIPPED.name) if is_released else kept
