"""Steps of a program in files, with which another version of maxlp or JAX, or another machine, is compared.

A folder has a file ``step_N.npz`` for each step: a `difference.Recorded`, and what made it as JSON. Numbers
of dtypes that NumPy does not know are stored as unsigned integers of the same bits.
"""

import io
import json
import re
import tokenize
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import maxlp
from maxlp.core.train_state import State
from maxlp.run import changes, difference, two_runs
from maxlp.run.config import ConfigError
from maxlp.run.difference import Batch, CompiledProgram, Recorded, TensorSite
from maxlp.run.earlier_versions import upgraded
from maxlp.run.experiment import resolve_settings
from maxlp.run.reopen import open_or_create_run
from maxlp.run.settings import OBSERVING, Settings
from maxlp.runtime import files, tree_spec

INFO = "info"  # the name of the JSON in a file
# Keys that decide how far rounding moves a tensor, which is recorded.
ROUNDING = ("model.dtype", "model.param_dtype", "precision")


def record(
    s: Settings,
    config: Mapping[str, Any],
    workdir: Path | None,
    step: int | None,
    number: int,
    folder: Path,
) -> Iterator[Path]:
    """Writes ``number`` steps of a run, one file each.

    Args:
      workdir, step: see `two_runs.reports`.

    Raises:
      ConfigError: the folder has steps already.
    """
    if _files(folder):
        raise ConfigError(f"--record={folder} has steps already; give a new folder")
    with open_or_create_run(s, workdir, step) as at:
        program = two_runs.program_of(at.run, jnp.finfo(s.model.dtype).nmant)
        positions = two_runs.positions(at.run)
        info = {"config": config, "positions": positions, "made_by": made_by()}
        state, first_batch, batches = two_runs.steps_of(at, step, number)
        compiled = CompiledProgram(program, first_batch, bool(positions))
        folder.mkdir(parents=True, exist_ok=True)
        for n, batch in batches:
            found, state = difference.record(compiled, state, batch, n, program.bits, program.is_quantized)
            path = folder / f"step_{n}.npz"
            _write(path, found, info)
            yield path


def made_by() -> str:
    return f"maxlp {maxlp.__version__}, jax {jax.__version__} on {jax.devices()[0].device_kind}"


def check(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """What recorded the steps, and the lines of the keys in which the config differs from the recorded one.

    Raises:
      ConfigError: no steps, or they differ in the model, the data or the precision. Keys that only one
        version has are not compared.
    """
    if not (paths := _files(folder)):
        raise ConfigError(f"--against={folder} has no steps; record them with diff --record={folder}")
    _, info = _read(paths[0])
    recorded = upgraded(info["config"])
    old, new = changes.flat(recorded), changes.flat(config)
    both = old.keys() & new.keys()
    lines = changes.differences({k: old[k] for k in both}, {k: new[k] for k in both})
    for key, line in lines.items():
        if changes.is_fixed(key, recorded, config) or changes.is_in(ROUNDING, key):
            raise ConfigError(f"{line}: the steps in {folder} need the same model, data and precision")
    lines = [line for key, line in lines.items() if not changes.is_in(OBSERVING, key)]
    return [f"recorded by {info['made_by']}", f"compared: {made_by()}", *lines]


def reports(s: Settings, folder: Path) -> Iterator[two_runs.Report]:
    """Compares the recorded steps with a run of these settings, up to the first that differs.

    Raises:
      ConfigError: a file is damaged, or the run keeps other states.
    """
    run = resolve_settings(s)
    program, compiled = two_runs.program_of(run, jnp.finfo(s.model.dtype).nmant), None
    for path in _files(folder):
        arrays, info = _read(path)
        found = _recorded(arrays, info, program.abstract, path)
        if compiled is None:
            tapped = two_runs.same_positions(info["positions"], two_runs.positions(run))
            compiled = CompiledProgram(program, found.batch, tapped)
        if compiled.taps.keys() != found.given.keys():  # compare the steps as trained alone
            found = found._replace(given={})
        report = two_runs.report_of(_step(path), difference.differences(found, compiled), compiled)
        yield report
        if report.beyond:
            return


# --- files ----------------------------------------------------------------------------------------------


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _files(folder: Path) -> list[Path]:
    """The recorded steps of a folder, in their order."""
    return sorted((p for p in folder.glob("step_*.npz") if re.fullmatch(r"step_\d+", p.stem)), key=_step)


def _write(path: Path, found: Recorded, info: Mapping[str, Any]) -> None:
    arrays: dict[str, np.ndarray] = {f"batch/{name}": x for name, x in found.batch.items()}
    arrays |= {f"state/{name}": x for name, x in tree_spec.leaves(found.state)}
    arrays |= {f"given/{i}": x for i, x in enumerate(found.given.values())}
    arrays |= {f"tensor/{i}": x for i, x in enumerate(found.tensors.values())}
    arrays["spread"] = np.array([found.spread[site] for site in found.tensors])
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    names = {"given": list(found.given), "sites": list(found.tensors)}
    names["dtypes"] = {name: x.dtype.name for name, x in arrays.items() if not _is_native(x)}
    coded = {name: x if _is_native(x) else x.view(f"u{x.dtype.itemsize}") for name, x in arrays.items()}
    text = json.dumps(dict(info) | names).encode()
    with files.replacing(path) as file:
        np.savez(file, allow_pickle=False, **coded, **{INFO: np.frombuffer(text, np.uint8)})


def _is_native(x: np.ndarray) -> bool:
    return x.dtype.isbuiltin == 1


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = dict(file)
        info = json.loads(arrays.pop(INFO).tobytes())
        return {name: _decoded(x, info["dtypes"].get(name)) for name, x in arrays.items()}, info
    except (
        *(ValueError, KeyError, EOFError, NotImplementedError),
        *(zipfile.BadZipFile, tokenize.TokenError),
    ) as error:
        raise ConfigError(f"{path} is damaged; record the steps again") from error


def _decoded(x: np.ndarray, dtype: str | None) -> np.ndarray:
    return x if dtype is None else x.view(jnp.dtype(dtype))


def _recorded(arrays: dict[str, np.ndarray], info: Mapping[str, Any], like: State, path: Path) -> Recorded:
    def of(kind: str) -> dict[str, np.ndarray]:
        return {k.removeprefix(f"{kind}/"): x for k, x in arrays.items() if k.startswith(f"{kind}/")}

    given, tensors, sites = of("given"), of("tensor"), [TensorSite(*site) for site in info["sites"]]
    batch: Batch = of("batch")
    return Recorded(
        state=_state(of("state"), like, path),
        batch=batch,
        given={tuple(name): given[str(i)] for i, name in enumerate(info["given"])},
        tensors={site: tensors[str(i)] for i, site in enumerate(sites)},
        spread=dict(zip(sites, arrays["spread"], strict=True)),
    )


def _state(flat: Mapping[str, np.ndarray], like: State, path: Path) -> State:
    """The parts of a recorded state that the program's state has too."""
    state = {}
    for part, abstract in like.items():
        own = dict(tree_spec.leaves({part: abstract}))
        shapes = {name: x.shape for name, x in own.items()}
        if shapes == {k: x.shape for k, x in flat.items() if k == part or k.startswith(f"{part}/")}:
            leaves = [flat[name] for name in own]
            state[part] = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        elif part in ("params", "opt_state"):
            key = "config.optimizer" if part == "opt_state" else "config.model"
            raise ConfigError(
                f"{key}: {path} and this version keep different states, so that no step can be compared"
            )
    return state
