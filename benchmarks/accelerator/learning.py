"""Do the recipes and optimizers learn as well at 60 and 130 million parameters? One seed, real text.

Many of the variants are those of benchmarks/fidelity.py, which trains models of 344,000 parameters.
"""

import functools
import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

from fidelity import VARIANTS
from fidelity_runs import Data, Trainer, watch_nothing
from ml_collections import ConfigDict
from training import changed

from benchmarks.accelerator.results import OutOfTime, Result
from configs.llama import tiny as tiny_config
from maxlp.run.presets import LOW_BIT

STEPS, VALIDATION_BATCHES = 400, 32
REAL_TEXT = {
    "data.source": "stdlib",
    "data.tokenizer": "bpe:32000",
    "data.batch_size": 64,  # × 256 tokens: 6.5 million in all, about as many as the standard library has
    "data.shuffle_tokens": 2**22,
    "optimizer.warmup_steps": STEPS // 10,
    "train.total_steps": STEPS,
    "train.eval_every": 0,
    "precision.first_blocks": 0,
    "precision.last_blocks": 0,
}
TINY = {"train.total_steps": 4, "optimizer.warmup_steps": 1, "data.source": "stdlib?validation=0.002"}


def fidelity(out: Result) -> None:
    """Trains every variant from the same weights on the same batches, as long as time is left."""
    base = tiny_config.get_config() if out.tiny else make_config(out.name.removeprefix("fidelity_"))
    chosen = variants(base)
    if out.tiny:
        base = changed(base, TINY)
        chosen = {name: chosen[name] for name in ("bf16", "fp8_delayed")}
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        data = Data(base, Path(folder), 2 if out.tiny else VALIDATION_BATCHES)
        for name, changes in chosen.items():
            if out.seconds_left < 1.5 * longest:
                raise OutOfTime
            start = time.monotonic()
            out.measure(functools.partial(train, changes, data), variant=name)
            longest = max(longest, time.monotonic() - start)


def make_config(size: str) -> ConfigDict:
    return changed(importlib.import_module(f"configs.llama.{size}").get_config(), REAL_TEXT)


def variants(base: ConfigDict) -> dict[str, dict[str, Any]]:
    """Name to changes of the config, the most important first."""
    recipes = {name: VARIANTS["precision"][name] for name in ("bf16", "fp8_delayed", "fp8_current")}
    small = {"rank": base.model.embed_dim // 4, "scale": 1.0, "update_proj_gap": 50}
    return recipes | {
        "int8_switchback": VARIANTS["precision"]["int8_switchback"],
        "GaLore, rank d/4": {"optimizer.galore": small},
        "StableAdamW": {"optimizer.name": "stable_adamw"},
        "8-bit moments": {"optimizer.low_bit": LOW_BIT["8bit"]},
        "int8_all": VARIANTS["precision"]["int8_all"],
        "mxfp8": VARIANTS["precision"]["mxfp8"],
    }


def train(changes: dict[str, Any], data: Data) -> dict[str, Any]:
    trainer = Trainer(changes, data)
    steps = trainer.settings.train.total_steps
    state, records = trainer.train(trainer.init(0), data.batches(0, steps), watch_nothing)
    return {"validation_loss": trainer.evaluate(state)["loss"], "losses": records["loss"]}
