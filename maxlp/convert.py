r"""Imports weights from other libraries, and exports trained weights.

    python -m maxlp.convert import --input=/models/Llama-3.2-1B \
        --output=/data/llama_1b
    python -m maxlp.convert import --input=meta-llama/Llama-3.2-1B@main \
        --output=/data/llama_1b
    python -m maxlp.convert export --workdir=/tmp/run \
        --output=/tmp/llama --dtype=bfloat16

========= ================================== ==================================
--format  files                              loads with
========= ================================== ==================================
hf_llama  config.json, model*.safetensors    transformers.AutoModelForCausalLM
hf_qwen3  the same, of a dense Qwen3         transformers.AutoModelForCausalLM
hf_clip   the same, of CLIP or SigLIP        transformers.AutoModel
open_clip open_clip_config.json,             open_clip.create_model(
          open_clip_model.safetensors            "local-dir:DIR")
========= ================================== ==================================

--quantize=int8 or fp8 exports the kernels in the blocks of a language model in
8 bits, for vLLM and transformers (compressed-tensors), and the rest in
bfloat16; an import reads such folders too. Such a model also rounds the inputs
of its matmuls; outlier channels of the gated products (SwiGLU) then cause large
errors.
--calibration_sequences=64 measures these products on 64 sequences of the run's
validation data and scales the outliers down, with factors in the weights that
change nothing without quantization (Smooth-SwiGLU).

--adapter exports the adapters of a run with train.lora alone, in the format of
PEFT, which vLLM reads too: adapter_config.json and adapter_model.safetensors.
An import of such a folder merges them into the model that its config names.

An import detects the format from the config in its folder; an export of a CLIP
writes hf_clip by default. The result of an import is a run at step 0, from
which `generate` samples. Training needs no import: `train --from` reads such
files itself.

--image_size=336 interpolates the position embeddings of an image tower.

Both run on the CPU and need memory for one copy of the model. An export also
needs memory for one file of 2 GB (open_clip: for a second copy of the model),
and with --quantize for the codes, one byte each.
"""

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import jax
from absl import flags
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxlp.core.train_state import abstract_model, num_params
from maxlp.data import tokenizers
from maxlp.data.tokenizers import Tokenizer, make_tokenizer
from maxlp.families import Family, compressed_tensors, hf_tokenizer, peft, weights
from maxlp.families.weights import WeightFormat
from maxlp.parallel import sharding
from maxlp.run import cli, run_dir
from maxlp.run.pretrained import LibraryWeights, RunWeights, check_written, published_params
from maxlp.run.restore import restore_model
from maxlp.run.settings import read, read_model
from maxlp.run.tokenizer import saved_tokenizer
from maxlp.runtime import checkpoint, files, hub, new_folder
from maxlp.runtime.distributed import print_primary
from maxlp.runtime.safetensors import write_tensors

PRECISION = dict(  # of an imported model: all matmuls in model.dtype
    recipe="bf16", options={}, rules=(), first_blocks=0, last_blocks=0, min_dim=0, smooth_swiglu="none"
)
COMMANDS = {  # the flags of each, besides those of both
    "import": ("input", "image_size"),
    "export": ("workdir", "step", "quantize", "calibration_sequences", "adapter"),
}
TOKENIZER_FILES = (*tokenizers.FILES, *tokenizers.COMPANIONS, "vocab.json", "merges.txt", "spiece.model")


def define_flags() -> None:
    flags.DEFINE_string("format", None, "Format of the other library's weights, see above.")
    flags.DEFINE_string(
        "input",
        None,
        "import: folder with a config and safetensors files, or ORG/NAME[@REVISION].",
    )
    flags.DEFINE_string("workdir", None, "export: directory of a run.")
    flags.DEFINE_integer("step", None, "export: checkpoint; by default the newest.", lower_bound=0)
    flags.DEFINE_string("output", None, "Folder to write to; new or empty.")
    dtypes = ["float32", "bfloat16", "float16"]
    flags.DEFINE_enum("dtype", None, dtypes, "Dtype of the written weights; by default that of the input.")
    schemes = [*compressed_tensors.SCHEMES]
    flags.DEFINE_enum("quantize", None, schemes, "export: write the kernels of blocks in 8 bits.")
    flags.DEFINE_integer(
        "calibration_sequences",
        0,
        "export: validation sequences from which to compute Smooth-SwiGLU's factors; 0: no factors.",
        lower_bound=0,
    )
    flags.DEFINE_boolean(
        "adapter", False, "export: write the adapters (train.lora) for PEFT, without the model's weights."
    )
    flags.DEFINE_integer("image_size", None, "import: image size to resize the model to.", lower_bound=1)


def main(command: str = "") -> None:
    jax.config.update("jax_platforms", "cpu")
    values = flags.FLAGS
    cli.check_first_argument(command, COMMANDS)
    for other in COMMANDS.keys() - {command}:
        for name in COMMANDS[other]:
            if values[name].present:
                raise ValueError(f"--{name} is for {other}, not for {command}; drop it")
    new_folder.clean_up_on_sigterm()
    if command == "import":
        source, workdir = hub.as_id(str(values.input or "")), _required("output")
        if not hub.is_id(source):
            source = str(_required("input"))
        import_weights(source, workdir, values.format, values.dtype, values.image_size)
        print_primary(f"{workdir} is a run at step 0; training starts from it with --from={workdir}")
    else:
        workdir, output = _required("workdir"), _required("output")
        if values.adapter:
            for name in ("quantize", "calibration_sequences"):
                if value := values[name].value:
                    raise ValueError(
                        f"--{name}={value} is for the weights of the model; drop it, or drop --adapter"
                    )
            export_adapter(workdir, output, values.format, values.step, values.dtype)
        else:
            export_weights(
                workdir,
                output,
                values.format,
                values.step,
                values.dtype,
                values.quantize,
                values.calibration_sequences,
            )
        print_primary(f"{output} holds {', '.join(sorted(path.name for path in output.iterdir()))}")


def _required(flag: str) -> Path:
    value = flags.FLAGS[flag].value
    if value is None:
        raise ValueError(f"--{flag} is missing; see --help")
    return files.local_path(value, f"--{flag}")


# --- import ---------------------------------------------------------------------------------------------


def import_weights(
    source: str | os.PathLike[str],
    workdir: Path,
    format_name: str | None = None,
    dtype: str | None = None,
    image_size: int | None = None,
) -> None:
    """Makes a run at step 0 from weights: the model's config, its parameters, the tokenizer.

    Args:
      source: a folder, or the id of a repository of the Hub; see `LibraryWeights`.
      format_name: see `formats`; None detects it.
      dtype: of the parameters; None takes that of the input.
      image_size: size of images to resize the model to; None keeps its own.

    Raises:
      ValueError: an unknown format or architecture, a damaged file, or a workdir that is not empty.
    """
    _check_unused(workdir)
    checkpoint.check_path(workdir, "--output")
    found = LibraryWeights(os.fspath(source), format_name)
    if image_size is not None and found.format.resize is None:
        raise ValueError(
            f"--image_size={image_size} is for image models, and {source} holds a {found.family.name}; "
            "drop the flag"
        )
    model = dataclasses.replace(found.config, param_dtype=dtype or found.config.dtype)
    with found.naming_config():
        abstract = _abstract_params(found.family, model)
    with new_folder.unfinished(workdir) as unfinished:
        with weights.naming(found.folder):
            params = weights.to_maxlp(found.tensors, abstract, found.format.layout(model))
        if found.format.resize is not None and image_size is not None:
            with weights.naming(Path(f"--image_size={image_size}")):
                params, model = found.format.resize(params, model, image_size)
        _save_run(unfinished, found.family.name, dataclasses.asdict(model), params, found.tokenizer_folder)


def _save_run(workdir: Path, name: str, model: dict[str, Any], params: dict, source: Path) -> None:
    params = _to_jax(params)
    with checkpoint.Checkpointer(workdir / "checkpoints", every_steps=1) as checkpoints:
        checkpoints.save(0, {"params": params, "model_state": {}}, data_state={})
    _copy_tokenizer(source, workdir)
    c = dict(model=dict(name=name, **model), precision=PRECISION, data=dict(tokenizer="tokenizer.json"))
    run_dir.record_launch(workdir, ConfigDict(c), 0, num_params(params))


def _to_jax(tree: dict) -> dict:
    """Replaces NumPy arrays by `jax.Array`, in place, so that only one at a time is in memory twice."""
    for key, leaf in tree.items():
        tree[key] = _to_jax(leaf) if isinstance(leaf, dict) else jax.device_put(leaf).block_until_ready()
    return tree


# --- export ---------------------------------------------------------------------------------------------


def export_weights(
    workdir: Path,
    output: Path,
    format_name: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    calibration_sequences: int = 0,
) -> None:
    """Writes a run's weights, config and tokenizer as a folder that another library loads.

    Args:
      format_name: a format of the run's family; None takes the first one.
      step: None takes the newest intact checkpoint.
      dtype: of the tensors; None takes the run's ``param_dtype``.
      quantize: a key of `compressed_tensors.SCHEMES` for the matmuls of blocks; the rest is in bfloat16.
      calibration_sequences: see `run.calibration`; 0 leaves the weights as they are.

    Raises:
      ValueError: no run, no such checkpoint, a format that does not support the model or the scheme, no
        data for a calibration, or an output folder that is not empty.
    """
    _check_unused(output)
    if quantize is not None and dtype is not None:
        raise ValueError(
            f"--quantize={quantize} writes what it does not quantize in bfloat16; drop --dtype={dtype}"
        )
    c = run_dir.load_config(workdir)
    family, model, _ = read_model(c)
    stored = dtype or model.param_dtype
    if quantize is not None:
        stored = "bfloat16"  # what is not quantized
    model = dataclasses.replace(model, param_dtype=stored)
    format_name, weight_format = _format_of(workdir, family, format_name)
    model = weight_format.as_trained(model, c.to_dict().get("data", {}))
    for_language = dict(quantize=quantize, calibration_sequences=calibration_sequences)
    for flag, value in for_language.items():
        if value and not weight_format.quantizable:
            raise ValueError(
                f"--{flag}={value} is for language models, not for {format_name}; drop the flag"
            )
    if calibration_sequences and run_dir.is_imported(c):
        raise ValueError(
            f"{workdir} holds imported weights and names no data; drop --calibration_sequences"
        )
    if calibration_sequences and stored == "float16":
        raise ValueError(
            "--calibration_sequences changes weights by powers of two, for which float16 has no room; set "
            "--dtype=bfloat16 or float32"
        )

    # Before any weights are read: these raise for a model that the format does not support.
    layout = weight_format.layout(model)
    texts = weight_format.config_files(model, lambda: _tokenizer_of(workdir))
    scheme = None if quantize is None else compressed_tensors.SCHEMES[quantize]
    if scheme is not None:
        texts[weight_format.config_file]["quantization_config"] = scheme.config()
    with new_folder.unfinished(output) as unfinished:
        _export_tokenizer(workdir, unfinished, c.to_dict(), ends=not family.generates_text)
        _write_missing(unfinished, texts)  # the run's own tokenizer_config.json takes precedence
        check_written(family, model, weight_format, unfinished)
        params = published_params(workdir, step, _cpu_mesh())
        if calibration_sequences:
            from maxlp.run.calibration import calibrated_params  # few exports need it

            params = calibrated_params(read(c), workdir, params, calibration_sequences, _cpu_mesh())
        if scheme is None:  # else codes are computed from the weights as they are
            params = jax.tree.map(lambda leaf: leaf.astype(model.param_dtype), params)
        with weights.naming(workdir):
            tensors = weights.to_other(params, layout)
        if scheme is not None:
            tensors = compressed_tensors.quantize(tensors, weight_format.quantizable, scheme)
        write_tensors(
            unfinished,
            tensors,
            dtype=model.param_dtype,
            weights=weight_format.weights_file,
            max_shard_bytes=weight_format.max_shard_bytes,
        )


def export_adapter(
    workdir: Path,
    output: Path,
    format_name: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
) -> None:
    """Writes a run's adapters and tokenizer as a folder that PEFT loads, see `families.peft`.

    Args:
      format_name, step: as in `export_weights`; the format is that of the model which was frozen.
      dtype: of the tensors; None takes that of the adapters, float32.

    Raises:
      ValueError: no run, no such checkpoint, no adapters, adapters of a model that others were merged into,
        a model that the format does not support, or an output folder that is not empty.
    """
    _check_unused(output)
    c = run_dir.load_config(workdir)
    family, model, _ = read_model(c)
    format_name, weight_format = _format_of(workdir, family, format_name)
    if not family.generates_text:
        raise ValueError(f"--adapter is for language models, not for {format_name}; drop the flag")
    if run_dir.is_imported(c) or read(c).train.lora is None:
        raise ValueError(
            f"{workdir} was trained without adapters (train.lora.rank); drop --adapter to export the whole "
            "model"
        )
    base = c.train.init_from
    hub.commits.update(run_dir.hub_commits(workdir))
    if _holds_adapters(base):
        raise ValueError(
            f"{workdir} has adapters of a model into which those of {base} were merged, which PEFT "
            "cannot find by a name; drop --adapter to export the whole model"
        )
    layout = weight_format.layout(model)
    texts = weight_format.config_files(model, lambda: _tokenizer_of(workdir))
    del texts[weight_format.config_file]  # with which the folder would be that of a whole model
    with new_folder.unfinished(output) as unfinished:
        _export_tokenizer(workdir, unfinished, c.to_dict(), ends=False)
        graphdef, state, _ = restore_model(c, workdir, step, _cpu_mesh())
        with weights.naming(workdir):
            tensors = weights.to_other(state["params"], peft.layout(layout))
        adapted = nnx.merge(graphdef, state["params"], state["model_state"])
        commit = hub.commits.get(base)
        name = base.removeprefix("hf:").partition("@")[0] if hub.is_id(base) else base
        texts[weights.ADAPTER_CONFIG] = peft.config(adapted, layout, name, commit)
        _write_missing(unfinished, texts)
        write_tensors(unfinished, tensors, dtype=dtype or "float32", weights=peft.WEIGHTS)


def _holds_adapters(source: str) -> bool:
    """Whether a run that started from these weights started from adapters merged into their model."""
    if not hub.is_id(source):
        return weights.holds_adapters(Path(source))
    with contextlib.suppress(ValueError, ConnectionError):  # an export needs no network
        return weights.holds_adapters(hub.fetch(source, ("config.json", weights.ADAPTER_CONFIG)))
    return False


def _format_of(workdir: Path, family: Family, name: str | None) -> tuple[str, WeightFormat]:
    """A format of the family of a run, by default the first one."""
    known = weights.formats(family.name)
    if not known:
        raise ValueError(
            f"{workdir} holds a {family.name}, a family without weight formats; add one to FORMATS of its "
            "export.py"
        )
    name = name or next(iter(known))
    if name not in known:
        raise ValueError(
            f"--format={name} is not for {workdir}, which holds a {family.name}; one of {', '.join(known)}"
        )
    return name, known[name]


def _tokenizer_of(workdir: Path) -> Tokenizer | None:
    spec = RunWeights(workdir).tokenizer
    return None if spec is None else make_tokenizer(spec)


def _export_tokenizer(workdir: Path, target: Path, config: dict[str, Any], ends: bool) -> None:
    """Copies the tokenizer of a run with this config, for texts that become what they were in training."""
    _copy_tokenizer(workdir, target)
    if not (file := target / "tokenizer.json").exists():
        return
    if config["data"].get("lowercase"):
        hf_tokenizer.lowercase(file)
    if not (run_dir.is_imported(config) or config.get("train", {}).get("init_from")):  # trained here alone
        made = make_tokenizer(saved_tokenizer(config["data"]["tokenizer"], workdir))
        hf_tokenizer.add_specials(file, made, ends)


def _write_missing(folder: Path, contents: dict[str, Any]) -> None:
    for name, content in contents.items():
        if not (folder / name).exists():
            files.write_json(folder / name, content)


# --- both -----------------------------------------------------------------------------------------------


def _abstract_params(family: Family, model: Any) -> dict:
    """The parameters as shapes on one CPU device, in the model's ``param_dtype``."""
    _, abstract = abstract_model(lambda rngs: family.make_model(model, rngs=rngs), _cpu_mesh())
    return abstract["params"]


def _cpu_mesh() -> Mesh:
    return sharding.make_mesh(devices=jax.devices("cpu")[:1])


def _check_unused(directory: Path) -> None:
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise ValueError(f"--output={directory} is not a directory; choose a new directory")
    names = {path.name for path in directory.iterdir()}
    if names and new_folder.UNFINISHED not in names:  # else `new_folder.unfinished` decides
        raise ValueError(f"--output={directory} is not empty; choose a new directory")


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


if __name__ == "__main__":
    define_flags()
    cli.run(main, num_arguments=1)
