"""The tokenizer of a run; the workdir keeps its file, so that the run does not depend on the original.

``config.data.tokenizer`` is a spec of `data.tokenizers.make_tokenizer`, or ``bpe:V``: a byte-level BPE of V
tokens, trained on a sample of the corpus when the run begins, which takes seconds. Until the first
checkpoint every launch makes the file anew, so that none remains from a launch with other data. Checkpoints
record the fingerprint of the tokenizer that they were trained with, and the data that it was learned from.
"""

import hashlib
from pathlib import Path

from maxlp.data.specs import naming_key
from maxlp.data.tokenizers import COMPANIONS, FILES, Tokenizer, make_tokenizer
from maxlp.run import run_dir
from maxlp.run.config import ConfigError
from maxlp.run.constraints import too_many_tokens
from maxlp.run.settings import Settings
from maxlp.runtime import distributed, files


def prepare_tokenizer(s: Settings, workdir: Path) -> str:
    """Puts the run's tokenizer into the workdir, unless the run has one already; returns its spec.

    Raises:
      ValueError: no such tokenizer, another one than the run was trained with, more tokens than the model
        has room for, or a workdir that is no run and has files of another tokenizer.
    """
    resumes = run_dir.saved_data_state(workdir) is not None
    is_kept = resumes and any((workdir / name).exists() for name in FILES)
    if distributed.is_primary() and not is_kept:
        made = _make(s)
        if s.train.init_from and not (s.train.swap_tokenizer or resumes):
            from maxlp.run import pretrained  # few runs need it

            pretrained.check_tokenizer(s.train.init_from, s.data.tokenizer, made)
        if not run_dir.holds_run(workdir):
            _check_replaces_nothing(workdir, made)
        for name in (*FILES, *COMPANIONS):
            if name in made.files:
                files.write_bytes(workdir / name, made.files[name])
            else:
                files.remove(workdir / name)
    distributed.barrier("tokenizer")
    return saved_tokenizer(s.data.tokenizer, workdir)


def _check_replaces_nothing(workdir: Path, made: Tokenizer) -> None:
    """Raises a ConfigError if a folder that is no run has other files of a tokenizer: they are not ours."""
    for path in (workdir / name for name in (*FILES, *COMPANIONS)):
        if path.exists() and path.read_bytes() != made.files.get(path.name):
            raise ConfigError(
                f"--workdir={workdir} holds no run, but a {path.name} that this launch would replace; "
                "choose another folder, or move the file away"
            )


def _make(s: Settings) -> Tokenizer:
    spec = s.data.tokenizer
    if spec.startswith("bpe:"):
        from maxlp.data.tokenizers.training import train_bpe

        with naming_key("config.data.source"):
            texts = s.family.tokenizer_texts(s.data, s.train.seed)
        size, ends = int(spec.removeprefix("bpe:")), not s.family.generates_text
        try:
            made = train_bpe(texts, size, ends, setting="config.data.tokenizer=bpe:")
        except ValueError as error:
            raise ConfigError(f"config.data.tokenizer={spec}: {error}") from error
    else:
        with naming_key("config.data.tokenizer"):
            made = make_tokenizer(spec)
    if message := too_many_tokens(s, made.vocab_size):
        raise ConfigError(f"config.{message}")
    return made


def saved_tokenizer(spec: str, workdir: Path) -> str:
    """The spec of the tokenizer that a run keeps in its workdir.

    Args:
      spec: the config's.

    Raises:
      ConfigError: there is none, or not the one that the run was trained with.
    """
    path, _, options = spec.partition("?")
    state = run_dir.saved_data_state(workdir)
    trained_with = (state or {}).get("settings", {}).get("tokenizer")  # none in imported weights
    found = [p for p in (workdir / name for name in FILES) if p.exists()]
    if path == "bytes":
        if trained_with not in (None, "bytes") or (trained_with is None and found):
            raise ConfigError(
                f"config.data.tokenizer=bytes is not the tokenizer that {workdir} was trained with; give "
                "the run's own"
            )
        return "bytes"
    if not found:
        missing = f"{workdir} has no {' or '.join(FILES)}"
        reason = "it holds no run" if state is None else "put back the file that the run was trained with"
        raise ConfigError(f"{missing}: {reason}")
    fingerprint = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if trained_with not in (None, fingerprint):
        raise ConfigError(
            f"{found[0]} is not the tokenizer that the run was trained with (its SHA-256 is "
            f"{fingerprint[:12]}…, in the checkpoint {trained_with[:12]}…); put the original file back"
        )
    kept = [option for option in options.split("&") if not option.startswith("chat_template=")]
    return f"{found[0]}?{'&'.join(kept)}" if any(kept) else str(found[0])
