"""A tiny random Llama as a folder that Hugging Face's libraries read, and runs that start from weights."""

import json
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from maxlp.data.tokenizers import make_tokenizer
from maxlp.data.tokenizers.training import train_bpe
from maxlp.families import weights
from maxlp.families.llama import hf
from maxlp.families.llama.model import Llama
from maxlp.run import pretrained, run_dir
from maxlp.run.experiment import resolve
from maxlp.run.tokenizer import prepare_tokenizer
from maxlp.runtime.checkpoint import Checkpointer
from maxlp.runtime.safetensors import write_tensors
from tests.fixtures import llama_config
from tests.run.fixtures import changed, load

TEXTS = ["to be or not to be, that is the question"] * 10
TOKENS = 270


def write_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes the folder, and returns it. The model has the sizes of `fixtures.LLAMA` with these changes.

    Args:
      seed: of the weights.
    """
    config = llama_config(**dict(vocab_size=TOKENS, tie_embeddings=True) | changes)
    params = jax.device_get(nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(seed)), nnx.Param)))
    write_tensors(folder, weights.to_other(params, hf.LAYOUT), dtype=config.param_dtype)
    (folder / "config.json").write_text(json.dumps(hf.config_to_hf(config)))
    (folder / "tokenizer.json").write_bytes(train_bpe(TEXTS, TOKENS).files["tokenizer.json"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


def configured(workdir: Path, source: Any, swap: str | None = None, **overrides: Any):
    """The config of ``train --from=SOURCE`` with the debug config and these flags."""
    overrides = {key.replace("__", "."): value for key, value in overrides.items()}
    c = changed(load("debug"), {"data.seq_len": 32} | overrides)
    return pretrained.configure(c, workdir, str(source), swap, overrides)


def save_run(workdir: Path, c, change=lambda state: state, step: int = 3) -> None:
    """A run at a step, as training would leave it, with some change of its initial state."""
    workdir.mkdir(parents=True, exist_ok=True)
    run = resolve(c, jax.devices()[:1])
    prepare_tokenizer(run.settings, workdir)
    with jax.set_mesh(run.mesh), Checkpointer(workdir / "checkpoints", every_steps=1) as checkpoints:
        _, abstract = run.abstract_state()
        state = change(run.initial_state(abstract, workdir))
        fingerprint = make_tokenizer(str(workdir / "tokenizer.json")).fingerprint
        checkpoints.save(step, state, {"settings": {"tokenizer": fingerprint}})
    run_dir.record_launch(workdir, c, 0, 1)
