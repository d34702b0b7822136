"""Weights of other libraries: their files, and how their tensors map to the parameters of a model.

A `Layout` is a table of names. Beyond names, three things differ: kernels are (in, out) here and (out, in)
in PyTorch; a leaf of ``layers`` here is a stack of the tensors of all layers there; and some libraries
keep the kernels of q, k and v in one tensor.

Shape letters: O out · I in · p pixels of a patch, along its height and its width.
"""

import contextlib
import dataclasses
import fnmatch
import math
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from maxlp import families, schema
from maxlp.families import FAMILIES, Family
from maxlp.runtime.files import read_json

if TYPE_CHECKING:
    from maxlp.data.tokenizers import Tokenizer

Array = np.ndarray
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT


class Transform(NamedTuple):
    """Turns a tensor of another library into a parameter, and back."""

    to_maxlp: Callable[[Array], Array]
    to_other: Callable[[Array], Array]


def _conv_to_kernel(conv_OIpp: Array) -> Array:
    return conv_OIpp.transpose(2, 3, 1, 0).reshape(-1, len(conv_OIpp))


def _kernel_to_conv(kernel: Array) -> Array:
    size = math.isqrt(len(kernel) // 3)
    return kernel.reshape(size, size, 3, -1).transpose(3, 2, 0, 1)


def _to_scalar(x: Array) -> Array:
    """A scalar, which some files hold as a vector of one."""
    if x.shape not in ((), (1,)):
        raise ValueError(x.shape)
    return x.reshape(())


SAME = Transform(lambda x: x, lambda x: x)
TRANSPOSED = Transform(lambda x: x.T, lambda x: x.T)
PATCH_CONV = Transform(_conv_to_kernel, _kernel_to_conv)  # of pixels with 3 channels
SCALAR = Transform(_to_scalar, lambda x: x)
VECTOR_OF_ONE = Transform(_to_scalar, lambda x: x.reshape(1))
ROW = Transform(lambda x: x[0], lambda x: x[None])


class Place(NamedTuple):
    """Where a parameter is in another library.

    Attributes:
      name: of the tensor; "{}" is the number of the layer.
      third: which third of the transformed tensor's last dim the parameter is; None for all of it.
    """

    name: str
    transform: Transform = SAME
    third: int | None = None


class Layout(NamedTuple):
    """The names of another library for the parameters of a model.

    Attributes:
      modules: path of a module to its name there; its kernel or scale is the tensor NAME.weight, its bias
        NAME.bias.
      leaves: path of a parameter to its place, for exceptions.
      optional_prefix: names may begin with it.
      ignored: patterns of the names of tensors that repeat what the config specifies.
      copies: name of a tensor -> name of the tensor that it may repeat.
    """

    modules: Mapping[str, str]
    leaves: Mapping[str, Place]
    optional_prefix: str = ""
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = {}

    def place(self, path: str) -> Place:
        """The place of a parameter.

        Raises:
          ValueError: the layout has no name for it.
        """
        if path in self.leaves:
            return self.leaves[path]
        module, _, leaf = path.rpartition("/")
        if module not in self.modules:
            raise ValueError(f"parameter {path!r} has no counterpart in this format of weights")
        name = f"{self.modules[module]}.{'bias' if leaf == 'bias' else 'weight'}"
        return Place(name, TRANSPOSED if leaf == "kernel" else SAME)

    def parts(self, path: str, shape: tuple[int, ...]) -> Iterator[tuple[Any, str]]:
        """(index, name) of the tensors that a parameter consists of, at this index of its first dim."""
        name = self.place(path).name
        if "{}" not in name:
            return iter([(..., name)])
        return ((i, name.format(i)) for i in range(shape[0]))


# --- formats --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightFormat:
    """A folder of weights as another library reads and writes it: JSON files and safetensors files.

    ``model`` in the signatures below is an instance of the family's config class (`Family.Model`).

    Attributes:
      config_file: name of the JSON file that describes the model.
      model_types: values of its key ``model_type`` for models of this format; empty if other formats have
        no file of this name.
      read_model: (folder, tensors) to the keywords of the family's config class, except for dtype,
        param_dtype, attention, scan_layers and remat; and the dtype of the tensors.
      layout: model to the names of the tensors; raises a ValueError for a model that the format
        cannot represent.
      config_files: (model, make_tokenizer) to the content of the JSON files by name; raises a ValueError
        like ``layout``. make_tokenizer() makes the run's tokenizer, or returns None if it has no file.
      weights_file, max_shard_bytes: as in `runtime.safetensors.write_tensors`.
      quantizable: patterns of the names of the tensors that can be written in 8 bits, see
        `families.compressed_tensors`.
      resize: (params, model, image_size) to the params and the model for images of that size; None for
        models without images.
      as_trained: (model, section ``data``) to the model to write.
    """

    config_file: str
    read_model: Callable[[Path, Mapping[str, Array]], tuple[dict[str, Any], str]]
    layout: Callable[[Any], Layout]
    config_files: Callable[[Any, "Callable[[], Tokenizer | None]"], dict[str, dict[str, Any]]]
    weights_file: str
    max_shard_bytes: int
    model_types: tuple[str, ...] = ()
    quantizable: tuple[str, ...] = ()
    resize: Callable[[dict, Any, int], tuple[dict, Any]] | None = None
    as_trained: Callable[[Any, Mapping[str, Any]], Any] = lambda model, data: model

    def matches(self, folder: Path) -> bool:
        """Whether a folder holds a model in this format."""
        path = folder / self.config_file
        if not path.exists():
            return False
        return not self.model_types or read_config(path).get("model_type") in self.model_types


def formats(family: str) -> Mapping[str, WeightFormat]:
    """The formats of a family by name; the first is the one to export to by default."""
    return pkgutil.resolve_name(f"{FAMILIES[family]}.export:FORMATS")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a model's JSON file.

    Raises:
      ValueError: there is no such file, or it is not a JSON object.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: {path.parent} holds no model")
    return read_json(path, remedy="copy or download it again")


def find_format(source: Path, name: str | None = None) -> tuple[Family, WeightFormat]:
    """The family and the format of a folder; families are imported one after the other until one fits.

    Args:
      name: of the format, see `formats`; None detects it.

    Raises:
      ValueError: an unknown format, or not a folder with a model that is known.
    """
    if not source.is_dir():
        raise ValueError(f"{source} {'is a file' if source.exists() else 'does not exist'}; give a folder")
    tried: dict[str, WeightFormat] = {}
    for family in FAMILIES:
        of_family = formats(family)
        for key, candidate in of_family.items():
            if name == key or (name is None and candidate.matches(source)):
                return families.get(family), candidate
        tried |= of_family
    if name is not None:
        raise ValueError(f"--format={name} is unknown; one of {', '.join(tried)}")
    for file in dict.fromkeys(one.config_file for one in tried.values()):
        if (source / file).exists():
            config = read_config(source / file)
            if "model_type" not in config and "model" in config:
                raise ValueError(
                    f"{source} holds a run or imported weights already; train --from={source} in another "
                    "--workdir, or write them for other libraries with python -m maxlp.convert export"
                )
            model_type = config.get("model_type")
            known = [kind for one in tried.values() if one.config_file == file for kind in one.model_types]
            raise ValueError(f"{source / file}: {model_type=} is not supported; one of {', '.join(known)}")
    config_files = " nor ".join(dict.fromkeys(one.config_file for one in tried.values()))
    raise ValueError(f"{source} holds no model: there is neither {config_files}")


def holds_adapters(folder: Path) -> bool:
    """Whether a folder holds adapters of PEFT, without the model that they belong to."""
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file that is read in front of the message of a ValueError, if it is not there yet."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        message = str(error)
        for known in (path, path.parent):
            if message.startswith(str(known)):
                raise
        message = message.removeprefix(f"{path.name}: ")
        other_file = re.match(r"[\w.]+\.json: ", message)
        raise ValueError(f"{path.parent}/{message}" if other_file else f"{path}: {message}") from error


REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Section:
    """A JSON object of another library's file; each value is checked when it is read.

    Attributes:
      place: the file and the keys that lead to the object, for messages: "config.json: vision_config.".
      values: the object.
    """

    place: str
    values: Mapping[str, Any]

    def read(self, key: str, hint: Any, default: Any = REQUIRED) -> Any:
        """The value of a key.

        Args:
          hint: an annotation, see `schema`.
          default: for a missing key; if it is None, also for null.

        Raises:
          ValueError: a missing key or a value that does not fit.
        """
        value = self.values.get(key, default)
        if value is REQUIRED:
            raise ValueError(f"{self.place}{key} is missing; add it, or download the file again")
        if isinstance(value, list) and typing.get_origin(hint) is tuple:
            value = tuple(value)
        if value is not default:
            schema.check_value(f"{self.place}{key}", value, hint)
        return value

    def section(self, key: str, default: Any = REQUIRED) -> "Section":
        """The object under a key; an empty one if the default is None."""
        return Section(f"{self.place}{key}.", self.read(key, Mapping[str, Any], default) or {})

    def refusal(self, key: str, supported: str) -> ValueError:
        """The error for a value that the model does not implement."""
        return ValueError(f"{self.place}{key}={self.values.get(key)!r} is not supported, only {supported}")


# --- tensors --------------------------------------------------------------------------------------------


def to_maxlp(
    tensors: Mapping[str, Array],
    abstract: Mapping[str, Any],
    layout: Layout,
    put: Callable[[Array, Any], Any] = lambda array, leaf: array,
) -> dict:
    """Parameters from the tensors of another library.

    Reads one tensor at a time: with a mapping that reads from disk (`runtime.safetensors.Tensors`) this
    needs memory for one copy of the model and one tensor.

    Args:
      tensors: name to array, as in the state dict of the other library.
      abstract: the parameters as a nested dict of shapes and dtypes.
      put: called with each parameter as a NumPy array and its abstract leaf, as soon as it is complete.

    Returns:
      what ``put`` has returned, as a nested dict: by default NumPy arrays.

    Raises:
      ValueError: a tensor that is missing, unknown, of a wrong shape or not finite; the message has its
        name.
    """
    params: dict[str, Any] = {}
    for path, leaf, parts in _matched(tensors, abstract, layout):
        array: Any = None
        for index, name, value in parts:
            if array is None:  # not before: a wrong size may be more than fits into memory
                array = np.empty(leaf.shape, leaf.dtype)
            _fill(array[index], value, name)
        assert array is not None  # a parameter is made of at least one tensor
        params[path] = put(array, leaf)
    return unflatten_mapping(params, sep="/")


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], abstract: Mapping[str, Any], layout: Layout
) -> None:
    """Raises a ValueError as `to_maxlp` does for tensors of these names and shapes, which are not read."""
    tensors = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    for _, _, parts in _matched(tensors, abstract, layout):
        for _ in parts:
            pass


def _matched(
    tensors: Mapping[str, Array], abstract: Mapping[str, Any], layout: Layout
) -> Iterator[tuple[str, Any, Iterator[tuple[Any, str, Array]]]]:
    """Of each parameter its path, its abstract leaf and its parts: index, name of the tensor, value."""
    stored: dict[str, str] = {}
    for name in tensors:
        bare_name = name.removeprefix(layout.optional_prefix)
        if bare_name in stored:
            raise ValueError(
                f"tensors {stored[bare_name]!r} and {name!r} stand for the same parameter; remove one"
            )
        stored[bare_name] = name
    leaves, wanted = flatten_mapping(abstract, sep="/"), set()
    for path, leaf in leaves.items():
        for _, name in layout.parts(path, leaf.shape):
            if name not in stored:  # the first of them: a wrong number of layers makes millions
                raise ValueError(
                    f"tensor {name!r} is missing, but the config describes it; copy or download it again"
                )
            wanted.add(name)
    unknown = [name for name in sorted(set(stored) - wanted) if not _is_redundant(name, tensors, layout)]
    if unknown:
        if (other := layout.copies.get(unknown[0])) in tensors:
            raise ValueError(
                f"tensor {unknown[0]!r} differs from {other!r}, to which the config ties it; correct the "
                "config (tie_word_embeddings=false), or remove the tensor"
            )
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ValueError(f"tensor {unknown[0]!r} has no place in the model that the config describes{more}")

    def parts(path: str, leaf: Any) -> Iterator[tuple[Any, str, Array]]:
        for index, name in layout.parts(path, leaf.shape):
            shape = leaf.shape if index is ... else leaf.shape[1:]
            yield index, name, _part(tensors[stored[name]], layout.place(path), name, path, shape)

    for path, leaf in leaves.items():
        yield path, leaf, parts(path, leaf)


def _part(tensor: Array, place: Place, name: str, path: str, shape: tuple[int, ...]) -> Array:
    """A tensor as (a layer of) the parameter at this path."""
    try:
        value = place.transform.to_maxlp(tensor)
        if place.third is not None:
            value = np.split(value, 3, axis=-1)[place.third]
    except (ValueError, IndexError):  # the tensor has another rank
        value = None
    if value is None or value.shape != shape:
        raise ValueError(
            f"tensor {name!r} of shape {tensor.shape} does not fit {path} of shape {shape}: the config "
            "describes another model"
        )
    return value


def _fill(target: Array, value: Array, name: str) -> None:
    """Writes a value into (a layer of) a parameter, in place and in the parameter's dtype."""
    with np.errstate(over="ignore"):
        target[...] = value
    _check_finite(target, name)


def _check_finite(value: Array, name: str) -> None:
    if not np.isfinite(value).all():
        wider = "or float32 (--dtype, in training model.param_dtype) if their range is larger"
        remedy = "give intact weights" + (f", {wider}" if value.dtype != np.float32 else "")
        raise ValueError(f"tensor {name!r} holds NaN or infinity in {value.dtype}; {remedy}")


def _is_redundant(name: str, tensors: Mapping[str, Array], layout: Layout) -> bool:
    """Whether a tensor repeats what the config specifies, or another tensor."""
    other = layout.copies.get(name)
    if other is not None and other in tensors:
        return np.array_equal(tensors[name], tensors[other])
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in layout.ignored)


def to_other(params: Mapping[str, Any], layout: Layout) -> dict[str, Array]:
    """The tensors of another library from parameters: views wherever possible.

    Raises:
      ValueError: a parameter for which the layout has no name, or one that is not finite.
    """
    tensors: dict[str, Any] = {}
    in_thirds: dict[str, Transform] = {}
    for path, leaf in flatten_mapping(params, sep="/").items():
        place = layout.place(path)
        for index, name in layout.parts(path, leaf.shape):
            value = np.asarray(leaf)[index]
            _check_finite(value, name)
            if place.third is None:
                tensors[name] = place.transform.to_other(value)
            else:
                tensors.setdefault(name, [None] * 3)[place.third] = value
                in_thirds[name] = place.transform
    for name, transform in in_thirds.items():
        tensors[name] = transform.to_other(np.concatenate(tensors[name], axis=-1))
    return tensors
