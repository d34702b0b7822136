"""Makes ``peaks.json``: what the compilers say of a grid of small runs, for `test_estimate.py`.

    python tests/planning/record_peaks.py h100:1x8 "twice the batch" "CLIP l14"

A topology, and names of `GRID` or `CLIP` (all of `GRID` if there are none). Needs pip install 'maxlp[aot]';
15 seconds (GPU) to a minute (TPU) for each on 2 cores.
"""

import json
import sys
from pathlib import Path

from configs.common import CLIP_SIZES, clip, llama, siglip
from maxlp.planning import compiled, search, topologies

FILE = Path(__file__).parent / "peaks.json"
KERNELS = {"cuda": "cudnn", "tpu": "splash", "cpu": "xla"}
SIZES = dict(
    embed_dim=1024,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    mlp_dim=4096,
    vocab_size=32000,
)
RUN = {"data.source": "unread", "data.tokenizer": "bytes", "data.seq_len": 2048, "data.batch_size": 32}
GRID: dict[str, dict] = {
    "as it is": {},
    "tensor 2": {"mesh.tensor": 2},
    "remat none": {"model.remat": "none"},
    "remat dots": {"model.remat": "dots"},
    "2 microbatches": {"train.microbatches": 2},
    "tensor 2, remat none": {"mesh.tensor": 2, "model.remat": "none"},
    "logits at once": {"loss.num_chunks": 1},
    "plain attention": {"model.attention": "xla"},
    "twice as wide": {"model.embed_dim": 2048, "model.mlp_dim": 8192, "data.batch_size": 16},
    "twice the batch": {"data.batch_size": 64},
    "twice as deep": {"model.num_layers": 16},
    "tensor 4, remat dots": {"mesh.tensor": 4, "model.remat": "dots"},
    "context 2": {"mesh.context": 2, "model.attention": "ring"},
    "context 4": {"mesh.context": 4, "model.attention": "ring"},
    "stage 2": {"mesh.stage": 2, "model.pipeline.microbatches": 4},
    "stage 4, 2 rounds": {"mesh.stage": 4, "model.pipeline.rounds": 2},
}


CLIP: dict[str, tuple[str, dict]] = {
    "CLIP b32": ("b32", {"data.batch_size": 8192}),
    "CLIP b32, remat none": ("b32", {"data.batch_size": 4096, "model.remat": "none"}),
    "CLIP b32, remat dots": ("b32", {"data.batch_size": 8192, "model.remat": "dots"}),
    "CLIP b32, 32k sharded": ("b32", {"data.batch_size": 32768, "loss.method": "sharded"}),
    "CLIP b32, 32k plain": ("b32", {"data.batch_size": 32768, "loss.method": "plain"}),
    "CLIP b32, 32k plain, 8 microbatches": (
        "b32",
        {"data.batch_size": 32768, "loss.method": "plain", "train.microbatches": 8},
    ),
    "CLIP b32, 32k": ("b32", {"data.batch_size": 32768}),
    "CLIP b32, half the batch": ("b32", {"data.batch_size": 4096}),
    "CLIP b32, twice the batch": ("b32", {"data.batch_size": 16384}),
    "CLIP b32, tensor 2": ("b32", {"data.batch_size": 4096, "mesh.tensor": 2}),
    "CLIP l14": ("l14", {"data.batch_size": 2048}),
    "CLIP l14, half the patches": (
        "l14",
        {"data.batch_size": 2048, "model.visual.patch_dropout": 0.5},
    ),
    "CLIP l14, 2 microbatches": ("l14", {"data.batch_size": 2048, "train.microbatches": 2}),
    "CLIP h14": ("h14", {"data.batch_size": 1024}),
    "CLIP h14, 4 microbatches": ("h14", {"data.batch_size": 4096, "train.microbatches": 4}),
    "SigLIP b16": ("b16", {"data.batch_size": 4096}),
    "SigLIP b16, cudnn": ("b16", {"data.batch_size": 4096, "model.attention": "cudnn"}),
}


def config_of(name: str, platform: str):
    if name in CLIP:
        size, changes = CLIP[name]
        family = siglip if name.startswith("SigLIP") else clip
        return search.changed(family(**CLIP_SIZES[size]), {"data.source": "unread"} | changes)
    return search.changed(llama(**SIZES), RUN | {"model.attention": KERNELS[platform]} | GRID[name])


def main() -> None:
    peaks = json.loads(FILE.read_text()) if FILE.exists() else {"compilers": {}}
    topology_name, *names = sys.argv[1:]
    topology = topologies.parse(topology_name)
    recorded = peaks.setdefault(topology_name, {})
    for name in names or GRID:
        done = compiled.compile_step(config_of(name, topology.chip.platform), topologies.devices(topology))
        recorded[name] = done.peak
        print(topology_name, name, f"{done.peak / 2**20:.0f} MiB", f"{done.seconds:.0f} s", flush=True)
        peaks["compilers"][topology_name] = compiled.versions(topology.chip.platform)
        FILE.write_text(json.dumps(peaks, indent=1) + "\n")


if __name__ == "__main__":
    main()
