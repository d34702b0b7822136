"""Checks that all processes of a run have the same config, workdir and code."""

import json

from ml_collections import ConfigDict

from maxlp.run import changes, run_dir
from maxlp.run.config import ConfigError
from maxlp.runtime import distributed


def check(c: ConfigDict, workdir: str) -> None:
    """Checks that all processes have the same config, workdir and code, or they would train a mixture.

    A collective.

    Raises:
      ConfigError: in all processes, with what differs.
    """
    revision = run_dir.git_revision()
    code = {"--workdir": workdir} | run_dir.versions() | ({"git": revision} if revision else {})
    first, *others = distributed.gather_json([json.loads(c.to_json_best_effort()), code])
    for number, (config, versions) in enumerate(others, 1):
        differing = [*changes.differences(first[0], config).values()] or [
            f"{name}: {first[1][name]} -> {versions[name]}"
            for name in sorted(first[1].keys() & versions.keys())
            if first[1][name] != versions[name]
        ]
        if differing:
            raise ConfigError(
                f"process {number} is not of the run of process 0 ({'; '.join(differing)}); start all "
                "processes with the same command and the same code"
            )
