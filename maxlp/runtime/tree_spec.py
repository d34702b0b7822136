"""The structure of a pytree as text: path, dtype and shape of every leaf."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

Names = Collection[str] | None


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields every leaf with its path, such as ``params/layers/kernel``."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def describe(tree: Any) -> dict[str, str]:
    """Dtype and shape of every leaf by its path, see `describe_leaf`."""
    return {path: describe_leaf(leaf) for path, leaf in leaves(tree)}


def describe_leaf(leaf: Any) -> str:
    """Dtype and shape such as ``float32[8,16]``; the type and ``[]`` if the leaf is not an array."""
    shape = ",".join(str(size) for size in getattr(leaf, "shape", ()))
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]"


def shape_of(described: str) -> tuple[int, ...]:
    """The shape in a text of `describe_leaf`."""
    _, _, shape = described.partition("[")
    return tuple(int(size) for size in shape.rstrip("]").split(",") if size)


class Mismatch(NamedTuple):
    """A leaf that differs between two trees: its path, and what it is in either, or "absent"."""

    path: str
    saved: str
    wanted: str


def find_mismatch(
    saved: Mapping[str, str], wanted: Any, *, exact: bool, required: Names = None
) -> Mismatch | None:
    """Compares a saved structure with a requested one.

    Args:
      saved: from `describe`.
      wanted: a pytree of arrays or `jax.ShapeDtypeStruct`s.
      exact: require the same leaves and dtypes. Otherwise `saved` may have more leaves, and
        floating-point leaves may differ in dtype.
      required: top-level entries; either side may lack others as a whole. None requires all.

    Returns:
      the first leaf that does not fit, parameters first; None if all leaves fit.
    """
    described = describe(wanted)
    paths = described.keys() | saved.keys() if exact else described.keys()
    if required is not None:
        compared = (entries(saved) & entries(described)).union(required)
        paths = {path for path in paths if path.partition("/")[0] in compared}
    for path in sorted(paths, key=lambda path: (not path.startswith("params/"), path)):
        old, new = saved.get(path, "absent"), described.get(path, "absent")
        if old != new and (exact or not _castable(old, new)):
            return Mismatch(path, old, new)
    return None


def entries(described: Iterable[str]) -> set[str]:
    """The top-level entries of a tree whose leaves have these paths."""
    return {path.partition("/")[0] for path in described}


def _castable(old: str, new: str) -> bool:
    return "float" in old and "float" in new and shape_of(old) == shape_of(new)
