"""The commands of docs/chat.md: conversations are trained on, prepared, continued and measured."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.chats import numbered, tokenizer_json

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent
BLOCKS = dict(
    re.findall(r"<!-- test: (\w+) -->\n```bash\n(.*?)\n```", (ROOT / "docs/chat.md").read_text(), re.DOTALL)
)
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["7", "8"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Runs a command of the page in folders of this test; returns what it prints."""
    folder = tmp_path_factory.mktemp("chat")
    data, model = folder / "data", folder / "models" / "mine"
    (data / "tasks").mkdir(parents=True)
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_bytes(tokenizer_json())
    lines = (json.dumps({"messages": messages}) for messages in numbered(200, longest=6))
    (data / "chat.jsonl").write_text("\n".join(lines))
    (data / "tasks" / "sums.yaml").write_text(TASK.replace("FOLDER", str(data)))
    (data / "sums.jsonl").write_text('{"question": "What is 3 plus 4?"}\n' * 4)

    def run(name: str, *options: str, stdin: str = "") -> str:
        command = BLOCKS[name].replace("/tmp/chat", f"{folder}/run").replace("/models", f"{folder}/models")
        command = command.replace("=/data", f"={data}").replace(":/data", f":{data}")
        command = command.replace("python ", f"{sys.executable} ")
        done = subprocess.run(
            ["bash", "-c", " ".join([command, *options])],
            cwd=ROOT,
            capture_output=True,
            text=True,
            input=stdin,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run("train", "--config.train.total_steps=30", "--config.optimizer.warmup_steps=3")
    assert "step 30/30" in out and "data: 196 documents, about" in out
    assert "validation data: 4 documents, about" in out
    return run


def test_a_chat_answers_each_line(shown):
    out = shown("chat", "--temperature=0", stdin="question 1\n\nquestion 2\n/quit\nquestion 3\n")
    answers = out.splitlines()
    assert len(answers) == 2 and all("because" in answer for answer in answers)


def test_a_pipe_gets_the_answer_alone(shown):
    assert re.fullmatch(r"because.*\n", shown("pipe"))


def test_conversations_are_prepared(shown):
    assert re.match(r"wrote 200 documents, .* tokens in 4 shards", shown("prepare"))


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs pip install 'maxlp[lm-eval]'"
)
def test_a_task_of_ones_own_is_evaluated(shown):
    for flags, in_chat in ((), False), (["--lm_eval_apply_chat_template"], True):
        out = shown("lm_eval", *flags)
        results = json.loads(Path(re.search(r"written to (\S+)", out)[1]).read_text(encoding="utf-8"))["30"]
        assert results["results"]["sums"]["acc,none"] in (0.0, 1.0) and "|sums" in out
        assert results["chat_template"] == {"sums": in_chat}
