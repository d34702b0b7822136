r"""Measures a trained model on held-out data.

Llama: loss, perplexity, bits per byte of text. CLIP: zero-shot classification, retrieval, linear probe.

    python -m maxlp.evaluate --workdir=/tmp/run
    python -m maxlp.evaluate --workdir=/tmp/run --step=200
    python -m maxlp.evaluate --workdir=/tmp/run --config=configs/llama/debug.py \
        --config.data.source='text:/data/books/*.txt?split=all'

    python -m maxlp.evaluate --workdir=/tmp/clip --linear_probe

Without --config the run's own config says what the held-out data is, on however many devices are here.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp.parallel import sharding
from maxlp.run import build, config
from maxlp.run import run_dir as files
from maxlp.runtime import distributed


def define_flags() -> None:
    config.define_flags("Directory of the run.", config_required=False)
    flags.adopt_module_key_flags(config)
    flags.DEFINE_bool("linear_probe", False, "CLIP: also fit a linear classifier to the image features.")
    flags.DEFINE_float("l2", 1e-4, "Weight decay of the linear probe.", lower_bound=0.0)
    flags.DEFINE_integer("step", None, "Checkpoint to measure; the newest by default.", lower_bound=0)


def main() -> None:
    distributed.initialize()
    workdir = Path(flags.FLAGS.workdir)
    c = flags.FLAGS.config or files.load_config(workdir)
    if flags.FLAGS.config is None and "mesh" not in c:
        raise config.ConfigError(
            f"{workdir} holds imported weights and names no data; give --config=FILE with the same model"
        )
    mesh, task = mesh_of(c, given=flags.FLAGS.config is not None), build.task(c)
    build.check(c, mesh)
    if flags.FLAGS.linear_probe and not hasattr(task, "linear_probe"):
        raise config.ConfigError(f"--linear_probe is of images, config.model.name={c.model.name} has none")
    with jax.set_mesh(mesh):
        graphdef, state, at_step = build.restore_model(c, workdir, flags.FLAGS.step, mesh)
        tokenizer = build.saved_tokenizer(c, workdir)
        data = build.heldout(c, tokenizer)
        source = c.data.get("heldout_source") or c.data.source
        if flags.FLAGS.linear_probe and not data.classes:
            raise config.ConfigError(
                f"--linear_probe needs images with labels, and {source} has no classes; name them with "
                "--config.data.classes=FILE, or drop it"
            )
        results = task.evaluator(c, graphdef, data)(state, lambda: batches(data, mesh))
        if flags.FLAGS.linear_probe:
            train = batches(build.heldout(c, tokenizer, of_training=True), mesh)
            probe = functools.partial(task.linear_probe, graphdef, state, train, batches(data, mesh))
            found = probe(num_classes=len(data.classes), l2=flags.FLAGS.l2)
            results |= {f"linear_probe_{name}": value for name, value in found.items()}
    distributed.print_primary(f"{workdir} at step {at_step}, on {source}")
    width = max(map(len, results))
    for name, value in results.items():
        counts = value >= 1000 or (value > 1 and float(value).is_integer())
        distributed.print_primary(
            f"{name:>{width}}  {value:,.0f}" if counts else f"{name:>{width}}  {value:.4f}"
        )


def mesh_of(c: ConfigDict, given: bool) -> Mesh:
    """The mesh of a config; where a run's own is not ``given`` and fits other machines, all devices here.

    Raises:
      ConfigError: a given one does not fit.
    """
    try:
        return build.mesh(c)
    except config.ConfigError:
        if given:
            raise
        return sharding.make_mesh(fsdp=-1)


def batches(data: Any, mesh: Mesh) -> Iterator[dict]:
    return (batch for batch, _ in sharding.device_batches(iter(data), mesh))


if __name__ == "__main__":
    define_flags()
    config.run(main)
