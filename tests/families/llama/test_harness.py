"""Tasks of lm-eval from local files."""

import json

import numpy as np
import pytest
from flax import nnx

from maxlp.data.chat import Chat
from maxlp.data.tokenizers import make_tokenizer
from maxlp.families.llama import harness
from maxlp.families.llama.harness import Questions
from tests.data.chats import write_tokenizer
from tests.fixtures import make_llama

pytest.importorskip("lm_eval", reason="needs pip install 'maxlp[lm-eval]'")

CHOICE = """\
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choose.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
TEXT = """\
task: read
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/read.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
ANSWER = """\
task: answer
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/answer.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["Z"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_tasks_from_local_files_have_the_metrics_of_our_likelihoods(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    tokenizer = make_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    model = make_llama(init_std=0.3, vocab_size=tokenizer.vocab_size, max_seq_len=64)(nnx.Rngs(0))
    questions = Questions(model, tokenizer, 64)
    choices, rng = ["why", "because", "the user"], np.random.default_rng(0)
    chosen = [dict(question=f"asks {i}:", choices=choices, answer=int(rng.integers(3))) for i in range(12)]
    texts = [dict(text="the user asks why " * n) for n in (1, 9)]
    [made] = questions.generate_until([("the user", {"max_gen_toks": 6, "until": ["Z"]})])
    for name, task, records in (
        ("choose", CHOICE, chosen),
        ("read", TEXT, texts),
        ("answer", ANSWER, [dict(question="the user", text=made), dict(question="why", text="no")]),
    ):
        write(tmp_path / f"{name}.jsonl", records)
        (tmp_path / f"{name}.yaml").write_text(task.replace("FOLDER", str(tmp_path)))
    results, table = harness.evaluate(
        model, tokenizer, ["choose", "read", "answer"], max_len=64, include=str(tmp_path)
    )
    scores = questions.loglikelihood(
        [(each["question"], f" {choice}") for each in chosen for choice in choices]
    )
    best = np.array([value for value, _ in scores]).reshape(-1, 3).argmax(axis=1)
    right = np.mean(best == [each["answer"] for each in chosen])
    assert results["results"]["choose"]["acc,none"] == pytest.approx(right)
    nats = -sum(questions.loglikelihood_rolling([each["text"] for each in texts]))
    num_bytes = sum(len(each["text"]) for each in texts)
    assert results["results"]["read"]["bits_per_byte,none"] == pytest.approx(nats / np.log(2) / num_bytes)
    assert results["results"]["answer"]["exact_match,none"] == 0.5
    assert "choose" in table and "bits_per_byte" in table


def test_a_chat_template_makes_turns_of_examples_and_questions(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    tokenizer = make_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    model, chat = make_llama(vocab_size=tokenizer.vocab_size, max_seq_len=256)(nnx.Rngs(0)), Chat(tokenizer)
    asked = []

    def generate_until(_, pairs):
        asked.extend(pairs)
        return [""] * len(pairs)

    monkeypatch.setattr(Questions, "generate_until", generate_until)
    write(tmp_path / "answer.jsonl", [dict(question="why", text="no"), dict(question="who", text="I")])
    examples = "fewshot_split: test\nfewshot_config: {sampler: first_n}\n"
    begun = 'gen_prefix: "because"\n'
    for name, more in (("answer", examples), ("begun", begun)):
        task = ANSWER.replace("FOLDER", str(tmp_path)).replace("task: answer", f"task: {name}")
        (tmp_path / f"{name}.yaml").write_text(task + more)
    how = dict(max_len=256, chat=chat, include=str(tmp_path))
    results, _ = harness.evaluate(model, tokenizer, ["answer"], num_fewshot=1, **how)
    assert results["chat_template"] == {"answer": True}
    turns = [("user", "why"), ("assistant", "no"), ("user", "who")]
    messages = [dict(role=role, content=content) for role, content in turns]
    assert asked[1][0] == chat.render_prompt(messages)
    harness.evaluate(model, tokenizer, ["begun"], limit=1, **how)
    assert asked[-1][0] == chat.render_prompt(messages[:1]) + "because"


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match=r"^--lm_eval=no_such_task is unknown to lm-eval"):
        harness.evaluate(None, None, ["no_such_task"], max_len=64)
