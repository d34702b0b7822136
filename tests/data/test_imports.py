"""Modules of this package that a run imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from maxlp.data.sources import make_source
from maxlp.data.tokenizers.training import sample_texts, train_bpe

DATA = Path(__file__).parents[2] / "maxlp" / "data"
TEXT_RUN = """
import sys
import maxlp.prepare
heavy = {"jax", "grain", "PIL", "tensorflow", "tensorflow_datasets", "pyarrow", "tokenizers"}
heavy |= {"sentencepiece"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in [name for name in sys.modules if name.startswith("maxlp")]:
    del sys.modules[name]

from maxlp.data import text
config = text.TextDataConfig(source='stdlib', tokenizer=sys.argv[1], seq_len=32, batch_size=2)
next(iter(text.make_data(config, split="train")))
heavy -= {"jax", "grain", "tokenizers"}  # Grain imports JAX
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print(*[name for name in sys.modules if name.startswith("maxlp.data")])
"""


@pytest.fixture(scope="module")
def imported_files(tmp_path_factory):
    """Files of the package that training on the standard library with a tokenizer.json imports."""
    path = tmp_path_factory.mktemp("imports") / "tokenizer.json"
    made = train_bpe(sample_texts(make_source("stdlib", "train"), 20_000, 0), 300)
    path.write_bytes(made.files["tokenizer.json"])
    command = [sys.executable, "-c", TEXT_RUN, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names = {Path(*name.split(".")[2:]) for name in done.stdout.split()}
    return {
        str(name / "__init__.py" if (DATA / name).is_dir() else name.with_suffix(".py")) for name in names
    }


def test_a_text_run_imports_only_its_reader_and_tokenizer(imported_files):
    modules = {"common.py", "fingerprint.py", "packing.py", "sources.py", "specs.py", "text.py"}
    packages = {"__init__.py", "readers/__init__.py", "tokenizers/__init__.py"}
    assert imported_files == modules | packages | {"readers/files.py", "tokenizers/hugging_face.py"}


def test_a_text_run_imports_at_most_2100_lines(imported_files):
    assert sum(len((DATA / name).read_text().splitlines()) for name in imported_files) <= 2100
