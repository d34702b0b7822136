"""Checkpoints are restored bit for bit as they were saved, or reported as damaged and not loaded."""

import asyncio
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
import tracemalloc
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlp.numerics.formats import Quantized
from maxlp.runtime import checkpoint, files, manifest, tree_spec, verification
from maxlp.runtime.checkpoint import Checkpointer, CheckpointError, NotWrittenError
from tests.runtime import workers
from tests.runtime.damage import DAMAGES, flip_bit

DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "int32",
    "uint32",
    "bool",
]


def make_mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def raw_bytes(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def assert_same_bits(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and raw_bytes(x) == raw_bytes(y)


def small_state(seed=0, sharding=None):
    """Parameters, Adam's NamedTuples and a step; large enough that the arrays get files of their own."""
    kernel = jax.random.normal(jax.random.key(seed), (32, 1024))
    params = {"layers": {"kernel": kernel}, "final_norm": {"scale": kernel[0].astype(jnp.bfloat16)}}
    if sharding is not None:
        params = jax.device_put(params, sharding)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"params": params, "model_state": {}, "opt_state": tx.init(params), "step": jnp.int32(seed)}


def load_params(path, wanted):
    return checkpoint.restore(path, {"params": wanted}).state["params"]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A directory with intact checkpoints of steps 10 and 20."""
    directory = tmp_path_factory.mktemp("two_steps")
    with Checkpointer(directory, every_steps=10) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, small_state(step), {"position": step})
    return directory


@pytest.fixture
def logged(monkeypatch):
    """The lines logged as errors."""
    lines = []
    monkeypatch.setattr(verification.logging, "error", lambda text, *args: lines.append(text % args))
    return lines


# --- Saving and restoring -----------------------------------------------------------------------------


def test_every_dtype_and_structure_is_restored_to_the_bit(tmp_path):
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.integers(0, 256, 64, np.uint8)).view("uint8") for name in DTYPES}
    params = {
        name: (x % 2).astype(bool) if name == "bool" else jax.lax.bitcast_convert_type(pack(x, name), name)
        for name, x in params.items()
    }
    state = {
        **small_state(3),
        "dtypes": params,
        "nested": (
            jnp.arange(3),
            [jnp.zeros((1, 1, 1))],
            {"none": None, "empty": (), "scalar": jnp.float32(-0.0)},
        ),
        "keys": {"one": jax.random.key(1), "many": jax.random.split(jax.random.key(2, impl="rbg"), 4)},
    }
    data_state = {"shards": [{"next": 1}, {"next": 2}], "text": "é", "large": 2**60, "float": 0.1}
    meta = {"config": {"lr": 1e-3, "none": None}}
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        assert checkpointer.restore_latest(abstract(state)) is None
        checkpointer.save(7, state, data_state, meta)
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        restored = checkpointer.restore_latest(abstract(state))
    assert_same_bits(restored.state, state)
    assert (restored.step, restored.data_state, restored.meta) == (7, data_state, meta)


def pack(x, dtype):
    """Bytes as unsigned integers as wide as `dtype`."""
    width = jnp.dtype(dtype).itemsize
    return jnp.asarray(np.asarray(x).view(f"uint{8 * width}"))


def test_another_mesh_gets_the_same_bits_in_its_own_sharding(tmp_path):
    fsdp = make_mesh(fsdp=8)
    state = small_state(1, NamedSharding(fsdp, P("fsdp")))
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(1, state, {})
    mesh = make_mesh(data=2, tensor=4)

    def reshard(x):
        spec = P(None, "tensor") if x.ndim == 2 else P("data") if x.ndim else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    wanted = jax.tree.map(reshard, state)
    restored = checkpoint.restore(tmp_path, wanted).state
    assert_same_bits(restored, state)
    assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding, restored)) == jax.tree.leaves(
        jax.tree.map(lambda x: x.sharding, wanted)
    )


def test_state_may_be_donated_while_it_is_written(tmp_path):
    sharding = NamedSharding(make_mesh(fsdp=8), P("fsdp"))
    train_step = jax.jit(lambda x: jax.tree.map(lambda x: x * -3 + 1, x), donate_argnums=0)
    state = {
        f"w{i}": jax.device_put(jnp.full((8, 1 << 17), float(i)), sharding) for i in range(8)
    }  # 32 MiB
    train_step(jax.tree.map(jnp.copy, state))  # compiles, so that nothing delays the overwriting below
    expected = jax.tree.map(np.array, state)
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(1, state, {})
        for _ in range(10):
            state = train_step(state)
        jax.block_until_ready(state)
    assert_same_bits(checkpoint.restore(tmp_path, abstract(state)).state, expected)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_restored_state_is_replaced_in_its_own_memory(tmp_path, devices):
    """Whether Orbax has read an array into memory that a device can take over depends on its address."""
    place = NamedSharding(jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,)), P("data"))
    leaf = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=place)
    wanted = {"params": {str(i): leaf for i in range(40)}}
    state = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype), place), wanted)
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(1, state, {})
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        state = checkpointer.restore_latest(wanted).state

    def addresses(tree):
        return [
            [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in jax.tree.leaves(tree)
        ]

    before = addresses(state)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0, out_shardings=place)
    new = jax.block_until_ready(step(state))
    assert addresses(new) == before and all(x.is_deleted() for x in jax.tree.leaves(state))


def test_restoring_holds_no_more_on_the_host_than_the_largest_array(tmp_path, monkeypatch):
    """Beside what is on the devices, which keep nothing of an array on the host, as accelerators do."""
    wanted = abstract({"params": {str(i): jnp.ones((8, 2**15)) for i in range(32)}})
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(1, jax.tree.map(lambda x: jnp.ones(x.shape), wanted), {})
    monkeypatch.setattr(checkpoint, "_READ_AT_ONCE", 0)  # at tiny sizes too
    monkeypatch.setattr(manifest, "_BLOCK_BYTES", 2**10)
    monkeypatch.setattr(jax, "device_put", lambda x, *args: jnp.zeros(x.shape, x.dtype))
    tracemalloc.start()
    try:
        restored = checkpoint.restore(tmp_path, wanted)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert jax.tree.structure(restored.state) == jax.tree.structure(wanted)
    # All at once are 32 MiB. One is 1 MiB, and a few may not be collected yet.
    assert peak < 8 * 2**20


def test_save_returns_before_the_checkpoint_exists_and_wait_after(tmp_path, monkeypatch):
    checksums, proceed = manifest.checksums, threading.Event()
    monkeypatch.setattr(manifest, "checksums", lambda *args: proceed.wait(30) and checksums(*args))
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(1, small_state(), {})
        time.sleep(0.3)
        assert not (tmp_path / "1").exists()
        proceed.set()
        checkpointer.wait()
        assert (tmp_path / "1" / "manifest.txt").exists()


def test_should_save(tmp_path):
    with Checkpointer(tmp_path, every_steps=4) as checkpointer:
        assert [step for step in range(13) if checkpointer.should_save(step)] == [4, 8, 12]


def test_listing_skips_a_checkpoint_that_is_deleted_meanwhile(two_steps, tmp_path, monkeypatch):
    """As when the run deletes an old one while a report is made."""
    directory, read = shutil.copytree(two_steps, tmp_path / "run"), manifest.read

    def read_and_delete(root):
        sums = read(root)
        if root.name == "10":
            shutil.rmtree(root)
        return sums

    monkeypatch.setattr(manifest, "read", read_and_delete)
    assert [(info.step, info.status) for info in checkpoint.list_steps(directory)] == [(20, "complete")]


def test_whoever_asks_is_told_when_a_checkpoint_is_complete(tmp_path):
    complete = []

    def on_complete(step):
        complete.append((step, checkpoint.list_steps(tmp_path)[-1].status))

    with Checkpointer(tmp_path, every_steps=1, on_complete=on_complete) as checkpointer:
        checkpointer.save(1, small_state(), {})
        checkpointer.save(2, small_state(), {})
    assert complete == [(1, "complete"), (2, "complete")]


# --- Damage -------------------------------------------------------------------------------------------

KINDS = [
    "checkpoint.json",
    "manifest.txt",
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
    "state/_METADATA",
    "state/_sharding",
    "state/manifest.ocdbt",
    "state/array_metadatas/*",
    "state/d/*",
    "state/ocdbt.process_0/manifest.ocdbt",
    "state/ocdbt.process_0/d/*",
]


def test_the_kinds_cover_every_file_of_a_checkpoint(two_steps):
    root = two_steps / "20"
    found = {path for path in root.rglob("*") if path.is_file() and path.stat().st_size}
    assert {path for kind in KINDS for path in root.glob(kind)} == found


@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_is_detected_and_the_previous_step_is_restored(two_steps, tmp_path, logged, kind):
    directory = shutil.copytree(two_steps, tmp_path / "run")
    path = next((directory / "20").glob(kind))
    name, intact = path.relative_to(directory / "20").as_posix(), path.read_bytes()
    for damage, inflict in DAMAGES.items():
        path.write_bytes(intact)
        inflict(path, random.Random(f"{kind} {damage}"))
        [fault] = manifest.find_faults(directory / "20")
        assert fault.startswith(f"{name} "), damage
    with Checkpointer(directory, every_steps=10) as checkpointer:
        restored = checkpointer.restore_latest(abstract(small_state()))
    assert_same_bits(restored.state, small_state(10))
    assert (restored.step, restored.data_state) == (10, {"position": 10})
    assert f"{directory}/20 is damaged: {name} " in logged[0]
    assert logged[1] == "step 10 is read instead"
    assert sorted(os.listdir(directory)) == ["10", "20.damaged"]


@pytest.mark.parametrize("kind", [".", "20/manifest.txt", "20/state/d/*"])
def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_a_damaged_one(two_steps, monkeypatch, kind):
    denied = next(two_steps.glob(kind)) if kind != "." else two_steps

    def checked(call):  # modes of files would not stop root
        def wrapped(path, *args, **kwargs):
            if path == denied:
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return wrapped

    for name in ("iterdir", "open"):
        monkeypatch.setattr(pathlib.Path, name, checked(getattr(pathlib.Path, name)))
    with pytest.raises(PermissionError, match=str(denied)):
        load_params(two_steps, {})
    monkeypatch.setattr(pathlib.Path, "glob", lambda *_: [])  # it ignores such errors
    with pytest.raises(PermissionError, match=str(denied)):
        verification.newest_intact(two_steps)
    assert sorted(os.listdir(two_steps)) == ["10", "20"]


def test_a_damaged_step_can_be_saved_again(two_steps, tmp_path, logged):
    directory = shutil.copytree(two_steps, tmp_path / "run")
    for _ in range(2):
        flip_bit(next((directory / "20").glob("state/d/*")), random.Random(0))
        with Checkpointer(directory, every_steps=10) as checkpointer:
            assert checkpointer.restore_latest(abstract(small_state())).step == 10
            checkpointer.save(20, small_state(21), {})
        with Checkpointer(directory, every_steps=10) as checkpointer:
            assert_same_bits(checkpointer.restore_latest(abstract(small_state())).state, small_state(21))
    assert sorted(os.listdir(directory)) == ["10", "20", "20.damaged", "20.damaged-2"]


def test_without_an_intact_checkpoint_the_run_does_not_silently_start_over(two_steps, tmp_path, logged):
    directory = shutil.copytree(two_steps, tmp_path / "run")
    for step in ("10", "20"):
        flip_bit(next((directory / step).glob("state/d/*")), random.Random(step))
    for _ in range(2):
        with (
            Checkpointer(directory, every_steps=10) as checkpointer,
            pytest.raises(
                CheckpointError, match=r"no intact checkpoint in .*: 20 \(state/d.*, 10 \(state/d"
            ),
        ):
            checkpointer.restore_latest(abstract(small_state()))
    with pytest.raises(CheckpointError, match=r"20 \(state/d.*, 10 \(state/d.*; put back a good copy$"):
        checkpoint.restore(directory, abstract(small_state()))
    assert not logged, "the error names the faults"
    assert sorted(os.listdir(directory)) == ["10", "20"]
    for step in ("10", "20"):
        (directory / step).rename(directory / f"{step}.damaged")
    with (
        Checkpointer(directory, every_steps=10) as checkpointer,
        pytest.raises(CheckpointError, match=r"10\.damaged, 20\.damaged"),
    ):
        checkpointer.restore_latest(abstract(small_state()))


# --- Writing that fails or is killed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (manifest, "file_sizes"),
        (manifest, "checksums"),
        (files, "write_text"),
        (manifest, "write"),
        (files, "publish"),
    ],
)
def test_a_save_that_fails_anywhere_keeps_the_previous_checkpoint(
    two_steps, tmp_path, monkeypatch, module, function
):
    directory = shutil.copytree(two_steps, tmp_path / "run")

    def fails(*_):
        raise OSError(28, "No space left on device")

    checkpointer = Checkpointer(directory, every_steps=10, keep_last=1)
    with monkeypatch.context() as patched:
        patched.setattr(module, function, fails)
        checkpointer.save(30, small_state(30), {})
        with pytest.raises(NotWrittenError, match=r"/30 was not written: OSError: .*No space left"):
            checkpointer.wait()
    assert {"10", "20", "30.unfinished"} == set(os.listdir(directory))
    with Checkpointer(directory, every_steps=10) as checkpointer:
        assert sorted(os.listdir(directory)) == ["10", "20"]
        assert checkpointer.restore_latest(abstract(small_state())).step == 20
        checkpointer.save(30, small_state(30), {})
    assert checkpoint.restore(directory, abstract(small_state())).step == 30


def test_a_failed_save_is_noticed_at_the_next_step(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", fails)
    checkpointer = Checkpointer(tmp_path, every_steps=100)
    checkpointer.save(100, small_state(), {})
    with pytest.raises(NotWrittenError, match=r"/100 was not written: .*No space left"):
        for step in range(101, 200):
            assert not checkpointer.should_save(step)
            time.sleep(0.1)
    assert not checkpointer.should_save(step + 1)  # told once


def test_a_save_that_cannot_begin_is_one_line_too(tmp_path, monkeypatch):
    from orbax.checkpoint import v1

    def fails(*_):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\n\n  [source locations='a.cc:1']")

    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(v1, "save_checkpointables_async", fails)
            with pytest.raises(
                NotWrittenError, match=r"/1 was not written: .* on device; the same command resumes"
            ):
                checkpointer.save(1, small_state(), {})
        checkpointer.save(1, small_state(), {})  # not taken for a step that is saved already
    assert verification.list_numbered(tmp_path) == [1]


def test_writes_that_end_after_a_save_has_failed_print_nothing(monkeypatch):
    """Orbax closes its event loop at the first error, while TensorStore still writes other arrays."""
    printed, (promise, late) = [], tensorstore.Promise.new()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(unraisable.exc_value))
    checkpoint._silence_orbax.__wrapped__()

    async def write(future):
        await future

    async def fail():
        raise OSError(28, "No space left on device")

    async def save():
        await asyncio.gather(write(late), fail())

    loop = asyncio.new_event_loop()
    with pytest.raises(OSError, match="No space left"):
        loop.run_until_complete(save())
    loop.close()
    promise.set_result(None)
    assert printed == []
    sys.unraisablehook(SimpleNamespace(exc_value=KeyError("other")))
    assert repr(printed) == "[KeyError('other')]"


def test_a_save_that_a_clock_set_back_keeps_from_ending_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_CLOCK_GRACE", 0.1)
    checksums, proceed, now = manifest.checksums, threading.Event(), time.time
    monkeypatch.setattr(manifest, "checksums", lambda *args: proceed.wait(60) and checksums(*args))
    checkpointer = Checkpointer(tmp_path, every_steps=100)
    checkpointer.save(100, small_state(), {})
    assert not checkpointer.should_save(101)  # slow is not stuck
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    with pytest.raises(checkpoint.ClockSetBackError, match=r"the clock was set back by 3,600 s meanwhile"):
        checkpointer.should_save(102)
    proceed.set()


def test_a_clock_set_back_does_not_disturb_a_save_that_ends(tmp_path, monkeypatch):
    now = time.time
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        for step, jump in enumerate((0, 3600, 30 * 24 * 3600), start=1):
            monkeypatch.setattr(time, "time", lambda jump=jump: now() - jump)
            checkpointer.save(step, small_state(), {})
    assert verification.list_numbered(tmp_path) == [2, 3]


def test_kill_9_in_the_middle_of_saves_leaves_an_intact_directory(tmp_path):
    newest = 0
    for place in ("arrays", "manifest.shared_checksums", "files.write_text", "manifest.write"):
        run = workers.Workers()
        run.send("killed_in_save", tmp_path, place)
        assert run.read() == {"start": newest}
        run.finish(-signal.SIGKILL)
        newest += 2
        infos = checkpoint.list_steps(tmp_path)
        assert max(info.step for info in infos if info.status == "complete") == newest
        assert [info.step for info in infos if info.status == "unfinished"] == [newest + 1], place
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        assert workers.restore(checkpointer).step == newest
    assert all(name.isdigit() for name in os.listdir(tmp_path))


# --- Retention ----------------------------------------------------------------------------------------


def test_retention_keeps_the_last_and_the_multiples(tmp_path):
    with Checkpointer(tmp_path, every_steps=1, keep_last=2, keep_every=4) as checkpointer:
        for step in range(1, 12):
            checkpointer.save(step, {"w": jnp.float32(step)}, {})
    assert [(info.step, info.status) for info in checkpoint.list_steps(tmp_path)] == [
        (step, "complete") for step in (4, 8, 10, 11)
    ]


def test_the_only_checkpoint_stays_until_the_next_is_complete(tmp_path, monkeypatch):
    state = {"w": jnp.arange(4.0)}
    write, intact = files.write_text, []

    def find_then_write(path, text):
        intact.append(checkpoint._find(tmp_path).name)
        write(path, text)

    with Checkpointer(tmp_path, every_steps=1, keep_last=1) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        monkeypatch.setattr(files, "write_text", find_then_write)
        checkpointer.save(2, state, {})
        checkpointer.wait()
    assert intact == ["1", "1"]  # while checkpoint.json and while manifest.txt were written
    assert os.listdir(tmp_path) == ["2"]


def test_saving_a_step_twice_does_nothing_and_never_overwrites(tmp_path):
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(1, {"w": jnp.float32(1)}, {})
        checkpointer.save(1, {"w": jnp.float32(2)}, {})
    assert checkpoint.restore(tmp_path, {"w": abstract(jnp.float32(0))}).state["w"] == 1
    with (
        Checkpointer(tmp_path, every_steps=1) as checkpointer,
        pytest.raises(CheckpointError, match="already exists"),
    ):
        checkpointer.save(1, {"w": jnp.float32(2)}, {})
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        assert checkpointer.restore_latest({"w": abstract(jnp.float32(0))}).step == 1
        checkpointer.save(1, {"w": jnp.float32(2)}, {})  # a run that ends where it resumed
    assert checkpoint.restore(tmp_path, {"w": abstract(jnp.float32(0))}).state["w"] == 1


# --- Other configs, other runs -------------------------------------------------------------------------


def test_a_leaf_that_does_not_fit_is_named(two_steps):
    wanted = abstract(small_state())
    sharding = wanted["step"].sharding
    other = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=sharding)
    for change, message in [
        (
            {"params": {**wanted["params"], "layers": {"kernel": other}}},
            r"layers/kernel is float32\[32,1024\] in the checkpoint and float32\[64,1024\] in the config",
        ),
        ({"opt_state": ()}, r"opt_state/.* in the checkpoint and absent in the config"),
        (
            {"params": {**wanted["params"], "lm_head": other}},
            r"params/lm_head is absent in the checkpoint and float32\[64,1024\] in the config",
        ),
        (
            {"step": jax.ShapeDtypeStruct((), jnp.uint32, sharding=sharding)},
            r"step is int32\[\] in the checkpoint and uint32\[\] in the config",
        ),
    ]:
        with (
            Checkpointer(two_steps, every_steps=10) as checkpointer,
            pytest.raises(CheckpointError, match=message) as error,
        ):
            checkpointer.restore_latest({**wanted, **change})
        assert "\n" not in str(error.value)
    assert [info.status for info in checkpoint.list_steps(two_steps)] == ["complete", "complete"]


def test_an_optional_entry_may_be_only_in_the_checkpoint_or_only_in_the_config(two_steps):
    """A guard that a resumed run begins with, or ends."""
    wanted = abstract(small_state())
    more = wanted | {"guard": {"seen": wanted["step"]}}
    fewer = {name: tree for name, tree in wanted.items() if name != "opt_state"}
    with Checkpointer(two_steps, every_steps=10) as checkpointer:
        for state, required in ((more, wanted), (fewer, fewer)):
            checkpoint.fitting_record(two_steps / "20", state, exact=True, required=required)
            found = checkpointer.restore_latest(state, required).state
            assert_same_bits(found, {k: x for k, x in small_state(20).items() if k in state})
        with pytest.raises(CheckpointError, match=r"guard/seen is absent in the checkpoint"):
            checkpointer.restore_latest(more, more)


def test_a_check_of_the_shapes_takes_the_newest_complete_step(two_steps, tmp_path):
    """As loading does, although the steps may differ."""
    directory = shutil.copytree(two_steps, tmp_path / "run")
    other = {"params": {"w": jnp.zeros(3)}}
    with Checkpointer(directory, every_steps=10, keep_last=3) as checkpointer:
        checkpointer.save(30, other, {})
    (directory / "40").mkdir()  # without a manifest
    checkpoint.check_fits(directory, abstract(other))
    checkpoint.check_fits(directory / "20", abstract(small_state()))
    with pytest.raises(CheckpointError, match=r"/30 does not fit this config: "):
        checkpoint.check_fits(directory, abstract(small_state()))


class BlocksOf02(NamedTuple):
    codes: jax.Array
    scale: jax.Array


def test_a_field_that_is_none_need_not_be_in_the_checkpoint(tmp_path):
    """Version 0.2 saved moments in few bits without `tensor_scale`."""
    codes, scale = jnp.arange(4, dtype=jnp.uint8), jnp.ones(1)
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(1, {"opt_state": (BlocksOf02(codes, scale),)}, {})
    wanted = {"opt_state": (Quantized(codes, scale),)}
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        assert_same_bits(checkpointer.restore_latest(abstract(wanted)).state, wanted)


def test_restore_reads_only_weights_from_any_level_of_a_run(two_steps, tmp_path, logged):
    run = tmp_path / "2026"  # the name of a run may be a number, like that of a step
    shutil.copytree(two_steps, run / "checkpoints")
    wanted = abstract(small_state()["params"])
    assert_same_bits(load_params(run, wanted), small_state(20)["params"])
    assert_same_bits(load_params(run / "checkpoints", wanted), small_state(20)["params"])
    assert_same_bits(load_params(run / "checkpoints" / "10", wanted), small_state(10)["params"])

    as_bfloat16 = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), wanted
    )
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small_state(20)["params"])
    assert_same_bits(load_params(run, as_bfloat16), cast)

    flip_bit(next((run / "checkpoints" / "20").glob("state/ocdbt.process_0/d/*")), random.Random(0))
    with pytest.raises(CheckpointError, match=r"20 is damaged: state/ocdbt.*; put back a good copy"):
        load_params(run / "checkpoints" / "20", wanted)
    assert_same_bits(load_params(run, wanted), small_state(10)["params"])
    assert sorted(os.listdir(run / "checkpoints")) == ["10", "20"]  # reading changes nothing


def test_a_step_that_is_not_saved_is_refused_with_those_that_are(tmp_path):
    (tmp_path / "10").mkdir()
    (tmp_path / "20").mkdir()
    with pytest.raises(CheckpointError, match=r"/15: that step is not saved; saved: 10, 20$"):
        load_params(tmp_path / "15", {})


@pytest.mark.parametrize("place", ["nothing", "10"])
def test_restore_names_a_directory_without_checkpoints(tmp_path, place):
    with pytest.raises(CheckpointError, match=f"no intact checkpoint in .*{place}: no step directory"):
        load_params(tmp_path / place, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_steps": 0}, r"every_steps=0 must be at least 1"),
        ({"every_steps": 1, "keep_last": 0}, r"keep_last=0"),
        ({"every_steps": 1, "keep_every": 0}, r"keep_every=0"),
        (
            {"every_steps": 1, "directory": "https://server/run"},
            r"directory=https://server/run is not a folder that can be used",
        ),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        Checkpointer(**{"directory": tmp_path, **arguments})


@pytest.mark.parametrize("leaf", [3, np.zeros(2), jnp.zeros((0, 4))])
def test_leaves_that_cannot_be_saved_are_named_before_anything_is_written(tmp_path, leaf):
    with (
        Checkpointer(tmp_path, every_steps=1) as checkpointer,
        pytest.raises(CheckpointError, match="cannot save a/b:"),
    ):
        checkpointer.save(1, {"a": {"b": leaf}}, {})
    assert os.listdir(tmp_path) == []


# --- Several processes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """Two processes of one run."""
    pair = workers.Workers(2)
    yield pair
    pair.finish(0, 0)


def test_two_processes_save_and_one_restores(pair, tmp_path):
    pair.call("save", tmp_path, 2)
    assert [(info.step, info.status) for info in checkpoint.list_steps(tmp_path)] == [
        (1, "complete"),
        (2, "complete"),
    ]
    assert any((tmp_path / "2").glob("state/ocdbt.process_1/d/*"))  # both wrote arrays
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        restored = workers.restore(checkpointer)
    assert restored.step == 2
    assert restored.data_state == {"position": [2, 2]} and restored.meta == {"processes": 2}


@pytest.mark.parametrize("damaged", [False, True])
def test_one_process_saves_and_two_restore_the_same_intact_step(pair, tmp_path, damaged):
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, workers.device_state(step), {"position": [step]}, {"processes": 1})
    if damaged:
        for path in (tmp_path / "2").glob("state/ocdbt.process_0/d/*"):
            flip_bit(path, random.Random(0))
    step = 1 if damaged else 2
    reply = {"step": step, "data_state": {"position": [step]}, "meta": {"processes": 1}}
    assert pair.call("restore", tmp_path) == [reply, reply]
    assert sorted(os.listdir(tmp_path)) == (["1", "2.damaged"] if damaged else ["1", "2"])


def test_a_listing_tells_complete_checkpoints_from_others(two_steps, tmp_path):
    root = tmp_path / "checkpoints"
    shutil.copytree(two_steps, root)
    (root / "20" / "manifest.txt").unlink()
    (root / "30.unfinished").mkdir()
    (root / "40.damaged-2").mkdir()
    found = checkpoint.list_steps(root)
    assert [(info.step, info.status) for info in found] == [
        (10, "complete"),
        (20, "damaged"),
        (30, "unfinished"),
        (40, "damaged"),
    ]
    on_disk = sum(path.stat().st_size for path in (root / "10").rglob("*") if path.is_file())
    assert found[0].num_bytes == on_disk - (root / "10" / "manifest.txt").stat().st_size
    assert found[1].num_bytes == 0 and found[0].path == root / "10"


def test_of_several_leaves_that_do_not_fit_a_parameter_is_named_first():
    """What else differs follows from it: moments have the shapes of their parameters."""
    saved = {"opt_state": jnp.zeros(4), "params": {"w": jnp.zeros(4)}, "step": jnp.zeros(2)}
    wanted = jax.tree.map(lambda x: jnp.zeros(len(x) + 1), saved)
    described = tree_spec.describe(saved)
    for exact in (True, False):
        found = tree_spec.find_mismatch(described, wanted, exact=exact)
        assert found == ("params/w", "float32[4]", "float32[5]")
    half = {"params": {"w": jnp.zeros(4, jnp.bfloat16)}}
    assert tree_spec.find_mismatch(described, half, exact=False) is None, "floats are cast, more is left"
    assert tree_spec.find_mismatch(described, half, exact=True).path == "params/w"
    whole = {"params": {"w": jnp.zeros(4, jnp.int32)}}
    assert tree_spec.find_mismatch(described, whole, exact=False).path == "params/w"
