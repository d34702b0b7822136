"""Memory of the contrastive losses: bytes per device for the loss and its gradients, compiled but not run.

    python benchmarks/contrastive_memory.py --topology=v5e:4x4 --topology=h100:2x8

Needs no device, only the compilers: `pip install -e '.[aot]'` (Linux). The compiled function takes float32
features (B, E), sharded over all devices, and returns the loss and its gradients with respect to features,
scale and bias. Its arguments and results alone are four arrays of features, 16 B E / devices bytes. The GPU
topology above takes 9 seconds of CPU time, the TPU topology 130.
"""

import argparse
import datetime
import functools
import importlib.metadata
import re

import jax
import jax.numpy as jnp
from training import topology

from maxlp.families.clip.contrastive import LOSSES, METHODS, ContrastiveConfig, contrastive_sums
from maxlp.parallel import sharding
from maxlp.planning import topologies
from maxlp.planning.topologies import GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--topology", type=topology, action="append", required=True)
    parser.add_argument("--batch_size", type=int, nargs="+", default=[2**15, 2**18, 2**20])
    parser.add_argument("--embed_dim", type=int, nargs="+", default=[512])
    parser.add_argument("--loss", nargs="+", default=["softmax"], choices=LOSSES)
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--tile_size", type=int, default=4096)
    args = parser.parse_args()
    versions = ", ".join(f"{name} {_version(name)}" for name in ("jax", "libtpu", "jax-cuda13-plugin"))
    print(f"{datetime.date.today()}, {versions}, tiles of {args.tile_size}", flush=True)
    print("GiB per device: temporaries (total)", flush=True)
    for machine in args.topology:
        print(f"\n{machine.size} × {machine.chip.kind}, {machine.chip.memory / GIB:.2f} GiB")
        print(
            f"| loss | E | B | {' | '.join(args.method)} |\n|---|---|---|{'---|' * len(args.method)}",
            flush=True,
        )
        mesh = sharding.make_mesh(data=1, fsdp=-1, devices=topologies.devices(machine))
        for loss in args.loss:
            for E in args.embed_dim:
                for B in args.batch_size:
                    cells = [_cell(mesh, B, E, loss, method, args.tile_size) for method in args.method]
                    print(f"| {loss} | {E} | {B:,} | {' | '.join(cells)} |", flush=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cell(mesh: jax.sharding.Mesh, B: int, E: int, loss: str, method: str, tile_size: int) -> str:
    """GiB of temporaries, and of all memory in brackets; or how much a refused program would need."""
    with jax.set_mesh(mesh):
        rows = jax.ShapeDtypeStruct((B, E), jnp.float32, sharding=sharding.batch_sharding(mesh))
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(mesh))
        config = ContrastiveConfig(kind=loss, method=method, tile_size=tile_size)
        value = functools.partial(_value, config=config)
        traced = jax.jit(jax.value_and_grad(value, argnums=range(4))).trace(rows, rows, scalar, scalar)
        platform = mesh.devices.flat[0].platform
        lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
        try:
            memory = lowered.compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"([\d.]+[KMGT])\)? (?:of [\d.]+[KMGT] hbm|exceeds)", str(error))
            if found is None:
                raise
            return f"refused, needs {found[1]}"
    temporaries, code = memory.temp_size_in_bytes, memory.generated_code_size_in_bytes
    rest = memory.argument_size_in_bytes + memory.output_size_in_bytes + code
    return f"{temporaries / GIB:.3g} ({(temporaries + rest) / GIB:.3g})"


def _value(*args: jax.Array, config: ContrastiveConfig) -> jax.Array:
    return contrastive_sums(*args, config)["loss"]


if __name__ == "__main__":
    main()
