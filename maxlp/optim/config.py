"""The config's `optimizer` section: its keys, their ranges and the combinations that work."""

import dataclasses
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import optax

from maxlp import schema
from maxlp.numerics.formats import FORMATS, STATES
from maxlp.optim.schedules import SCHEDULES, takes
from maxlp.optim.tree_utils import HIDDEN_KERNELS, Targets
from maxlp.schema import Count, CountOrZero, DecayRate, Fraction, NotNegative, OneOf, Positive, Range, Seed

# "module:NAME" of each `OptimizerKind`, imported only when a config names it.
OPTIMIZERS = {
    "adamw": "maxlp.optim.adamw:ADAMW",
    "stable_adamw": "maxlp.optim.stable_adamw:STABLE_ADAMW",
    "stable_spam": "maxlp.optim.stable_spam:STABLE_SPAM",
    "adafactor": "maxlp.optim.adafactor:ADAFACTOR",
    "lion": "maxlp.optim.lion:LION",
    "muon": "maxlp.optim.muon:MUON",
    "normuon": "maxlp.optim.muon:NORMUON",
    "soap": "maxlp.optim.soap:SOAP",
    "apollo": "maxlp.optim.apollo:APOLLO",
    "apollo_mini": "maxlp.optim.apollo:APOLLO_MINI",
    "schedule_free_adamw": "maxlp.optim.schedule_free:SCHEDULE_FREE_ADAMW",
    "adamp": "maxlp.optim.adamp:ADAMP",
    "sgd": "maxlp.optim.sgd:SGD",
}
SHARED = ("b1", "b2", "eps", "mu_dtype")  # each is passed to the optimizers that have such a parameter
# The rules of options of optax's functions; our own functions have them as annotations.
OPTAX_HINTS: dict[str, Any] = {
    "eps_root": NotNegative,
    "nesterov": bool,
    "mode": Annotated[str, OneOf(("hard", "smooth", "refined"))],
    "smooth_beta": Positive,
}
Divisors = Callable[[optax.OptState], optax.Updates]
Conflict = tuple[str, Any, str]  # a key of the section, its value, and the reason with the way out
MU_DTYPES = ("float32", "bfloat16", "float16")
# int4 has too few values for a moment.
MOMENT_FORMATS = ("float32", *(name for name in STATES if name != "int4"))
BF16_ROUNDINGS = ("stochastic", "kahan", "residual", "float16_master")
PARAM_ROUNDINGS = (*BF16_ROUNDINGS, "nearest")  # the last is for float16 parameters


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerKind:
    """What other modules know about an optimizer.

    Attributes:
      scale_by: makes its rescaling; its parameters are those of `SHARED` that it needs, and its own
        options.
      conflicts: an `OptimizerConfig` to further values in it that cannot be combined with the optimizer.
      not_galore: why it takes whole gradients, which GaLore projects; "" if it need not.
      only_moment: the moment that it has, if it has only one.
      decay_divisors: an `OptimizerConfig` to the function that maps the state after an update to what the
        decay of each tensor is divided by, (*layers) for each parameter; to None if nothing divides it.
      last_rms: the optimizer's state to RMS_t of the last update, by parameter; None if it does not keep
        it.
      second_moment: the type of the state that has Adam's second moment as `nu`, with decay rate
        `OptimizerConfig.b2`, and the number of updates as `count`; None if there is none.
      like_params: whether all moments have the shapes of the parameters.
      matmuls: how an update multiplies matrices: "none", "once", or "iterated" as Muon does.
      moves: how often an update sends whole matrices between the devices of an axis (`parallel.by_layers`).
      averages: whether an average of the parameters is evaluated (`optax.contrib.schedule_free`).
      galore_rates: whether the learning rates of GaLore's own runs, which used Adam, suit it too.
    """

    scale_by: Callable[..., optax.GradientTransformation]
    conflicts: Callable[["OptimizerConfig"], Iterable[Conflict]] = lambda config: ()
    not_galore: str = ""
    only_moment: Literal["mu", "nu"] | None = None
    decay_divisors: Callable[["OptimizerConfig"], Divisors | None] = lambda config: None
    last_rms: Callable[[optax.OptState], optax.Updates] | None = None
    second_moment: type | None = None
    like_params: bool = False
    matmuls: Literal["none", "once", "iterated"] = "none"
    moves: int = 0
    averages: bool = False
    galore_rates: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaloreConfig:
    """Options of GaLore (`maxlp.optim.galore`): the optimizer sees projected gradients.

    Attributes:
      rank: r, the rank of the projection, cut to the short side of a kernel; 0 turns GaLore off.
      update_proj_gap: steps between refreshes of the subspace; the first step always refreshes.
      scale: the paper's α, a factor on the updates of projected kernels: their learning rate is
        learning_rate · scale, that of all other parameters learning_rate. See docs/optimizers.md.
      side: the side of a kernel that is projected. "short" is the paper's and galore-torch's `std` (a
        square kernel is projected on its input side), "long" is galore-torch's `reverse_std`: smaller
        moments, a larger projector.
      basis: "svd", or "randomized" for a range finder with two power iterations (Halko et al. 2011),
        which is much faster; its random matrix depends on `seed` and the number of updates alone.
      moments: what a refresh does to the moments: "keep" them (the paper), "reset" them to μ = R and
        ν = R² (Adam's bias correction goes on: steps are shorter until b2^t is small), or "reproject" them:
        with C = P_newᵀ P_old, μ ← C μ and ν ← C² ν (elementwise square, as if the directions were
        uncorrelated).
      projector: "float32", "bfloat16", or "int8" or "int4" with one scale per 256 entries of a row
        (Q-GaLore, Zhang et al. 2024, arXiv:2407.08296; their zero point is left out, since a basis is
        symmetric around 0).
      lazy_threshold: Q-GaLore's lazy updates, per layer: the gap doubles when the cosine of successive
        leading directions averages at least this over five refreshes. 0.4 in the paper; 0 turns it off.
      targets: regular expressions, searched in names such as `layers/attn/q_proj/kernel`.
      seed: seed of the random matrices.
    """

    rank: CountOrZero
    update_proj_gap: Count = 200
    scale: Positive = 0.25
    side: Annotated[str, OneOf(("short", "long"))] = "short"
    basis: Annotated[str, OneOf(("svd", "randomized"))] = "svd"
    moments: Annotated[str, OneOf(("keep", "reset", "reproject"))] = "keep"
    projector: Annotated[str, OneOf(("float32", "bfloat16", "int8", "int4"))] = "float32"
    lazy_threshold: Fraction = 0.0
    targets: Targets = HIDDEN_KERNELS
    seed: Seed = 0

    def __post_init__(self) -> None:
        schema.check(self)
        if self.projector == "int4" and self.rank % 2:
            raise ValueError(f"rank={self.rank} must be even with projector='int4', two entries per byte")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBitConfig:
    """Options of low-bit moments (`maxlp.optim.low_bit`).

    Attributes:
      mu, nu: formats of the first and second moment, of `MOMENT_FORMATS`; "float32" does not encode it.
      block_size: entries of a row that share a scale; 0 for one scale per tensor of a layer.
      min_size: moments of tensors with fewer entries per layer (norms), and of scalars, are not encoded.
      seed: of the stochastic rounding of both moments in bfloat16 and float8_e5m2, and of nu in any float.
    """

    mu: Annotated[str, OneOf(MOMENT_FORMATS)]
    nu: Annotated[str, OneOf(MOMENT_FORMATS)]
    block_size: CountOrZero = 0
    min_size: CountOrZero = 4096
    seed: Seed = 0

    def __post_init__(self) -> None:
        schema.check(self)
        encoded = [FORMATS[name] for name in (self.mu, self.nu) if name != "float32"]
        if self.block_size and encoded and not any(to.needs_scale for to in encoded):
            raise ValueError(
                f"block_size={self.block_size} has no effect with mu={self.mu} and nu={self.nu}, which "
                "have no scales; set it to 0"
            )

    @property
    def is_random(self) -> bool:
        """Whether any moment is rounded stochastically."""
        mu, nu = (FORMATS.get(name) for name in (self.mu, self.nu))  # None for float32
        return any(to is not None and to.stochastic for to in (mu, nu)) or (
            nu is not None and nu.kind == "float"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaGCConfig:
    """Options of AdaGC (`maxlp.optim.adagc`), which is on if one of them is set.

    Attributes:
      ratio: λ_rel, the largest ratio of a tensor's gradient norm to the average norm of its clipped
        gradients.
      decay: β, decay rate of that average.
      warmup_steps: T_start, the updates in which `clip_norm` bounds the global norm instead.
    """

    ratio: Annotated[float, Range(at_least=1)] = 1.05
    decay: DecayRate = 0.98
    warmup_steps: Count = 100

    def __post_init__(self) -> None:
        schema.check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The config's `optimizer` section.

    Attributes:
      name: a key of `OPTIMIZERS`.
      learning_rate: the peak of the schedule.
      schedule: a key of `SCHEDULES`; each begins with a linear warm-up.
      warmup_steps: updates before the peak; 0 starts at the peak. In a run that would end before the peak,
        the warm-up takes a tenth of the run.
      final_lr_fraction: the last learning rate as a fraction of the peak; without effect for constant.
      decay_fraction: the fraction of all steps in which the rate decays (wsd only).
      clip_norm: gradients are scaled down to this global L2 norm; 0 turns clipping off.
      adagc: clips each tensor by its own norms, after a warm-up with clip_norm; None uses clip_norm alone.
      weight_decay: decoupled weight decay of the tensors that `decay_mask` selects.
      decay_embeddings: whether embedding tables decay too.
      decay_with_clip: whether update clipping (stable_adamw) shortens the decay along with the step.
      b1: decay rate of the first moment; in schedule_free_adamw, the weight of the average.
      b2: decay rate of the second moment.
      eps: added to the denominator.
      mu_dtype: dtype of the first moment; None for float32 or the parameter's, see the optimizer.
      options: keyword arguments of this optimizer alone. Of `b1, b2, eps, mu_dtype` it uses those that
        its function has (adafactor only `mu_dtype`, lion all but `eps`).
      galore: projection of the gradients; with None, or a rank of 0, they are not projected.
      low_bit: storage of the moments in few bits; with None, or float32 for both, they are not encoded.
      adascale: S, the ratio of the batch to the small one that learning_rate, warmup_steps and
        train.total_steps are for: a step then counts as up to S of those steps (`maxlp.optim.adascale`, sgd
        only). None counts each step as one.
      param_rounding: computes updates in float32 and rounds the new parameters: one of `BF16_ROUNDINGS`
        for bfloat16 parameters, ``nearest`` for float16 ones. None computes in their dtype, which loses
        small updates.
      offload: keeps the state, except for scalars, in pinned host memory between steps.

    Raises:
      ValueError: an invalid value, or values that cannot be combined; the message starts with the key.
    """

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    learning_rate: Positive
    schedule: Annotated[str, OneOf(SCHEDULES)] = "cosine"
    warmup_steps: CountOrZero
    final_lr_fraction: Fraction
    decay_fraction: Fraction = 0.2
    clip_norm: NotNegative
    weight_decay: NotNegative
    decay_embeddings: bool = False
    decay_with_clip: bool = True
    b1: DecayRate
    b2: DecayRate
    eps: Positive
    mu_dtype: Annotated[str, OneOf(MU_DTYPES)] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adagc: AdaGCConfig | None = None
    galore: GaloreConfig | None = None
    low_bit: LowBitConfig | None = None
    adascale: Annotated[float, Range(at_least=1)] | None = None
    param_rounding: Annotated[str, OneOf(PARAM_ROUNDINGS)] | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        schema.check(self)
        own = options_of(self.name)
        for key, value in self.options.items():
            if key not in own:
                raise ValueError(f"options.{key} {unknown_option(key, self.name)}")
            schema.check_value(f"options.{key}", value, own[key])
        if self.galore is not None and not self.galore.rank:
            object.__setattr__(self, "galore", None)
        if self.low_bit is not None and {self.low_bit.mu, self.low_bit.nu} == {"float32"}:
            object.__setattr__(self, "low_bit", None)
        decaying = [name for name in SCHEDULES if takes(name, "decay_steps")]
        if self.schedule not in decaying and self.decay_fraction != OptimizerConfig.decay_fraction:
            others = " or ".join(map(repr, decaying))
            raise ValueError(
                f"decay_fraction={self.decay_fraction} has no effect with schedule={self.schedule!r}; set "
                f"schedule={others}, or leave it unset"
            )
        if self.adascale is not None and self.galore is not None:
            raise ValueError(
                f"galore.rank={self.galore.rank} cannot be combined with adascale={self.adascale}, which "
                "measures the noise of whole gradients, not of projected ones; set galore.rank=0"
            )
        conflicts = [*self.kind.conflicts(self)]
        if self.galore is not None and self.kind.not_galore:
            reason = f"{self.kind.not_galore}; set galore.rank=0"
            conflicts.append(("galore.rank", self.galore.rank, reason))
        own, low_bit = self.kind.only_moment, self.low_bit
        if own and low_bit is not None and getattr(low_bit, own) == "float32":
            other, which = ("nu", "second") if own == "mu" else ("mu", "first")
            reason = f"it has no {which} moment; set low_bit.{own}"
            conflicts.append((f"low_bit.{other}", getattr(low_bit, other), reason))
        if self.adascale is not None and self.name != "sgd":
            reason = "its steps are normalized, so they grow with the batch already; set name='sgd'"
            conflicts.append(("adascale", self.adascale, reason))
        if not self.decay_with_clip and self.kind.last_rms is None:
            conflicts.append(("decay_with_clip", False, "only stable_adamw has it; set it to True"))
        for key, value, reason in conflicts:
            raise ValueError(f"{key}={value!r} cannot be combined with name={self.name!r}: {reason}")

    @property
    def unused(self) -> list[str]:
        """The required keys, and the seeds, that have no effect here, each with the reason."""
        parameters = inspect.signature(self.kind.scale_by).parameters
        used = {*parameters, "b1"} if self.kind.averages else {*parameters}
        found = [f"{key} (name={self.name})" for key in ("b1", "b2", "eps") if key not in used]
        if not takes(self.schedule, "final"):
            found.append(f"final_lr_fraction (schedule={self.schedule})")
        if self.galore is not None and self.galore.seed and self.galore.basis == "svd":
            found.append("galore.seed (basis=svd)")
        low_bit = self.low_bit
        if low_bit is not None and low_bit.seed and not low_bit.is_random:
            found.append(f"low_bit.seed (mu={low_bit.mu}, nu={low_bit.nu})")
        return found

    @property
    def kind(self) -> OptimizerKind:
        """What is known about the optimizer called `name`, imported here."""
        return pkgutil.resolve_name(OPTIMIZERS[self.name])


def unknown_option(key: str, name: str) -> str:
    """The phrase for an option that the optimizer does not have, see `schema.unknown_key`."""
    return schema.unknown_key(key, options_of(name), f"options of name={name!r}")


def options_of(name: str) -> dict[str, Any]:
    """The options of this optimizer alone: name → annotation, with the rules of its values."""
    scale_by = pkgutil.resolve_name(OPTIMIZERS[name]).scale_by
    hints = schema.annotations(scale_by) | OPTAX_HINTS
    parameters = inspect.signature(scale_by).parameters
    return {key: hints[key] for key in parameters if key not in SHARED}
