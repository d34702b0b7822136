"""Steps in files: what another version finds in them, and which it refuses to compare."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlp.nn import layers
from maxlp.run import recorded_steps
from maxlp.run.config import ConfigError
from maxlp.run.difference import AS_TRAINED, Recorded, TensorSite
from maxlp.run.settings import read
from tests.run.fixtures import TINY, changed, load

MODEL = {"dtype": "float32", "embed_dim": 64}
CONFIG = {"model": MODEL, "train": {"seed": 0}, "data": {}, "spikes": {"k": 1}}


def step(value: float = 1.0) -> Recorded:
    """With numbers of dtypes that NumPy does not have, NaN among them."""
    tensors = {TensorSite(AS_TRAINED, "gradient", "kernel", 1): jnp.array([value, jnp.nan], jnp.bfloat16)}
    state = {
        "params": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "opt_state": ({"mu": jnp.array([value, -2], jnp.float8_e5m2)}, jnp.array(3)),
        "model_state": {"q": jnp.array([-8, 7], jnp.int4)},
    }
    spread = {site: np.array([1e-3, np.inf]) for site in tensors}
    given = {("layers", "tap", "x"): np.ones((2, 2), np.float32)}
    return jax.device_get(Recorded(state, {"tokens": np.arange(4)}, given, tensors, spread))


def write(folder, n=1, config=CONFIG, found=None):
    info = {"config": config, "positions": "xla", "made_by": "maxlp 0.1"}
    recorded_steps._write(folder / f"step_{n}.npz", found or step(), info)


def test_what_is_written_is_read_to_the_bit(tmp_path):
    write(tmp_path)
    [path] = recorded_steps._files(tmp_path)
    found = recorded_steps._recorded(*recorded_steps._read(path), step().state, path)
    assert jax.tree.structure(found) == jax.tree.structure(step())
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(step()), strict=True):
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        assert ours.tobytes() == expected.tobytes()


def test_steps_are_read_in_their_order_and_nothing_else_is(tmp_path):
    for n in (10, 9, 100):
        write(tmp_path, n)
    for name in ("step_x.npz", ".step_1.npz.tmp", "step_1.json"):
        (tmp_path / name).touch()
    assert [path.stem for path in recorded_steps._files(tmp_path)] == ["step_9", "step_10", "step_100"]


def test_damaged_files_are_named(tmp_path):
    write(tmp_path)
    path = tmp_path / "step_1.npz"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    header = whole.replace(b"{'descr'", b"{{descr'", 1)  # NumPy: EOF in multi-line statement
    packed = bytearray(whole)
    packed[whole.index(b"PK\x01\x02") + 10] ^= 64  # zipfile: that compression method is not supported
    for damaged in (b"", whole[: len(whole) // 2], bytes(flipped), b"text", header, bytes(packed)):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"step_1.npz is damaged; record the steps again"):
            recorded_steps.check(tmp_path, CONFIG)


def test_only_what_does_not_change_the_rounding_may_differ(tmp_path):
    with pytest.raises(ConfigError, match=r"--against=.* has no steps; record them with diff --record="):
        recorded_steps.check(tmp_path, CONFIG)
    write(tmp_path)
    recorded, compared = recorded_steps.check(tmp_path, CONFIG | {"spikes": {"k": 2}})
    assert recorded == "recorded by maxlp 0.1" and compared.startswith("compared: maxlp ")
    of_this_version = CONFIG | {"train": {"seed": 0, "new": 1}}
    assert len(recorded_steps.check(tmp_path, of_this_version)) == 2
    for other in ({"model": MODEL | {"dtype": "bfloat16"}}, {"model": MODEL | {"embed_dim": 32}}):
        with pytest.raises(ConfigError, match="need the same model, data and precision"):
            recorded_steps.check(tmp_path, CONFIG | other)


def test_another_state_is_refused(tmp_path):
    write(tmp_path)
    path = tmp_path / "step_1.npz"
    like = step().state | {"gate": {"scale": np.ones(1)}}
    del like["model_state"]
    found = recorded_steps._recorded(*recorded_steps._read(path), like, path)
    assert found.state.keys() == {"params", "opt_state"}  # a part of one version alone is no obstacle
    with pytest.raises(ConfigError, match=r"config\.optimizer: .*step_1.npz and this version"):
        recorded_steps._recorded(*recorded_steps._read(path), like | {"opt_state": ()}, path)


@pytest.mark.slow
def test_a_defect_of_another_version_is_named(tmp_path, monkeypatch):
    fp8 = {"precision.recipe": "fp8_delayed", "precision.first_blocks": 0, "precision.last_blocks": 0}
    c = changed(load("debug"), TINY | fp8 | {"model.dtype": "bfloat16"})
    s, config = read(c), json.loads(c.to_json_best_effort())
    paths = list(recorded_steps.record(s, config, None, 2, 2, tmp_path))
    assert [path.stem for path in paths] == ["step_2", "step_3"]
    with pytest.raises(ConfigError, match=r"--record=.* has steps already; give a new folder"):
        next(recorded_steps.record(s, config, None, 2, 2, tmp_path))

    clean = list(recorded_steps.reports(s, tmp_path))
    assert [one.step for one in clean] == [2, 3]
    assert not any(found.value for one in clean for found in one.tensors)  # the same version: bit for bit

    norm = layers.RMSNorm.__call__
    monkeypatch.setattr(layers.RMSNorm, "__call__", lambda self, x: norm(self, x) * 1.1)
    [report] = recorded_steps.reports(s, tmp_path)
    assert str(report.beyond[0].site) == "layers/attn_norm 0 output"
