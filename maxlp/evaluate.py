r"""Evaluates a trained model on validation data.

Llama, Qwen3: loss, perplexity, bits per byte of text. CLIP: zero-shot
classification, retrieval, linear probe.

    python -m maxlp.evaluate --workdir=/tmp/run
    python -m maxlp.evaluate --workdir=/tmp/run --step=200
    python -m maxlp.evaluate --workdir=/tmp/run --config=llama/debug \
        --config.data.source='text:/data/books/*.txt?split=all'

    python -m maxlp.evaluate --workdir=/tmp/clip --linear_probe
    python -m maxlp.evaluate --workdir=/tmp/run --lm_eval=hellaswag,arc_easy

--lm_eval runs tasks of lm-eval instead, and writes their results to
lm_eval.json in the run's directory.

Without --config the run's own config names the validation data; the number of
devices may differ from the run's.
"""

import contextlib
import dataclasses
import fcntl
import functools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp import schema
from maxlp.data.specs import split_options
from maxlp.parallel import sharding
from maxlp.parallel.batches import one_pass
from maxlp.run import cli, constraints, run_dir, same_model
from maxlp.run.config import ConfigError
from maxlp.run.experiment import make_data
from maxlp.run.language_model import LanguageModel
from maxlp.run.restore import restore_model
from maxlp.run.settings import Settings, read
from maxlp.run.tokenizer import saved_tokenizer
from maxlp.runtime import distributed, files
from maxlp.runtime.distributed import print_primary
from maxlp.runtime.messages import format_seconds
from maxlp.schema import NotNegative


def define_flags() -> None:
    cli.define_flags("Directory of the run.", config_required=False)
    flags.adopt_module_key_flags(cli)
    flags.DEFINE_bool("linear_probe", False, "CLIP: also fit a linear classifier to the image features.")
    flags.DEFINE_float("l2", 1e-4, "Weight decay of the linear probe.", lower_bound=0.0)
    flags.DEFINE_list("lm_eval", [], "Llama, Qwen3: tasks of lm-eval (pip install 'maxlp[lm-eval]').")
    flags.DEFINE_string("lm_eval_include", None, "Folder with further tasks of lm-eval, as YAML files.")
    flags.DEFINE_bool("lm_eval_apply_chat_template", False, "Ask in the tokenizer's chat template.")
    flags.DEFINE_integer("lm_eval_num_fewshot", None, "Examples per prompt; by default the task's own.")
    flags.DEFINE_integer("lm_eval_limit", None, "Use only this many examples of each task.", lower_bound=1)
    flags.DEFINE_integer("step", None, "Checkpoint to evaluate; the newest by default.", lower_bound=0)


def main() -> None:
    distributed.initialize()
    schema.check_value("--l2", flags.FLAGS.l2, NotNegative)
    workdir = files.local_path(flags.FLAGS.workdir, "--workdir")
    check_flags()
    if flags.FLAGS.lm_eval:
        return run_lm_eval(workdir)
    c = run_dir.load_config(workdir)
    if flags.FLAGS.config is not None:
        given = flags.FLAGS.config.to_dict()
        c = ConfigDict(of_same_model(given, cli.overrides(), c.to_dict(), workdir))
    elif run_dir.is_imported(c):
        raise ConfigError(
            f"{workdir} holds imported weights and names no data; give --config=FILE, such as "
            f"--config={c.model.name}/debug --config.data.source='SOURCE?split=all'"
        )
    s = read(c)
    mesh = make_mesh(s, fixed=flags.FLAGS.config is not None)
    if flags.FLAGS.linear_probe and s.family.linear_probe is None:
        raise ConfigError(
            f"--linear_probe needs image features, which config.model.name={s.family.name} lacks; drop the "
            "flag"
        )
    with jax.set_mesh(mesh):
        results, step, source = evaluate(c, s, workdir, mesh)
    print_primary(f"{workdir} at step {step}, on {source}")
    width = max(map(len, results))
    for name, value in results.items():
        print_primary(f"{name:>{width}}  {formatted(value)}")


def of_same_model(
    given: Mapping[str, Any], overrides: Mapping[str, Any], of_run: Mapping[str, Any], workdir: Path
) -> dict[str, Any]:
    """The config of --config, with everything from the run's config that determines its model's results.

    The model's sizes are those of the weights if they were imported, for which there need be no preset.

    Args:
      overrides: keys of ``given`` and values that were set on the command line.
      of_run: the config in the workdir; see also `run_dir.is_imported`.

    Raises:
      ConfigError: a config of another model, or a flag that would have no effect.
    """
    model = given["model"]
    if run_dir.is_imported(of_run):
        from maxlp.run import pretrained  # evaluations of runs do not need it

        model = pretrained.joined_model(of_run["model"], model, overrides, f"--workdir={workdir}")
    if others := same_model.model_differences(of_run["model"], model):
        lines = others.get("model.name") or "; ".join(others.values())  # all differ in another family
        raise ConfigError(
            f"{workdir} holds the weights of another model ({lines}); give one with that model"
        )
    # The recipe, average and adapters with which the weights were trained.
    sections = {name: of_run[name] for name in ("precision", "optimizer", "train") if name in of_run}
    ignored = {"optimizer", "train", *sections}  # imported weights have neither, and may have no precision
    for key, value in overrides.items():
        if key.partition(".")[0] in ignored:
            raise ConfigError(
                f"config.{key}={value!r} has no effect: {workdir} is evaluated as it was trained; drop the "
                "flag"
            )
    of_texts = same_model.text_keys(of_run.get("data", {}), overrides)
    return {**given, **sections, "model": model, "data": given["data"] | of_texts}


def formatted(value: float) -> str:
    """A result as text: counts and values from 1,000 on without decimals, from 10¹² on with four digits."""
    if value >= 1e12:
        return f"{value:.4g}"
    is_count = value >= 1000 or (value > 1 and float(value).is_integer())
    return f"{value:,.0f}" if is_count else f"{value:.4f}"


def check_flags() -> None:
    """Raises a ConfigError for a flag that the evaluation would ignore."""
    f = flags.FLAGS
    if f.lm_eval:
        unused: dict[str, str] = dict.fromkeys(("config", "linear_probe", "l2"), "with --lm_eval")
    else:
        own = ("include", "apply_chat_template", "num_fewshot", "limit")
        unused = dict.fromkeys([f"lm_eval_{name}" for name in own], "without --lm_eval")
        if not f.linear_probe:
            unused["l2"] = "without --linear_probe"
    for name, why in unused.items():
        if f[name].present:
            raise ConfigError(f"--{name} has no effect {why}; drop it")


def run_lm_eval(workdir: Path) -> None:
    """Runs the tasks of --lm_eval; results of other tasks at the same step stay in the file."""
    from maxlp.data.chat import make_chat
    from maxlp.families.llama import harness

    f, language = flags.FLAGS, LanguageModel(workdir)
    if jax.process_count() > 1:
        raise ValueError(f"--lm_eval runs in one process, not in {jax.process_count()}")
    chat = make_chat(language.tokenizer, language.tokenizer_spec) if f.lm_eval_apply_chat_template else None
    mesh = sharding.make_mesh(fsdp=-1)
    with jax.set_mesh(mesh):
        results, table = harness.evaluate(
            language.restore(f.step, mesh),
            language.tokenizer,
            f.lm_eval,
            max_len=language.model.max_seq_len,
            chat=chat,
            include=f.lm_eval_include,
            num_fewshot=f.lm_eval_num_fewshot,
            limit=f.lm_eval_limit,
        )
    print_primary(f"{workdir} at step {language.step}\n{table}")  # before it may be impossible to write
    path = workdir / "lm_eval.json"
    with locked(workdir):  # otherwise one of two simultaneous evaluations would lose its results
        every_step = files.read_json(path, {}, remedy="delete it, and evaluate again")
        at_step = every_step.setdefault(str(language.step), {})
        for key, value in results.items():
            at_step[key] = at_step.get(key, {}) | value
        files.write_json(path, every_step)
        files.send(path)
    print_primary(f"written to {path}")


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Waits until no other process of this machine is in such a block for the directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_mesh(s: Settings, fixed: bool) -> Mesh:
    """The mesh of the settings; if they do not fit the devices here, all devices along fsdp.

    Args:
      fixed: whether settings that do not fit are an error.

    Raises:
      ConfigError: settings that do not fit.
    """
    devices = jax.devices()
    # Settings that matter only in training are turned off, because their constraints (several replicas,
    # batches that divide into microbatches, …) need not hold here.
    s = dataclasses.replace(
        s,
        precision=dataclasses.replace(s.precision, exchange="none", scatter="none"),
        optimizer=dataclasses.replace(s.optimizer, adascale=None, offload=False, low_bit=None),
        train=dataclasses.replace(s.train, local=None, microbatches=1, release_gradients=False),
        checkpoint=functools.partial(s.checkpoint.func),
        metrics=functools.partial(s.metrics.func),
        profile=functools.partial(s.profile.func),
    )
    try:
        machine = s.machine_of(devices)
        mesh: Mapping[str, int] = s.mesh
    except ConfigError:
        if fixed:
            raise
        mesh = dict(fsdp=-1, dcn_data=sharding.dcn_sizes(devices)[0])
        s = dataclasses.replace(s, mesh=mesh)
        machine = s.machine_of(devices)
    constraints.check(s, machine)
    return sharding.make_mesh(**mesh, devices=devices)


def evaluate(c: ConfigDict, s: Settings, workdir: Path, mesh: Mesh) -> tuple[dict[str, float], int, str]:
    """Named results, the step of the checkpoint and the source of the data."""
    graphdef, state, step = restore_model(c, workdir, flags.FLAGS.step, mesh)
    run_dir.use_hub_commits(workdir, s.data)
    tokenizer = saved_tokenizer(s.data.tokenizer, workdir)
    validation = make_data(s, tokenizer, "validation", mesh)
    source = c.data.get("validation_source") or c.data.source
    linear_probe = s.family.linear_probe if flags.FLAGS.linear_probe else None
    train = probe_data(s, tokenizer, validation.classes, mesh) if linear_probe else None
    run = s.family.evaluator(graphdef, s.model, s.data, s.loss, validation)
    results = run(state, lambda: counted(one_pass(validation, mesh)))
    if linear_probe:
        found = linear_probe(
            graphdef,
            state,
            counted(one_pass(train, mesh)),
            counted(one_pass(validation, mesh)),
            num_classes=len(validation.classes),
            l2=flags.FLAGS.l2,
        )
        results |= {f"linear_probe_{name}": value for name, value in found.items()}
    return results, step, source


def counted(batches: Iterable[dict]) -> Iterator[dict]:
    """The batches, counted on a terminal; how many follow is not known before texts are packed."""
    if not (sys.stderr.isatty() and distributed.is_primary()):
        yield from batches
        return
    start = time.monotonic()
    try:
        for number, batch in enumerate(batches, 1):
            elapsed = format_seconds(time.monotonic() - start)
            print(f"\r\x1b[Kbatch {number:,}  {elapsed}", end="", file=sys.stderr, flush=True)
            yield batch
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def probe_data(s: Settings, tokenizer: str, classes: Sequence[str], mesh: Mesh) -> Any:
    """The images that a linear probe is fitted to: each training image once, without augmentation.

    Args:
      classes: of the validation data.

    Raises:
      ConfigError: labels have no meaning, or a different one in the validation data.
    """
    source = s.data.validation_source or s.data.source
    if not classes:
        raise ConfigError(
            f"--linear_probe needs images with labels, and {source} has no classes; name them with "
            "--config.data.classes=FILE, or drop the flag"
        )
    train = make_data(on_training_data(s), tokenizer, "validation", mesh)
    if [*train.classes] != [*classes]:
        raise ConfigError(
            f"--linear_probe needs training images with the classes of {source}, and {s.data.source} has "
            "others; set --config.data.source to the training split of the same data, or drop the flag"
        )
    return train


def on_training_data(s: Settings) -> Settings:
    """Settings whose validation data is the training data."""
    source, options = s.data.source, split_options(s.data.source)[1]
    if "split" not in options:
        source += f"{'&' if options else '?'}split=train"
    return dataclasses.replace(s, data=dataclasses.replace(s.data, source=source, validation_source=""))


if __name__ == "__main__":
    define_flags()
    cli.run(main)
