r"""Continues prompts with a language model, or answers in a chat.

    python -m maxlp.generate --workdir=/tmp/run --max_new_tokens=100 \
        --prompt="def " --prompt="class "
    python -m maxlp.generate --workdir=/tmp/run --chat

Each --prompt is one row of a batch. The same seed gives a row the same text,
whatever the other rows are.

--chat reads a message per line from standard input, a terminal or a file, and
answers with the template of the run's tokenizer. /reset forgets the
conversation; /quit, or the end of the input, ends it.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from maxlp import schema
from maxlp.data import tokenizers
from maxlp.data.chat import Messages, make_chat
from maxlp.nn.decoding import Sampling, generate
from maxlp.parallel import sharding
from maxlp.run import cli
from maxlp.run.language_model import LanguageModel
from maxlp.runtime import distributed, files
from maxlp.schema import Seed


def define_flags() -> None:
    # absl appends "; repeat this option …".
    prompt = "Text to continue, a row of the batch; without it, the model begins a text"
    flags.DEFINE_multi_string("prompt", None, prompt)
    flags.DEFINE_bool("chat", False, "Answer messages from standard input, one per line.")
    flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
    flags.DEFINE_integer("step", None, "Checkpoint to use; the newest by default.", lower_bound=0)
    flags.DEFINE_integer("max_new_tokens", 128, "Tokens to add to each prompt.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0 takes the most likely token.")
    flags.DEFINE_integer("top_k", 0, "Sample from the k most likely tokens; 0: from all.")
    flags.DEFINE_float("top_p", 1.0, "Sample from the fewest tokens with this total probability.")
    flags.DEFINE_integer("seed", 0, "Seed of the random sampling.")


def main() -> None:
    distributed.initialize()
    f = flags.FLAGS
    schema.check_value("--seed", f.seed, Seed)
    try:
        sampling = Sampling(f.temperature, f.top_k, f.top_p)
    except ValueError as error:
        raise ValueError(f"--{error}") from error
    if f.chat and f.prompt:
        raise ValueError("--chat reads its messages from standard input; drop --prompt")
    language = LanguageModel(files.local_path(f.workdir, "--workdir"))
    mesh = sharding.make_mesh(fsdp=-1)
    with jax.set_mesh(mesh):
        if f.chat:
            chat(language, mesh, sampling)
        else:
            continue_prompts(language, mesh, sampling)


def continue_prompts(language: LanguageModel, mesh: Mesh, sampling: Sampling) -> None:
    """Prints each --prompt with its continuation."""
    f, tokenizer = flags.FLAGS, language.tokenizer
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in f.prompt or [""]]
    healed = heal(tokenizer, prompts, language.model.vocab_size)
    longest = max(map(len, prompts)) + f.max_new_tokens
    if longest > language.model.max_seq_len:
        raise ValueError(
            f"the longest prompt and --max_new_tokens={f.max_new_tokens} have {longest} tokens, more than "
            f"model.max_seq_len={language.model.max_seq_len}; shorten the prompt or lower --max_new_tokens"
        )
    rows = generate(
        language.restore(f.step, mesh),
        [prompt for prompt, _ in healed],
        allowed_first=np.stack([allowed_V for _, allowed_V in healed]),
        max_new_tokens=f.max_new_tokens,
        sampling=sampling,
        seed=f.seed,
        eos_id=tokenizer.eos_id,
    )
    for (prompt, _), row in zip(healed, rows, strict=True):
        distributed.print_primary(f"{'─' * 80}\n{tokenizer.decode(prompt + row)}")


def heal(
    tokenizer: tokenizers.Tokenizer, prompts: list[list[int]], vocab_size: int
) -> list[tuple[list[int], np.ndarray]]:
    """Token healing: removes the last token of each prompt and constrains the first new token instead.

    A prompt may end inside what is a single token in the training text: "def " ends in a space that the
    tokenizer joins with the name after it.

    Returns:
      for each prompt, the tokens that remain, and bool allowed_V: the tokens whose text starts with that of
      the removed token.
    """
    # Not their `decode`, which drops the space before a single piece of SentencePiece.
    pieces = tokenizer.tokens[:vocab_size]
    healed = []
    for prompt in prompts:
        allowed_V = np.ones(vocab_size, bool)
        if len(prompt) > 1 and pieces[prompt[-1]]:
            last = pieces[prompt[-1]]
            allowed_V[:] = False
            allowed_V[: len(pieces)] = [piece.startswith(last) for piece in pieces]
            prompt = prompt[:-1]
        healed.append((prompt, allowed_V))
    return healed


def chat(language: LanguageModel, mesh: Mesh, sampling: Sampling) -> None:
    """Answers messages from standard input."""
    if jax.process_count() > 1:
        raise ValueError(f"--chat runs in one process, not in {jax.process_count()}")
    f, template = flags.FLAGS, make_chat(language.tokenizer, language.tokenizer_spec)
    model, longest = language.restore(f.step, mesh), language.model.max_seq_len

    def answer(messages: Messages) -> str:
        prompt = template.prompt(messages)
        room = longest - len(prompt)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, and the model reads {longest}; /reset"
            )
        [row] = generate(
            model,
            [prompt],
            max_new_tokens=min(room, f.max_new_tokens),
            sampling=sampling,
            seed=f.seed + len(messages) // 2,  # another one for each answer
            eos_id=template.end_id,
        )
        return language.tokenizer.decode(row)

    converse(answer)


def converse(answer: Callable[[Messages], str]) -> None:
    """Reads messages, one per line, and prints their answers, until the input ends."""
    sys.stdin.reconfigure(errors="surrogateescape")  # a line in another encoding must not end the chat
    messages: Messages = []
    for line in _lines("> " if sys.stdin.isatty() else ""):
        if line == "/reset":
            messages = []
        elif line:
            try:
                _check_text(line)
                text = answer([*messages, {"role": "user", "content": line}])
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            print(text, flush=True)
            messages += [{"role": "user", "content": line}, {"role": "assistant", "content": text}]


def _check_text(line: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start + 1} of the message is not {sys.stdin.encoding}; convert the message, "
            "or name its encoding in PYTHONIOENCODING"
        ) from None


def _lines(prompt: str) -> Iterator[str]:
    """Lines of standard input without white space around them, up to its end or /quit."""
    with contextlib.suppress(EOFError):
        while (line := input(prompt).strip()) != "/quit":
            yield line


if __name__ == "__main__":
    define_flags()
    cli.run(main)
