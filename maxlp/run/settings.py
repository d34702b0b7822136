"""A config as typed values: every section as the dataclass or the bound function that it configures."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp import families, precision, schema
from maxlp.core.train_state import num_params
from maxlp.families import Family
from maxlp.monitoring.spikes import SpikeConfig
from maxlp.nn import attention
from maxlp.nn.stack import Part, find_stacks
from maxlp.optim.config import OptimizerConfig
from maxlp.optim.make_tx import Optimizer, make_tx
from maxlp.parallel import sharding
from maxlp.precision import PrecisionConfig
from maxlp.run.config import ConfigError, bind, call, check_section, errors_of
from maxlp.runtime.checkpoint import Checkpointer
from maxlp.runtime.profiler import Profiler
from maxlp.runtime.writers import MetricWriter
from maxlp.schema import Count, CountOrZero, DecayRate, NotEmpty, Positive, Seed

OBSERVING = ("spikes", "checkpoint", "metrics", "profile")  # sections that do not affect training
SECTIONS = ("model", "precision", "mesh", "optimizer", "data", "loss", "train", *OBSERVING)
SUPPLIED = {  # arguments that a command supplies, by section
    "mesh": ("devices",),
    "checkpoint": ("directory", "on_complete"),
    "metrics": ("workdir", "total_steps", "resume_step", "run_config"),
    "profile": ("workdir",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The config's ``train.lora`` section: low-rank adapters (`nn.lora`).

    Attributes:
      rank: columns of each adapter.
      alpha: the adapters' outputs are multiplied by ``alpha / rank``; None takes ``2 * rank``.
      targets: patterns of the matmuls that get an adapter, such as ``*/q_proj``; None takes all matmuls of
        the blocks.

    Raises:
      ValueError: a rank or alpha that is not positive, or no targets at all.
    """

    rank: Count
    alpha: Positive | None = None
    targets: Annotated[tuple[str, ...], NotEmpty()] | None = None

    def __post_init__(self):
        schema.check(self)

    def add_to(self, model: nnx.Module, rngs: nnx.Rngs) -> None:
        from maxlp.nn import lora  # few runs need it

        scale = 2.0 if self.alpha is None else self.alpha / self.rank
        lora.add_adapters(model, rngs, rank=self.rank, scale=scale, targets=self.targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """The config's ``train.local`` section: local steps with an outer update (`core.local_steps`).

    Attributes:
      steps: H, how many steps the replicas of the ``data`` axis take alone between outer updates.
      outer_rate, outer_momentum: λ and μ of the outer update.
    """

    steps: Count
    outer_rate: Positive = 0.7
    outer_momentum: DecayRate = 0.9

    def __post_init__(self):
        schema.check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The config's ``train`` section.

    Attributes:
      total_steps: updates of the run; with AdaScale, the number of steps with the small batch that its
        updates must be worth together (its scale-invariant iterations).
      microbatches: gradient accumulation: how many parts each batch is split into, one after the other.
      seed: of the initial weights, the order of the data and the stochastic rounding of parameters.
      log_every: updates between records of metrics.
      eval_every: updates between evaluations; 0 evaluates at the end only.
      eval_batches: validation batches in each evaluation, the same ones every time (0: all). Unless it is
        0, the last step is also evaluated on all validation data, as ``eval_full/``.
      init_from: weights to start from (`run.pretrained`): a run or checkpoint, a folder of another library
        or ``hf:ORG/NAME``; "" draws them at random.
      swap_tokenizer: exchange the tokenizer of these weights for ``data.tokenizer``
        (`run.tokenizer_swap`).
      release_gradients: update each layer in the backward pass, so that the gradients of all layers never
        exist together; see `core.fused_backward`. The backward pass then recomputes each layer and scans
        over layers, whatever the model's ``remat`` and ``scan_layers``, and no per-tensor statistics are
        recorded.
      lora: trains low-rank adapters and freezes the weights; None trains the weights.
      local: replicas train alone for some steps at a time; None all-reduces gradients in every step.
    """

    total_steps: Count
    microbatches: Count
    seed: Seed
    log_every: Count
    eval_every: CountOrZero
    eval_batches: CountOrZero
    init_from: str
    swap_tokenizer: bool = False
    release_gradients: bool = False
    lora: LoraConfig | None = None
    local: LocalConfig | None = None

    def __post_init__(self):
        schema.check(self)


class Machine(NamedTuple):
    """The mesh and the devices of a run.

    Attributes:
      axes: size of every mesh axis.
      platform, device_kind: of its devices, as in `jax.Device`.
    """

    axes: Mapping[str, int]
    platform: str
    device_kind: str

    @classmethod
    def of(cls, mesh: Mesh) -> "Machine":
        """The machine of a mesh with devices."""
        device = mesh.devices.flat[0]
        return cls(dict(mesh.shape), device.platform, device.device_kind)

    @property
    def batch_shards(self) -> int:
        """How many parts a batch is split into along its rows."""
        return sharding.batch_shards(sharding.abstract_mesh(self.axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of a config, section by section; the README's table names the class of each.

    Attributes:
      checkpoint, metrics, profile: constructors without the arguments that a command supplies.
    """

    family: Family
    model: Any
    precision: PrecisionConfig
    mesh: Mapping[str, int]
    optimizer: OptimizerConfig
    data: Any
    loss: Any
    train: TrainConfig
    spikes: SpikeConfig
    checkpoint: functools.partial
    metrics: functools.partial
    profile: functools.partial

    def machine(
        self, num_devices: int, platform: str, dcn_sizes: Collection[int] = (1,), device_kind: str = ""
    ) -> Machine:
        """The mesh of the config on this number of devices.

        Args:
          platform, device_kind: see `Machine`.
          dcn_sizes: see `sharding.dcn_sizes`.

        Raises:
          ConfigError: sizes that do not fit the devices.
        """
        dcn_data = self.mesh.get("dcn_data", 1)
        if dcn_data not in dcn_sizes:
            sizes = " or ".join(map(str, sorted(set(dcn_sizes))))
            raise ConfigError(
                f"config.mesh.dcn_data={dcn_data} must be {sizes} here: the number of TPU slices, and "
                "elsewhere 1 or the number of hosts; within these, use mesh.data"
            )
        try:
            return Machine(sharding.resolve_axes(num_devices, **self.mesh), platform, device_kind)
        except ValueError as error:
            raise ConfigError(f"config.{error}") from error

    def machine_of(self, devices: Sequence[jax.Device]) -> Machine:
        """The mesh of the config on these devices; raises as `machine` does."""
        first, dcn_sizes = devices[0], sharding.dcn_sizes(devices)
        return self.machine(len(devices), first.platform, dcn_sizes, first.device_kind)

    def on(self, machine: Machine) -> "Settings":
        """These settings with the kernel that ``model.attention=auto`` stands for on a machine."""
        if self.model.attention != attention.AUTO:
            return self
        kernel = attention.choose(self.attention_uses(machine), *machine)
        return dataclasses.replace(self, model=_changed(self.model, attention=kernel))

    def attention_uses(self, machine: Machine) -> list[attention.Use]:
        """The uses of attention in a training step on a machine."""
        rows, uses = self.device_rows(machine), self.family.attention_uses(self.model, self.data)
        return [dataclasses.replace(use, rows=rows) for use in uses]

    def device_rows(self, machine: Machine) -> int:
        """Rows of a microbatch on one device: the per-device batch size."""
        return self.data.batch_size // (machine.batch_shards * self.train.microbatches)

    @functools.cached_property
    def _traced(self) -> "_TracedModel":
        # Settings that affect neither parameters nor matmuls are fixed, so that each model is traced once.
        model = _changed(self.model, attention=attention.AUTO, remat="none")
        return _traced_model(self.family, model, self.precision, self.train.lora)

    @property
    def matmuls(self) -> dict[str, str]:
        """Path of each matmul of the model -> its precision recipe."""
        return self._traced.matmuls

    @property
    def parts(self) -> dict[str, tuple[Part, ...]]:
        """Path of each stack of blocks -> the parts in which its matmuls differ, if they do."""
        return self._traced.parts

    def recipe(self, path: str) -> precision.Recipe:
        """The recipe of a matmul; ``bf16`` for one that stays in high precision."""
        name = self.matmuls.get(path, precision.HIGH_PRECISION).partition(",")[0]  # "NAME, smooth FORM"
        if name == precision.HIGH_PRECISION:
            return precision.RECIPES["bf16"]
        if self.precision.scalify != "none":  # what `scalify.fp8_dot_general` multiplies
            return dataclasses.replace(precision.RECIPES["fp8_current"], name=name, residuals="full")
        return _recipe(self.precision, name)

    @property
    def replicas_are_separate(self) -> bool:
        """Whether replicas compute gradients of their own, in a `jax.shard_map` over ``data``."""
        return self.train.local is not None or self.precision.exchange != "none"

    @property
    def starts_cold(self) -> bool:
        """Whether any delayed scale comes from the data while its history is empty."""
        return any((r := self.recipe(path)).delayed and r.cold_start for path in self.matmuls)

    @property
    def samples_tokens(self) -> bool:
        """Whether the gradient of any kernel comes from a sample of the tokens (`precision.sampling`)."""
        return any(self.recipe(path).keep < 1 for path in self.matmuls)

    @property
    def weights(self) -> nnx.State:
        """The parameters of the model as shapes, without adapters."""
        return self._traced.weights

    @property
    def params(self) -> nnx.State:
        """The trained parameters as shapes."""
        return self._traced.params

    @property
    def num_params(self) -> int:
        """The number of parameters of the model, without adapters."""
        return self._traced.num_params

    @property
    def flops_per_unit(self) -> tuple[float, float]:
        """Training FLOPs per token or image with (full, causal) attention, adapters not counted."""
        frozen = self.train.lora is not None
        return self.family.flops_per_unit(self.model, self.data, self.num_params, frozen)

    @property
    def is_quantized(self) -> bool:
        """Whether any matmul has a recipe other than the model's own dtype."""
        return set(self.matmuls.values()) != {precision.HIGH_PRECISION}


def make_model(
    family: Family, model: Any, config: PrecisionConfig, adapters: LoraConfig | None = None
) -> Callable[[nnx.Rngs], nnx.Module]:
    """The function that makes the model with its precision recipes and any adapters.

    Call it under `jax.jit` or `jax.eval_shape` if the model is large.
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        made = family.make_model(model, rngs=rngs)
        precision.apply(made, config, gated_products=family.gated_products)
        if adapters is not None:
            adapters.add_to(made, rngs)
        return made

    return make


def make_optimizer(s: Settings) -> Optimizer:
    """The optimizer, with its schedule over ``train.total_steps``.

    Raises:
      ConfigError: an option that the optimizer does not have, or a schedule that does not fit.
    """
    with errors_of("optimizer"):
        microbatches, seed = s.train.microbatches, s.train.seed
        return make_tx(s.optimizer, total_steps=s.train.total_steps, microbatches=microbatches, seed=seed)


# The planner's search asks for each matmul of each candidate.
_recipe = functools.cache(PrecisionConfig.make)


class _TracedModel(NamedTuple):
    matmuls: dict[str, str]
    parts: dict[str, tuple[Part, ...]]
    weights: nnx.State
    params: nnx.State
    num_params: int


@functools.lru_cache(maxsize=64)
def _changed(model: Any, **values: Any) -> Any:
    return dataclasses.replace(model, **values)


@functools.lru_cache(maxsize=64)
def _traced_model(
    family: Family, model: Any, config: PrecisionConfig, adapters: LoraConfig | None
) -> _TracedModel:
    table: dict[str, str] = {}
    parts: dict[str, tuple[Part, ...]] = {}

    def make() -> tuple[nnx.State, nnx.State]:
        made = family.make_model(model, rngs=nnx.Rngs(0))
        with errors_of("precision"):
            table.update(precision.apply(made, config, gated_products=family.gated_products))
        parts.update({name: blocks.parts for name, blocks in find_stacks(made).items()})
        weights = nnx.state(made, nnx.Param)
        if adapters is None:
            return weights, weights
        with errors_of("train"):
            adapters.add_to(made, nnx.Rngs(0))
        return weights, nnx.state(made, nnx.Param)

    weights, trained = jax.eval_shape(make)
    return _TracedModel(table, parts, weights, trained, num_params(nnx.to_pure_dict(weights)))


def read(c: ConfigDict) -> Settings:
    """The settings of a config.

    Raises:
      ConfigError: an unknown, missing or wrong section, key or value.
    """
    for name in SECTIONS:
        if name not in c:
            raise ConfigError(f"config.{name} is missing; sections: {', '.join(SECTIONS)}")
    for name in c:
        if name not in SECTIONS:
            raise ConfigError(f"config.{name} is unknown; sections: {', '.join(SECTIONS)}")
    family, model, model_precision = read_model(c)
    values: dict[str, Any] = {"model": model, "precision": model_precision}
    for name, function in sections(family).items():
        if name in SUPPLIED:
            values[name] = bind(function, name, c[name], *SUPPLIED[name])
        elif name not in values:
            values[name] = call(function, name, c[name])
    return Settings(family=family, **values | {"mesh": values["mesh"].keywords})


def sections(family: Family) -> dict[str, Callable]:
    """What each section of a config configures: its keys are the arguments, without those of `SUPPLIED`."""
    return dict(
        model=family.Model,
        precision=PrecisionConfig,
        mesh=sharding.make_mesh,
        optimizer=OptimizerConfig,
        data=family.Data,
        loss=family.Loss,
        train=TrainConfig,
        spikes=SpikeConfig,
        checkpoint=Checkpointer,
        metrics=MetricWriter,
        profile=Profiler,
    )


def read_model(c: ConfigDict) -> tuple[Family, Any, PrecisionConfig]:
    """The family and the sections model and precision, which the config of imported weights has too.

    Raises:
      ConfigError: as `read`.
    """
    check_section("model", c.get("model"))
    values = dict(c.model.items())
    family = call(families.get, "model", {key: values.pop(key) for key in ("name",) if key in values})
    model = call(family.Model, "model", values)
    return family, model, call(PrecisionConfig, "precision", c.get("precision"))
