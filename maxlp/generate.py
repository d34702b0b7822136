r"""Continues prompts with a trained Llama.

    python -m maxlp.generate --workdir=/tmp/run --prompt="def " --prompt="class " --max_new_tokens=100

Each --prompt is one row of a batch. The same seed gives the same text, whatever else is in the batch.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from maxlp.data import tokenizers
from maxlp.parallel import sharding
from maxlp.run import cli, run_dir
from maxlp.run.restore import restore_model
from maxlp.run.settings import read_model
from maxlp.run.tokenizer import saved_tokenizer
from maxlp.runtime import distributed


def define_flags() -> None:
    flags.DEFINE_multi_string("prompt", None, "Text to continue; give it several times for a batch.")
    flags.DEFINE_string("workdir", None, "Directory of a run.", required=True)
    flags.DEFINE_integer("step", None, "Checkpoint to use; the newest by default.", lower_bound=0)
    flags.DEFINE_integer("max_new_tokens", 128, "Tokens to add to each prompt.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token.", lower_bound=0.0)
    flags.DEFINE_integer("top_k", 0, "Sample among the k likeliest tokens; 0: all.", lower_bound=0)
    flags.DEFINE_float("top_p", 1.0, "Sample among the likeliest tokens that hold this probability.")
    flags.DEFINE_integer("seed", 0, "Seed of the sampling.")


class Sampling(NamedTuple):
    """How a token is drawn; see `sample`."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


def main() -> None:
    distributed.initialize()
    f = flags.FLAGS
    if not 0 < f.top_p <= 1:
        raise ValueError(f"--top_p={f.top_p} must be above 0 and at most 1")
    workdir, texts = Path(f.workdir), f.prompt or [""]
    c = run_dir.load_config(workdir)
    family, model, _ = read_model(c)
    if family.name != "llama":
        raise ValueError(f"{workdir} holds a {family.name}, which does not generate text")
    tokenizer = tokenizers.make_tokenizer(saved_tokenizer(c.data.tokenizer, workdir))
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
    healed = heal(tokenizer, prompts, model.vocab_size)
    longest = max(map(len, prompts)) + f.max_new_tokens
    if longest > model.max_seq_len:
        raise ValueError(
            f"the longest prompt and --max_new_tokens={f.max_new_tokens} make {longest} tokens, more than "
            f"the model's max_seq_len={model.max_seq_len}"
        )
    mesh = sharding.make_mesh(fsdp=-1)
    with jax.set_mesh(mesh):
        graphdef, state, _ = restore_model(c, workdir, f.step, mesh)
        rows = generate(
            nnx.merge(graphdef, state["params"], state["model_state"]),
            [prompt for prompt, _ in healed],
            first=np.stack([allowed_V for _, allowed_V in healed]),
            max_new_tokens=f.max_new_tokens,
            sampling=Sampling(f.temperature, f.top_k, f.top_p),
            seed=f.seed,
            eos_id=tokenizer.eos_id,
        )
    for (prompt, _), row in zip(healed, rows, strict=True):
        distributed.print_primary(f"{'─' * 80}\n{tokenizer.decode(prompt + row)}")


def heal(
    tokenizer: tokenizers.Tokenizer, prompts: list[list[int]], vocab_size: int
) -> list[tuple[list[int], np.ndarray]]:
    """Each prompt without its last token, and the tokens (V,) that may follow: those that begin like it.

    A prompt may end in the middle of what is one token to the model: "def " ends in a space, which in the
    training text belongs to the name that follows.
    """
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    healed = []
    for prompt in prompts:
        allowed_V = np.ones(vocab_size, bool)
        if len(prompt) > 1 and pieces[prompt[-1]]:
            last = pieces[prompt[-1]]
            allowed_V[: len(pieces)] = [piece.startswith(last) for piece in pieces]
            allowed_V[len(pieces) :] = False
            prompt = prompt[:-1]
        healed.append((prompt, allowed_V))
    return healed


def generate(
    model: nnx.Module,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    eos_id: int | None = None,
    first: np.ndarray | None = None,
) -> list[list[int]]:
    """New tokens for each prompt, up to and without ``eos_id``.

    Args:
      prompts: token ids, at least one each; they may differ in length.
      seed: row i draws with a key of its own, so its text depends on no other row.
      first: bool (B, V), the tokens that each row may begin with; None allows all.
    """
    lengths_B = np.array([len(p) for p in prompts], np.int32)
    width = -(-lengths_B.max() // 32) * 32  # few different shapes, few compilations
    tokens_BS = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens_BS, prompts, strict=True):
        row[: len(prompt)] = prompt
    stop = -1 if eos_id is None else eos_id
    graphdef, state = nnx.split(model)
    values = nnx.to_pure_dict(state)
    rows = np.asarray(
        _generate(graphdef, values, tokens_BS, lengths_B, first, seed, stop, sampling, max_new_tokens)
    ).tolist()
    return [row[: row.index(stop)] if stop in row else row for row in rows]


@functools.partial(jax.jit, static_argnames=("graphdef", "sampling", "new"))
def _generate(graphdef, state, tokens_BS, lengths_B, first_BV, seed, stop, sampling, new):
    def model() -> Any:
        # Merged anew for each use, so that amax histories stay as training left them.
        return nnx.merge(graphdef, state)

    B, S = tokens_BS.shape
    keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(B))

    def draw(i, x_B1D, allowed_BV=None):
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, i)
        logits_BV = model().logits(x_B1D)[:, 0]
        if allowed_BV is not None:
            logits_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
        return jax.vmap(lambda key, logits_V: sample(key, logits_V, sampling))(keys, logits_BV)

    # All prompts at once. The cache slots after a short prompt hold keys of padding that nothing attends
    # to: slot t holds position t, and a new token overwrites the slot of its position before it attends.
    positions_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
    x_BSD, cache = model().hidden(tokens_BS, positions_BS, cache=model().init_cache(B, S + new))
    first_B = draw(0, jnp.take_along_axis(x_BSD, (lengths_B - 1)[:, None, None], axis=1), first_BV)
    out_BN = jnp.full((B, new), stop, jnp.int32).at[:, 0].set(first_B)

    def unfinished(carry):
        i, token_B, ended_B, _, _ = carry
        return (i < new) & ~jnp.all(ended_B | (token_B == stop))

    def body(carry):
        i, token_B, ended_B, cache, out_BN = carry
        ended_B |= token_B == stop
        x_B1D, cache = model().hidden(token_B[:, None], (lengths_B + i - 1)[:, None], cache=cache)
        token_B = jnp.where(ended_B, stop, draw(i, x_B1D))
        return i + 1, token_B, ended_B, cache, out_BN.at[:, i].set(token_B)

    start = (1, first_B, jnp.zeros(B, bool), cache, out_BN)
    return jax.lax.while_loop(unfinished, body, start)[-1]


def sample(key: jax.Array, logits_V: jax.Array, sampling: Sampling) -> jax.Array:
    """One token id from float32 logits.

    ``temperature`` divides the logits, 0 takes the largest. ``top_k`` keeps the k largest, 0 keeps all.
    ``top_p`` keeps the fewest of the largest that hold this probability, after temperature and top_k
    (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751).
    """
    temperature, top_k, top_p = sampling
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    logits_V = logits_V / temperature
    if 0 < top_k < logits_V.size:
        logits_V = jnp.where(logits_V < jax.lax.top_k(logits_V, top_k)[0][-1], -jnp.inf, logits_V)
    if top_p < 1:
        sorted_V = jnp.sort(logits_V, descending=True)
        probability_V = jax.nn.softmax(sorted_V)
        before_V = jnp.cumsum(probability_V) - probability_V
        least = jnp.min(jnp.where(before_V < top_p, sorted_V, jnp.inf))
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
