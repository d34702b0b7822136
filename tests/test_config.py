"""Configs: presets are exact, and whatever cannot work is refused in one line before anything compiles."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from maxlp import evaluate
from maxlp.core import train_step as step
from maxlp.families.llama.model import num_params
from maxlp.parallel import sharding
from maxlp.run import build, config
from maxlp.run import run_dir as workdir

ROOT = Path(__file__).parent.parent
PRESETS = {
    "60m": 58_073_600,
    "130m": 134_105_856,
    "350m": 367_969_280,
    "1b": 1_339_082_752,
    "llama2_7b": 6_738_415_616,
    "llama3_2_1b": 1_235_814_400,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


def load(name: str, arg: str = "") -> ConfigDict:
    return importlib.import_module(f"configs.llama.{name}").get_config(arg)


@pytest.mark.parametrize(("name", "count"), PRESETS.items())
def test_preset_has_the_published_number_of_parameters(name, count):
    c = load(name)
    assert num_params(nnx.eval_shape(build.model(c), nnx.Rngs(0))) == count
    c.data.source = c.data.tokenizer = "bytes"
    c.mesh.tensor = 1
    build.check(c, build.mesh(c))


def test_every_config_file_is_a_preset_or_debug():
    names = {path.stem for path in (ROOT / "configs" / "llama").glob("*.py")} - {"__init__"}
    assert names == PRESETS.keys() | {"debug", "tiny"}


@pytest.mark.parametrize("family", ["llama", "clip"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8", "int8_switchback", "fp16", "pure_bf16"])
def test_debug_configs_take_every_choice_of_precision(family, recipe):
    config = importlib.import_module(f"configs.{family}.debug")
    c = config.get_config(f"precision={recipe},optimizer=stable_adamw,galore=16,low_bit=8bit")
    mesh = build.mesh(c)
    build.check(c, mesh)
    _, state = step.abstract_state(build.model(c), build.tx(c)[0], mesh, build.judges(c))
    assert ("loss_scale" in state) == (recipe == "fp16")
    low = {name for name in build.precision_table(c).values() if name != "high precision"}
    assert low == (set() if recipe in ("fp16", "pure_bf16") else {recipe})


def test_405b_state_and_shardings_without_allocating():
    """The whole training state of 405B over 8 devices: shapes and shardings in seconds, no memory."""
    c = load("405b")
    start = time.monotonic()
    mesh = build.mesh(c)
    _, state = step.abstract_state(build.model(c), build.tx(c)[0], mesh)
    assert time.monotonic() - start < 20
    kernel = state["params"]["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.sharding.spec == sharding.spec("layers", "embed", "mlp")
    moments = [leaf for leaf in jax.tree.leaves(state["opt_state"]) if leaf.shape == kernel.shape]
    assert len(moments) == 4  # gate and up have the same shape, two moments each
    assert all(m.sharding == kernel.sharding for m in moments)


BAD_VALUES = [
    ({"model.num_heads": 5}, "num_kv_heads"),
    ({"model.head_dim": 33}, "head_dim=33"),
    ({"model.attention": "flash"}, "xla"),
    ({"model.remat": "all"}, "block"),
    ({"model.name": "gpt"}, "llama"),
    ({"mesh.data": 3}, "mesh.data=3"),
    ({"mesh.data": -1}, "-1"),
    ({"mesh.tensor": 0}, "mesh.tensor=0"),
    ({"data.batch_size": 12, "mesh.data": 8, "mesh.fsdp": 1}, "batch_size=12"),
    ({"train.microbatches": 5}, "microbatches=5"),
    ({"train.total_steps": 0}, "total_steps=0"),
    ({"data.seq_len": 2048}, "max_seq_len=1024"),
    ({"loss.num_chunks": 7}, "num_chunks=7"),
    ({"data.name": "video"}, "text"),
    ({"optimizer.name": "adam"}, "adamw"),
    ({"precision.recipe": "fp4"}, "fp8_delayed"),
    ({"precision.rules": (("layers/mlp/fc", "fp8_current"),)}, "layers/mlp/fc"),
    ({"precision.rules": (("lm_head", "fp8_delayed"),), "loss.num_chunks": 2}, "num_chunks=2"),
    ({"precision.recipe": "fp8_current", "precision.first_blocks": 4}, "first_blocks=4"),
    ({"optimizer.schedule": "step"}, "cosine"),
    ({"checkpoint.every_steps": 0}, "every_steps"),
    ({"data.packing": "none"}, "packing"),
    ({"model.num_layers": 0}, "config.model.num_layers=0 must be at least 1"),
    ({"model.embed_dim": -64}, "config.model.embed_dim=-64 must be at least 1"),
    ({"model.dtype": "float8"}, "config.model.dtype='float8' is unknown; one of float32, bfloat16"),
    ({"loss.num_chunks": 0}, "config.loss.num_chunks=0 must be at least 1"),
    ({"precision.first_blocks": -1}, "config.precision.first_blocks=-1 must be at least 0"),
]


@pytest.mark.parametrize(("values", "says"), BAD_VALUES, ids=lambda v: str(v)[:50])
def test_impossible_value_is_one_clear_line(values, says, tmp_path):
    c = load("debug")
    for key, value in values.items():
        with c.unlocked():
            c[key.split(".")[0]][key.split(".")[1]] = value
    with pytest.raises(ValueError) as caught:
        mesh = build.mesh(c)
        build.check(c, mesh)
        build.loop(c)
        build.tx(c)
        build.task(c).gradients(c)
        step.abstract_model(build.model(c), mesh)
        build.checkpointer(c, tmp_path / "checkpoints")
        c.data.tokenizer = "bytes"
        build.train_data(c, "bytes")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss.kind": "cosine"}, "config.loss: kind='cosine' is unknown; one of softmax, sigmoid"),
        ({"loss.method": "chunked"}, "config.loss: method='chunked' is unknown"),
        ({"model.visual.patch_size": 0}, "config.model.visual.patch_size=0 must be at least 1"),
        ({"model.text.num_heads": 0}, "config.model.text.num_heads=0 must be at least 1"),
    ],
    ids=str,
)
def test_impossible_value_of_a_clip_is_one_clear_line(values, says):
    c = importlib.import_module("configs.clip.debug").get_config()
    c.update_from_flattened_dict(values)
    with pytest.raises(config.ConfigError) as caught:
        build.check(c, build.mesh(c))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_of_other_machines_is_evaluated_on_these():
    c = load("debug")
    c.mesh.tensor = 2
    assert evaluate.mesh_of(c, given=False).shape == build.mesh(c).shape
    c.mesh.update(fsdp=64, tensor=1)
    assert evaluate.mesh_of(c, given=False).shape["fsdp"] == jax.device_count()
    with pytest.raises(config.ConfigError, match=r"mesh\.fsdp=64"):
        evaluate.mesh_of(c, given=True)


def test_unknown_missing_and_wrongly_typed_keys():
    def section(*, size: int, rate: float, name: str | None = None, extra=None):
        return size, rate, name

    assert config.call(section, "s", {"size": 1, "rate": 2}, extra=0) == (1, 2, None)
    for values, says in [
        ({"size": 1, "rate": 1.0, "sise": 2}, "config.s.sise is unknown; keys: name, rate, size"),
        ({"size": 1}, "config.s.rate is missing"),
        ({"size": "1", "rate": 1.0}, "config.s.size='1' is of type str, expected int"),
        ({"size": True, "rate": 1.0}, "expected int"),
        ({"size": 1.5, "rate": 1.0}, "expected int"),
        ({"size": None, "rate": 1.0}, "config.s.size is not set"),
        ({"size": 1, "rate": 1.0, "extra": 1}, "config.s.extra is unknown"),
    ]:
        with pytest.raises(config.ConfigError) as caught:
            config.call(section, "s", values, extra=0)
        assert says in str(caught.value)


def test_a_saved_config_builds_the_same_model(tmp_path):
    c = load("debug", "precision=fp8_current")
    with c.unlocked():
        c.precision.rules = (("lm_head", "int8_switchback"),)
    workdir.save_config(tmp_path, c)
    assert build.precision_table(workdir.load_config(tmp_path)) == build.precision_table(c)
    assert workdir.save_config(tmp_path, c) == []
    c.train.seed = 7
    assert workdir.save_config(tmp_path, c) == ["config.train.seed: 0 -> 7"]


def run(*args: str) -> tuple[subprocess.CompletedProcess, float]:
    start = time.monotonic()
    command = [sys.executable, "-m", "maxlp.train", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done, time.monotonic() - start


DEBUG = "--config=configs/llama/debug.py"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([DEBUG, "--config.optimizer.learning_rat=1"], "config.optimizer.learning_rat: there is no key"),
        ([DEBUG, "--config.train.total_steps=1.5"], "1.5"),
        (["--config=configs/llama/debug.py:speed=fast"], "speed"),
        (["--config=configs/llama/none.py"], "none.py"),
        ([DEBUG, "--config.mesh.fsdp=3"], "mesh.fsdp=3"),
        ([], "error: --config is missing; see --help"),
        ([DEBUG, "config.train.total_steps=3"], "'config.train.total_steps=3' is not a flag"),
        ([DEBUG, "--config.data.source=text:/nowhere/*.txt"], "/nowhere"),
        (["--config=configs/llama/8b.py"], "config.data.source is not set"),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) and v else "",
)
def test_command_line_mistake_ends_with_one_line(args, says, tmp_path):
    done, _ = run(*args, f"--workdir={tmp_path}/run")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode != 0
    assert says in lines[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        ("KeyboardInterrupt", 130, "error: interrupted"),
        ("PermissionError(13, 'Permission denied', '/w')", 2, "Permission denied: '/w'"),
        ("OSError(5, 'Input/output error', '/w')", 1, "OSError: [Errno 5]"),  # the launchers start again
        ("checkpoint.NotWrittenError('/w/9 was not written: disk full')", 1, "error: /w/9 was not written"),
    ],
)
def test_what_ends_a_command_from_outside(error, code, says):
    program = f"from maxlp import checkpoint, config\ndef main():\n  raise {error}\nconfig.run(main)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and says in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == error.startswith("OSError")


def test_an_error_does_not_wait_for_the_compiler():
    program = """
import concurrent.futures, time
from maxlp import config
def main():
    concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 60)
    raise ValueError("config.x=1 is wrong")
config.run(main)"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 2 and "error: config.x=1 is wrong" in done.stderr


def test_dry_run_prints_and_leaves_nothing(tmp_path):
    done, _ = run(
        "--config=configs/llama/405b.py",
        f"--workdir={tmp_path}/run",
        "--dry_run",
        "--config.data.source=stdlib",
        "--config.data.tokenizer=bytes",
        "--config.mesh.tensor=1",
    )
    assert done.returncode == 0, done.stderr
    assert "405,853,388,800 parameters" in done.stdout
    assert not (tmp_path / "run").exists()
