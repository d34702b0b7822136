"""CLIP's tensors in the formats of Hugging Face and open_clip: tables of names.

Shape letters: S positions · D embed.
"""

import dataclasses

import jax
import numpy as np

from maxlp.families.clip.model import MAX_LOGIT_SCALE, CLIPConfig
from maxlp.families.clip.vit import resize_pos_embed
from maxlp.families.weights import (
    PATCH_CONV,
    ROW,
    SAME,
    SCALAR,
    TRANSPOSED,
    VECTOR_OF_ONE,
    Layout,
    Place,
    Transform,
)


def _blocks(path: str, name: str, table: dict[str, str]) -> dict[str, str]:
    return {f"{path}/layers/{module}": f"{name}.{{}}.{other}" for module, other in table.items()}


def _joint_qkv(path: str, name: str) -> dict[str, Place]:
    """Places of q, k and v in PyTorch's MultiheadAttention, which has one tensor for the three."""
    places = {}
    for third, module in enumerate(("q_proj", "k_proj", "v_proj")):
        places[f"{path}/{module}/kernel"] = Place(f"{name}.in_proj_weight", TRANSPOSED, third)
        places[f"{path}/{module}/bias"] = Place(f"{name}.in_proj_bias", SAME, third)
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
    "visual/patch_embed/kernel": Place("vision_model.embeddings.patch_embedding.weight", PATCH_CONV),
    "visual/pos_embed": Place("vision_model.embeddings.position_embedding.weight"),
    "text/pos_embed": Place("text_model.embeddings.position_embedding.weight"),
}

HF_CLIP = Layout(
    modules=_HF_TOWERS
    | {
        "visual/pre_norm": "vision_model.pre_layrnorm",  # [sic]
        "visual/proj": "visual_projection",
        "text/proj": "text_projection",
    },
    leaves=_HF_LEAVES
    | {
        "visual/class_embed": Place("vision_model.embeddings.class_embedding"),
        "logit_scale": Place("logit_scale", SCALAR),
    },
    ignored=("*.position_ids",),
)

HF_SIGLIP = Layout(
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
        "visual/map_pool/probe": Place("vision_model.head.probe", ROW),
        "logit_scale": Place("logit_scale", VECTOR_OF_ONE),
        "logit_bias": Place("logit_bias", VECTOR_OF_ONE),
    },
    ignored=("*.position_ids",),
)

OPEN_CLIP = Layout(
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
        "visual/patch_embed/kernel": Place("visual.conv1.weight", PATCH_CONV),
        "visual/class_embed": Place("visual.class_embedding"),
        "visual/pos_embed": Place("visual.positional_embedding"),
        "visual/proj/kernel": Place("visual.proj"),
        "text/pos_embed": Place("positional_embedding"),
        "text/proj/kernel": Place("text_projection"),
        "logit_scale": Place("logit_scale", SCALAR),
        "logit_bias": Place("logit_bias", SCALAR),
    },
    optional_prefix="text.",  # of the text tower in models with "custom_text"
    ignored=("attn_mask", "*.position_ids"),
)


def of_model(layout: Layout, config: CLIPConfig) -> Layout:
    """The layout, which exports no text position from ``max_len`` on, and caps the scale of the logits.

    `CLIP.scale_and_bias` caps it in every forward pass (without a bias); other libraries do not.
    """
    leaves = dict(layout.leaves)
    text_len = config.text.max_len
    positions = Transform(lambda x: x, lambda x: x[:text_len])
    leaves["text/pos_embed"] = leaves["text/pos_embed"]._replace(transform=positions)
    if config.logit_bias is None:
        capped = Transform(SCALAR.to_maxlp, lambda x: np.minimum(x, MAX_LOGIT_SCALE))
        leaves["logit_scale"] = leaves["logit_scale"]._replace(transform=capped)
    return layout._replace(leaves=leaves)


def resize(params: dict, config: CLIPConfig, image_size: int) -> tuple[dict, CLIPConfig]:
    """Parameters and config for another image size; interpolates position embeddings like open_clip."""
    visual = dataclasses.replace(config.visual, image_size=image_size)
    pos_SD = params["visual"]["pos_embed"]
    new_SD = resize_pos_embed(
        jax.numpy.asarray(pos_SD, np.float32), visual.num_patches, first=visual.class_tokens
    )
    params = dict(params, visual=dict(params["visual"], pos_embed=np.asarray(new_SD, pos_SD.dtype)))
    return params, dataclasses.replace(config, visual=visual)
