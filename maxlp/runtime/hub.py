"""Repositories of the Hugging Face Hub: ``hf:ORG/NAME``, or ``hf:ORG/NAME@REVISION``.

`huggingface_hub` downloads to its own cache and reads its own variables of the environment: HF_HOME,
HF_TOKEN, HF_ENDPOINT, and HF_HUB_OFFLINE=1 for no network at all.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The commit of each id that this process has used. A branch moves, so an id is resolved once; a run records
# its commits in run.json, and its next launches use these (`run.run_dir`).
commits: dict[str, str] = {}
_folders: dict[tuple, Path] = {}  # of what was fetched, as the library asks the Hub again each time

_NAME = r"\w[\w.-]*/\w[\w.-]*"
_REVISION = r"@[\w./-]+"


def is_id(spec: str) -> bool:
    """Whether this names a repository rather than a path."""
    return spec.startswith("hf:")


def as_id(name: str) -> str:
    """``hf:ORG/NAME`` for ``ORG/NAME``, unless that is a path here; anything else as it is."""
    if re.fullmatch(f"{_NAME}({_REVISION})?", name) and not os.path.lexists(name):
        return f"hf:{name}"
    return name


def fetch(spec: str, patterns: Sequence[str]) -> Path:
    """The folder in the cache with the files of a repository whose names match the patterns.

    Raises:
      ValueError: no such repository or revision, no access to it, or not in the cache when offline.
      ConnectionError: the Hub does not answer, and the files are not in the cache.
    """
    if not (match := re.fullmatch(f"hf:({_NAME})(?:({_REVISION}))?", spec)):
        raise ValueError(
            f"{spec} is not the name of a repository; write hf:ORG/NAME or hf:ORG/NAME@REVISION"
        )
    try:
        import huggingface_hub  # heavy
        from huggingface_hub import constants, errors
    except ModuleNotFoundError:
        raise ValueError(f"{spec} needs huggingface_hub: pip install 'maxlp[hf]'") from None
    repo, revision = match[1], (match[2] or "@main")[1:]
    url = f"{constants.ENDPOINT}/{repo}"
    mistyped = "" if os.path.lexists(repo) else f", nor is there a folder ./{repo} here"
    fetched = constants.HF_HUB_CACHE, spec, commits.get(spec), *patterns
    if fetched in _folders:
        return _folders[fetched]
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=commits.get(spec, revision),
            allow_patterns=list(patterns),
            tqdm_class=None if any(".safetensors" in pattern for pattern in patterns) else _silent(),
        )
    except errors.GatedRepoError:
        raise ValueError(
            f"{spec} is gated: accept the conditions at {url}, then `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{spec}: there is no {url}, or it is private{mistyped}; correct the name, or log in with "
            "`hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{spec}: no revision {revision} in {url}; give a branch, tag or commit") from None
    except errors.HFValidationError as error:
        raise ValueError(f"{spec}: {' '.join(str(error).split())}") from None
    except OSError as error:  # all others of the library, and those of the network
        where = f"is not complete in the cache {constants.HF_HUB_CACHE}"
        if constants.HF_HUB_OFFLINE:
            raise ValueError(f"{spec} {where}{mistyped}; unset HF_HUB_OFFLINE, or give a folder") from None
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ConnectionError(
            f"{spec} {where}, and {constants.ENDPOINT} does not answer ({reason}){mistyped}"
        ) from error
    commits[spec] = Path(folder).name
    _folders[constants.HF_HUB_CACHE, spec, commits[spec], *patterns] = Path(folder)
    return Path(folder)


def _silent() -> type:
    """A progress bar that shows nothing, for small files."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return Silent
