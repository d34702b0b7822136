"""Kernels that XLA cannot partition, run on each device's part of the batch and of the heads.

Shape letters: those of `nn.attention`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from maxlp.parallel import sharding


def on_each_device(attend: Callable[..., jax.Array], *arrays: jax.Array | None) -> jax.Array:
    """``attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)`` on each device's rows and heads.

    A pipeline maps over its stages (`jax.vmap`). Here the stages become additional rows, so that
    kernels need no batching rule.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return attend(*arrays)
    rows = sharding.spec("batch")[0]
    if mesh.shape["stage"] == 1:
        return _on_rows(attend, rows, *arrays)
    one_stage = jax.custom_batching.custom_vmap(functools.partial(_on_rows, attend, rows))

    @one_stage.def_vmap
    def all_stages(stages, batched, *arrays):
        assert all(jax.tree.leaves(batched))
        arrays = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
        out_BSNH = _on_rows(attend, ("stage", *rows), *arrays)
        return out_BSNH.reshape(stages, -1, *out_BSNH.shape[1:]), True

    return one_stage(*arrays)


def _on_rows(
    attend: Callable[..., jax.Array], rows: Any, q_BSNH, k_BSKH, v_BSKH, segment_ids_BS
) -> jax.Array:
    heads = PartitionSpec(rows, None, sharding.RULES["act_heads"], None)
    specs = (heads, heads, heads, PartitionSpec(rows, None))
    # check_vma would require kernels to declare over which mesh axes their outputs vary.
    run = jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False)
    return run(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS)
