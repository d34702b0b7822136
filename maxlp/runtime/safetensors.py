"""Folders of safetensors files: a single file, or shards with an index as Hugging Face writes them."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

WEIGHTS = "model.safetensors"
SHARD_BYTES = 2 * 10**9


def index_of(weights: str) -> str:
    """The name of the index of a file's shards."""
    return f"{weights}.index.json"


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a folder by name; each is read from disk when it is looked up.

    Args:
      directory: holds the file, or its shards and their index.
      weights: name of the file.

    Raises:
      ValueError: there are no such files, or one of them is damaged.
    """

    def __init__(self, directory: str | os.PathLike, weights: str = WEIGHTS):
        self.directory = os.fspath(directory)
        index = index_of(weights)
        if os.path.exists(self._path(weights)):
            self.file_of = dict.fromkeys(self._open(weights).keys(), weights)
        elif os.path.exists(self._path(index)):
            try:
                with open(self._path(index)) as file:
                    self.file_of = json.load(file)["weight_map"]
            except (ValueError, KeyError) as error:
                problem = f"{self._path(index)} is not an index of shards ({error!r})"
                raise ValueError(f"{problem}; copy or download it again") from None
        else:
            raise ValueError(f"{self.directory} contains neither {weights} nor {index}; check the path")

    def __getitem__(self, name: str) -> np.ndarray:
        with self._open(self.file_of[name]) as file:
            try:
                return file.get_tensor(name)
            except SafetensorError as error:
                raise _unreadable(self._path(self.file_of[name]), error) from None

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


def _unreadable(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read ({error}); copy or download it again")


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
      dtype: of the tensors in the file.
      max_shard_bytes: a shard is larger only if it holds a single tensor.
      weights: name of the file; shards and index are named after it.
    """
    to = jax.numpy.dtype(dtype)  # NumPy alone has no bfloat16
    shards = _shards({name: tensor.size * to.itemsize for name, tensor in tensors.items()}, max_shard_bytes)
    os.makedirs(directory, exist_ok=True)
    weight_map = {}
    for i, names in enumerate(shards):
        file = weights
        if len(shards) > 1:
            stem = weights.removesuffix(".safetensors")
            file = f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            # save_file ignores strides: a transposed view would be written untransposed.
            {name: np.asarray(tensors[name], to, order="C") for name in names},
            os.path.join(directory, file),
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.size * to.itemsize for tensor in tensors.values())
        index = dict(metadata=dict(total_size=total), weight_map=weight_map)
        with open(os.path.join(directory, index_of(weights)), "w") as file:
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
