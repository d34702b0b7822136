"""From a config to the parts of a run: the one place where model, mesh, optimizer and loss meet.

Each function binds one section of the config to the function it belongs to; `check` holds what no section
can know alone. All of it runs in seconds and before anything is allocated or compiled.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp import optim, precision
from maxlp.core import fused_backward as layerwise
from maxlp.core import train_step as step
from maxlp.data import DATA
from maxlp.data import tokenizer as tokenizers
from maxlp.families import MODELS, TASKS
from maxlp.families.llama import task as language
from maxlp.monitoring import guards as guard
from maxlp.monitoring.spikes import Policy
from maxlp.monitoring.statistics import tensor_statistics
from maxlp.parallel import sharding
from maxlp.parallel.pipeline import PipelineConfig
from maxlp.precision import health as precision_health
from maxlp.run.config import ConfigError, bind, call
from maxlp.runtime import checkpoint, distributed, metrics
from maxlp.runtime.profiler import Profiler

SECTIONS = (
    *("model", "precision", "mesh", "optimizer", "data", "loss", "train"),
    *("spikes", "checkpoint", "metrics", "profile"),
)
# Numbers of which less makes no sense, wherever they stand.
LEAST = {
    **dict.fromkeys(("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"), 1),
    **dict.fromkeys(("mlp_dim", "max_seq_len", "width", "patch_size", "image_size", "max_len"), 1),
    **dict.fromkeys(("batch_size", "seq_len", "text_len", "num_chunks", "tile_size"), 1),
    **dict.fromkeys(("first_blocks", "last_blocks", "min_dim", "health_every", "z_loss", "seed"), 0),
}
DTYPES = ("float32", "bfloat16", "float16")
WRITER_ARGUMENTS = ("workdir", "total_steps", "resume_step", "run_config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """The config's ``train`` section.

    total_steps: updates of the run.
    microbatches: passes that each batch is split into.
    seed: of the weights and the order of the data.
    log_every, eval_every: updates between records and held-out evaluations (eval_every 0: at the end).
    eval_batches: of held-out data during the run (0: all); the last evaluation always takes all.
    init_from: a run or checkpoint whose weights to start from; "" draws them at random.
    release_gradients: each layer is updated in the backward pass, so that the gradients never all exist:
      see `layerwise`.
    """

    total_steps: int
    microbatches: int
    seed: int
    log_every: int
    eval_every: int
    eval_batches: int
    init_from: str
    release_gradients: bool = False

    def __post_init__(self):
        least = {"total_steps": 1, "microbatches": 1, "log_every": 1, "eval_every": 0, "eval_batches": 0}
        for key, bound in least.items():
            if getattr(self, key) < bound:
                raise ConfigError(f"config.train.{key}={getattr(self, key)} must be at least {bound}")


def loop(c: ConfigDict) -> Loop:
    return call(Loop, "train", c.train)


def check_sections(c: ConfigDict) -> None:
    for name in SECTIONS:
        if name not in c:
            raise ConfigError(f"config.{name} is missing; sections: {', '.join(SECTIONS)}")
    for name in c:
        if name not in SECTIONS:
            raise ConfigError(f"config.{name} is unknown; sections: {', '.join(SECTIONS)}")


def mesh(c: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    check_sections(c)
    return call(sharding.make_mesh, "mesh", c.mesh, devices=devices)


def model(c: ConfigDict) -> Callable[[nnx.Rngs], nnx.Module]:
    """The function that makes the model; call it under `jax.jit` or `jax.eval_shape` if it is large."""
    task(c)  # knows the name, or says so
    make = bind(MODELS[c.model.name], "model", _sizes(c), "rngs")
    section = precision_section(c)

    def make_model(rngs: nnx.Rngs) -> nnx.Module:
        made = make(rngs=rngs)
        precision.apply(made, section, gated_products=GATED_PRODUCTS.get(c.model.name, ()))
        return made

    return make_model


def _sizes(c: ConfigDict) -> dict:
    return {key: value for key, value in c.model.items() if key != "name"}


GATED_PRODUCTS = {"llama": ("*/down_proj",)}


def precision_section(c: ConfigDict) -> precision.PrecisionConfig:
    options = call(precision.RecipeOptions, "precision.options", c.precision.options)
    values = dict(c.precision, options=options)
    if (loss_scale := c.precision.get("loss_scale")) is not None:
        values["loss_scale"] = call(precision.DynamicLossScale, "precision.loss_scale", loss_scale)
    return call(precision.PrecisionConfig, "precision", values)


def judges(c: ConfigDict) -> step.Judges:
    """What decides whether a step counts: see `step.Judge`."""
    found: dict[str, step.Judge] = {}
    if (loss_scale := c.precision.get("loss_scale")) is not None:
        found["loss_scale"] = call(precision.DynamicLossScale, "precision.loss_scale", loss_scale)
    return found | guard.judges(spike_policy(c))


def spike_policy(c: ConfigDict) -> Policy:
    """What counts as a spike, and what is done about it."""
    return call(Policy, "spikes", {key: value for key, value in c.spikes.items() if key != "statistics"})


def statistics(c: ConfigDict) -> step.Statistics:
    """What each step tells of single tensors: see `diagnostics.statistics`."""
    if not c.spikes.get("statistics", True):
        return step.no_statistics
    o = c.optimizer
    return functools.partial(tensor_statistics, b2=o.b2, eps=o.eps, clip_norm=o.clip_norm)


def health_every(c: ConfigDict) -> int:
    """Steps between measurements of `health`; 0: none."""
    return c.precision.get("health_every", 0)


def health(c: ConfigDict, graphdef: nnx.GraphDef) -> Callable[[dict, dict], dict[str, float]]:
    """A function of (state, batch) to what quantization does to every tensor: see `precision.health`."""
    measure = functools.partial(precision_health.measure, graphdef=graphdef, gradients=task(c).gradients(c))
    compiled = jax.jit(measure, out_shardings=sharding.replicated(jax.sharding.get_mesh()))

    def numbers(state: dict, batch: dict) -> dict[str, float]:
        found = precision_health.flatten(jax.device_get(compiled(state, batch)))
        return precision_health.summary(found) | found

    return numbers


def train_step(c: ConfigDict, graphdef: nnx.GraphDef, abstract: dict, mesh: Mesh) -> jax.stages.Wrapped:
    """The compiled step of the run: (state, batch) to (state, metrics)."""
    transformation, schedule = tx(c)
    if c.train.release_gradients:
        released = functools.partial(
            layerwise.train_step,
            graphdef=graphdef,
            loss_fn=task(c).loss(c),
            weight=language.num_targets,
            tx=transformation,
            schedule=schedule,
        )
        return step.jit(released, abstract, mesh)
    return step.jit_train_step(
        abstract,
        mesh,
        graphdef=graphdef,
        gradients=task(c).gradients(c),
        tx=transformation,
        schedule=schedule,
        judges=judges(c),
        statistics=statistics(c),
    )


def tx(c: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    return call(optim.make_tx, "optimizer", c.optimizer, total_steps=c.train.total_steps)


def task(c: ConfigDict) -> ModuleType:
    """What this family of models trains on: see `maxlp.tasks`."""
    name = c.model.get("name")
    if name not in TASKS:
        raise ConfigError(f"config.model.name={name!r} is unknown; one of {', '.join(TASKS)}")
    return TASKS[name]


def checkpointer(c: ConfigDict, directory: Path) -> checkpoint.Checkpointer:
    return call(checkpoint.Checkpointer, "checkpoint", c.checkpoint, directory=directory)


def profiler(c: ConfigDict, workdir: Path) -> Profiler:
    return call(Profiler, "profile", c.profile, workdir=workdir)


def metric_writer(c: ConfigDict, workdir: Path, total_steps: int, start: int) -> metrics.MetricWriter:
    values = (workdir, total_steps, start, c.to_dict())
    return call(
        metrics.MetricWriter, "metrics", c.metrics, **dict(zip(WRITER_ARGUMENTS, values, strict=True))
    )


def tokenizer(c: ConfigDict, workdir: Path) -> str:
    """The spec of the run's tokenizer, whose file it puts into the workdir: the run needs no other.

    ``config.data.tokenizer`` is a spec of `data.tokenizer.make_tokenizer`, or ``bpe:V``: a byte-level BPE
    of V tokens, trained on the start of the corpus when the run begins (seconds).

    Raises:
      ValueError: no such tokenizer, another one than the run began with, or more tokens than the model.
    """
    spec = c.data.tokenizer
    if distributed.is_primary():
        if spec.startswith("bpe:"):
            size = int(spec.removeprefix("bpe:"))
            check_vocabulary(c, size)
            tokenizers.train_or_load(str(workdir / "tokenizer.json"), task(c).texts(c), size)
        else:
            made = tokenizers.make_tokenizer(spec)
            check_vocabulary(c, made.vocab_size)
            for name, content in made.files.items():
                path = workdir / name
                if path.exists() and path.read_bytes() != content:
                    raise ConfigError(
                        f"config.data.tokenizer={spec} is another tokenizer than {path}, with which the "
                        "run began; use that one or a new workdir"
                    )
                path.write_bytes(content)
    distributed.barrier("tokenizer")
    return saved_tokenizer(c, workdir)


def check_vocabulary(c: ConfigDict, size: int) -> None:
    key, room = task(c).vocabulary(c)
    if size > room:
        raise ConfigError(
            f"config.data.tokenizer={c.data.tokenizer} has {size:,} tokens, the model room for {room:,}; "
            f"set config.{key}={size}"
        )


def saved_tokenizer(c: ConfigDict, workdir: Path) -> str:
    """The spec of the tokenizer that a run keeps in its workdir."""
    path, _, options = c.data.tokenizer.partition("?")
    if path == "bytes":
        return "bytes"
    found = [p for p in (workdir / "tokenizer.json", workdir / "tokenizer.model") if p.exists()]
    if not found:
        raise ConfigError(f"{workdir} has no tokenizer.json or tokenizer.model: it holds no run")
    return f"{found[0]}?{options}" if options else str(found[0])


def train_data(c: ConfigDict, tokenizer: str) -> Any:
    """This process's part of the training batches."""
    return _data_section(c)(split="train", **_data_extra(c, tokenizer))


def heldout(c: ConfigDict, tokenizer: str, of_training: bool = False) -> Any:
    """This process's part of the held-out batches: everything once, then it ends.

    Args:
      of_training: the training data in that form (images: as they are, with labels).
    """
    data = _data_section(c)
    if of_training:
        join = "&" if "?" in c.data.source else "?"
        data = functools.partial(data, source=f"{c.data.source}{join}split=train", heldout_source="")
    return data(split="heldout", **_data_extra(c, tokenizer))


def _data_extra(c: ConfigDict, tokenizer: str) -> dict:
    index, count = sharding.batch_part(jax.sharding.get_mesh())
    return {"tokenizer": tokenizer, "seed": c.train.seed, "process_index": index, "process_count": count}


def _data_section(c: ConfigDict) -> functools.partial:
    values = dict(c.data.items())
    name = values.pop("name", None)
    if name not in DATA:
        raise ConfigError(f"config.data.name={name!r} is unknown; one of {', '.join(DATA)}")
    return bind(DATA[name], "data", values, "split", "seed", "process_index", "process_count")


def restore_model(
    c: ConfigDict, workdir: Path, step_number: int | None, mesh: Mesh
) -> tuple[nnx.GraphDef, dict, int]:
    """A checkpoint's model: its structure, {"params", "model_state"} on the mesh, and the step.

    Args:
      step_number: None takes the newest sound checkpoint.
    """
    graphdef, wanted = step.abstract_model(model(c), mesh)
    if "optimizer" in c:  # an imported model has none
        _, abstract = step.abstract_state(model(c), tx(c)[0], mesh)
        if part := optim.eval_part(abstract["opt_state"]):
            wanted["opt_state"] = part
    root = workdir / "checkpoints"
    restored = checkpoint.restore(root if step_number is None else root / str(step_number), wanted)
    return graphdef, evaluated(restored.state), restored.step


def evaluated(state: dict) -> dict:
    """The state with the parameters to measure: of schedule_free_adamw, the average of those it trains."""
    params = optim.eval_params(state.get("opt_state", {}), state["params"])
    return {"params": params, "model_state": state["model_state"]}


def num_params(params: dict) -> int:
    return sum(math.prod(p.shape) for p in jax.tree.leaves(params))


def precision_table(c: ConfigDict) -> dict[str, str]:
    """Path of each matmul of the model → name of its precision recipe."""
    table: dict[str, str] = {}

    def make() -> None:
        made = call(MODELS[c.model.name], "model", _sizes(c), rngs=nnx.Rngs(0))
        products = GATED_PRODUCTS.get(c.model.name, ())
        config = precision_section(c)
        table.update(
            call(precision.apply, "precision", {}, model=made, config=config, gated_products=products)
        )

    jax.eval_shape(make)
    return table


def describe(c: ConfigDict, mesh: Mesh, state: dict) -> str:
    """What will run, in a few lines."""
    family = task(c)
    full, causal = family.flops(c, num_params(state["params"]))

    def per_device(tree: dict) -> float:
        shards = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards) / 2**30

    lines = [
        f"{c.model.name}: {num_params(state['params']):,} parameters in {c.model.param_dtype}, "
        f"activations in {c.model.dtype}",
        f"mesh: {sharding.describe(mesh.shape)} ({mesh.size} × {mesh.devices.flat[0].device_kind}); "
        f"per device params {per_device(state['params']):.3g} GiB, "
        f"optimizer {per_device(state['opt_state']):.3g} GiB",
        f"batch: {family.describe(c)}, {c.train.total_steps:,} steps = "
        f"{c.train.total_steps * family.units(c):,} {family.UNIT}, "
        f"{full:.3g} FLOPs each ({causal:.3g} with causal attention)",
    ]
    matmuls = precision_table(c)
    if set(matmuls.values()) != {precision.HIGH_PRECISION}:
        ends = f"{c.precision.first_blocks} first and {c.precision.last_blocks} last blocks"
        lines.append(f"precision ({ends} stay in {c.model.dtype}):")
        lines += [f"  {path}: {recipe}" for path, recipe in matmuls.items()]
    return "\n".join(lines)


def check_release(c: ConfigDict) -> None:
    """Raises a ConfigError if a section needs the gradients of all layers at once, or all of a step."""
    needed = {
        "model.name": (c.model.name, "llama"),
        "optimizer.clip_norm": (c.optimizer.clip_norm, 0.0),
        "train.microbatches": (c.train.microbatches, 1),
        "spikes.guard": (c.spikes.guard, "off"),
        "precision.loss_scale": (c.precision.get("loss_scale"), None),
    }
    if set(precision_table(c).values()) != {precision.HIGH_PRECISION}:
        needed["precision.first_blocks"] = (c.precision.first_blocks, 0)
        needed["precision.last_blocks"] = (c.precision.last_blocks, 0)
    for key, (value, possible) in needed.items():
        if value != possible:
            raise ConfigError(
                f"config.{key}={value} does not go with config.train.release_gradients=True, which updates "
                f"each layer by itself; set config.{key}={possible}"
            )


def pipeline(c: ConfigDict) -> PipelineConfig:
    return call(PipelineConfig, "model.pipeline", c.model.get("pipeline") or {})


def check_stages(c: ConfigDict, stages: int, rows: int, matmuls: dict[str, str]) -> None:
    """Raises a ConfigError if the layers or the batch do not go through so many pipeline stages.

    Args:
      rows: of the batch on one device, in one of its microbatches.
    """
    s = pipeline(c).over(stages)
    key, mesh = "config.model.pipeline", f"config.mesh.stage={stages}"
    for name, value in (("microbatches", s.microbatches), ("rounds", s.rounds)):
        if value < 1:
            raise ConfigError(f"{key}.{name}={value} must be at least 1")
    if stages == 1:
        return
    if not c.model.scan_layers:
        raise ConfigError(f"{mesh} does not go with config.model.scan_layers=False; set it to True")
    if c.train.release_gradients:
        raise ConfigError(f"{mesh} does not go with config.train.release_gradients=True; set it to False")
    if c.model.num_layers % (stages * s.rounds):
        raise ConfigError(
            f"config.model.num_layers={c.model.num_layers} does not divide into {mesh} × "
            f"{key}.rounds={s.rounds}; choose stages and rounds whose product divides it"
        )
    if s.microbatches % stages:
        more = -(-s.microbatches // stages) * stages
        raise ConfigError(f"{key}.microbatches={s.microbatches} is not a multiple of {mesh}; take {more}")
    if rows % s.microbatches:
        raise ConfigError(
            f"{key}.microbatches={s.microbatches} does not divide the {rows} rows of a device in each of "
            "config.train.microbatches; change it or config.data.batch_size"
        )
    if s.rounds > 1 and c.model.remat == "none":
        raise ConfigError(
            f"{key}.rounds={s.rounds} with config.model.remat=none would keep a copy of the weights for "
            "every tick; set config.model.remat=block or dots"
        )
    ends = (c.precision.first_blocks, c.precision.last_blocks)
    if ends != (0, 0) and set(matmuls.values()) != {precision.HIGH_PRECISION}:
        raise ConfigError(
            f"{mesh} needs stages that are alike; set config.precision.first_blocks=0 and "
            "config.precision.last_blocks=0"
        )


def check_values(c: ConfigDict) -> None:
    """Raises a ConfigError for a size that is none, or a dtype that no model computes in."""
    for path, value in jax.tree_util.tree_leaves_with_path(c.to_dict()):
        least = LEAST.get(getattr(path[-1], "key", ""))
        if least is not None and isinstance(value, int | float) and value < least:
            key = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ConfigError(f"config.{key}={value} must be at least {least}")
    for key in ("dtype", "param_dtype"):
        if (value := c.model.get(key, DTYPES[0])) not in DTYPES:
            raise ConfigError(f"config.model.{key}={value!r} is unknown; one of {', '.join(DTYPES)}")


def check(c: ConfigDict, devices: Mesh) -> None:
    """Raises a ConfigError with the first pair of sections that do not fit each other."""
    check_values(c)
    _data_section(c)
    bind(checkpoint.Checkpointer, "checkpoint", c.checkpoint, "directory")
    bind(metrics.MetricWriter, "metrics", c.metrics, *WRITER_ARGUMENTS)
    call(Profiler, "profile", c.profile, workdir=Path())
    pipeline(c)
    batch, shards = c.data.batch_size, sharding.batch_shards(devices)
    rows = shards * c.train.microbatches
    if batch % rows:
        raise ConfigError(
            f"config.data.batch_size={batch} does not divide into {shards} data shards × "
            f"config.train.microbatches={c.train.microbatches}; use a multiple of {rows}"
        )
    if c.model.dtype == "float16" and c.precision.get("loss_scale") is None:
        raise ConfigError(
            "config.model.dtype=float16 needs config.precision.loss_scale, or its gradients vanish; choose "
            "both with --config=FILE:precision=fp16"
        )
    if c.train.release_gradients:
        check_release(c)
    family, matmuls = task(c), precision_table(c)  # in this order: an unknown model is said first
    family.check(c, devices, matmuls)
    check_stages(c, devices.shape["stage"], batch // rows, matmuls)
