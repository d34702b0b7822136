r"""Brings Hugging Face weights in, and trained weights out.

    python -m maxlp.convert import --format=hf_llama --input=/models/Llama-3.2-1B --output=/data/llama_1b
    python -m maxlp.convert export --format=hf_llama --workdir=/tmp/run --output=/tmp/llama --dtype=bfloat16

What is imported is a directory like that of a run, at step 0: `generate` samples from it, and training
starts from it with --config.train.init_from=DIR. What is exported loads with
transformers.AutoModelForCausalLM.from_pretrained. No accelerator is used. Memory is needed for one copy of
the model, and for export one file of 2 GB more.
"""

import json
import shutil
import sys
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict

from maxlp import build, checkpoint, config, sharding, step
from maxlp import workdir as files
from maxlp.data import tokenizer as tokenizers
from maxlp.models import hf
from maxlp.models.llama import Llama

PRECISION = dict(  # of an imported model: all matmuls in model.dtype
    recipe="bf16", options={}, rules=(), first_blocks=0, last_blocks=0, min_dim=0, smooth_swiglu="none"
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


def define_flags() -> None:
    flags.DEFINE_enum("format", "hf_llama", ["hf_llama"], "What the weights are outside of maxlp.")
    flags.DEFINE_string("input", None, "import: directory with config.json and safetensors files.")
    flags.DEFINE_string("workdir", None, "export: directory of a run.")
    flags.DEFINE_integer("step", None, "export: checkpoint to take, by default the newest.", lower_bound=0)
    flags.DEFINE_string("output", None, "Directory to write; new or empty.")
    dtypes = ["float32", "bfloat16", "float16"]
    flags.DEFINE_enum("dtype", None, dtypes, "Of the weights written; by default that of those read.")


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    command = sys.argv[1] if len(sys.argv) > 1 else "nothing"
    if command == "import":
        import_hf_llama(_given("input"), _given("output"), flags.FLAGS.dtype)
    elif command == "export":
        export_hf_llama(_given("workdir"), _given("output"), flags.FLAGS.step, flags.FLAGS.dtype)
    else:
        raise ValueError(f"expected 'import' or 'export' as first argument, got {command!r}")


def _given(flag: str) -> Path:
    value = flags.FLAGS[flag].value
    if value is None:
        raise ValueError(f"--{flag} is missing")
    return Path(value)


def import_hf_llama(source: Path, workdir: Path, dtype: str | None = None) -> None:
    """Makes a run of step 0 from a Hugging Face Llama: weights, model config and tokenizer.

    Raises:
      ValueError: not a Llama that `hf` knows, a damaged file, or a workdir that is not empty.
    """
    _refuse_if_used(workdir)
    if not (source / "config.json").exists():
        raise ValueError(f"{source / 'config.json'} does not exist: --input={source} holds no model")
    theirs = json.loads((source / "config.json").read_text())
    stored = theirs.get("dtype") or theirs.get("torch_dtype") or "float32"
    model = hf.config_from_hf(theirs) | dict(
        dtype=stored, param_dtype=dtype or stored, attention="xla", scan_layers=True, remat="none"
    )
    params = _to_jax(hf.to_maxlp(hf.Tensors(source), model))
    with checkpoint.Checkpointer(workdir / "checkpoints", every_steps=1, asynchronous=False) as checkpoints:
        checkpoints.save(0, {"params": params, "model_state": {}}, data_state={})
    _copy(TOKENIZER_FILES, source, workdir)
    files.record_start(workdir, 0, build.num_params(params))
    c = dict(model=dict(name="llama", **model), precision=PRECISION, data=dict(tokenizer="tokenizer.json"))
    files.save_config(workdir, ConfigDict(c))


def export_hf_llama(
    workdir: Path, output: Path, step_number: int | None = None, dtype: str | None = None
) -> None:
    """Writes a run's Llama as a Hugging Face directory: weights, config.json and tokenizer.

    Args:
      step_number: None takes the newest sound checkpoint.
      dtype: of the tensors; None leaves them in the run's ``param_dtype``.

    Raises:
      ValueError: no run, no such checkpoint, another model, or an output directory that is not empty.
    """
    _refuse_if_used(output)
    c = files.load_config(workdir)
    model = c.to_dict()["model"]
    if (name := model.pop("name")) != "llama":
        raise ValueError(f"{workdir} holds a {name}; --format=hf_llama is for llama")
    dtype = dtype or model["param_dtype"]
    model["param_dtype"] = dtype  # the checkpoint is cast as it is read
    mesh = sharding.make_mesh(devices=jax.devices("cpu")[:1])
    _, abstract = step.abstract_model(lambda rngs: Llama(**model, rngs=rngs), mesh)
    root = workdir / "checkpoints"
    params = checkpoint.load_params(
        root if step_number is None else root / str(step_number), abstract["params"]
    )
    hf.write_tensors(output, hf.to_hf(params), dtype=dtype)
    config_json = hf.config_to_hf(model, dtype)
    _copy(TOKENIZER_FILES, workdir, output)
    if any((workdir / name).exists() for name in TOKENIZER_FILES):
        tokenizer = tokenizers.make_tokenizer(build.saved_tokenizer(c, workdir))
        config_json |= dict(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
        if not (output / "tokenizer_config.json").exists() and "tokenizer.json" in tokenizer.files:
            files.write_json(output / "tokenizer_config.json", _tokenizer_config(tokenizer))
    files.write_json(output / "config.json", config_json)


def _tokenizer_config(tokenizer: tokenizers.Tokenizer) -> dict[str, str]:
    """What transformers needs beside a tokenizer.json to read it as it is."""
    added = json.loads(tokenizer.files["tokenizer.json"])["added_tokens"]
    name_of = {token["id"]: token["content"] for token in added}
    special = dict(bos_token=tokenizer.bos_id, eos_token=tokenizer.eos_id, pad_token=tokenizer.pad_id)
    return dict(tokenizer_class="PreTrainedTokenizerFast") | {k: name_of[i] for k, i in special.items()}


def _to_jax(tree: dict) -> dict:
    """Makes each NumPy array of a nested dict a `jax.Array`, in place, so that only one is there twice."""
    for key, leaf in tree.items():
        tree[key] = _to_jax(leaf) if isinstance(leaf, dict) else jax.device_put(leaf).block_until_ready()
    return tree


def _refuse_if_used(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"--output={directory} is not empty; choose a new directory")


def _copy(names: tuple[str, ...], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


if __name__ == "__main__":
    define_flags()
    config.run(main)
