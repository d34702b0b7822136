"""What the config files of CLIP and SigLIP share."""

import math

from ml_collections import ConfigDict, config_dict

from maxlp.run.presets import sections


def _clip_size(embed_dim: int, patch_size: int, visual: tuple, text: tuple) -> dict:
    keys = ("width", "num_layers", "num_heads", "mlp_dim")
    return dict(
        embed_dim=embed_dim,
        visual=dict(zip(keys, visual, strict=True), patch_size=patch_size),
        text=dict(zip(keys, (*text, 4 * text[0]), strict=True)),
    )


# Of open_clip: joint dim, patch, image (width, layers, heads, mlp), text (width, layers, heads).
CLIP_SIZES = {
    "s32": _clip_size(384, 32, (384, 12, 6, 1536), (384, 12, 6)),
    "b32": _clip_size(512, 32, (768, 12, 12, 3072), (512, 12, 8)),
    "b16": _clip_size(512, 16, (768, 12, 12, 3072), (512, 12, 8)),
    "l14": _clip_size(768, 14, (1024, 24, 16, 4096), (768, 12, 12)),
    "h14": _clip_size(1024, 14, (1280, 32, 16, 5120), (1024, 24, 16)),
    "g14": _clip_size(1024, 14, (1408, 40, 16, 6144), (1024, 24, 16)),
    "bigG14": _clip_size(1280, 14, (1664, 48, 16, 8192), (1280, 32, 20)),
}


def clip(**sizes) -> ConfigDict:
    """The config of a CLIP run; presets set sizes, lengths and rates.

    Args:
      sizes: keys of the ``model`` section (`CLIP_SIZES` has sets of them); those of ``visual`` and ``text``
        are merged into the defaults below.
    """
    c = sections(
        model=dict(
            name="clip",
            embed_dim=512,
            visual=dict(
                image_size=224,
                pool="cls",
                pre_norm=True,
                patch_bias=False,
                proj=True,
                patch_dropout=0.0,
            ),
            text=dict(
                vocab_size=49408,  # CLIP's BPE
                max_len=77,
                causal=True,
                pool="argmax",
                eos_id=config_dict.placeholder(int),
                proj_bias=False,
            ),
            act="gelu",
            norm_eps=1e-5,
            layer_scale=config_dict.placeholder(float),
            qk_norm=False,
            init="clip",
            logit_scale=math.log(1 / 0.07),
            logit_bias=config_dict.placeholder(float),
            image_mean=(0.48145466, 0.4578275, 0.40821073),  # OpenAI's
            image_std=(0.26862954, 0.26130258, 0.27577711),
            image_resize="shortest",  # or "squash": the whole image, without its proportions
            image_interpolation="bicubic",
            dtype="bfloat16",
            param_dtype="float32",
            attention="auto",  # the platform's kernel: nn.attention.choose
            scan_layers=True,
            remat="block",
        ),
        data=dict(
            source=config_dict.placeholder(str),  # e.g. "tar:/data/laion/{00000..41455}.tar"
            validation_source="",  # e.g. "tfds:imagenet2012?data_dir=/data/tfds"; if empty, part of source
            tokenizer=config_dict.placeholder(str),  # of CLIP's 49408 tokens
            classes="",  # a file of names for labels that have none
            image_size=224,
            text_len=77,
            lowercase=False,  # CLIP's tokenizer does it itself
            batch_size=32768,
            crop_scale=config_dict.placeholder(tuple),
            templates=config_dict.placeholder(tuple),
            templates_file=config_dict.placeholder(str),  # with one per line
            max_pixels=config_dict.placeholder(int),
            num_threads=config_dict.placeholder(int),
            max_broken=100,  # examples that a process skips before it stops
            num_epochs=config_dict.placeholder(int),  # unset: repeats forever
            num_workers=0,
        ),
        loss=dict(kind="softmax", method="tiled", tile_size=4096),
    )
    c.model.update(sizes)
    # open_clip's settings for these sizes.
    c.optimizer.update(
        dict(
            learning_rate=5e-4,
            warmup_steps=10_000,
            final_lr_fraction=0.0,
            clip_norm=0.0,
            weight_decay=0.2,
            decay_embeddings=True,
            b1=0.9,
            b2=0.98,
            eps=1e-6,
        )
    )
    return c


def siglip(**sizes) -> ConfigDict:
    """As `clip`, for a SigLIP (Zhai et al. 2023, arXiv:2303.15343): a sigmoid loss over single pairs."""
    c = clip(
        visual=dict(pool="map", pre_norm=False, patch_bias=True, proj=False),
        text=dict(vocab_size=32000, max_len=64, causal=False, pool="last", proj_bias=True),
        act="gelu_tanh",
        norm_eps=1e-6,
        init="siglip",
        logit_scale=math.log(10),
        logit_bias=-10.0,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        image_resize="squash",
    )
    c.model.update(sizes)
    c.optimizer.update(dict(learning_rate=1e-3, weight_decay=1e-4, decay_embeddings=False, b2=0.95))
    c.data.update(dict(text_len=64, lowercase=True))
    c.loss.kind = "sigmoid"
    return c
