"""CLIP weights of Hugging Face and of open_clip, in and out: tables of names, and the tensors.

What differs between the worlds, and all that differs: kernels are (in, out) here and (out, in) there (but
for open_clip's projections), a leaf of ``layers`` here is a stack of the tensors of every layer there, a
patch embedding is a matmul here and a convolution there, and some keep q, k and v as the rows of one
tensor.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from maxlp.families.clip.model import CLIP
from maxlp.families.clip.vit import resize_pos_embed

Array = np.ndarray


class Place(NamedTuple):
    """Where a leaf is: the name of their tensor ("{}" is the layer), what turns one into the other
    (a key of `TURNS`), and which third of their tensor's rows it is (None: all)."""

    name: str
    turn: str = "same"
    third: int | None = None


def _conv_to_kernel(conv_OIpp: Array) -> Array:
    return conv_OIpp.transpose(2, 3, 1, 0).reshape(-1, len(conv_OIpp))


def _kernel_to_conv(kernel: Array) -> Array:
    size = math.isqrt(len(kernel) // 3)
    return kernel.reshape(size, size, 3, -1).transpose(3, 2, 0, 1)


TURNS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {  # to ours, to theirs
    "same": (lambda x: x, lambda x: x),
    "kernel": (lambda x: x.T, lambda x: x.T),
    "conv": (_conv_to_kernel, _kernel_to_conv),
    "number": (lambda x: x.reshape(()), lambda x: x),
    "vector of one": (lambda x: x.reshape(()), lambda x: x.reshape(1)),
    "row": (lambda x: x[0], lambda x: x[None]),
}


class Layout(NamedTuple):
    """Names of the modules (whose kernel or scale is their weight), and of leaves that are an exception."""

    modules: dict[str, str]
    leaves: dict[str, Place]


def _blocks(ours: str, theirs: str, table: dict[str, str]) -> dict[str, str]:
    return {f"{ours}/layers/{path}": f"{theirs}.{{}}.{name}" for path, name in table.items()}


def _joint_qkv(ours: str, theirs: str) -> dict[str, Place]:
    """Places of q, k and v in PyTorch's MultiheadAttention."""
    places = {}
    for third, name in enumerate(("q_proj", "k_proj", "v_proj")):
        places[f"{ours}/{name}/kernel"] = Place(f"{theirs}.in_proj_weight", "kernel", third)
        places[f"{ours}/{name}/bias"] = Place(f"{theirs}.in_proj_bias", "same", third)
    return places


_HF_BLOCK = {
    "attn_norm": "layer_norm1",
    "attn/q_proj": "self_attn.q_proj",
    "attn/k_proj": "self_attn.k_proj",
    "attn/v_proj": "self_attn.v_proj",
    "attn/o_proj": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "mlp/up_proj": "mlp.fc1",
    "mlp/down_proj": "mlp.fc2",
}
_OPEN_CLIP_BLOCK = {
    "attn_norm": "ln_1",
    "attn/o_proj": "attn.out_proj",
    "mlp_norm": "ln_2",
    "mlp/up_proj": "mlp.c_fc",
    "mlp/down_proj": "mlp.c_proj",
}
_HF_TOWERS = {
    "visual/patch_embed": "vision_model.embeddings.patch_embedding",
    "visual/final_norm": "vision_model.post_layernorm",
    "text/tok_embed": "text_model.embeddings.token_embedding",
    "text/final_norm": "text_model.final_layer_norm",
    **_blocks("visual", "vision_model.encoder.layers", _HF_BLOCK),
    **_blocks("text", "text_model.encoder.layers", _HF_BLOCK),
}
_HF_LEAVES = {
    "visual/patch_embed/kernel": Place("vision_model.embeddings.patch_embedding.weight", "conv"),
    "visual/pos_embed": Place("vision_model.embeddings.position_embedding.weight"),
    "text/pos_embed": Place("text_model.embeddings.position_embedding.weight"),
}

LAYOUTS: dict[str, Layout] = {
    "hf_clip": Layout(
        modules=_HF_TOWERS
        | {
            "visual/pre_norm": "vision_model.pre_layrnorm",  # their spelling
            "visual/proj": "visual_projection",
            "text/proj": "text_projection",
        },
        leaves=_HF_LEAVES
        | {
            "visual/class_embed": Place("vision_model.embeddings.class_embedding"),
            "logit_scale": Place("logit_scale", "number"),
        },
    ),
    "hf_siglip": Layout(
        modules=_HF_TOWERS
        | {
            "visual/map_pool/attn/o_proj": "vision_model.head.attention.out_proj",
            "visual/map_pool/mlp_norm": "vision_model.head.layernorm",
            "visual/map_pool/mlp/up_proj": "vision_model.head.mlp.fc1",
            "visual/map_pool/mlp/down_proj": "vision_model.head.mlp.fc2",
            "text/proj": "text_model.head",
        },
        leaves=_HF_LEAVES
        | _joint_qkv("visual/map_pool/attn", "vision_model.head.attention")
        | {
            "visual/map_pool/probe": Place("vision_model.head.probe", "row"),
            "logit_scale": Place("logit_scale", "vector of one"),
            "logit_bias": Place("logit_bias", "vector of one"),
        },
    ),
    "open_clip": Layout(
        modules={
            "visual/pre_norm": "visual.ln_pre",
            "visual/final_norm": "visual.ln_post",
            "text/tok_embed": "token_embedding",
            "text/final_norm": "ln_final",
            **_blocks("visual", "visual.transformer.resblocks", _OPEN_CLIP_BLOCK),
            **_blocks("text", "transformer.resblocks", _OPEN_CLIP_BLOCK),
        },
        leaves={
            **_joint_qkv("visual/layers/attn", "visual.transformer.resblocks.{}.attn"),
            **_joint_qkv("text/layers/attn", "transformer.resblocks.{}.attn"),
            "visual/layers/attn_scale/scale": Place("visual.transformer.resblocks.{}.ls_1.gamma"),
            "visual/layers/mlp_scale/scale": Place("visual.transformer.resblocks.{}.ls_2.gamma"),
            "text/layers/attn_scale/scale": Place("transformer.resblocks.{}.ls_1.gamma"),
            "text/layers/mlp_scale/scale": Place("transformer.resblocks.{}.ls_2.gamma"),
            "visual/patch_embed/kernel": Place("visual.conv1.weight", "conv"),
            "visual/class_embed": Place("visual.class_embedding"),
            "visual/pos_embed": Place("visual.positional_embedding"),
            "visual/proj/kernel": Place("visual.proj"),
            "text/pos_embed": Place("positional_embedding"),
            "text/proj/kernel": Place("text_projection"),
            "logit_scale": Place("logit_scale", "number"),
            "logit_bias": Place("logit_bias", "number"),
        },
    ),
}


# --- tensors ------------------------------------------------------------------------------------------


def to_maxlp(tensors: Mapping[str, Array], config: Mapping[str, Any], layout: str) -> dict:
    """Parameters from their tensors, of which one at a time is read.

    Args:
      tensors: name to array, as in the state dict of their model. The names of an open_clip text tower may
        begin with "text.".
      config: all keyword arguments of `CLIP`; the parameters get its ``param_dtype``.
      layout: a key of `LAYOUTS`.

    Returns:
      The nested dict of NumPy arrays that ``nnx.state(model, nnx.Param)`` has for this config.

    Raises:
      ValueError: a missing or unknown tensor or a wrong shape, with the tensor's name.
    """
    stored = {name.removeprefix("text.") if layout == "open_clip" else name: name for name in tensors}
    leaves = flatten_mapping(_abstract_params(config), sep="/")
    wanted = {name for path, leaf in leaves.items() for _, name in _parts(layout, path, leaf.shape)}
    if missing := sorted(wanted - set(stored)):
        raise ValueError(f"tensor {missing[0]!r} is missing{_and_more(missing)}")
    if unknown := sorted(name for name in set(stored) - wanted if not _is_derived(name)):
        raise ValueError(f"tensor {unknown[0]!r} has no place in this model{_and_more(unknown)}")
    params = {}
    for path, leaf in leaves.items():
        place = _place(layout, path)
        params[path] = np.empty(leaf.shape, leaf.dtype)
        for index, name in _parts(layout, path, leaf.shape):
            theirs, ours = tensors[stored[name]], params[path][index]
            try:
                part = theirs if place.third is None else np.split(theirs, 3)[place.third]
                value = TURNS[place.turn][0](part)
            except (ValueError, IndexError):  # of another rank
                value = None
            if value is None or value.shape != ours.shape:
                raise ValueError(
                    f"tensor {name!r} of shape {theirs.shape} does not fit {path} of shape {ours.shape}"
                )
            ours[...] = value
    return unflatten_mapping(params, sep="/")


def to_theirs(params: Mapping[str, Any], layout: str) -> dict[str, Array]:
    """Their tensors from parameters: views where that is possible.

    Raises:
      ValueError: a parameter for which the layout has no name.
    """
    tensors: dict[str, Any] = {}
    for path, leaf in flatten_mapping(params, sep="/").items():
        place = _place(layout, path)
        for index, name in _parts(layout, path, leaf.shape):
            value = TURNS[place.turn][1](np.asarray(leaf)[index])
            if place.third is None:
                tensors[name] = value
            else:
                tensors.setdefault(name, [None] * 3)[place.third] = value
    return {name: np.concatenate(t) if isinstance(t, list) else t for name, t in tensors.items()}


def resized(params: dict, config: Mapping[str, Any], image_size: int) -> tuple[dict, dict[str, Any]]:
    """Parameters and config for images of another size: the positions are resized as open_clip does it."""
    visual = dict(config["visual"], image_size=image_size)
    pos_SD = params["visual"]["pos_embed"]
    grid_SD = resize_pos_embed(
        jax.numpy.asarray(pos_SD, np.float32),
        (image_size // visual["patch_size"]) ** 2,
        first=int(visual["pool"] == "cls"),
    )
    params = dict(params, visual=dict(params["visual"], pos_embed=np.asarray(grid_SD, pos_SD.dtype)))
    return params, dict(config, visual=visual)


def _place(layout: str, path: str) -> Place:
    table = LAYOUTS[layout]
    if path in table.leaves:
        return table.leaves[path]
    module, _, leaf = path.rpartition("/")
    if module not in table.modules:
        raise ValueError(f"parameter {path!r} has no place in the weights of {layout}")
    name = f"{table.modules[module]}.{'bias' if leaf == 'bias' else 'weight'}"
    return Place(name, "kernel" if leaf == "kernel" else "same")


def _parts(layout: str, path: str, shape: tuple[int, ...]) -> list[tuple[Any, str]]:
    """For each tensor that a leaf comes from: the index at which the leaf holds it, and its name."""
    name = _place(layout, path).name
    return [(i, name.format(i)) for i in range(shape[0])] if "{}" in name else [(..., name)]


def _is_derived(name: str) -> bool:
    """Whether a tensor only repeats what the config says (some files hold such copies)."""
    return name.endswith("position_ids") or name == "attn_mask"


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _abstract_params(config: Mapping[str, Any]) -> dict:
    def init() -> dict:
        return nnx.to_pure_dict(nnx.state(CLIP(**config, rngs=nnx.Rngs(0)), nnx.Param))

    return jax.eval_shape(init)
