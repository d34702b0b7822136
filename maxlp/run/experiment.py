"""An experiment: a config resolved, once, into everything that a run is made of.

`resolve` reads and checks the config and makes the parts; what comes after takes the parts it needs as
plain arguments and does not read the config again. All of it takes seconds, before anything is allocated
or compiled.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp.core import train_step
from maxlp.core.gates import Gate, Gates
from maxlp.core.gradients import Gradients, join_trees, shard_like_params
from maxlp.core.train_state import MakeModel, State, abstract_state, init_state, num_params, shardings
from maxlp.core.train_step import Statistics, Step
from maxlp.families import Family
from maxlp.monitoring.statistics import tensor_statistics
from maxlp.optim.config import options_of
from maxlp.optim.schedules import fitting_warmup
from maxlp.parallel import sharding
from maxlp.parallel.batches import batch_part
from maxlp.run import constraints
from maxlp.run.progress import Progress
from maxlp.run.settings import Machine, Settings, make_model, make_optimizer, read
from maxlp.run.switched_off import unused_keys
from maxlp.runtime.messages import counted, rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """The parts of a run.

    Attributes:
      settings: the values of the config, section by section.
      machine: the mesh's axes and the platform.
      mesh: the devices.
      make_model: the model with its precision recipes, from `nnx.Rngs`.
      tx, schedule: the optimizer, and its learning rate as a function of the number of finished updates.
      gates: decide whether a step is applied or skipped, by name.
      gradients: the function that computes a batch's gradients.
      step: the train step, which joins the parts above.
    """

    settings: Settings
    machine: Machine
    mesh: Mesh
    make_model: MakeModel
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    gates: Gates
    gradients: Gradients
    step: Step

    @property
    def family(self) -> Family:
        return self.settings.family

    def abstract_state(self) -> tuple[nnx.GraphDef, State]:
        """See `train_state.abstract_state`."""
        return abstract_state(self.make_model, self.tx, self.mesh, self.gates)

    def initial_state(self, abstract: State, workdir: Path | None = None) -> State:
        """The state before the first step, initialized already sharded: random weights, or `init_from`'s.

        Args:
          abstract: the state as shapes, dtypes and shardings.
          workdir: holds the run's tokenizer, for weights whose tokenizer is swapped.
        """
        train, out = self.settings.train, shardings(abstract)
        init = functools.partial(init_state, self.make_model, self.tx, train.seed, self.gates)
        if not train.init_from:
            return jax.jit(init, out_shardings=out)()
        from maxlp.run import pretrained  # few runs need it

        part = "params" if train.lora is None else "model_state"  # which holds the frozen weights

        def init_from(weights: State) -> State:
            return init(start_from=lambda core: core | {part: join_trees(core[part], weights)})

        weights = pretrained.load(self.settings, self.mesh, workdir)
        return jax.jit(init_from, donate_argnums=0, out_shardings=out)(weights)

    def with_all_gates(self, state: State) -> State:
        """A restored state, with initial state for gates that the run did not have when saved."""
        if not (new := self.gates.keys() - state.keys()):
            return state
        replicated = sharding.replicated(self.mesh)
        init = jax.jit(lambda: {name: self.gates[name].init() for name in new}, out_shardings=replicated)
        return state | init()

    def jit_step(self, graphdef: nnx.GraphDef, abstract: State, resumes: bool = False) -> Any:
        """As `train_step.jit_step`; ``resumes``: see `warm_scales.Programs`."""
        if not self.settings.starts_cold:
            return train_step.jit_step(self.step, graphdef, abstract, self.mesh)
        from maxlp.run import warm_scales  # few runs need it

        return warm_scales.jit_step(self.step, graphdef, abstract, self.mesh, resumes)

    def progress(self, state: State, step: int) -> Progress:
        """The progress of a run with this state, after ``step`` updates."""
        total, gain = self.settings.train.total_steps, self.settings.optimizer.adascale
        if gain is None:
            return Progress(total, step, float(step))
        from maxlp.optim import adascale

        return Progress(total, step, float(adascale.metrics_of(state["opt_state"])["tau"]), fastest=gain)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The global training batch as shapes, dtypes and shardings."""
        where = sharding.batch_sharding(self.mesh)
        shapes = self.family.batch_shapes(self.settings.data)
        return {k: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where) for k, s in shapes.items()}


def resolve(c: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Experiment:
    """The experiment of a config.

    Args:
      devices: defaults to all devices of all processes; descriptions of devices (`planning`) are enough.

    Raises:
      ConfigError: a config that cannot work on them.
    """
    return resolve_settings(read(c), devices)


def resolve_settings(settings: Settings, devices: Sequence[jax.Device] | None = None) -> Experiment:
    """As `resolve`, for settings that are read already."""
    devices = list(jax.devices() if devices is None else devices)
    machine = settings.machine_of(devices)
    constraints.check(settings, machine)
    return assemble(settings, machine, sharding.make_mesh(**settings.mesh, devices=devices))


def assemble(settings: Settings, machine: Machine, mesh: Mesh) -> Experiment:
    """The experiment of settings that satisfy the constraints on this machine."""
    s, family = settings.on(machine), settings.family
    optimizer, model = make_optimizer(s), make_model(family, s.model, s.precision, s.train.lora)
    uses_adascale, metrics = s.optimizer.adascale is not None, optimizer.rate_of_last_update
    gradients = family.gradients(s.loss, s.train.seed, s.train.microbatches, uses_adascale)
    if s.precision.scalify != "none":
        from maxlp.precision import scalify  # few runs need it

        gradients = scalify.scaled_gradients(gradients)
    if machine.axes["tensor"] > 1:
        gradients = shard_like_params(gradients)
    gates: dict[str, Gate] = {}
    if s.precision.loss_scale is not None:
        gates["loss_scale"] = s.precision.loss_scale
        if s.precision.loss_scale.per_tensor:
            from maxlp.optim.skip_tensors import skip_nonfinite

            optimizer = skip_nonfinite(optimizer)
    if s.spikes.guard == "skip":
        from maxlp.monitoring.skip_guard import SkipGuard

        gates["guard"] = SkipGuard(s.spikes)
    supports_gates = not s.train.release_gradients and s.train.local is None
    assert supports_gates or not gates, f"run.combinations has to refuse the gates {', '.join(gates)}"
    if s.train.release_gradients:
        from maxlp.core import fused_backward
        from maxlp.parallel.by_layers import like_params

        optimizer = dataclasses.replace(optimizer, tx=like_params(optimizer.tx))
        step: Any = functools.partial(fused_backward.train_step, loss=family.loss(s.loss, s.train.seed))
    else:
        statistics: Statistics = train_step.nothing
        if s.spikes.statistics:
            statistics = functools.partial(
                tensor_statistics, rms=optimizer.rms, update_ratios=s.spikes.update_ratios
            )
        step = functools.partial(
            train_step.train_step, gradients=gradients, gates=gates, statistics=statistics
        )
        if uses_adascale:
            from maxlp.optim import adascale

            metrics = adascale.metrics_of
            step = functools.partial(step, update_arguments=adascale.update_arguments)
    after_update = family.after_update(s.model)
    step = functools.partial(step, tx=optimizer.tx, optimizer_metrics=metrics, after_update=after_update)
    if s.replicas_are_separate:
        from maxlp.run import low_communication  # few runs need it

        model, optimizer, step = low_communication.apply(s, machine, model, optimizer, step)
    return Experiment(
        settings=s,
        machine=machine,
        mesh=mesh,
        make_model=model,
        tx=optimizer.tx,
        schedule=optimizer.schedule,
        gates=gates,
        gradients=gradients,
        step=step,
    )


# --- data -----------------------------------------------------------------------------------------------


def make_data(settings: Settings, tokenizer: str, split: str, mesh: Mesh) -> Any:
    """This process's part of the batches of a split.

    Args:
      tokenizer: the spec of the run's own tokenizer (`run.tokenizer`).
      split: "train", or "validation": every example once.
    """
    index, count = batch_part(mesh)
    data = dataclasses.replace(settings.data, tokenizer=tokenizer)
    how = dict(split=split, seed=settings.train.seed, process_index=index, process_count=count)
    return settings.family.make_data(settings.model, data, **how)


# --- summary --------------------------------------------------------------------------------------------


def _memory(s: Settings, state: State) -> str:
    def gib(tree: Any) -> float:
        shards = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards) / 2**30

    names = {"params": "parameters", "opt_state": "optimizer"}
    if s.train.lora is not None:
        names |= {"params": "adapters", "model_state": "frozen parameters"}
    sizes = {part: f"{name} {rounded(gib(state[part]), 3)} GiB" for part, name in names.items()}
    if s.optimizer.offload:
        sizes["opt_state"] += " on the host"
    return ", ".join(sizes.values())


def describe(e: Experiment, state: State) -> str:
    """What will run, in a few lines.

    Args:
      state: the abstract training state.
    """
    s, family = e.settings, e.family
    full, causal = s.flops_per_unit
    units = family.units_per_step(s.data)
    trained = "" if s.train.lora is None else f" ({num_params(state['params']):,} in adapters are trained)"
    at_most = "" if s.optimizer.adascale is None else "at most "
    lines = [
        f"{family.name}: {s.num_params:,} parameters in {s.model.param_dtype}{trained}, activations in "
        f"{s.model.dtype}, attention by {s.model.attention}",
        f"mesh: {sharding.describe(e.mesh.shape)} ({e.mesh.size} × {e.mesh.devices.flat[0].device_kind})",
        f"memory per device: {_memory(s, state)}",
        f"batch: {family.describe_batch(s.data)}; {at_most}{counted(s.train.total_steps, 'step')} = "
        f"{s.train.total_steps * units:,} {family.unit}",
        f"work: {full:.3g} FLOPs per {family.unit[:-1]} ({causal:.3g} with causal attention)",
    ]
    if unused := [f"optimizer.{key}" for key in s.optimizer.unused] + unused_keys(s):
        lines.append("without effect: " + ", ".join(unused))
    warmup = fitting_warmup(s.optimizer.warmup_steps, s.train.total_steps)
    if warmup != s.optimizer.warmup_steps:
        lines.append(
            f"warning: optimizer.warmup_steps={s.optimizer.warmup_steps} is not below "
            f"train.total_steps={s.train.total_steps}; the warm-up takes {counted(warmup, 'step')}"
        )
    if s.model.param_dtype == "bfloat16" and s.optimizer.param_rounding is None and s.train.lora is None:
        lines.append(
            "warning: model.param_dtype=bfloat16 without optimizer.param_rounding loses updates below 2⁻⁹ "
            "of a parameter; optimizer.param_rounding=stochastic needs no memory"
        )
    adagc = s.optimizer.adagc
    if adagc is not None and (steps := adagc.warmup_steps) >= s.train.total_steps:
        lines.append(f"warning: optimizer.adagc.warmup_steps={steps} is the whole run; AdaGC never clips")
    if s.optimizer.low_bit is not None:
        from maxlp.optim import low_bit  # few runs need it

        lines += [f"warning: {line}" for line in low_bit.warnings(state["opt_state"], s.optimizer.low_bit)]
    projects = s.optimizer.galore is not None or "rank" in options_of(s.optimizer.name)
    if projects or s.train.lora is not None:
        from maxlp.optim import galore, targets  # few runs need it

        rates = [] if s.train.init_from else galore.rate_warnings(s.optimizer)
        lines += [f"warning: {line}" for line in (*rates, *targets.warnings(state["params"], s.optimizer))]
    if s.is_quantized:
        from maxlp.run import emulation  # few runs need it

        lines += [f"warning: {line}" for line in emulation.warnings(s, e.machine.device_kind)]
        blocks = f"{s.precision.first_blocks} first and {s.precision.last_blocks} last blocks"
        lines.append(f"precision ({blocks} stay in {s.model.dtype}):")
        lines += [f"  {path}: {recipe}" for path, recipe in s.matmuls.items()]
    return "\n".join(lines)
