"""What the config files of Qwen3 share."""

from ml_collections import ConfigDict

from maxlp.families.llama.presets import llama


def qwen3(**sizes) -> ConfigDict:
    """The config of a Qwen3 run; presets set sizes, lengths and rates.

    The numbers are those of the published ``config.json`` files (Qwen/Qwen3-0.6B and so on).
    """
    model = dict(
        name="qwen3",
        vocab_size=151936,
        num_kv_heads=8,
        head_dim=128,
        max_seq_len=40960,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=True,
        tie_embeddings=True,
    )
    return llama(**model | sizes)
