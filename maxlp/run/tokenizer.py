"""The tokenizer of a run; the workdir keeps its file, so that the run does not depend on the original.

``config.data.tokenizer`` is a spec of `data.tokenizers.make_tokenizer`, or ``bpe:V``: a byte-level BPE of V
tokens, trained on a sample of the corpus when the run begins, which takes seconds.
"""

from pathlib import Path

from maxlp.data.tokenizers import make_tokenizer
from maxlp.run.config import ConfigError
from maxlp.run.constraints import too_many_tokens
from maxlp.run.settings import Settings
from maxlp.runtime import distributed


def prepare_tokenizer(s: Settings, workdir: Path) -> str:
    """Puts the run's tokenizer into the workdir; returns its spec.

    Raises:
      ValueError: no such tokenizer, another one than the run began with, or more tokens than the model has
        room for.
    """
    spec = s.data.tokenizer
    if distributed.is_primary():
        if spec.startswith("bpe:"):
            from maxlp.data.tokenizers.training import train_or_load

            texts = s.family.tokenizer_texts(s.data, s.train.seed)
            train_or_load(str(workdir / "tokenizer.json"), texts, int(spec.removeprefix("bpe:")))
        else:
            made = make_tokenizer(spec)
            if message := too_many_tokens(spec, made.vocab_size, *s.family.vocabulary(s.model)):
                raise ConfigError(f"config.{message}")
            for name, content in made.files.items():
                _keep_file(workdir / name, content, spec)
    distributed.barrier("tokenizer")
    return saved_tokenizer(spec, workdir)


def _keep_file(path: Path, content: bytes, spec: str) -> None:
    if path.exists() and path.read_bytes() != content:
        raise ConfigError(
            f"config.data.tokenizer={spec} is not {path}, the tokenizer that the run began with; use that "
            "one or a new workdir"
        )
    path.write_bytes(content)


def saved_tokenizer(spec: str, workdir: Path) -> str:
    """The spec of the tokenizer that a run keeps in its workdir.

    Args:
      spec: the config's.

    Raises:
      ConfigError: there is none.
    """
    path, _, options = spec.partition("?")
    if path == "bytes":
        return "bytes"
    found = [p for p in (workdir / "tokenizer.json", workdir / "tokenizer.model") if p.exists()]
    if not found:
        raise ConfigError(f"{workdir} has no tokenizer.json or tokenizer.model: it holds no run")
    return f"{found[0]}?{options}" if options else str(found[0])
