import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.runtime.safetensors import WEIGHTS, Tensors, index_of, write_tensors


def make_tensors(size: int = 16) -> dict[str, np.ndarray]:
    """Matrices that are transposed views, and a vector."""
    rng = np.random.default_rng(0)
    names = [f"layers.{i}.weight" for i in range(7)]
    tensors = {name: rng.standard_normal((size, 2 * size), np.float32).T for name in names}
    return tensors | {"norm.weight": np.ones(size, np.float32)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes, num_files", [(10**9, 1), (4096, None)])
def test_tensors_survive_the_round_trip(tmp_path, dtype, max_shard_bytes, num_files):
    tensors = make_tensors()
    write_tensors(tmp_path, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
    back = Tensors(tmp_path)
    assert set(back) == set(tensors) and len(back) == len(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor.astype(jnp.dtype(dtype)), strict=True)
    files = list(tmp_path.glob("*.safetensors"))
    if num_files == 1:
        assert [file.name for file in files] == [WEIGHTS]
        return
    index = json.loads((tmp_path / index_of(WEIGHTS)).read_text())
    itemsize = jnp.dtype(dtype).itemsize
    assert index["metadata"]["total_size"] == itemsize * sum(t.size for t in tensors.values())
    assert len(files) > 1 and set(index["weight_map"].values()) == {file.name for file in files}
    header = 1024
    assert all(file.stat().st_size <= max_shard_bytes + header for file in files)


def test_the_files_have_the_permissions_of_other_files(tmp_path):
    """Other users, and servers that run as one, can read exported weights."""
    before = os.umask(0o022)
    try:
        (tmp_path / "file").touch()
        write_tensors(tmp_path, make_tensors(), dtype="float32", max_shard_bytes=4096)
    finally:
        os.umask(before)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        Tensors(tmp_path)
    for content in ("{", "{}", "[1]", '{"weight_map": {}}', '{"weight_map": [1]}', "[" * 100_000):
        (tmp_path / index_of(WEIGHTS)).write_text(content)
        with pytest.raises(ValueError, match=r"model.safetensors.index.json (is damaged|cannot be used)"):
            Tensors(tmp_path)
    write_tensors(tmp_path, make_tensors(), dtype="float32", max_shard_bytes=4096)
    damaged = tmp_path / Tensors(tmp_path).file_of["norm.weight"]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=damaged.name):
        Tensors(tmp_path)
    damaged.unlink()
    with pytest.raises(ValueError, match=damaged.name):
        Tensors(tmp_path)


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "..", "", 7, None])
def test_an_index_names_only_files_beside_it(tmp_path, file):
    write_tensors(tmp_path / "weights", make_tensors(), dtype="float32", max_shard_bytes=4096)
    write_tensors(tmp_path, make_tensors(), dtype="float32", weights="other.safetensors")
    path = tmp_path / "weights" / index_of(WEIGHTS)
    index = json.loads(path.read_text())
    index["weight_map"]["norm.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"index.json cannot be used \(tensor 'norm.weight' is in .*beside"
    ):
        Tensors(tmp_path / "weights")


def test_an_index_that_does_not_match_its_shards_is_refused(tmp_path):
    write_tensors(tmp_path, make_tensors(), dtype="float32", max_shard_bytes=4096)
    path = tmp_path / index_of(WEIGHTS)
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"]["norm.weight"] = next(s for s in shards if s != index["weight_map"]["norm.weight"])
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index.json cannot be used \(tensor 'norm.weight' is not in"):
        Tensors(tmp_path)
    (tmp_path / shards[0]).write_bytes((tmp_path / shards[1]).read_bytes())
    with pytest.raises(ValueError, match=f"{shards[1]} cannot be used \\({shards[0]} has tensor"):
        Tensors(tmp_path)


def write_header(path: Path, header: str, num_bytes: int) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(num_bytes))


def test_a_name_that_occurs_twice_is_refused(tmp_path):
    """The library keeps the last one, and does not report that there are two."""
    entry = '"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
    write_header(tmp_path / WEIGHTS, f"{{{entry}, {entry}}}", 16)
    with pytest.raises(ValueError, match=r"model.safetensors cannot be used \(tensor 'x' occurs twice\)"):
        Tensors(tmp_path)


@pytest.mark.parametrize("dtype", ["I8", "I32", "U8", "BOOL", "F8_E4M3", "C64"])
def test_only_floating_point_numbers_are_read(tmp_path, dtype):
    """Quantized weights without their scales would be cast in silence."""
    size = {"I32": 4, "C64": 8}.get(dtype, 1)
    header = {"x": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4 * size]}}
    write_header(tmp_path / WEIGHTS, json.dumps(header), 4 * size)
    with pytest.raises(
        ValueError, match=rf"model.safetensors: tensor 'x' holds numbers of type {dtype}, not F"
    ):
        Tensors(tmp_path)["x"]


def test_shards_and_index_are_named_after_the_file(tmp_path):
    write_tensors(
        tmp_path, make_tensors(), dtype="float32", weights="other.safetensors", max_shard_bytes=4096
    )
    assert (tmp_path / "other.safetensors.index.json").exists()
    assert all(path.name.startswith("other") for path in Path(tmp_path).iterdir())
    assert set(Tensors(tmp_path, "other.safetensors")) == set(make_tensors())


def test_writing_copies_one_shard_at_a_time(tmp_path):
    tensors = make_tensors(512)
    size = sum(tensor.nbytes for tensor in tensors.values())
    tracemalloc.start()
    try:
        write_tensors(tmp_path, tensors, dtype="float32", max_shard_bytes=size // 8)
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    tensors = {
        "large": np.ones(600, np.float32),
        "small": np.ones(10, np.float32),
        "wide": np.ones(500, np.float32),
    }
    write_tensors(tmp_path, tensors, dtype="float32", max_shard_bytes=1000)
    files = Tensors(tmp_path).file_of
    assert files == {
        name: f"model-{i:05d}-of-00003.safetensors" for i, name in enumerate(("large", "small", "wide"), 1)
    }
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_full_disk_is_an_os_error(tmp_path):
    """Simulated by a limit on the size of files, in a process of its own."""
    program = """
import resource, sys
import numpy as np
from maxlp.runtime.safetensors import write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_tensors(sys.argv[1], {"a": np.zeros(9999, np.float32)}, dtype="float32")
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert done.stdout.startswith(f"{tmp_path}/{WEIGHTS} was not written: "), done.stderr
