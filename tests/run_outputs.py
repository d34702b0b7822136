"""What a run has left in its workdir; arrays are read by Orbax, not by the code under test."""

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint

from maxlp.monitoring.run_record import read_jsonl


def losses(workdir: Path) -> dict[int, float]:
    """The training loss by step."""
    return {r["step"]: r["train/loss"] for r in read_jsonl(workdir / "metrics.jsonl") if "train/loss" in r}


def records(workdir: Path) -> list[dict]:
    """The records of the metrics file, without values that depend on the clock or the machine."""
    kept = ("train/", "eval/", "eval_full/")
    return [
        {k: v for k, v in r.items() if k == "step" or k.startswith(kept)}
        for r in read_jsonl(workdir / "metrics.jsonl")
    ]


def checkpoint(workdir: Path, step: int) -> dict:
    """The data's position and every array, as bytes: equal bytes, equal checkpoints."""
    root = workdir / "checkpoints" / str(step)
    record = json.loads((root / "checkpoint.json").read_text())
    return {"data": record["data_state"], "arrays": arrays(root)}


def arrays(root: Path) -> dict[str, bytes]:
    """Every array of a checkpoint, as bytes."""
    reader = orbax.checkpoint.PyTreeCheckpointer()
    tree = reader.metadata(root / "state").item_metadata.tree
    as_numpy = jax.tree.map(lambda _: orbax.checkpoint.RestoreArgs(restore_type=np.ndarray), tree)
    saved = reader.restore(root / "state", restore_args=as_numpy)
    return {jax.tree_util.keystr(k): v.tobytes() for k, v in jax.tree_util.tree_leaves_with_path(saved)}
