"""Writes tests/goldens/clip_*.npz: outputs of Hugging Face's and open_clip's CLIP, small and random.

    pip install torch torchvision transformers open_clip_torch numpy
    python tools/make_clip_goldens.py tests/goldens

Each file holds

* ``config``: the model's config.json or open_clip_config.json, as text;
* ``weights/NAME``: every tensor of the state dict. They are stored as float16 to keep the file small; the
  model's float32 weights have exactly these values;
* ``image`` (B, H, W, C): float32, already normalized; ``text`` (B, S): int32;
* ``image_features``, ``text_features`` (B, E): float32 unit vectors;
* ``grads/NAME``: the gradient of the sum of ``image_features @ text_features.T`` weighted by ``weight``
  (B, B), for some weights;
* ``resized`` (open_clip): the position embedding resized to images twice as large.
"""

import json

import numpy as np
import open_clip
import torch
import transformers
from goldens_folder import goldens_folder
from open_clip.model import resize_pos_embed

EOS = 63  # the highest id, as in CLIP's vocabulary
FIRST_EOS = 50  # of the model that pools the first token with this id
HF_VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=20,
    patch_size=5,
)
HF_TEXT = dict(
    vocab_size=64,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=3,
    num_attention_heads=3,
    max_position_embeddings=12,
)
OPEN_CLIP_VISION = dict(layers=2, width=32, head_width=16, mlp_ratio=1.5, patch_size=5, image_size=20)
OPEN_CLIP_TEXT = dict(context_length=12, vocab_size=64, width=24, heads=3, layers=3, mlp_ratio=1.5)


def hf_clip(act: str, eos_token_id: int):
    towers = [
        dict(tower, hidden_act=act, projection_dim=16, attn_implementation="eager")
        for tower in (HF_VISION, HF_TEXT)
    ]
    towers[1] |= dict(eos_token_id=eos_token_id, bos_token_id=0, pad_token_id=1)
    config = transformers.CLIPConfig(vision_config=towers[0], text_config=towers[1], projection_dim=16)
    return transformers.CLIPModel(config), config.to_json_string(use_diff=False)


def hf_siglip():
    config = transformers.SiglipConfig(
        vision_config=HF_VISION, text_config=dict(HF_TEXT, projection_size=32, pad_token_id=1)
    )
    return transformers.SiglipModel(config), config.to_json_string(use_diff=True)


def of_open_clip(quick_gelu: bool, **tower):
    cfg = dict(
        embed_dim=16,
        quick_gelu=quick_gelu,
        vision_cfg=dict(OPEN_CLIP_VISION, **tower),
        text_cfg=dict(OPEN_CLIP_TEXT, **tower),
    )
    return open_clip.CLIP(**cfg), json.dumps(dict(model_cfg=cfg, preprocess_cfg={}))


CASES = {
    "clip_hf_quick_gelu": lambda: hf_clip("quick_gelu", 2),
    "clip_hf_gelu": lambda: hf_clip("gelu", FIRST_EOS),
    "clip_hf_siglip": hf_siglip,
    "clip_open_clip": lambda: of_open_clip(False, ls_init_value=0.1),
    "clip_open_clip_quick_gelu": lambda: of_open_clip(True),
}
GRADS = ("patch_embedding.weight", "conv1.weight", "0.self_attn.k_proj.weight", "0.attn.in_proj_weight")
GRADS += ("token_embedding.weight", "probe", "1.ls_2.gamma", "logit_scale")


def features(model, image_BCHW, text_BS) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(model, open_clip.CLIP):
        return model.encode_image(image_BCHW, True), model.encode_text(text_BS, True)
    out = model(input_ids=text_BS, pixel_values=image_BCHW)
    return out.image_embeds, out.text_embeds


def golden(seed: int, name: str) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    model, config = CASES[name]()
    model.eval()
    with torch.no_grad():
        # Large enough that attention is far from uniform, so that small errors are visible.
        for key, weight in model.named_parameters():
            gain = "norm" in key or "ln_" in key or "gamma" in key
            mean = 1.0 if gain and key.endswith(("weight", "gamma")) else 0.0
            weight.copy_((mean + 0.2 * torch.randn_like(weight)).half().float())
    image_BCHW = torch.randn(4, 3, 20, 20).half().float()
    text_BS = torch.randint(1, 50, (4, 12))
    end_B = torch.tensor([3, 7, 11, 5])
    text_BS[torch.arange(4), end_B] = EOS
    if name == "clip_hf_gelu":
        text_BS[torch.arange(4), end_B] = FIRST_EOS
        text_BS[:, 1] = EOS  # a higher id, which does not end the text
    weight_BB = torch.randn(4, 4)
    image_BE, text_BE = features(model, image_BCHW, text_BS)
    (weight_BB * (image_BE @ text_BE.T)).sum().backward()
    weights = dict(model.named_parameters())
    out = {
        "config": np.array(config),
        "image": image_BCHW.permute(0, 2, 3, 1).numpy().astype(np.float16),
        "text": text_BS.numpy().astype(np.int32),
        "weight": weight_BB.numpy(),
        "image_features": image_BE.detach().numpy(),
        "text_features": text_BE.detach().numpy(),
        **{f"weights/{k}": w.detach().numpy().astype(np.float16) for k, w in weights.items()},
        **{
            f"grads/{k}": w.grad.numpy()
            for k, w in weights.items()
            if k.endswith(GRADS) and w.grad is not None
        },
    }
    if isinstance(model, open_clip.CLIP):
        state = model.state_dict()
        model.visual.grid_size = (8, 8)
        resize_pos_embed(state, model)
        out["resized"] = state["visual.positional_embedding"].numpy()
    return out


if __name__ == "__main__":
    folder = goldens_folder()
    for seed, name in enumerate(CASES):
        np.savez_compressed(f"{folder}/{name}.npz", **golden(seed, name))
