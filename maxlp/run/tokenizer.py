"""The tokenizer of a run; the workdir keeps its file, so that the run does not depend on the original.

``config.data.tokenizer`` is a spec of `data.tokenizers.make_tokenizer`, or ``bpe:V``: a byte-level BPE of V
tokens, trained on a sample of the corpus when the run begins, which takes seconds.
"""

from pathlib import Path

from maxlp.data.tokenizers import make_tokenizer
from maxlp.run.config import ConfigError
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
            size = _bpe_size(spec)
            check_vocabulary(s, size)
            from maxlp.data.tokenizers.training import train_or_load

            texts = s.family.tokenizer_texts(s.data, s.train.seed)
            train_or_load(str(workdir / "tokenizer.json"), texts, size)
        else:
            made = make_tokenizer(spec)
            check_vocabulary(s, made.vocab_size)
            for name, content in made.files.items():
                _keep_file(workdir / name, content, spec)
    distributed.barrier("tokenizer")
    return saved_tokenizer(spec, workdir)


def _bpe_size(spec: str) -> int:
    size = spec.removeprefix("bpe:")
    if not size.isdecimal():
        raise ConfigError(
            f"config.data.tokenizer={spec} does not give a number of tokens; write one, as in bpe:4096"
        )
    return int(size)


def _keep_file(path: Path, content: bytes, spec: str) -> None:
    if path.exists() and path.read_bytes() != content:
        raise ConfigError(
            f"config.data.tokenizer={spec} is not {path}, the tokenizer that the run began with; use that "
            "one or a new workdir"
        )
    path.write_bytes(content)


def check_vocabulary(s: Settings, size: int) -> None:
    """Raises a ConfigError if the model has room for fewer token ids."""
    key, room = s.family.vocabulary(s.model)
    if size > room:
        raise ConfigError(
            f"config.data.tokenizer={s.data.tokenizer} has {size:,} tokens, but config.{key}={room:,}; "
            f"set config.{key}={size}"
        )


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
