"""How many images per second does one core decode and augment, compared with what training needs?

    python benchmarks/image_pipeline.py           # rates of the pipeline alone: 5 seconds of CPU time
    python benchmarks/image_pipeline.py --stall   # train steps fed by it, and fed the same batch again

The rates are per second of CPU time of this process, so that other work on the machine changes them little:
N cores for data make about N times as many. The need for glyphs is that of configs/clip/debug.py, 1,200
steps of 128 images in 240 seconds. The need for photographs is per 100 TFLOP/s that a machine's devices
achieve (not their peak), at three times open_clip's FLOPs of a forward pass. The photographs are smooth
colors with grain, saved in a tar as JPEGs of quality 90.
"""

import argparse
import io
import itertools
import os
import tarfile
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from PIL import Image
from training import CompiledRun

from configs.clip import debug
from maxlp.data.image_text import ImageTextDataConfig, make_data
from maxlp.parallel.batches import device_batches
from maxlp.run import experiment
from maxlp.run.tokenizer import prepare_tokenizer

PHOTOS = 48
BATCH = 32
TURNS, STEPS = 6, 25  # of `stall`: rounds, and the steps of each kind in a round

# GFLOP of a forward pass for one pair, from open_clip's table of models.
FORWARD_GFLOP = {"B/32": 14.78, "B/16": 41.09, "L/14": 175.33}
NEED_GLYPHS = 1200 * 128 / 240


def write_photos(path: str, width: int, height: int) -> None:
    rng = np.random.default_rng(0)
    grain = rng.normal(0, 6, (height, width, 1)).astype(np.float32)
    with tarfile.open(path, "w") as tar:
        for number in range(PHOTOS):
            coarse = Image.fromarray(rng.integers(0, 256, (height // 12, width // 12, 3), np.uint8))
            pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + grain
            file = io.BytesIO()
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
            for kind, data in ("jpg", file.getvalue()), ("txt", f"photograph number {number}".encode()):
                member = tarfile.TarInfo(f"{number:05d}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def images_per_core_second(batches: int, **options) -> float:
    """The rate of the training pipeline in one thread, once its files are open.

    Args:
      options: fields of `ImageTextDataConfig`.
    """
    config = ImageTextDataConfig(batch_size=BATCH, num_threads=1, tokenizer="bytes", **options)
    dataset = make_data(config, split="train")
    iterator = iter(dataset)
    list(itertools.islice(iterator, max(2, dataset.steps_per_epoch)))  # opens files, draws each glyph once
    start = time.process_time()
    list(itertools.islice(iterator, batches))
    seconds = time.process_time() - start
    iterator.close()
    return BATCH * batches / seconds


def stall() -> None:
    """Times train steps of configs/clip/debug.py, alternately on new batches and on one batch again."""
    run = experiment.resolve(debug.get_config())
    compiled = CompiledRun(run)
    state = compiled.initial_state()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = prepare_tokenizer(run.settings, Path(folder))
        batches = iter(experiment.make_data(run.settings, tokenizer, "train", run.mesh))
    batches.start_prefetch()
    stream = device_batches(batches, run.mesh)
    one, _ = next(stream)
    state, metrics = compiled.step(state, one)
    seconds: dict[str, list[float]] = {"pipeline": [], "one batch": []}
    for kind in TURNS * list(seconds):
        jax.block_until_ready(metrics)
        start = time.perf_counter()
        for _ in range(STEPS):
            state, metrics = compiled.step(state, next(stream)[0] if kind == "pipeline" else one)
        jax.block_until_ready(metrics)
        seconds[kind].append((time.perf_counter() - start) / STEPS)
    batches.close()
    fed, alone = (1e3 * np.array(taken) for taken in seconds.values())
    print(
        f"a step fed by the pipeline takes {np.median(fed):.0f} ms, {np.median(fed / alone):.3f} times as "
        f"long as one fed the same batch again ({np.median(alone):.0f} ms); median of {TURNS} pairs of "
        f"{STEPS} steps"
    )


def rates(folder: str) -> list[tuple[str, float]]:
    """Images per second and core, for each kind of images."""
    rate = images_per_core_second(60, source="glyphs", image_size=32, text_len=64)
    rows = [("glyphs, 32 pixels", rate)]
    for width, height, batches in ((500, 375, 6), (2000, 1500, 2)):
        path = os.path.join(folder, f"{width}.tar")
        write_photos(path, width, height)
        size = os.path.getsize(path) // PHOTOS // 1000
        rate = images_per_core_second(batches, source=f"tar:{path}?split=all", image_size=224, text_len=77)
        rows.append((f"JPEG {width} × {height} ({size} kB) to 224", rate))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stall", action="store_true", help="time train steps, not the pipeline alone")
    args = parser.parse_args()
    if args.stall:
        stall()
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = rates(folder)
    need = {f"{name} at 100 TFLOP/s": 1e5 / (3 * cost) for name, cost in FORWARD_GFLOP.items()}
    print("| images | per second and core | needed per second | cores |\n|---|---|---|---|")
    for number, (name, rate) in enumerate(rows):
        for user, needed in need.items() if number else [("debug config", NEED_GLYPHS)]:
            print(f"| {name} | {rate:,.0f} | {user}: {needed:,.0f} | {needed / rate:.2f} |")


if __name__ == "__main__":
    main()
