"""Likelihoods against log-softmaxes in NumPy of one sequence at a time."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from maxlp.data.chat import Chat
from maxlp.data.tokenizers import make_tokenizer
from maxlp.families.llama import harness, likelihood
from maxlp.families.llama.harness import Questions
from tests.data.chats import write_tokenizer
from tests.fixtures import make_llama

MAX_LEN = 48


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_llama(init_std=0.3, vocab_size=tokenizer.vocab_size, max_seq_len=MAX_LEN)(nnx.Rngs(0))


@pytest.fixture(scope="module")
def log_probs(model):
    """float64 log-probabilities (S, V) of what follows each token of a sequence."""
    graphdef, state = nnx.split(model)
    padded = jax.jit(lambda tokens_1S: nnx.merge(graphdef, state)(tokens_1S))

    def of(ids):
        row = np.zeros((1, MAX_LEN), np.int32)
        row[0, : len(ids)] = ids
        x = np.asarray(padded(row), np.float64)[0, : len(ids)]
        return (
            x
            - np.log(np.sum(np.exp(x - x.max(-1, keepdims=True)), -1, keepdims=True))
            - x.max(-1, keepdims=True)
        )

    return of


def expected_score(log_probs, context, continuation):
    ids = [*context, *continuation][-MAX_LEN - 1 :]
    rows = log_probs(ids[:-1])[-len(continuation) :]
    found = sum(row[token] for row, token in zip(rows, continuation, strict=True))
    return found, all(row.argmax() == token for row, token in zip(rows, continuation, strict=True))


def assert_scores(found, expected):
    # Sums of up to 48 float32 logarithms, each rounded to 2^-24 of its size (below 16).
    np.testing.assert_allclose(
        [x for x, _ in found], [x for x, _ in expected], rtol=1e-5, atol=48 * 16 * 2**-24
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_scores_equal_those_of_one_sequence_at_a_time(model, tokenizer, log_probs):
    rng = np.random.default_rng(0)
    sizes = [
        (1, 1),
        (1, 48),
        (5, 3),
        (30, 18),
        (30, 19),
        (60, 4),
        (20, 48),
        *rng.integers(1, 20, (60, 2)).tolist(),
    ]
    pairs = [[rng.integers(0, tokenizer.vocab_size, n).tolist() for n in size] for size in sizes]
    for context, _ in list(pairs[:3]):  # greedy ones
        pairs.append([context, [int(log_probs(context)[-1].argmax())]])
    expected = [expected_score(log_probs, *pair) for pair in pairs]
    assert {greedy for _, greedy in expected} == {True, False}
    assert_scores(likelihood.score(model, pairs, MAX_LEN), expected)


def test_few_shapes_are_compiled(model, tokenizer, monkeypatch):
    shapes, real = set(), likelihood._score

    def watched(graphdef, state, tokens_BS, *labels_BS):
        shapes.add(tokens_BS.shape)
        return real(graphdef, state, tokens_BS, *labels_BS)

    monkeypatch.setattr(likelihood, "_score", watched)
    likelihood.score(model, [([1] * n, [2]) for n in range(1, 49)], MAX_LEN)
    assert shapes == {(32, 128)}


def test_a_continuation_that_does_not_fit_is_refused(model):
    with pytest.raises(ValueError, match=r"a continuation has 49 tokens, more than model\.max_seq_len=48"):
        likelihood.score(model, [([1], [2] * 49)], MAX_LEN)


def test_white_space_belongs_to_the_continuation(tokenizer):
    for context, continuation in (
        ("the user", " asks"),
        ("the user ", "asks"),
        ("", "asks"),
        (" ", "x"),
        ("a\n", ""),
    ):
        encode = functools.partial(likelihood.encode_document, tokenizer)
        begin, rest = likelihood.encode_pair(encode, context, continuation)
        assert begin == [tokenizer.bos_id, *tokenizer.encode(context.rstrip())]
        assert [*begin[1:], *rest] == tokenizer.encode(context + continuation).tolist()


def test_a_continuation_that_joins_the_last_token_of_its_context_has_that_token():
    ids = {"the (": [0, 1, 2], "the (A": [0, 1, 3], "the (AB": [0, 1, 3, 4]}
    assert likelihood.encode_pair(ids.__getitem__, "the (", "A") == ([0, 1], [3])
    assert likelihood.encode_pair(ids.__getitem__, "the (", "AB") == ([0, 1, 2], [4])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_windows_score_each_token_once_with_the_most_context(tokenizer, length):
    text = "".join(chr(0x4E00 + i) for i in range(length))  # three tokens each
    ids = tokenizer.encode(text).tolist()
    windows = likelihood.rolling(tokenizer, text, 4)
    assert [token for _, continuation in windows for token in continuation] == ids
    assert all(len(context) + len(continuation) <= 5 for context, continuation in windows)
    seen = [tokenizer.bos_id]
    for context, continuation in windows:
        assert context == seen[-len(context) :]
        seen += continuation
    context, continuation = windows[-1]
    assert len(windows) == -(-len(ids) // 4) and len(context) + len(continuation) == min(5, len(ids) + 1)


def test_a_long_text_has_the_likelihood_of_its_windows(model, tokenizer, log_probs):
    texts = ["the user asks why " * 20, "why", ""]
    expected = [
        sum(
            expected_score(log_probs, *window)[0] for window in likelihood.rolling(tokenizer, text, MAX_LEN)
        )
        for text in texts
    ]
    found = Questions(model, tokenizer, MAX_LEN).loglikelihood_rolling(texts)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # sums as in `assert_scores`
    assert found[2] == 0


def test_answers_are_greedy_and_end_before_a_stop(model, tokenizer, log_probs):
    questions = Questions(model, tokenizer, MAX_LEN)
    contexts = ["the user", "why", "the user asks: why? " * 9]
    plain = questions.generate_until([(context, {"max_gen_toks": 8}) for context in contexts])
    for context, answer in zip(contexts, plain, strict=True):
        prompt = [tokenizer.bos_id, *tokenizer.encode(context)][-(MAX_LEN - 8) :]  # its end, of a long one
        ids = [*prompt]
        for _ in range(8):
            ids.append(int(log_probs(ids)[-1].argmax()))
        assert answer == tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
    stop = plain[1][3]
    found = questions.generate_until(
        [(context, {"max_gen_toks": 8, "until": [stop]}) for context in contexts]
    )
    assert found == [text.partition(stop)[0] for text in plain]


def test_an_answer_as_long_as_the_model_reads_leaves_room_for_the_question(model, tokenizer):
    questions, half = Questions(model, tokenizer, MAX_LEN), {"max_gen_toks": MAX_LEN // 2}
    for options in {}, {"max_gen_toks": MAX_LEN}:
        assert questions.generate_until([("the user", options)]) == questions.generate_until(
            [("the user", half)]
        )


def test_in_a_chat_template_answers_are_turns(model, tokenizer, log_probs):
    chat = Chat(tokenizer)
    questions = Questions(model, tokenizer, MAX_LEN, chat)
    messages = [{"role": "user", "content": "why?"}]
    context, prompt = chat.render_prompt(messages), chat.prompt(messages)
    found = questions.loglikelihood([(context, "because"), (context, "a user")])
    # The line break at the end of the prompt counts as the beginning of the answer, as in lm-eval.
    header, line_break = prompt[:-1], prompt[-1:]
    assert tokenizer.decode(line_break) == "\n"
    expected = [
        expected_score(log_probs, header, [*line_break, *tokenizer.encode(answer)])
        for answer in ("because", "a user")
    ]
    assert_scores(found, expected)
    ids = [*prompt]
    for _ in range(8):
        ids.append(int(log_probs(ids)[-1].argmax()))
    chat.end_id = ids[len(prompt) + 3]  # as if the model ended its turn there
    [answer] = Questions(model, tokenizer, MAX_LEN, chat).generate_until([(context, {"max_gen_toks": 8})])
    kept = ids[: ids.index(chat.end_id, len(prompt))]
    assert answer == tokenizer.decode(kept)[len(tokenizer.decode(prompt)) :]


def test_every_sample_of_a_repeated_request_is_another_one(model, tokenizer, monkeypatch):
    """Self-consistency asks for many answers, which fill several batches."""
    monkeypatch.setattr(likelihood, "BATCH_TOKENS", 1)
    options = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    requests = [("the user", options)] * (2 * jax.device_count())
    answers = Questions(model, tokenizer, MAX_LEN).generate_until(requests)
    assert len(set(answers)) == len(answers)


def test_tasks_without_the_library_name_the_extra(model, tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"lm_eval is not installed; run pip install 'maxlp\[lm-eval\]'"):
        harness.evaluate(model, tokenizer, ["a"], max_len=MAX_LEN)
