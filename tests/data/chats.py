"""A small tokenizer with chat templates, and conversations."""

import functools
import json

import numpy as np

from maxlp.data.tokenizers.training import train_bpe

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>")
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@functools.cache
def tokenizer_json() -> bytes:
    """A byte-level BPE with special tokens of chats; as many files do, it trims offsets."""
    texts = [
        "The user asks: why? The assistant answers: because. \n\n\n assistant\n  user\n" * 9,
        "<think></think>",
    ]
    config = json.loads(train_bpe(texts, 300).files["tokenizer.json"])
    for number, name in enumerate(SPECIALS, len(config["model"]["vocab"])):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        config["added_tokens"].append(dict(id=number, content=name, special=True, **flags))
    config["post_processor"] = dict(
        type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False
    )
    return json.dumps(config).encode()


def write_tokenizer(folder, template=CHATML, **config):
    """Writes a tokenizer with a template; `config` is its tokenizer_config.json. Returns its spec."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


PIECES = (
    "why",
    " ",
    "\n",
    "\n\n",
    "because",
    "  the",
    "a",
    "answer",
    ".",
    "é",
    "漢字",
    "🎉",
    "\t",
    "user",
    "{{ x }}",
)


def random_messages(rng, system=True, turns=None, pieces=PIECES):
    """A conversation that begins with the user and ends with the assistant; contents may be empty."""

    def message(role):
        return {"role": role, "content": "".join(rng.choice(pieces, rng.integers(0, 9)))}

    messages = [message("system")] if system and rng.random() < 0.5 else []
    for _ in range(turns or rng.integers(1, 5)):
        messages += [message("user"), message("assistant")]
    return messages


def write_chats(path, conversations):
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    return f"jsonl:{path}?messages_key=messages&split=all"


def numbered(count, seed=0, longest=20):
    """Conversations whose questions are their numbers."""
    rng = np.random.default_rng(seed)
    return [
        [
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": " ".join(["because"] * int(rng.integers(1, longest)))},
        ]
        for i in range(count)
    ]
