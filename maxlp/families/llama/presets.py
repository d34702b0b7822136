"""What the config files of Llama share."""

from ml_collections import ConfigDict, config_dict

from maxlp.run.presets import sections, unset

FINE_TUNING = {  # of runs that start from weights: 1,000 steps of 16,384 tokens at a low rate
    "data.packing": "first_fit",  # conversations are not cut
    "data.seq_len": 2048,
    "data.batch_size": 8,
    "optimizer.learning_rate": 1e-5,
    "optimizer.warmup_steps": 50,
    "optimizer.weight_decay": 0.0,
    "train.total_steps": 1000,
    "train.eval_every": 100,
    "checkpoint.every_steps": 200,
}


def llama(**sizes) -> ConfigDict:
    """The config of a Llama run; presets set sizes, lengths and rates."""
    c = sections(
        model=dict(
            name="llama",
            vocab_size=128256,
            rope_theta=500000.0,
            rope_scaling=unset(
                factor=float, low_freq_factor=float, high_freq_factor=float, original_max_seq_len=int
            ),
            max_seq_len=8192,
            norm_eps=1e-5,
            qk_norm=False,
            logit_soft_cap=config_dict.placeholder(float),
            qk_clip=config_dict.placeholder(float),
            tie_embeddings=False,
            init_std=0.02,
            dtype="bfloat16",
            param_dtype="float32",
            attention="auto",  # the platform's kernel: nn.attention.choose
            scan_layers=True,
            remat="block",
            pipeline=dict(microbatches=config_dict.placeholder(int), rounds=1),  # on mesh.stage > 1
        ),
        data=dict(
            source=config_dict.placeholder(str),  # e.g. "array_record:/data/c4", "text:/data/**/*.txt"
            tokenizer=config_dict.placeholder(str),  # "bytes", or a tokenizer.json or .model file
            seq_len=8192,
            batch_size=512,
            packing="concat",
            max_documents=config_dict.placeholder(int),  # in a row; model.attention=cudnn needs a bound
            shuffle=config_dict.placeholder(bool),
            shuffle_tokens=config_dict.placeholder(int),
            num_epochs=config_dict.placeholder(int),  # unset: repeats forever
            num_workers=0,
        ),
        loss=dict(num_chunks=8, z_loss=0.0),
    )
    c.model.update(sizes)
    return c


# Llama 3.1 stretches the rotary wavelengths by 8 beyond the 8192 positions of Llama 3; 3.2 by 32.
LLAMA_3_1_ROPE = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
LLAMA_3_2_ROPE = dict(LLAMA_3_1_ROPE, factor=32.0)

LLAMA_3_2_1B = dict(
    embed_dim=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    mlp_dim=8192,
    rope_scaling=LLAMA_3_2_ROPE,
    max_seq_len=131072,
    tie_embeddings=True,
)


def llama_c4(steps: int, learning_rate: float, **sizes) -> ConfigDict:
    """The C4 pre-training runs of GaLore (arXiv:2403.03507, section 5.1 and appendix C).

    131 072 tokens a step in sequences of 256, warm-up over 10 % of the steps, cosine to 10 %.
    """
    c = llama(vocab_size=32000, rope_theta=10000.0, max_seq_len=1024, norm_eps=1e-6, remat="none", **sizes)
    c.data.seq_len = 256
    c.data.batch_size = 512
    c.loss.num_chunks = 1
    c.optimizer.learning_rate = learning_rate
    c.optimizer.warmup_steps = steps // 10
    c.optimizer.weight_decay = 0.0
    c.optimizer.b2 = 0.999
    c.train.total_steps = steps
    return c
