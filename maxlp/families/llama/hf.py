"""Hugging Face Llama in and out: one table of names, the config, and safetensors files.

What differs between the two worlds, and all that differs: a kernel is (in, out) here and (out, in)
there, and a leaf of ``layers`` here is a stack of the tensors of every layer there. Rotary embedding
turns the same pairs (i, i + H/2) on both sides, so no weight is permuted.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maxlp.families.llama.model import Llama

LLAMA: dict[str, str] = {
    "tok_embed/embedding": "model.embed_tokens.weight",
    "layers/attn_norm/scale": "model.layers.{}.input_layernorm.weight",
    "layers/attn/q_proj/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers/attn/k_proj/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers/attn/v_proj/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/attn/o_proj/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers/mlp_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/mlp/gate_proj/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers/mlp/up_proj/kernel": "model.layers.{}.mlp.up_proj.weight",
    "layers/mlp/down_proj/kernel": "model.layers.{}.mlp.down_proj.weight",
    "final_norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",  # absent when the embeddings are tied
}


# --- tensors ------------------------------------------------------------------------------------------


def to_maxlp(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict:
    """Parameters from Hugging Face tensors.

    One tensor is taken from ``tensors`` at a time, so a mapping that reads from disk (`Tensors`) needs
    one copy of the model and one tensor in memory.

    Args:
      tensors: name to array, as in ``LlamaForCausalLM.state_dict()``.
      config: all keyword arguments of `Llama`; the parameters get its ``param_dtype``.

    Returns:
      The nested dict of NumPy arrays that ``nnx.state(model, nnx.Param)`` has for this config.

    Raises:
      ValueError: a missing or unknown tensor or a wrong shape, with the tensor's name.
    """
    leaves = flatten_mapping(_abstract_params(config), sep="/")
    wanted = {name for path, leaf in leaves.items() for _, name in _places(path, leaf.shape)}
    if missing := sorted(wanted - set(tensors)):
        raise ValueError(f"tensor {missing[0]!r} is missing{_and_more(missing)}")
    if unknown := sorted(name for name in set(tensors) - wanted if not _is_derived(name, tensors)):
        raise ValueError(
            f"tensor {unknown[0]!r} has no place in a Llama with {config['num_layers']} layers and "
            f"tie_embeddings={config['tie_embeddings']}{_and_more(unknown)}"
        )
    params = {}
    for path, leaf in leaves.items():
        params[path] = np.empty(leaf.shape, leaf.dtype)
        for index, name in _places(path, leaf.shape):
            tensor, place = _turn(path, tensors[name]), params[path][index]
            if tensor.shape != place.shape:
                raise ValueError(
                    f"tensor {name!r} has shape {_turn(path, tensor).shape}, "
                    f"the config wants {_turn(path, place).shape}"
                )
            place[...] = tensor
    return unflatten_mapping(params, sep="/")


def to_hf(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Hugging Face tensors from parameters, as views: nothing is copied.

    Raises:
      ValueError: parameters that are not those of a `Llama`.
    """
    leaves = flatten_mapping(params, sep="/")
    if misfit := sorted((set(leaves) ^ set(LLAMA)) - {"lm_head/kernel"}):
        what = "not one of a Llama" if misfit[0] in leaves else "missing"
        raise ValueError(f"parameter {misfit[0]!r} is {what}{_and_more(misfit)}")
    tensors = {}
    for path, leaf in leaves.items():
        for index, name in _places(path, leaf.shape):
            tensors[name] = _turn(path, np.asarray(leaf)[index])
    return tensors


def _places(path: str, shape: tuple[int, ...]) -> list[tuple[Any, str]]:
    """For each tensor of a leaf: the index at which the leaf holds it, and its Hugging Face name."""
    if path.startswith("layers/"):
        return [(i, LLAMA[path].format(i)) for i in range(shape[0])]
    return [(..., LLAMA[path])]


def _turn(path: str, tensor: np.ndarray) -> np.ndarray:
    return tensor.T if path.endswith("kernel") else tensor


def _is_derived(name: str, tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether a tensor only repeats what others or the config say (some files hold such copies)."""
    if name == "lm_head.weight":  # unknown: the embeddings are tied
        return np.array_equal(tensors[name], tensors["model.embed_tokens.weight"])
    return name.endswith("rotary_emb.inv_freq")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _abstract_params(config: Mapping[str, Any]) -> dict:
    def init() -> dict:
        return nnx.to_pure_dict(nnx.state(Llama(**config, rngs=nnx.Rngs(0)), nnx.Param))

    return jax.eval_shape(init)


# --- config.json --------------------------------------------------------------------------------------


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Llama` that a Hugging Face ``config.json`` tells: all but how to run it.

    (``dtype``, ``param_dtype``, ``attention``, ``scan_layers`` and ``remat`` are the caller's.)

    Raises:
      ValueError: an architecture that `Llama` is not.
    """
    only = dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False)
    for key, value in only.items():
        if hf.get(key, value) != value:
            raise ValueError(f"config.json: {key}={hf[key]!r} is not supported, only {value!r}")
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for key in (*sizes, "intermediate_size", "max_position_embeddings", "rms_norm_eps"):
        if key not in hf:
            raise ValueError(f"config.json: {key!r} is missing")
    num_heads = hf["num_attention_heads"]
    # Files written since transformers 5 hold rope_theta and the scaling in one dict.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return dict(
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
        mlp_dim=hf["intermediate_size"],
        max_seq_len=hf["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope),
        norm_eps=hf["rms_norm_eps"],
        tie_embeddings=hf.get("tie_word_embeddings", False),
        init_std=hf.get("initializer_range", 0.02),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise ValueError(f"config.json: rope_type={rope_type!r} is not supported, only 'llama3'")
    return dict(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope["original_max_position_embeddings"],
    )


def config_to_hf(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A Hugging Face ``config.json`` for the arguments of `Llama`; ``dtype`` is that of the tensors.

    The tokens that begin and end a text belong to the tokenizer, so they are null here.
    """
    scaling = config["rope_scaling"]
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        vocab_size=config["vocab_size"],
        hidden_size=config["embed_dim"],
        num_hidden_layers=config["num_layers"],
        num_attention_heads=config["num_heads"],
        num_key_value_heads=config["num_kv_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["mlp_dim"],
        max_position_embeddings=config["max_seq_len"],
        rope_theta=config["rope_theta"],
        rope_scaling=scaling
        and dict(
            rope_type="llama3",
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_position_embeddings=scaling["original_max_seq_len"],
        ),
        rms_norm_eps=config["norm_eps"],
        tie_word_embeddings=config["tie_embeddings"],
        initializer_range=config["init_std"] or 0.02,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_id=None,
        torch_dtype=dtype,
    )


# --- files --------------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARD_BYTES = 2 * 10**9


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a directory with a safetensors file or its shards; each is read when asked for.

    Args:
      weights: name of the file; that of the shards' index is this and ".index.json".

    Raises:
      ValueError: no such files, or a damaged one.
    """

    def __init__(self, directory: str | os.PathLike, weights: str = WEIGHTS):
        self.directory = os.fspath(directory)
        index = f"{weights}.index.json"
        if os.path.exists(self._path(weights)):
            self.file_of = dict.fromkeys(self._open(weights).keys(), weights)
        elif os.path.exists(self._path(index)):
            with open(self._path(index)) as file:
                self.file_of = json.load(file)["weight_map"]
        else:
            raise ValueError(f"{self.directory}: holds neither {weights} nor {index}")

    def __getitem__(self, name: str) -> np.ndarray:
        with self._open(self.file_of[name]) as file:
            try:
                return file.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(f"{self._path(self.file_of[name])}: {error}") from None

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
            raise ValueError(f"{self._path(file)}: {error}") from None


def write_tensors(
    directory: str | os.PathLike,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str,
    max_shard_bytes: int = SHARD_BYTES,
    weights: str = WEIGHTS,
) -> None:
    """Writes tensors in ``dtype`` as the file ``weights``, or as shards and their index.

    One shard is copied (cast, made contiguous) at a time.
    """
    to = jax.numpy.dtype(dtype)  # knows bfloat16, NumPy alone does not
    shards, size = [[]], 0
    for name, tensor in tensors.items():
        size += tensor.size * to.itemsize
        if size > max_shard_bytes and shards[-1]:
            shards.append([])
            size = tensor.size * to.itemsize
        shards[-1].append(name)

    os.makedirs(directory, exist_ok=True)
    weight_map = {}
    for i, names in enumerate(shards):
        file = weights
        if len(shards) > 1:
            stem = weights.removesuffix(".safetensors")
            file = f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            # save_file takes the memory as it lies: a transposed view would be written untransposed.
            {name: np.asarray(tensors[name], to, order="C") for name in names},
            os.path.join(directory, file),
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.size * to.itemsize for tensor in tensors.values())
        index = dict(metadata=dict(total_size=total), weight_map=weight_map)
        with open(os.path.join(directory, f"{weights}.index.json"), "w") as file:
            json.dump(index, file, indent=2, sort_keys=True)
