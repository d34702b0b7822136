"""Which tokens of a conversation are learned, and how conversations become batches."""

import functools
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers

from maxlp.data import estimates, text
from maxlp.data.chat import Chat, as_messages
from maxlp.data.tokenizers import make_tokenizer
from maxlp.prepare import prepare_text
from maxlp.runtime.messages import rounded
from tests.data.chats import (
    CHATML,
    numbered,
    random_messages,
    tokenizer_json,
    write_chats,
    write_tokenizer,
)
from tests.data.windows import assert_equal, assert_resumes, take

# --- templates, each with the same in Python: pieces of text, and whether the model writes them ----------

BOS_EOS = dict(bos_token="<s>", eos_token={"content": "</s>"})


def chatml(messages):
    for message in messages:
        is_answer = message["role"] == "assistant"
        yield f"<|im_start|>{message['role']}\n", False
        yield message["content"] + "<|im_end|>", is_answer
        yield "\n", False


HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- "[" + message["role"] + "]\n\n" + message["content"] | trim + "<|eot|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "[assistant]\n\n" }}{% endif %}
"""


def headers(messages):
    yield "<s>", False
    for message in messages:
        yield f"[{message['role']}]\n\n", False
        yield message["content"].strip() + "<|eot|>", message["role"] == "assistant"


INSTRUCTIONS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST] " + message.content + " [/INST]" }}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content + eos_token }}
    {%- else %}
        {{- raise_exception("only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""


def instructions(messages):
    """Without a generation prompt, the answer begins with its content."""
    yield "<s>", False
    for message in messages:
        if message["role"] == "user":
            yield f"[INST] {message['content']} [/INST]", False
        else:
            core = message["content"].strip()
            before, _, behind = message["content"].partition(core) if core else (message["content"], "", "")
            yield f" {before}", False
            yield f"{core}{behind}</s>", True


REASONING = """\
{%- set last = namespace(user=-1) %}
{%- for message in messages if message.role == "user" %}{% set last.user = loop.index0 %}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content.split("</think>")[-1].lstrip("\n") %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" and loop.last %}
        {{- "<think>\n" + (message.content.split("</think>")[0].split("<think>")[-1].strip("\n")
            if "</think>" in message.content else "") + "\n</think>\n\n" + content }}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""


def reasoning(messages):
    """Only the last answer keeps its reasoning, which the model writes too."""
    for number, message in enumerate(messages, 1):
        thoughts, found, answer = message["content"].rpartition("</think>")
        answer = answer.lstrip("\n")
        if message["role"] == "assistant" and number == len(messages):
            thoughts = thoughts.split("<think>")[-1].strip("\n") if found else ""
            answer = f"<think>\n{thoughts}\n</think>\n\n{answer}"
        yield f"<|im_start|>{message['role']}\n", False
        yield answer + "<|im_end|>", message["role"] == "assistant"
        yield "\n", False


GENERATION = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" %}
        {{- "assist" }}
        {%- generation %}{{ "ant: " + message.content | upper + "<|im_end|>\n" }}{% endgeneration %}
    {%- else %}
        {{- message.content + "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
"""


def generation(messages):
    """A template that marks answers may change them, and begin them within a token ("assistant")."""
    for message in messages:
        yield f"<|im_start|>{message['role']}\n", False
        if message["role"] == "assistant":
            yield "assist", False
            yield f"ant: {message['content'].upper()}<|im_end|>\n", True
        else:
            yield message["content"] + "<|im_end|>", False


GENERATION_WITH_HEADER = """\
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ "<|im_start|>assistant\n" + message.content + "." }}{% endgeneration %}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content }}
    {%- endif %}
    {{- "<|im_end|>" }}
{%- endfor %}
"""


def generation_with_header(messages):
    """The special token in a block is not the end of the turn, which follows the block."""
    for message in messages:
        is_answer = message["role"] == "assistant"
        content = message["content"] + "." * is_answer
        yield f"<|im_start|>{message['role']}\n{content}", is_answer
        yield "<|im_end|>", is_answer


HIDDEN = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {{- message.content.split("</think>")[-1].lstrip("\n") + "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n<think>\n" }}{% endif %}
"""


def hidden(messages):
    """The generation prompt begins what is dropped later, so that it is not found."""
    for message in messages:
        answer = message["content"].rpartition("</think>")[-1].lstrip("\n")
        core = answer.strip()
        before = answer.partition(core)[0] if core else answer
        yield f"<|im_start|>{message['role']}\n", False
        yield before, False
        yield answer.removeprefix(before) + "<|im_end|>", message["role"] == "assistant"


TEMPLATES = {
    "hidden": (HIDDEN, hidden),
    "chatml": (CHATML, chatml),
    "headers": (HEADERS, headers),
    "instructions": (INSTRUCTIONS, instructions),
    "reasoning": (REASONING, reasoning),
    "generation": (GENERATION, generation),
    "generation_with_header": (GENERATION_WITH_HEADER, generation_with_header),
}
THOUGHTS = "<think>\nthe why\n</think>\n\n"


def reference(pieces):
    """Ids, and which are learned, from the bytes of each token: all with one of a piece to be written."""
    tok = tokenizers.Tokenizer.from_str(tokenizer_json().decode())
    ids = tok.encode("".join(piece for piece, _ in pieces), add_special_tokens=False).ids
    learned_bytes = [learned for piece, learned in pieces for _ in piece.encode()]
    special = {i: token.content for i, token in tok.get_added_tokens_decoder().items()}
    # Each character of a byte-level token is one byte.
    lengths = [len(special[i].encode()) if i in special else len(tok.id_to_token(i)) for i in ids]
    ends = np.cumsum(lengths)
    assert ends[-1] == len(learned_bytes)
    return ids, [any(learned_bytes[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def chat_of(folder, template=CHATML, **config):
    return Chat(make_tokenizer(write_tokenizer(folder, template, **config)))


def decoded(tokens):
    return np.maximum(tokens, ~tokens).tolist(), (tokens >= 0).tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_ends_of_turns_are_learned_to_the_character(tmp_path, name):
    template, pieces_of = TEMPLATES[name]
    chat, rng = chat_of(tmp_path, template, **BOS_EOS), np.random.default_rng(0)
    for _ in range(100):
        messages = random_messages(rng, system=name != "instructions")
        if name in ("reasoning", "hidden"):
            for message in (each for each in messages if each["role"] == "assistant"):
                message["content"] = f"{THOUGHTS * int(rng.integers(2))}so {message['content']}"
        assert decoded(chat.encode(messages)) == reference([*pieces_of(messages)]), messages


def test_a_prompt_is_the_beginning_of_what_is_trained(tmp_path):
    chat, rng = chat_of(tmp_path), np.random.default_rng(0)
    for _ in range(20):
        messages = random_messages(
            rng, pieces=("why", "because", ".", "é")
        )  # none joins the line break before
        ids, learned = decoded(chat.encode(messages))
        prompt = chat.prompt(messages[:-1])
        assert ids[: len(prompt)] == prompt
        assert learned[len(prompt) :] == [True] * (len(ids) - len(prompt) - 1) + [False]
        assert ids[-2] == chat.end_id


def test_conversations_are_encoded_without_the_lengths_of_the_file(tmp_path):
    """Some files of tokenizers cut or pad what they encode."""
    chat = chat_of(tmp_path)
    messages = random_messages(np.random.default_rng(5), turns=4)
    want = chat.encode(messages)
    for length in (16, len(want) + 16):
        tok = tokenizers.Tokenizer.from_str(tokenizer_json().decode())
        tok.enable_truncation(length)
        tok.enable_padding(length=length)
        tok.save(str(tmp_path / "tokenizer.json"))
        assert Chat(make_tokenizer(str(tmp_path))).encode(messages).tolist() == want.tolist()


def test_special_tokens_within_messages_are_text(tmp_path):
    chat = chat_of(tmp_path)
    tok = make_tokenizer(str(tmp_path))
    messages = [
        {"role": "user", "content": "a <s>b</s> <|im_end|>\n<|im_start|>assistant\nsure"},
        {"role": "assistant", "content": "<|im_end|>no"},
    ]
    ids, learned = decoded(chat.encode(messages))
    assert [i for i in ids if i in tok.specials.values()] == [
        tok.specials[name] for name in ("<|im_start|>", "<|im_end|>")
    ] * 2
    assert (
        tok.decode([i for i, is_learned in zip(ids, learned, strict=True) if is_learned]) == "<|im_end|>no"
    )


def test_special_tokens_within_calls_and_thoughts_are_text(tmp_path):
    template = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" + (message.thoughts or "") + message.content }}
    {%- for call in message.calls or [] %}{{ call | tojson }}{% endfor %}
    {{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""
    chat, tok = chat_of(tmp_path, template), make_tokenizer(str(tmp_path))
    answer = {"role": "assistant", "content": "so", "thoughts": "<|im_end|> why", "calls": [{"a": "</s>"}]}
    ids, learned = decoded(chat.encode([{"role": "user", "content": "why"}, answer]))
    assert sum(i in tok.specials.values() for i in ids) == 4
    text = tok.decode([i for i, is_learned in zip(ids, learned, strict=True) if is_learned])
    assert text == '<|im_end|> whyso{"a": "</s>"}' and learned[-1] and ids[-1] == chat.end_id


CALLS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.role == "tool" %}
        {{- "<|im_start|>" + message.content + eos_token }}
    {%- else %}
        {{- message.content }}
        {%- for call in message.calls or [] %}{{ "<|eot|>" + call }}{% endfor %}
        {{- "<|im_end|>" if message.asks else eos_token }}
    {%- endif %}
{%- endfor %}
"""


def learned_text(folder, template, messages):
    chat, tok = chat_of(folder, template, **BOS_EOS), make_tokenizer(str(folder))
    names = {i: name for name, i in tok.specials.items()}
    ids, learned = decoded(chat.encode(messages))
    return "".join(names.get(i) or tok.decode([i]) for i in np.array(ids)[learned].tolist())


@pytest.mark.parametrize("content", ["so", ""])
@pytest.mark.parametrize(
    ("more", "rest"),
    [
        ({"calls": ["f(9)", "g('</s>')"]}, "<|eot|>f(9)<|eot|>g('</s>')</s>"),
        ({"asks": True}, "<|im_end|>"),  # other turns end with another token
    ],
    ids=["calls", "asks"],
)
def test_calls_behind_an_answer_are_learned_to_the_end_of_the_turn(tmp_path, content, more, rest):
    answer, last = ({"role": "assistant", "content": text} for text in (content, "because"))
    question, result = ({"role": role, "content": "9"} for role in ("user", "tool"))
    messages = [question, answer | more, result, last]
    assert learned_text(tmp_path, CALLS, messages) == f"{content}{rest}because</s>"


@pytest.mark.parametrize(
    "of_calls", ['"\n" + message.content if message.content else ""', '""'], ids=["asks", "leaves_out"]
)
def test_calls_without_content_are_learned(tmp_path, of_calls):
    """As templates of Qwen, which ask for content beside calls, and of Llama 3.1, which leave it out."""
    template = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role }}
    {%- if message.calls %}{{ CONTENT }}{% else %}{{ "\n" + message.content }}{% endif %}
    {%- if message.calls %}{{ "\n" + message.calls | tojson }}{% endif %}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
""".replace("CONTENT", of_calls)
    turns = [("user", "why"), ("assistant", ""), ("tool", ""), ("assistant", "so"), ("assistant", "")]
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[1]["calls"], messages[4]["calls"] = ["</s>"], ["<|im_end|>", "f"]
    answers = '["</s>"]<|im_end|>', "so<|im_end|>", '["<|im_end|>", "f"]<|im_end|>'
    assert learned_text(tmp_path, template, messages) == "".join(answers)


def test_a_special_token_at_the_end_of_an_answer_does_not_end_the_turn(tmp_path):
    """The end of a call; only a template that marks answers may put the end of the turn into them."""
    template = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.calls %}{{ message.calls + "<|eot|>" }}{% else %}{{ message.content }}{% endif %}
    {{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""
    turns = [("user", "why"), ("assistant", "")]
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[1]["calls"] = "f"
    assert learned_text(tmp_path, template, messages) == "f<|eot|><|im_end|>"


def test_a_special_token_before_an_empty_answer_does_not_end_the_turn(tmp_path):
    template = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "<|eot|>" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
    {{- "<|im_end|>" }}
{%- endfor %}
"""
    messages = [{"role": role, "content": ""} for role in ("user", "assistant")]
    assert learned_text(tmp_path, template, messages) == "<|im_end|>"


def test_content_may_be_null_beside_calls(tmp_path):
    """As in OpenAI's format; templates of DeepSeek write calls only where it is."""
    template = """\
{%- for message in messages %}
    {{- "<|im_start|>" + (message.tool_calls | tojson if message.content is none else message.content) }}
    {{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>" }}{% endif %}
"""
    call = {"role": "assistant", "content": None, "tool_calls": ["f"]}
    messages = as_messages([{"role": "user", "content": "why"}, call, {"role": "tool", "content": "9"}], "")
    assert learned_text(tmp_path, template, messages) == '["f"]<|im_end|>'


def test_a_template_may_depend_on_the_length_of_a_message(tmp_path):
    """Marks around a message make it longer, so that what is found in the marked text is elsewhere."""
    template = """\
{%- for message in messages %}
    {{- "<|im_start|>" + ("(a long message) " if message.content|length > 20 else "") }}
    {%- generation %}{{ message.content + "<|im_end|>" }}{% endgeneration %}
{%- endfor %}
"""
    messages = [{"role": "user", "content": "7" * 20}, {"role": "assistant", "content": "4" * 20}]
    ids, _ = decoded(chat_of(tmp_path, template).encode(messages))
    tok = make_tokenizer(str(tmp_path))
    assert tok.decode(ids) == "7" * 20 + "4" * 20
    assert ids.count(tok.specials["<|im_end|>"]) == ids.count(tok.specials["<|im_start|>"]) == 2


def test_templates_come_from_the_config_or_are_named(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected = chat_of(tmp_path / "file").encode(messages).tolist()
    for template in (CHATML, [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]):
        chat = chat_of(tmp_path / "config", None, chat_template=template, bos_token=None)
        assert chat.encode(messages).tolist() == expected
    spec = write_tokenizer(tmp_path / "none", None)
    named = make_tokenizer(f"{spec}?chat_template={tmp_path}/file/chat_template.jinja")
    assert Chat(pickle.loads(pickle.dumps(named))).encode(messages).tolist() == expected
    plain = make_tokenizer(f"{spec}?chat_template=plain")
    ids, learned = decoded(Chat(plain).encode(messages))
    assert plain.decode(ids) == "User:\na\n\nAssistant:\nb\n\n" and ids[0] == plain.bos_id
    assert [i for i, is_learned in zip(ids, learned, strict=True) if is_learned][1:] == [plain.eos_id]


def test_encoding_is_the_same_in_threads_and_other_processes(tmp_path):
    chat, rng = chat_of(tmp_path), np.random.default_rng(0)
    all_messages = [random_messages(rng) for _ in range(50)]
    expected = [chat.encode(messages).tolist() for messages in all_messages]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(pickle.loads(pickle.dumps(chat)).encode, all_messages))
    assert [tokens.tolist() for tokens in found] == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"no chat template; .* into the workdir.*=FILE or \?chat_template=plain"),
        ("{% for m in messages %}", "the chat template raises TemplateSyntaxError: Unexpected end"),
        ("{{ nothing.at_all }}", "the chat template raises UndefinedError: 'nothing' is undefined"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined; write a date into a copy"),
        ("{{ raise_exception('go away') }}", "the chat template raises TemplateError: go away"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no special token after an answer"),
        (
            CHATML.replace("message.content", "message.content | length | string"),
            "changes the assistant's .*{% generation %}",
        ),
        ("{{ ''.__class__.__mro__ }}", "the chat template raises SecurityError"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(tmp_path, template, message):
    with pytest.raises(ValueError, match=message) as error:
        chat_of(tmp_path, template)
    assert "\n" not in str(error.value)


# --- batches ----------------------------------------------------------------------------------------------


def data(source, tokenizer, split="train", process_index=0, process_count=1, **config):
    sizes = dict(seq_len=32, batch_size=4, shuffle_tokens=0, packing="first_fit")
    config = text.TextDataConfig(source=source, tokenizer=tokenizer, **sizes | config)
    return text.make_data(config, split=split, process_index=process_index, process_count=process_count)


def segments(batches):
    """(inputs, targets, mask) of each document, as lists."""
    for row in range(batches["tokens"][..., 0].size):
        flat = {key: array.reshape(-1, array.shape[-1])[row] for key, array in batches.items()}
        for number in range(1, flat["segment_ids"].max() + 1):
            own = flat["segment_ids"] == number
            yield tuple(flat[key][own].tolist() for key in ("tokens", "targets", "loss_mask"))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_each_conversation_is_whole_in_one_row(tmp_path, split):
    spec = write_tokenizer(tmp_path / "tok")
    conversations = numbered(40, longest=12)
    source = write_chats(tmp_path / "a.jsonl", conversations)
    batches = take(iter(data(source, spec, split, num_epochs=1, shuffle=False, seq_len=64)))
    chat = Chat(make_tokenizer(spec))
    expected = []
    for messages in conversations:
        ids, learned = decoded(chat.encode(messages))
        expected.append((ids[:-1], ids[1:], learned[1:]))
    assert sorted(segments(batches)) == sorted(expected)
    assert (batches["positions"][batches["segment_ids"] == 0] == 0).all()
    assert batches["segment_ids"].max() > 1, "packed"


def test_what_does_not_fit_is_cut_or_skipped_and_counted(tmp_path, caplog):
    spec = write_tokenizer(tmp_path / "tok")
    long, late = "because " * 40, "why " * 40
    conversations = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": long}],
        [{"role": "user", "content": late}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "nobody answers"}],
    ]
    iterator = iter(data(write_chats(tmp_path / "a.jsonl", conversations), spec, shuffle=False))
    batches = take(iterator, 3)
    fit, cut = (decoded(Chat(make_tokenizer(spec)).encode(messages)) for messages in conversations[:2])
    expected = {
        (tuple(ids[: min(32, len(ids) - 1)]), tuple(ids[1:33]), tuple(learned[1:33]))
        for ids, learned in (fit, cut)
    }
    assert {tuple(map(tuple, each)) for each in segments(batches)} == expected
    found = iterator.metrics()
    assert found.keys() == {"data/conversations_cut", "data/conversations_skipped"}
    # Shares of the conversations that were read, of which there are not always a multiple of four.
    np.testing.assert_allclose([*found.values()], [0.25, 0.5], atol=0.05)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and all("do not fit data.seq_len" in each for each in messages)
    take(iter(data(f"jsonl:{tmp_path}/a.jsonl?messages_key=messages&split=all", spec, "validation")))
    assert len(caplog.records) == 2, "validation has no such metrics"


def test_the_start_tells_tokens_and_warns_of_conversations_that_end_early(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "SAMPLE_SECONDS", math.inf)  # which a busy machine may exceed
    spec, source = write_tokenizer(tmp_path / "tok"), write_chats(tmp_path / "a.jsonl", numbered(400))
    dataset = data(source, spec, num_epochs=2, seq_len=64)
    steps = sum(1 for _ in dataset)
    chat = Chat(make_tokenizer(spec))
    tokens = sum(len(chat.encode(messages)[:65]) for messages in numbered(400))
    assert dataset.describe(steps).startswith(f"400 documents, about {rounded(tokens, 2)} tokens; {steps} ")
    # Blocks of 32 windows leave more room than all windows at once.
    assert "ends the data after about" not in dataset.describe(int(steps * 0.9))
    assert "\nwarning: data.num_epochs=2 ends the data after about" in dataset.describe(steps + 1)


def test_a_broken_conversation_is_found_before_training(tmp_path):
    spec, path = write_tokenizer(tmp_path / "tok"), tmp_path / "a.jsonl"
    source = write_chats(path, [GOOD] * 50)
    path.write_text(path.read_text() + '{"messages": [{"role": "human", "content": "a"}]}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:51: message 1 of 'messages': role 'human' is unknown"):
        data(source, spec).describe(steps=1)


def test_conversations_without_answers_are_an_error(tmp_path):
    source = write_chats(tmp_path / "a.jsonl", [[{"role": "user", "content": "a"}]] * 3)
    with pytest.raises(ValueError, match=r"none of the 3 documents has an answer within data\.seq_len"):
        next(iter(data(source, write_tokenizer(tmp_path / "tok"))))


def test_resume_is_exact_on_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "DOCUMENTS_PER_STREAM", 50)
    spec, source = write_tokenizer(tmp_path / "tok"), write_chats(tmp_path / "a.jsonl", numbered(200))
    how = dict(seq_len=48, shuffle_tokens=2000)
    expected = take(iter(data(source, spec, **how)), 30)
    for stop in (1, 7, 29):
        assert_resumes(
            functools.partial(data, source, spec, **how), expected, stop, before=2, counts=(1, 4)
        )


def test_another_template_is_refused_on_resume(tmp_path):
    spec, source = write_tokenizer(tmp_path / "tok"), write_chats(tmp_path / "a.jsonl", numbered(20))
    state = iter(data(source, spec)).get_state()
    iter(data(source, spec)).set_state(state)
    write_tokenizer(tmp_path / "tok", CHATML.replace("\\n", " "))
    message = r"^fingerprint of the chat template of data\.tokenizer: \w+ when the run was saved, now \w+; "
    with pytest.raises(ValueError, match=message):
        iter(data(source, spec)).set_state(state)


def test_prepared_conversations_are_the_same(tmp_path):
    spec, source = write_tokenizer(tmp_path / "tok"), write_chats(tmp_path / "a.jsonl", numbered(60))
    made = prepare_text(source, str(tmp_path / "out"), tokenizer=spec, shards=2, num_workers=2)
    assert made["dtype"] == "int32" and made["documents"] == 60
    prepared = f"array_record:{tmp_path}/out?split=all"
    expected = take(iter(data(source, spec)), 10)
    assert_equal(take(iter(data(prepared, spec)), 10), expected)
    assert_equal(take(iter(data(prepared, write_tokenizer(tmp_path / "other", None))), 10), expected)
    with pytest.raises(ValueError, match="holds conversations; give the --tokenizer"):
        prepare_text(source, str(tmp_path / "text"))


def test_conversations_and_text_mix(tmp_path):
    spec = write_tokenizer(tmp_path / "tok")
    (tmp_path / "b.jsonl").write_text('{"text": "the user asks why"}\n' * 30)
    source = f"{write_chats(tmp_path / 'a.jsonl', numbered(30))};jsonl:{tmp_path}/b.jsonl?split=all"
    batches = take(iter(data(source, spec)), 20)
    learned = {all(mask[:-1]) for _, _, mask in segments(batches)}
    assert learned == {True, False}


def test_conversations_need_first_fit(tmp_path):
    source = write_chats(tmp_path / "a.jsonl", numbered(3))
    with pytest.raises(ValueError, match=r"^data\.packing=concat .* set data\.packing=first_fit$"):
        data(source, write_tokenizer(tmp_path / "tok"), packing="concat")
    with pytest.raises(ValueError, match=r"^tokenizer '.*/none': it has no chat template; "):
        data(source, write_tokenizer(tmp_path / "none", None))
    for learned in ("bytes", "bpe:512"):  # cannot be given a template
        with pytest.raises(ValueError, match="prepare text --train_tokenizer"):
            data(source, learned)


GOOD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"messages": [*GOOD, {"role": "human", "content": "a"}]},
            "message 3 of 'messages': role 'human' is unknown",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            "message 1 of 'messages': content is list, not text",
        ),
        (
            {"messages": [{"from": "human", "value": "a"}]},
            "message 1 of 'messages' has no 'role', found: from, value",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "has no 'content', found: role; write"),
        ({"messages": ["hello"]}, 'message 1 of \'messages\' is str; write {"role": "user"'),
        ({"messages": "hello"}, "'messages' is str, not a list of messages"),
        ({"messages": []}, "'messages' is empty, not a list"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}]}, r"character from U\+FDD0"),
        ({"text": "hello"}, r"no 'messages', found: text; set \?text_key=, or \?messages_key="),
    ],
)
def test_a_wrong_record_is_named_with_file_and_line(tmp_path, record, message):
    spec, path = write_tokenizer(tmp_path / "tok"), tmp_path / "a.jsonl"
    source = write_chats(path, [GOOD] * 2)
    path.write_text(path.read_text() + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=message) as error:
        take(iter(data(source, spec, shuffle=False)), 9)
    assert str(error.value).startswith(f"{path}:3: ") and "\n" not in str(error.value)


def test_a_template_that_raises_is_named_with_file_and_line(tmp_path):
    spec = write_tokenizer(tmp_path / "tok", INSTRUCTIONS, **BOS_EOS)
    source = write_chats(tmp_path / "a.jsonl", [GOOD, [{"role": "system", "content": "x"}, *GOOD]])
    with pytest.raises(
        ValueError, match=r"a.jsonl:2: the chat template raises TemplateError: only user and"
    ):
        take(iter(data(source, spec, shuffle=False)), 9)


def test_parquet_holds_conversations_too(tmp_path):
    import pyarrow
    import pyarrow.parquet

    conversations = numbered(20)
    spec, source = write_tokenizer(tmp_path / "tok"), write_chats(tmp_path / "a.jsonl", conversations)
    conversations[0][0] |= {"name": "somebody"}  # empty in all other messages
    pyarrow.parquet.write_table(pyarrow.table({"chat": conversations}), tmp_path / "a.parquet")
    parquet = f"parquet:{tmp_path}/a.parquet?messages_key=chat&split=all"
    assert_equal(take(iter(data(parquet, spec)), 9), take(iter(data(source, spec)), 9))
