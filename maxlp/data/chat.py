"""Conversations: from messages to the text of a chat template, to tokens, and to those a model learns.

A conversation is a list of messages, `{"role": …, "content": …}`. Its text is made by the chat template of
the tokenizer, a Jinja program that runs as in `transformers`: in a sandbox, with the same settings. The
template is the file `chat_template.jinja` beside the tokenizer, or `chat_template` in its
`tokenizer_config.json`.

The loss covers the answers only: everything that the model has to write itself, from the end of the prompt
to the end of its turn. An answer begins after the generation prompt, or with the content of the assistant's
message if the template has no such prompt there, and ends with the special token that ends the turn: the
one that ends plain answers or, if that does not come before the next message, the first special token after
the content. (Other special tokens may begin a tool call.) If the template marks the answers itself, with
`{% generation %}`, its marks decide. A token that spans the beginning of an answer belongs to it.

To find the contents in the text, the messages are rendered a second time with marks around each content.
A tool call without content, in which marks would change the text, is found as what follows the messages
before it.

Letters: T tokens of a conversation.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxlp.data import fingerprint
from maxlp.data.readers import BrokenExample
from maxlp.data.sources import Source
from maxlp.data.tokenizers import CHAT_TEMPLATE, Tokenizer, as_str, read_config, special_names
from maxlp.runtime.extras import import_extra
from maxlp.runtime.messages import one_line

if TYPE_CHECKING:
    from maxlp.data.text import TextDataConfig

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]

ROLES = ("system", "developer", "user", "assistant", "tool")
PROBE: Messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ANSWER, CONTENT = ("\ufdd0", "\ufdd1"), ("\ufdd2", "\ufdd3")  # Unicode reserves them for such a use
MARKS = "".join(ANSWER + CONTENT)

# For tokenizers without a template.
PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message.role | capitalize + ":\\n" + message.content }}
    {{- eos_token if message.role == "assistant" }}
    {{- "\\n\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "Assistant:\\n" }}
{%- endif %}
"""


def as_messages(value: Any, key: str) -> Messages:
    """Checks the messages of a record and drops empty fields.

    Raises:
      BrokenExample: anything but a list of messages, each with a known role and a text.
    """
    if not isinstance(value, list | tuple) or not value:
        raise BrokenExample(f"{key!r} is {_kind(value)}, not a list of messages")
    return [_as_message(message, f"message {number} of {key!r}") for number, message in enumerate(value, 1)]


def _as_message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BrokenExample(f'{name} is {_kind(value)}; write {{"role": "user", "content": "…"}}')
    message = {key: field for key, field in value.items() if field is not None}
    if message.get("tool_calls"):
        message = {"content": None} | message  # templates may ask whether it is none
    for key in ("role", "content"):
        if key not in message:
            found = ", ".join(message) or "nothing"
            raise BrokenExample(
                f'{name} has no {key!r}, found: {found}; write {{"role": "user", "content": "…"}}'
            )
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise BrokenExample(f"{name}: role {role!r} is unknown; one of {', '.join(ROLES)}")
    if content is None:
        return message
    if not isinstance(content, str):
        raise BrokenExample(f"{name}: content is {_kind(content)}, not text")
    if set(content) & set(MARKS):
        raise BrokenExample(f"{name}: content has a character from U+FDD0 to U+FDD3; remove it")
    return message | {"content": as_str(content)}


def _kind(value: Any) -> str:
    return "empty" if value in ([], ()) else type(value).__name__


def open_conversations(
    sources: Sequence[Source], chats: Sequence[bool], tokenizer: Tokenizer, config: TextDataConfig
) -> tuple[list[Source | Conversations], str]:
    """Sources, some of them of conversations, as documents of a run.

    Args:
      chats: for each source, whether it holds conversations.

    Returns:
      The sources, and the fingerprint of the template; empty if all conversations are tokens already.

    Raises:
      ValueError: the packing would cut conversations, or the tokenizer has no usable template.
    """
    if config.packing != "first_fit":
        first = next(part.name for part, is_chat in zip(sources, chats, strict=True) if is_chat)
        raise ValueError(
            f"data.packing={config.packing} would cut the conversations of source {first!r} (its records "
            "are messages, or tokens in int32) anywhere; set data.packing=first_fit"
        )
    has_messages = any("messages" in part[0] for part in sources)
    chat = make_chat(tokenizer, config.tokenizer) if has_messages else None
    documents = [
        Conversations(part, chat, config.seq_len) if is_chat else part
        for part, is_chat in zip(sources, chats, strict=True)
    ]
    return documents, chat.fingerprint if chat else ""


class Conversations:
    """Conversations as documents of a run, in place of the records of their source.

    A document is {"conversation": tokens, "counts": names of the counters that it adds to}. Its tokens are
    the first `seq_len` + 1, as a window holds `seq_len` tokens and their targets; none if there is no
    answer among them.
    """

    def __init__(self, source: Source, chat: Chat | None, seq_len: int):
        """Takes messages, which need `chat`, or tokens."""
        self._source, self._chat, self._seq_len = source, chat, seq_len

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens(index)
        cut = tokens[: self._seq_len + 1]
        if not (cut[1:] >= 0).any():
            return {"conversation": cut[:0], "counts": ("read", "skipped")}
        return {"conversation": cut, "counts": ("read", "cut") if len(cut) < len(tokens) else ("read",)}

    def tokens(self, index: int) -> np.ndarray:
        """All tokens of a conversation, see `Chat.encode`."""
        record = self._source[index]
        if self._chat is None or "tokens" in record:
            return record["tokens"]
        try:
            return self._chat.encode(record["messages"])
        except ValueError as error:
            raise BrokenExample(f"{self._source.where(index)}: {error}") from None


class Chat:
    """A tokenizer with its chat template; picklable.

    Attributes:
      end_id: the special token that ends a turn of the assistant.
      fingerprint: changes with the template and its variables.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Reads the template and tries it.

        Raises:
          ValueError: there is no template, or it cannot be used.
        """
        import tokenizers

        if "tokenizer.json" not in tokenizer.files:
            raise ValueError(
                "chats need a tokenizer.json: convert a SentencePiece model to one, or let prepare text "
                "--train_tokenizer write one"
            )
        self._tokenizer = tokenizer
        # Recognizes special tokens, which `tokenizer` does not.
        self._library = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
        self._library.no_truncation()
        self._library.no_padding()
        # A byte-level post-processor would leave white space out of the offsets.
        self._library.post_processor = tokenizers.processors.TemplateProcessing("$A", "$A $B", [])
        self._template, self._variables = _read_template(tokenizer)
        self._special_ids = sorted(tokenizer.specials.values())
        self._special = re.compile(
            "|".join(map(re.escape, sorted(tokenizer.specials, key=len)[::-1])) or "(?!)"
        )
        self._marks_itself = ANSWER[0] in self._render(PROBE)
        without, with_prompt = (self._render(PROBE[:1], prompt=prompt) for prompt in (False, True))
        found = with_prompt.startswith(without)
        self._generation_prompt = with_prompt[len(without) :] if found else ""
        self.end_id = -1  # not known yet
        tokens = self.encode(PROBE)
        ends = tokens[np.isin(tokens, self._special_ids)]
        if not len(ends):
            raise ValueError(
                "the chat template has no special token after an answer, so that the model could not end"
                " its turn; name another template with ?chat_template=FILE"
            )
        self.end_id = int(ends[-1])
        self._end = next(name for name, i in tokenizer.specials.items() if i == self.end_id)
        self.fingerprint = fingerprint.of_json(self._template, self._variables)

    def prompt(self, messages: Messages) -> list[int]:
        """The token ids of messages and generation prompt, after which a model writes its answer."""
        return self._encode(self._render_parts(messages, prompt=True))[0].tolist()

    def render_prompt(self, messages: Messages) -> str:
        """The text of messages and generation prompt.

        Raises:
          ValueError: the template raises.
        """
        return self._render(messages, prompt=True)

    def encode_rendered(self, text: str) -> list[int]:
        """The token ids of a rendered text. Unlike for `prompt`, messages can spell special tokens."""
        return self._library.encode(text, add_special_tokens=False).ids

    def encode(self, messages: Messages) -> np.ndarray:
        """The tokens of a conversation, int32 [T]; a token outside the answers is its complement `~id`.

        Raises:
          ValueError: the template raises, or changes answers so that they are not found in its text.
        """
        parts = self._render_parts(messages)
        ids, begin_T, end_T = self._encode(parts)
        is_special_T = np.isin(ids, self._special_ids)
        is_learned_T = np.zeros(len(ids), bool)
        for begin, end in parts.answers:
            answer_T = (end_T > begin) & (begin_T < end)
            after = np.flatnonzero(is_special_T & (begin_T >= end))
            # A {% generation %} block may begin with the special tokens of a header, which end no turn.
            last = np.searchsorted(begin_T, begin + len(parts.text[begin:end].rstrip())) - 1
            has_end = self._marks_itself and begin_T[last] >= begin and is_special_T[last]
            if len(after) and not has_end:
                following = self._next_content(parts.text, parts.contents, end)
                ends = after[(ids[after] == self.end_id) & (begin_T[after] < following)]
                turn_end = ends[0] if len(ends) else after[0]
                answer_T = (end_T > begin) & (begin_T < end_T[turn_end])
            is_learned_T |= answer_T
        return np.where(is_learned_T, ids, ~ids)

    def _next_content(self, text: str, contents: Spans, end: int) -> int:
        """Where the content of the next message after `end` begins, or else the end of the text."""
        # Special tokens that tool calls spell are marked like contents, and are no messages.
        later = (b for b, e in contents if b > end and not self._special.fullmatch(text, b, e))
        return min(later, default=len(text))

    def _encode(self, parts: _Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, and where in the text each begins and ends (exclusive): all int32 [T]."""
        # Within a message, the spelling of a special token is plain text.
        sections, last = [], 0
        for begin, end in parts.contents:
            if begin < 0:  # a template has dropped its beginning
                continue
            for match in self._special.finditer(parts.text, begin, end):
                sections += [(parts.text[last : match.start()], True), (match[0], False)]
                last = match.end()
        ids, offsets, length = [], [], 0
        for text, recognized in [*sections, (parts.text[last:], True)]:
            if recognized:
                encoding = self._library.encode(text, add_special_tokens=False)
                new, spans = encoding.ids, encoding.offsets
            else:
                new = self._tokenizer.encode(text).tolist()
                spans = [(0, len(text))] * len(new)
            ids += new
            offsets += [(begin + length, end + length) for begin, end in spans]
            length += len(text)
        begin_T, end_T = np.array(offsets, np.int32).reshape(-1, 2).T
        return np.array(ids, np.int32), begin_T, end_T

    def _render_parts(self, messages: Messages, prompt: bool = False) -> _Parts:
        """The text of a conversation, and where its answers and contents are."""
        text, own_answers = _find_spans(self._render(messages, prompt), ANSWER)
        marked_text, found, contents = self._render_marked(messages, prompt)
        if self._marks_itself:
            return _Parts(text, own_answers, contents if marked_text == text else [])
        num_answers = sum(message["role"] == "assistant" for message in messages)
        answers = found
        if marked_text != text or len(found) < num_answers:
            # Templates may test whether there is content beside tool calls, or leave it out.
            marked_text, found, contents = self._render_marked(messages, prompt, also_empty=False)
            answers = self._with_calls(messages, marked_text, found, contents)
        answers = [
            (self._answer_begin(text, begin, after, end), end)
            for (begin, end), after in zip(answers, [0, *(end for _, end in answers)], strict=False)
        ]
        all_found = len(answers) == num_answers and all(begin >= 0 for begin, _ in answers)
        if text != marked_text or not all_found:
            raise ValueError(
                "the chat template changes the assistant's messages, so that they cannot be found in its"
                " text; mark them in it with {% generation %}"
            )
        return _Parts(text, answers, sorted([*found, *contents]))

    def _render_marked(
        self, messages: Messages, prompt: bool, also_empty: bool = True
    ) -> tuple[str, Spans, Spans]:
        """The text without marks, and the contents of the assistant's messages and all others."""
        marked = self._render([self._marked(message, also_empty) for message in messages], prompt)
        text, contents = _find_spans(marked, CONTENT)
        return text, _find_spans(marked, ANSWER)[1], contents

    def _with_calls(self, messages: Messages, text: str, found: Spans, contents: Spans) -> Spans:
        """The spans of the answers: those found by marks, and tool calls up to the end of their turns."""
        others, answers = iter(found), []
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and (message["content"] or "").strip():
                span = next(others, None)
                if span is not None:
                    answers.append(span)
            elif message["role"] == "assistant":
                before = self._render(messages[:number], prompt=True)
                end = text.find(self._end, len(before), self._next_content(text, contents, len(before)))
                if text.startswith(before) and end >= 0:
                    answers.append((len(before), end))
        return answers

    def _answer_begin(self, text: str, begin: int, after: int, end: int) -> int:
        """Where an answer begins; -1 if that is not known.

        Args:
          begin, end: of its content; begin is -1 if the template has dropped what was there.
          after: the end of the previous one.
        """
        prompt = self._generation_prompt
        found = text.rfind(prompt, after, end if begin < 0 else begin) if prompt else -1
        return begin if found < 0 else found + len(prompt)

    def _marked(self, message: dict[str, Any], also_empty: bool) -> dict[str, Any]:
        """The message with marks around its content, within white space that a template may strip.

        Args:
          also_empty: whether an answer without content has marks; others never do.
        """
        is_answer = message["role"] == "assistant" and not self._marks_itself
        content = message["content"] or ""
        core = content.strip()
        before, _, after = content.partition(core) if core else (content, "", "")
        first, last = ANSWER if is_answer else CONTENT
        # Templates may drop the reasoning of earlier turns, and the mark at its beginning with it.
        core = re.sub(r"(</think>\s*)", rf"\1{first}", core)
        others = {key: self._with_marks(value) for key, value in message.items() if key != "role"}
        if not core and not (is_answer and also_empty):
            return message | others
        return message | others | {"content": f"{before}{first}{core}{last}{after}"}

    def _with_marks(self, value: Any) -> Any:
        """Another field, such as tool calls, with marks around what spells a special token."""
        if isinstance(value, str):
            return self._special.sub(rf"{CONTENT[0]}\g<0>{CONTENT[1]}", value)
        if isinstance(value, dict):
            return {key: self._with_marks(each) for key, each in value.items()}
        return [self._with_marks(each) for each in value] if isinstance(value, list) else value

    def _render(self, messages: Messages, prompt: bool = False) -> str:
        try:
            return _compile(self._template).render(
                messages=messages,
                add_generation_prompt=prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except Exception as error:  # a template is a program, which raises errors of any type
            remedy = "write a date into a copy of the template, and name the copy with ?chat_template=FILE"
            raise ValueError(
                f"the chat template raises {type(error).__name__}: {one_line(error)}"
                f"{f'; {remedy}' if 'strftime_now' in str(error) else ''}"
            ) from None


def make_chat(tokenizer: Tokenizer, spec: str) -> Chat:
    """The `Chat` of a tokenizer; `spec` names the tokenizer in errors.

    Raises:
      ValueError: as `Chat`.
    """
    try:
        return Chat(tokenizer)
    except ValueError as error:
        raise ValueError(f"tokenizer {spec!r}: {error}") from None


class _Parts(NamedTuple):
    text: str
    answers: Spans
    contents: Spans


def _find_spans(marked: str, marks: Sequence[str]) -> tuple[str, Spans]:
    """The text without any marks, and the spans between the first and the last of `marks`.

    Of several first marks the first one counts; the begin of a span is -1 if there is none.
    """
    first, last = marks
    texts, length, begin = [], 0, -1
    spans: Spans = []
    for piece in re.split(f"([{MARKS}])", marked):
        if piece not in tuple(MARKS):
            texts.append(piece)
            length += len(piece)
        elif piece == first:
            begin = length if begin < 0 else begin
        elif piece == last:
            spans.append((begin, length))
            begin = -1
    return "".join(texts), spans


# --- templates ------------------------------------------------------------------------------------


def _read_template(tokenizer: Tokenizer) -> tuple[str, dict[str, str]]:
    """The template of a tokenizer, and the special tokens that it uses by name (`bos_token`, …)."""
    names = {i: name for name, i in tokenizer.specials.items()}
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    config = read_config(tokenizer.files)
    template: Any = config.get("chat_template")
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template}.get("default")
    if data := tokenizer.files.get(CHAT_TEMPLATE):
        template = data.decode(errors="replace")
    if not isinstance(template, str):
        raise ValueError(
            f"it has no chat template; put a {CHAT_TEMPLATE} beside it (for a run, into the workdir), or "
            "add ?chat_template=FILE or ?chat_template=plain to the tokenizer for training or prepare"
        )
    own = {key: names[i] for key, i in ids.items() if i in names and key not in config}
    return template, own | special_names(config)  # a token that is null in the config has no name


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    """Jinja with the settings and functions that templates of `transformers` expect.

    Without `strftime_now`, so that a text does not change with the date: templates then use a fixed one.
    """
    import_extra("jinja2")
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}`: marks what is between."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return ANSWER[0] + caller() + ANSWER[1]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment
