"""The examples of docs/python.md."""

import re
from pathlib import Path

import pytest

from maxlp.runtime.checkpoint import Checkpointer

PAGE = Path(__file__).parents[1] / "docs/python.md"


@pytest.mark.full
def test_the_examples_run(tmp_path, capsys):
    """One after the other; the run that the second one opens is that of the first one's training."""
    names: dict = {}
    training, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(training, PAGE.name, "exec"), names)
    (tmp_path / "config.json").write_text(names["c"].to_json_best_effort())
    with Checkpointer(tmp_path / "checkpoints", every_steps=1) as checkpoints:
        checkpoints.save(20, names["state"], {}, {})
    for example in others:
        exec(compile(example.replace("/tmp/run", str(tmp_path)), PAGE.name, "exec"), names)
    assert names["losses"][-1] < names["losses"][0] - 1
    trained, structure, restored, *sizes = capsys.readouterr().out.splitlines()
    assert trained.startswith("loss 6.2") and structure == "(64, 512) QuantDot"
    assert restored.startswith("20 (1, 15, 512)")
    # Two moments of 256 · 257 numbers in float32, and the kernel's in 8 bits with a scale for each 256.
    float32, eight_bits = 2 * 256 * 257 * 4, 2 * (256 * 256 + 256 * 4 + 256 * 4)
    counts = [int(size.split()[0].replace(",", "")) for size in sizes]
    assert float32 < counts[0] < float32 + 32 and eight_bits < counts[1] < eight_bits + 32
