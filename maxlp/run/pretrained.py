"""Weights that a run starts from: ``train.init_from``, and the flags ``--from`` and ``--swap_tokenizer``.

They come from another run or another library, in a folder or a repository of the Hub. They are read in
place, one parameter at a time and straight into its shards. Converting them first (`maxlp.convert import`)
would take a second copy on disk and a whole copy in memory.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp.core.train_state import State, abstract_model
from maxlp.data import tokenizers
from maxlp.data.tokenizers import Tokenizer, make_tokenizer
from maxlp.families import Family, compressed_tensors, weights
from maxlp.families.weights import WeightFormat
from maxlp.nn.lora import merged_params
from maxlp.run import changes, run_dir, same_model
from maxlp.run.config import ConfigError
from maxlp.run.restore import restore_model
from maxlp.run.settings import Settings, make_model, read, read_model
from maxlp.run.tokenizer import saved_tokenizer
from maxlp.runtime import checkpoint, distributed, files, hub, tree_spec
from maxlp.runtime.safetensors import Tensors, index_of

SMALL_FILES = (
    *("config.json", "processor_config.json", "preprocessor_config.json", "open_clip_config.json"),
    weights.ADAPTER_CONFIG,
    *(*tokenizers.FILES, *tokenizers.COMPANIONS),
)
SOURCES = "give a run, a folder of weights, or hf:ORG/NAME of the Hub"
VOCABULARY_MULTIPLE = 128  # rows of a swapped vocabulary, so that meshes divide it


def published_params(workdir: Path, step: int | None, mesh: Mesh) -> State:
    """The parameters that a run publishes: averaged by schedule_free_adamw, with adapters merged into them.

    Args:
      step: None takes the newest intact checkpoint.
    """
    graphdef, state, _ = restore_model(run_dir.load_config(workdir), workdir, step, mesh)
    return merged_params(nnx.merge(graphdef, state["params"], state["model_state"]))


class RunWeights:
    """The weights that a run of maxlp has trained: those that it evaluates and exports.

    Args:
      path: the run, or one of its checkpoints.

    Attributes:
      model: the section ``model`` of the run's config; None for a checkpoint without a run.
      data: the section ``data`` of the run's config.
      tokenizer: the spec of the run's tokenizer; None if it has none.
    """

    def __init__(self, path: Path):
        self.path = path
        self.workdir = next((p for p in (path, *path.parents[:2]) if (p / "config.json").exists()), None)
        self.config = None if self.workdir is None else run_dir.load_config(self.workdir)
        self.model: dict[str, Any] | None = None
        self.data: dict[str, Any] = {}
        if self.config is not None:
            family, model, _ = read_model(self.config)
            self.model, self.data = _section(family, model), self.config.to_dict().get("data", {})

    @cached_property
    def tokenizer(self) -> str | None:
        if self.workdir is None or self.config is None:
            return None
        spec = self.config.get("data", {}).get("tokenizer")
        if spec != "bytes" and not any((self.workdir / name).exists() for name in tokenizers.FILES):
            return None
        return saved_tokenizer(spec, self.workdir)

    def check(self, abstract: State) -> None:
        """Raises a ValueError if the parameters have other shapes than these."""
        part = "params" if self._adapters is None else "model_state"  # which holds the frozen weights
        checkpoint.check_fits(self.path, {part: abstract})

    def load(self, abstract: State, mesh: Mesh) -> State:
        """The parameters in these dtypes and shardings."""
        self.check(abstract)
        if self.config is None or self.workdir is None or run_dir.is_imported(self.config):
            return checkpoint.restore(self.path, {"params": abstract}).state["params"]
        step = int(self.path.name) if self.path.parent == self.workdir / "checkpoints" else None
        params = published_params(self.workdir, step, mesh)
        return jax.tree.map(
            lambda leaf, wanted: jax.device_put(leaf.astype(wanted.dtype), wanted.sharding),
            params,
            abstract,
        )

    @property
    def _adapters(self) -> Any:
        if self.config is None or run_dir.is_imported(self.config):
            return None
        return read(self.config).train.lora


class LibraryWeights:
    """The weights of another library.

    Args:
      spec: the folder, or the id of a repository of the Hub; with adapters of PEFT alone, which are merged
        into the model that they name.
      format_name: see `weights.find_format`.

    Attributes:
      spec, folder: of the model; where its files are on this machine.
      family, format: of the model.
      tensors: by name; the files are downloaded and opened when the first one is asked for.
      config: of the model, with activations and parameters in the dtype of the files.
      model: the section ``model`` of a config for these weights.
      data: what is known of a section ``data``: nothing.
      tokenizer: the spec of their tokenizer; None if there is none beside them.
      tokenizer_folder: where the tokenizer is.
    """

    def __init__(self, spec: str, format_name: str | None = None):
        self.spec, self.folder, self._adapters = spec, _folder(spec), None
        given = self.folder
        if weights.holds_adapters(given):
            from maxlp.families import peft  # few runs need it

            self._adapters = peft.Adapters(_folder(spec, peft.WEIGHTS))
            self.spec, self.folder = self._adapters.base, _folder(self._adapters.base)
        self.tokenizer, self.tokenizer_folder = None, self.folder
        for source, folder in ((self.spec, self.folder), (spec, given)):  # that of the adapters, if any
            if any((folder / name).exists() for name in tokenizers.FILES):
                self.tokenizer, self.tokenizer_folder = source, folder
        self.family, self.format = weights.find_format(self.folder, format_name)
        self.tensors = _LazyTensors(self._open)
        with self.naming_config():
            self.config: Any = _model(self.family, self.format, self.folder, self.tensors)
        self.model: dict[str, Any] | None = _section(self.family, self.config)
        self.data: dict[str, Any] = {}

    def naming_config(self) -> contextlib.AbstractContextManager[None]:
        """Names the model's config file in errors."""
        return weights.naming(self.folder / self.format.config_file)

    def check(self, abstract: State) -> None:
        """Raises a ValueError if parameters or tensors have other shapes than these, or a file is damaged.

        Tensors are not read, and those of the Hub not downloaded for it.
        """
        own = tree_spec.describe(
            jax.eval_shape(
                lambda: nnx.to_pure_dict(
                    nnx.state(self.family.make_model(self.config, rngs=nnx.Rngs(0)), nnx.Param)
                )
            )
        )
        if mismatch := tree_spec.find_mismatch(own, abstract, exact=False):
            path, saved, wanted = mismatch
            raise ValueError(f"{path} is {saved} in the weights, but {wanted} here; change the config")
        if not hub.is_id(self.spec):
            shapes = {name: self._files.shape_of[name] for name in self.tensors}
            weights.check_shapes(shapes, abstract, self.format.layout(self.config))

    def load(self, abstract: State, mesh: Mesh) -> State:
        """The parameters in these dtypes and shardings."""
        with weights.naming(self.folder):
            return weights.to_maxlp(self.tensors, abstract, self.format.layout(self.config), put=_shards)

    def _open(self) -> Mapping[str, np.ndarray]:
        files = self._files
        with self.naming_config():
            tensors = compressed_tensors.dequantized(files, self.folder / self.format.config_file)
        return self._adapters.merged(tensors, files.shape_of) if self._adapters else tensors

    @cached_property
    def _files(self) -> Tensors:
        file = self.format.weights_file
        shards = file.replace(".safetensors", "-*.safetensors")
        return Tensors(_folder(self.spec, file, shards, index_of(file)), file)


def _folder(spec: str, *files: str) -> Path:
    """The folder with the small files of weights, and with these files."""
    return hub.fetch(spec, (*SMALL_FILES, *files)) if hub.is_id(spec) else Path(spec)


class _LazyTensors(Mapping[str, np.ndarray]):
    """Tensors that are opened when one is asked for."""

    def __init__(self, open_tensors: Callable[[], Mapping[str, np.ndarray]]):
        self._open = functools.cache(open_tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._open()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())


def check_written(family: Family, model: Any, weight_format: WeightFormat, folder: Path) -> None:
    """Raises a ValueError if the config files of a model, read again, describe another one."""
    written = _model(family, weight_format, folder, {})
    if lost := same_model.model_differences(_section(family, model), _section(family, written)):
        raise ValueError(
            f"the files of this format would describe another model ({'; '.join(lost.values())}); choose "
            "another --format, or train with the values that it can hold"
        )


def _model(family: Family, weight_format: WeightFormat, folder: Path, tensors: Mapping[str, Any]) -> Any:
    """The model of another library's files, with activations and parameters in the dtype of the tensors."""
    keywords, dtype = weight_format.read_model(folder, tensors)
    return family.Model(
        **keywords, dtype=dtype, param_dtype=dtype, attention="xla", scan_layers=True, remat="none"
    )


def _section(family: Family, model: Any) -> dict[str, Any]:
    """The section ``model`` of a config."""
    return {"name": family.name} | dataclasses.asdict(model)


def _shards(array: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda index: array[index])


def find(spec: str, key: str = "config.train.init_from") -> RunWeights | LibraryWeights:
    """The weights of a run, a checkpoint, a folder of another library or a repository of the Hub.

    Args:
      spec: a path or ``hf:ORG/NAME[@REVISION]``.
      key: what names it in messages.

    Raises:
      ValueError: there are none, or they are of an unknown model.
    """
    if hub.is_id(spec):
        return LibraryWeights(spec)
    path = files.local_path(spec, key)
    if not path.is_dir() or not any(path.iterdir()):
        found = "is empty" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"{key}={spec} {found}; {SOURCES}")
    configs = ("config.json", "open_clip_config.json", weights.ADAPTER_CONFIG)
    is_other = any((path / name).exists() for name in configs)
    if is_other and not (path / "checkpoints").is_dir() and not (path / "run.json").exists():
        return LibraryWeights(str(path))
    return RunWeights(path)


# --- the config of a run that starts from weights ---------------------------------------------------------


def configure(
    c: ConfigDict,
    workdir: Path | None,
    source: str | None,
    swap: str | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> ConfigDict:
    """A config with the model of the weights ``--from``, their tokenizer and their treatment of texts.

    A run that has a checkpoint no longer needs the weights: its own config holds what was taken from them.
    Nor does it need the two flags, without which the config stays as it is if the run had none.

    Args:
      workdir: of the run; None if there is none.
      source: a path or an id of the Hub, with or without ``hf:``; None without ``--from``.
      swap: the spec of another tokenizer, to exchange theirs for.
      overrides: keys and values that were set on the command line.

    Raises:
      ConfigError: a flag that contradicts the weights.
    """
    recorded = None if workdir is None else _recorded(workdir)
    if source is None and swap is None:
        if recorded is None:
            return c
        source = recorded.train.init_from
        swap = recorded.data.tokenizer if recorded.train.get("swap_tokenizer") else None
    if source is None:
        raise ConfigError(f"--swap_tokenizer={swap} needs --from, the weights to swap the tokenizer of")
    spec = hub.as_id(source)
    if not hub.is_id(spec) and not files.is_url(spec):
        spec = str(files.local_path(spec, "--from"))
    if workdir is not None:
        agree_on_commits(workdir, spec, swap or "")
    if recorded is not None and recorded.train.init_from == spec:
        model, their_tokenizer = recorded.model.to_dict(), recorded.data.tokenizer
        data = recorded.data.to_dict()
    else:
        recorded, found = None, find(spec, "--from")
        model, their_tokenizer, data = found.model, found.tokenizer, found.data
    if model is None:
        raise ConfigError(f"--from={source} holds no config.json; {SOURCES}")
    if (other := overrides.get("train.init_from", spec)) != spec:
        raise ConfigError(f"--from={source} contradicts config.train.init_from={other}; give one")
    tokenizer = overrides.get("data.tokenizer")
    if swap is not None:
        if tokenizer not in (None, swap):
            raise ConfigError(
                f"--swap_tokenizer={swap} contradicts config.data.tokenizer={tokenizer}; give one"
            )
        if recorded is None:
            model = _with_vocabulary(model, swap, overrides)
    section = joined_model(model, c.model.to_dict(), overrides, f"--from={source}")
    c = c.copy_and_resolve_references()
    with c.unlocked():
        c.model, c.train.init_from = ConfigDict(section), spec
        c.data.update(same_model.text_keys(data, overrides))
        c.data.tokenizer = swap or tokenizer or their_tokenizer or c.data.get("tokenizer")
        if swap is not None:
            c.train.swap_tokenizer = True
    return c


def _recorded(workdir: Path) -> ConfigDict | None:
    """The config of the run in the workdir, if it started from weights and has a checkpoint."""
    if run_dir.saved_data_state(workdir) is None:
        return None
    c = run_dir.load_config(workdir)
    return c if c.get("train", {}).get("init_from") else None


def joined_model(
    theirs: Mapping[str, Any], given: Mapping[str, Any], overrides: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """The model of weights, with those keys of a config that do not depend on weights.

    Args:
      theirs, given: sections ``model``.
      overrides: keys and values that were set on the command line.
      source: the flag that names the weights, and its value.

    Raises:
      ConfigError: a model of another family, or a flag that contradicts the weights.
    """
    if theirs["name"] != given["name"]:
        raise ConfigError(
            f"{source} holds a {theirs['name']}, but config.model.name={given['name']}; choose one "
            f"with --config={theirs['name']}/..."
        )
    config = {"model": given}
    fixed, values = changes.flat({"model": theirs}), changes.flat(config)
    for key in overrides:
        if not key.startswith("model.") or not changes.is_fixed(key, config):
            continue
        if same_model.is_initial(key, config) or same_model.is_training(key, config):
            continue
        if fixed.get(key) != values.get(key):
            raise ConfigError(
                f"config.{key}={values.get(key)!r} contradicts {source}, which has "
                f"{fixed.get(key)!r}; drop the flag"
            )
    joined = {k: v for k, v in theirs.items() if changes.is_fixed(f"model.{k}", config)}
    joined |= {k: v for k, v in given.items() if not changes.is_fixed(f"model.{k}", config)}
    section = ConfigDict(joined)
    ours = [k for k in values if same_model.is_training(k, config)]
    ours += [k for k in overrides if same_model.is_initial(k, config)]
    section.update_from_flattened_dict({k.removeprefix("model."): values[k] for k in ours})
    return section.to_dict()


def _with_vocabulary(model: dict, swap: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The model with the vocabulary of another tokenizer."""
    if "vocab_size" not in model:
        raise ConfigError(f"--swap_tokenizer={swap} is for language models, not for a {model['name']}")
    size = swap.removeprefix("bpe:")
    rows = int(size) if size.isdecimal() else make_tokenizer(swap).vocab_size
    rows = -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return model | {"vocab_size": overrides.get("model.vocab_size", rows)}


def agree_on_commits(workdir: Path, *specs: str) -> None:
    """Resolves ids of the Hub to the commits that the run has recorded, and the same in all processes."""
    if not (ids := [spec for spec in specs if hub.is_id(spec)]):
        return
    hub.commits.update(run_dir.hub_commits(workdir))
    if jax.process_count() == 1 or run_dir.saved_data_state(workdir) is not None:
        return
    if distributed.is_primary():
        for spec in ids:
            hub.fetch(spec.partition("?")[0], ("config.json",))
    hub.commits.update(distributed.gather_json(hub.commits)[0])


def report_differences(s: Settings, workdir: Path) -> None:
    """Prints the keys by which a new run's model computes something else than the model of its weights."""
    if not s.train.init_from or run_dir.saved_data_state(workdir) is not None:
        return
    if (model := find(s.train.init_from).model) is None:
        return
    for key, line in same_model.model_differences(model, _section(s.family, s.model)).items():
        if key != "model.vocab_size" or not s.train.swap_tokenizer:
            distributed.print_primary(f"not as in the model of config.train.init_from: {line}")


def check_tokenizer(init_from: str, spec: str, made: Tokenizer) -> None:
    """Raises a ConfigError for a tokenizer with which the weights were not trained.

    Args:
      spec: the config's tokenizer.
      made: the tokenizer of that spec.
    """
    theirs = find(init_from).tokenizer
    remedy = "give theirs"
    if theirs is None and not spec.startswith("bpe:"):
        return  # nothing is known about it
    if theirs is not None:
        options = spec.partition("?")[2]
        if options and "?" not in theirs:
            theirs += f"?{options}"
        if _mean_the_same(made, make_tokenizer(theirs)):
            return
        remedy = f"drop it and give --from={init_from}; to exchange theirs, add --swap_tokenizer={spec}"
    raise ConfigError(
        f"config.data.tokenizer={spec} is not the tokenizer that config.train.init_from={init_from} was "
        f"trained with; {remedy}"
    )


def _mean_the_same(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether each id stands for the same text in both, so that a model can be used with either."""
    return a.fingerprint == b.fingerprint or (
        (a.tokens, a.bos_id, a.eos_id) == (b.tokens, b.bos_id, b.eos_id)
    )


# --- parameters -------------------------------------------------------------------------------------------


def check(s: Settings, mesh: Mesh) -> None:
    """Raises a ConfigError if the weights of ``train.init_from`` do not fit the model."""
    found = find(s.train.init_from)
    try:
        found.check(_abstract(_with_their_vocabulary(s, found), mesh))
    except ValueError as error:
        raise ConfigError(f"config.train.init_from={s.train.init_from}: {error}") from error


def load(s: Settings, mesh: Mesh, workdir: Path | None) -> State:
    """The parameters of ``train.init_from``, with the rows of the config's tokenizer, on the mesh.

    Args:
      workdir: holds the run's tokenizer; only a swap of tokenizers needs it.

    Raises:
      ConfigError: weights that cannot be found, or whose tokenizer to swap is missing.
      ValueError: tensors that do not fit the config, or cannot be read.
    """
    if workdir is not None:
        agree_on_commits(workdir, s.train.init_from)
    found = find(s.train.init_from)
    params = found.load(_abstract(_with_their_vocabulary(s, found), mesh), mesh)
    if not s.train.swap_tokenizer:
        return params
    from maxlp.run.tokenizer_swap import swap_rows

    assert workdir is not None
    if found.tokenizer is None:
        raise ConfigError(f"--swap_tokenizer: {s.train.init_from} has no tokenizer to exchange")
    old, new = make_tokenizer(found.tokenizer), make_tokenizer(saved_tokenizer(s.data.tokenizer, workdir))
    make = make_model(s.family, s.model, s.precision)
    return swap_rows(params, _abstract(s, mesh), make, old, new)


def _with_their_vocabulary(s: Settings, found: RunWeights | LibraryWeights) -> Settings:
    """The settings with the vocabulary of the weights, if it is exchanged."""
    if not s.train.swap_tokenizer or found.model is None:
        return s
    return dataclasses.replace(s, model=dataclasses.replace(s.model, vocab_size=found.model["vocab_size"]))


def _abstract(s: Settings, mesh: Mesh) -> State:
    """The parameters as shapes, dtypes and shardings."""
    _, abstract = abstract_model(make_model(s.family, s.model, s.precision), mesh)
    return abstract["params"]
