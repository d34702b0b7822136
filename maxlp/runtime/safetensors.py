"""Folders of safetensors files: a single file, or shards with an index as Hugging Face writes them."""

import collections
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maxlp.runtime import files

WEIGHTS = "model.safetensors"
SHARD_BYTES = 2 * 10**9
FLOATS = ("F64", "F32", "F16", "BF16")  # as headers name them
CODES = {"I8": np.int8, "F8_E4M3": jax.numpy.float8_e4m3fn}  # of quantized weights


def index_of(weights: str) -> str:
    """The name of the index of a file's shards."""
    return f"{weights}.index.json"


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a folder by name; each is read from disk when it is looked up.

    The headers of all files are read and checked at once, so that a missing shard is found before any
    tensor is read.

    Args:
      directory: holds the file, or its shards and their index.
      weights: name of the file.

    Attributes:
      file_of: name of a tensor -> name of its file.
      shape_of: name of a tensor -> its shape.

    Raises:
      ValueError: there are no such files, or one of them is damaged or does not match the index.
    """

    def __init__(self, directory: str | os.PathLike, weights: str = WEIGHTS):
        self.directory = os.fspath(directory)
        path, index = self._path(weights), self._path(index_of(weights))
        if not os.path.lexists(path) and not os.path.lexists(index):
            raise ValueError(
                f"{self.directory} contains neither {weights} nor {index_of(weights)}; check the path, and "
                "convert pickles (.bin, .pth) or GGUF to safetensors"
            )
        shard_of = {} if os.path.lexists(path) else _read_index(index)
        self.file_of: dict[str, str] = {}
        self.shape_of: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(shard_of.values())) or [weights]:
            for name, shape in self._shapes(file).items():
                if name in self.file_of:
                    raise _unreadable(self._path(file), f"{self.file_of[name]} has tensor {name!r} too")
                self.file_of[name], self.shape_of[name] = file, shape
        if not shard_of:
            return
        for name in {**shard_of, **self.file_of}:
            file = shard_of.get(name)
            if file != self.file_of.get(name):
                where = f"not in {file}" if file else f"in {self.file_of[name]}, but not in the index"
                raise _unreadable(index, f"tensor {name!r} is {where}")

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a tensor.

        Raises:
          ValueError: it does not hold floating-point numbers.
        """
        path = self._path(self.file_of[name])
        with self._open(self.file_of[name]) as file:
            if (dtype := file.get_slice(name).get_dtype()) not in FLOATS:
                raise ValueError(
                    f"{path}: tensor {name!r} holds numbers of type {dtype}, not {', '.join(FLOATS)}; "
                    "give weights that are not quantized"
                )
            return file.get_tensor(name)

    def codes(self, name: str) -> np.ndarray:
        """Reads a tensor of 8-bit codes. (The library does not read E4M3 into NumPy.)

        Raises:
          ValueError: it holds other numbers.
        """
        path = self._path(self.file_of[name])
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length))[name]
            if entry["dtype"] not in CODES:
                raise ValueError(
                    f"{path}: tensor {name!r} holds numbers of type {entry['dtype']} with a scale, not "
                    f"{' or '.join(CODES)}; copy or download it again"
                )
            start, end = entry["data_offsets"]
            file.seek(8 + length + start)
            return np.frombuffer(file.read(end - start), CODES[entry["dtype"]]).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def _path(self, file: str) -> str:
        return os.path.join(self.directory, file)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self._path(file), framework="np")
        except (SafetensorError, OSError) as error:
            raise _unreadable(self._path(file), error) from None

    def _shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        """The shapes in a file's header; no name is there twice, of which the library keeps the last."""
        with self._open(file):
            pass  # the library checks offsets, shapes and dtypes
        with open(self._path(file), "rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
        pairs = json.loads(header, object_pairs_hook=list)
        entries = [(name, dict(entry)) for name, entry in pairs if name != "__metadata__"]
        names = collections.Counter(name for name, _ in entries)
        if twice := [name for name, count in names.items() if count > 1]:
            raise _unreadable(self._path(file), f"tensor {twice[0]!r} occurs twice")
        return {name: tuple(entry["shape"]) for name, entry in entries}


def _read_index(path: str) -> dict[str, str]:
    """Name of a tensor -> name of its shard, a file beside the index."""
    remedy = "copy or download it again"
    try:
        content = files.read_json(Path(path), {}, fields={"weight_map": dict}, remedy=remedy)
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    if not (shard_of := content.get("weight_map")):
        raise _unreadable(path, "it names no tensors")
    for name, file in shard_of.items():
        if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
            raise _unreadable(path, f"tensor {name!r} is in {file!r}, which is not a file beside the index")
    return shard_of


def _unreadable(path: str, reason: object) -> ValueError:
    return ValueError(f"{path} cannot be used ({reason}); copy or download it again")


def write_tensors(
    directory: str | os.PathLike,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str,
    max_shard_bytes: int = SHARD_BYTES,
    weights: str = WEIGHTS,
) -> None:
    """Writes tensors as one file, or as shards and their index.

    Only one shard is in memory as a copy (cast and made contiguous) at a time.

    Args:
      dtype: of the tensors in the file, except for 8-bit codes, which stay what they are.
      max_shard_bytes: a shard is larger only if it holds a single tensor.
      weights: name of the file; shards and index are named after it.

    Raises:
      OSError: a file cannot be written.
    """
    to = jax.numpy.dtype(dtype)  # NumPy alone has no bfloat16
    dtypes = {name: t.dtype if t.dtype in CODES.values() else to for name, t in tensors.items()}
    sizes = {name: tensor.size * dtypes[name].itemsize for name, tensor in tensors.items()}
    shards = _shards(sizes, max_shard_bytes)
    os.makedirs(directory, exist_ok=True)
    weight_map = {}
    for i, names in enumerate(shards):
        file = weights
        if len(shards) > 1:
            stem = weights.removesuffix(".safetensors")
            file = f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        path = os.path.join(directory, file)
        # save_file ignores strides: a transposed view would be written untransposed.
        shard = {name: np.asarray(tensors[name], dtypes[name], order="C") for name in names}
        Path(path).touch()
        mode = os.stat(path).st_mode
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"{path} was not written: {error}") from error
        os.chmod(path, mode)  # save_file renames a temporary file that only its owner can read
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = dict(metadata=dict(total_size=sum(sizes.values())), weight_map=weight_map)
        with open(os.path.join(directory, index_of(weights)), "w", encoding="utf-8") as file:
            json.dump(index, file, indent=2, sort_keys=True)


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """The names of the tensors of each shard, in order."""
    shards, total = [[]], 0
    for name, size in sizes.items():
        total += size
        if total > max_bytes and shards[-1]:
            shards.append([])
            total = size
        shards[-1].append(name)
    return shards
