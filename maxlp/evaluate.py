r"""Measures a trained Llama on held-out text: loss, perplexity, bits per byte.

    python -m maxlp.evaluate --workdir=/tmp/run
    python -m maxlp.evaluate --workdir=/tmp/run --step=200
    python -m maxlp.evaluate --workdir=/tmp/run --config=configs/llama/debug.py \
        --config.data.source='text:/data/books/*.txt?split=all'

Without --config the run's own config says what the held-out text is.
"""

from pathlib import Path

import jax
from absl import flags

from maxlp import build, config, distributed, sharding
from maxlp import workdir as files


def define_flags() -> None:
    config.define_flags("Directory of the run.", config_required=False)
    flags.adopt_module_key_flags(config)
    flags.DEFINE_integer("step", None, "Checkpoint to measure; the newest by default.", lower_bound=0)


def main() -> None:
    distributed.initialize()
    workdir = Path(flags.FLAGS.workdir)
    c = flags.FLAGS.config or files.load_config(workdir)
    mesh = build.mesh(c)
    build.check(c, mesh)
    with jax.set_mesh(mesh):
        graphdef, state, at_step = build.restore_model(c, workdir, flags.FLAGS.step, mesh)
        data = build.heldout(c, build.saved_tokenizer(c, workdir))
        batches = lambda: (batch for batch, _ in sharding.device_batches(iter(data), mesh))  # noqa: E731
        results = build.task(c).evaluator(c, graphdef, data)(state, batches)
    distributed.say(f"{workdir} at step {at_step}, on {c.data.source}")
    for name, value in results.items():
        distributed.say(
            f"{name:>14}  {value:,.0f}" if name in ("tokens", "bytes") else f"{name:>14}  {value:.4f}"
        )


if __name__ == "__main__":
    define_flags()
    config.run(main)
