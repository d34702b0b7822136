r"""Brings weights of Hugging Face and open_clip in, and trained weights out.

    python -m maxlp.convert import --input=/models/Llama-3.2-1B --output=/data/llama_1b
    python -m maxlp.convert export --workdir=/tmp/run --output=/tmp/llama --dtype=bfloat16

========= ====================================================== =======================================
--format  files                                                  loads with
========= ====================================================== =======================================
hf_llama  config.json, model*.safetensors                        transformers.AutoModelForCausalLM
hf_clip   the same, of CLIP or SigLIP                            transformers.AutoModel
open_clip open_clip_config.json, open_clip_model.safetensors     open_clip.create_model("local-dir:DIR")
========= ====================================================== =======================================

The format of what comes in is read from its config; a CLIP goes out as hf_clip unless told otherwise. What
is imported is a directory like that of a run, at step 0: `generate` samples from it, and training starts
from it with --config.train.init_from=DIR. --image_size=336 resizes the positions of an image tower. No
accelerator is used. Memory is needed for one copy of the model, and for export one file of 2 GB more
(open_clip: another copy).
"""

import json
import shutil
import sys
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict

from maxlp.core import train_step as step
from maxlp.data import tokenizers
from maxlp.families import MODELS
from maxlp.families.clip import hf as clip_configs
from maxlp.families.clip import weights as clip_weights
from maxlp.families.llama import hf
from maxlp.parallel import sharding
from maxlp.run import build, config, run_dir
from maxlp.runtime import checkpoint, files

PRECISION = dict(  # of an imported model: all matmuls in model.dtype
    recipe="bf16", options={}, rules=(), first_blocks=0, last_blocks=0, min_dim=0, smooth_swiglu="none"
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)
FORMATS = {"hf_llama": "llama", "hf_clip": "clip", "open_clip": "clip"}  # and the model that each is of
OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def define_flags() -> None:
    flags.DEFINE_enum("format", None, FORMATS, "What the weights are outside of maxlp; see above.")
    flags.DEFINE_string("input", None, "import: directory with a config and safetensors files.")
    flags.DEFINE_string("workdir", None, "export: directory of a run.")
    flags.DEFINE_integer("step", None, "export: checkpoint to take, by default the newest.", lower_bound=0)
    flags.DEFINE_string("output", None, "Directory to write; new or empty.")
    dtypes = ["float32", "bfloat16", "float16"]
    flags.DEFINE_enum("dtype", None, dtypes, "Of the weights written; by default that of those read.")
    flags.DEFINE_integer("image_size", None, "import of a CLIP: the size to resize it to.", lower_bound=1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    command = sys.argv[1] if len(sys.argv) > 1 else "nothing"
    values = flags.FLAGS
    if command == "import":
        source, workdir = _given("input"), _given("output")
        import_weights(source, workdir, values.format, values.dtype, values.image_size)
        print(
            f"{workdir} is a run at step 0; training starts there with --config.train.init_from={workdir}"
        )
    elif command == "export":
        workdir, output = _given("workdir"), _given("output")
        export_weights(workdir, output, values.format, values.step, values.dtype)
        print(f"{output} holds {', '.join(sorted(path.name for path in output.iterdir()))}")
    else:
        raise ValueError(f"expected 'import' or 'export' as first argument, got {command!r}")


def _given(flag: str) -> Path:
    value = flags.FLAGS[flag].value
    if value is None:
        raise ValueError(f"--{flag} is missing")
    return Path(value)


def import_weights(
    source: Path,
    workdir: Path,
    weights: str | None = None,
    dtype: str | None = None,
    image_size: int | None = None,
) -> None:
    """Makes a run of step 0 from a directory of weights.

    Args:
      weights: one of `FORMATS`; None reads it from the directory's config.

    Raises:
      ValueError: nothing that is known here, a damaged file, or a workdir that is not empty.
    """
    weights = weights or _format_of(source)
    if FORMATS[weights] == "clip":
        return import_clip(source, workdir, weights, dtype, image_size)
    if image_size is not None:
        raise ValueError(f"--image_size={image_size} is for a CLIP; {source} holds a {FORMATS[weights]}")
    return import_hf_llama(source, workdir, dtype)


def _format_of(source: Path) -> str:
    if not (source / "config.json").exists():
        if (source / OPEN_CLIP_CONFIG).exists():
            return "open_clip"
        raise ValueError(f"{source / 'config.json'} does not exist: --input={source} holds no model")
    kind = _read_json(source / "config.json").get("model_type")
    known = {"llama": "hf_llama", **dict.fromkeys(clip_configs.HF_DEFAULTS, "hf_clip")}
    if kind not in known and (source / OPEN_CLIP_CONFIG).exists():
        return "open_clip"
    if kind not in known:
        raise ValueError(
            f"{source / 'config.json'}: model_type={kind!r} is not supported; one of {', '.join(known)}"
        )
    return known[kind]


def _read_json(path: Path) -> dict:
    if not path.exists():
        raise ValueError(f"{path} does not exist: --input={path.parent} holds no model")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def import_hf_llama(source: Path, workdir: Path, dtype: str | None = None) -> None:
    """Makes a run of step 0 from a Hugging Face Llama: weights, model config and tokenizer.

    Raises:
      ValueError: not a Llama that `hf` knows, a damaged file, or a workdir that is not empty.
    """
    _refuse_if_used(workdir)
    theirs = _read_json(source / "config.json")
    stored = theirs.get("dtype") or theirs.get("torch_dtype") or "float32"
    model = hf.config_from_hf(theirs) | _how_to_run(stored, dtype)
    _save_run(workdir, "llama", model, hf.to_maxlp(hf.Tensors(source), model), source)


def import_clip(
    source: Path, workdir: Path, weights: str, dtype: str | None = None, image_size: int | None = None
) -> None:
    """Makes a run of step 0 from a CLIP: weights, model config and tokenizer.

    Args:
      weights: "hf_clip" or "open_clip".
      image_size: of the images it is for from now on; None leaves it.

    Raises:
      ValueError: not a CLIP that `clip_configs` knows, a damaged file, or a workdir that is not empty.
    """
    _refuse_if_used(workdir)
    if weights == "open_clip":
        layout, file = "open_clip", OPEN_CLIP_WEIGHTS
        model = clip_configs.config_from_open_clip(_read_json(source / OPEN_CLIP_CONFIG))
    else:
        preprocessor = source / "preprocessor_config.json"
        statistics = _read_json(preprocessor) if preprocessor.exists() else None
        model = clip_configs.config_from_hf(_read_json(source / "config.json"), statistics)
        layout, file = clip_configs.hf_layout(model), hf.WEIGHTS
    tensors = hf.Tensors(source, file)
    # The configs of open_clip say nothing of the dtype, and those of Hugging Face not always.
    stored = next((str(tensors[name].dtype) for name in tensors if name != "logit_scale"), "float32")
    model |= _how_to_run(stored, dtype)
    params = clip_weights.to_maxlp(tensors, model, layout)
    if image_size is not None:
        params, model = clip_weights.resized(params, model, image_size)
    _save_run(workdir, "clip", model, params, source)


def _how_to_run(stored: str, dtype: str | None) -> dict:
    return dict(dtype=stored, param_dtype=dtype or stored, attention="xla", scan_layers=True, remat="none")


def _save_run(workdir: Path, name: str, model: dict, params: dict, source: Path) -> None:
    params = _to_jax(params)
    with checkpoint.Checkpointer(workdir / "checkpoints", every_steps=1) as checkpoints:
        checkpoints.save(0, {"params": params, "model_state": {}}, data_state={})
    _copy(TOKENIZER_FILES, source, workdir)
    run_dir.record_start(workdir, 0, build.num_params(params))
    c = dict(model=dict(name=name, **model), precision=PRECISION, data=dict(tokenizer="tokenizer.json"))
    run_dir.save_config(workdir, ConfigDict(c))


def export_weights(
    workdir: Path,
    output: Path,
    weights: str | None = None,
    step_number: int | None = None,
    dtype: str | None = None,
) -> None:
    """Writes a run's weights, config and tokenizer as a directory that other libraries load.

    Args:
      weights: one of `FORMATS`; None is hf_llama or hf_clip, whichever the run holds.
      step_number: None takes the newest sound checkpoint.
      dtype: of the tensors; None leaves them in the run's ``param_dtype``.

    Raises:
      ValueError: no run, no such checkpoint, another model, or an output directory that is not empty.
    """
    name = run_dir.load_config(workdir).model.name
    weights = weights or f"hf_{name}"
    if FORMATS.get(weights) != name:
        raise ValueError(f"{workdir} holds a {name}; --format={weights} is for {FORMATS.get(weights)}")
    if name == "clip":
        export_clip(workdir, output, weights, step_number, dtype)
    else:
        export_hf_llama(workdir, output, step_number, dtype)


def export_hf_llama(
    workdir: Path, output: Path, step_number: int | None = None, dtype: str | None = None
) -> None:
    """`export_weights` of a Llama."""
    _refuse_if_used(output)
    c, model, params = _load_run(workdir, "llama", step_number, dtype)
    hf.write_tensors(output, hf.to_hf(params), dtype=model["param_dtype"])
    config_json = hf.config_to_hf(model, model["param_dtype"])
    _copy(TOKENIZER_FILES, workdir, output)
    if any((workdir / name).exists() for name in TOKENIZER_FILES):
        tokenizer = tokenizers.make_tokenizer(build.saved_tokenizer(c, workdir))
        config_json |= dict(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
        if not (output / "tokenizer_config.json").exists() and "tokenizer.json" in tokenizer.files:
            files.write_json(output / "tokenizer_config.json", _tokenizer_config(tokenizer))
    files.write_json(output / "config.json", config_json)


def export_clip(
    workdir: Path,
    output: Path,
    weights: str,
    step_number: int | None = None,
    dtype: str | None = None,
) -> None:
    """`export_weights` of a CLIP, as "hf_clip" (CLIP or SigLIP, whichever it is) or "open_clip"."""
    _refuse_if_used(output)
    model = run_dir.load_config(workdir).to_dict()["model"]
    if weights == "open_clip":  # before anything is read: what has no counterpart there
        layout, file, shard = "open_clip", OPEN_CLIP_WEIGHTS, sys.maxsize  # open_clip reads one file
        texts = {OPEN_CLIP_CONFIG: clip_configs.config_to_open_clip(model)}
    else:
        layout, file, shard = clip_configs.hf_layout(model), hf.WEIGHTS, hf.SHARD_BYTES
        config_json, preprocessor = clip_configs.config_to_hf(model, dtype or model["param_dtype"])
        texts = {"config.json": config_json, "preprocessor_config.json": preprocessor}
    _, model, params = _load_run(workdir, "clip", step_number, dtype)
    tensors = clip_weights.to_theirs(params, layout)
    hf.write_tensors(output, tensors, dtype=model["param_dtype"], weights=file, max_shard_bytes=shard)
    _copy(TOKENIZER_FILES, workdir, output)
    for name, text in texts.items():
        files.write_json(output / name, text)


def _load_run(
    workdir: Path, name: str, step_number: int | None, dtype: str | None
) -> tuple[ConfigDict, dict, dict]:
    """A run's config, the arguments of its model, and its parameters in ``dtype``."""
    c = run_dir.load_config(workdir)
    model = c.to_dict()["model"]
    if (found := model.pop("name")) != name:
        raise ValueError(f"{workdir} holds a {found}; this format is for a {name}")
    model["param_dtype"] = dtype or model["param_dtype"]  # the checkpoint is cast as it is read
    mesh = sharding.make_mesh(devices=jax.devices("cpu")[:1])
    _, abstract = step.abstract_model(lambda rngs: MODELS[name](**model, rngs=rngs), mesh)
    root = workdir / "checkpoints"
    params = checkpoint.load_params(
        root if step_number is None else root / str(step_number), abstract["params"]
    )
    return c, model, params


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
    config.run(main, words=1)
