"""Images a second that one core decodes and augments, next to what training takes.

    python benchmarks/image_pipeline.py           # rates of the pipeline alone
    python benchmarks/image_pipeline.py --stall   # steps of the debug CLIP fed by it, and by one batch

The rates are per second of CPU time of this process, so that a busy machine does not change them much:
a machine with N cores for data makes about N times as many. Needed are, for the glyphs, the 1,200 steps of
128 of configs/clip/debug.py in 240 seconds; for photographs, pairs for each 100 TFLOP/s that the devices
of a machine achieve (not their peak), at three times open_clip's FLOPs of a forward pass. The photographs
are smooth colours with grain, saved as JPEG of quality 90 in a tar.
"""

import functools
import io
import itertools
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from configs.clip import debug
from maxlp.core import train_step as step
from maxlp.data.image_text import ImageTextDataConfig, make_data
from maxlp.parallel import sharding
from maxlp.run import build

PHOTOS = 48
BATCH = 32

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


def images_per_core_second(batches: int, **kwargs) -> float:
    config = ImageTextDataConfig(batch_size=BATCH, num_threads=1, **kwargs)
    dataset = make_data(config, split="train")
    iterator = iter(dataset)
    list(itertools.islice(iterator, max(2, dataset.steps_per_epoch)))  # opens files, draws glyphs once
    start = time.process_time()
    list(itertools.islice(iterator, batches))
    seconds = time.process_time() - start
    iterator.close()
    return BATCH * batches / seconds


def stall(turns: int = 6, steps: int = 25) -> None:
    """Steps of configs/clip/debug.py in turns: from the pipeline, and with one batch again and again."""
    c = debug.get_config()
    mesh = build.mesh(c)
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
        graphdef, abstract = step.abstract_state(build.model(c), build.tx(c)[0], mesh, build.judges(c))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        init = functools.partial(step.init_state, build.model(c), build.tx(c)[0], 0, build.judges(c))
        state = jax.jit(init, out_shardings=shardings)()
        train_step = build.train_step(c, graphdef, abstract, mesh)
        batches = iter(build.train_data(c, build.tokenizer(c, Path(folder))))
        batches.start_prefetch()
        stream = sharding.device_batches(batches, mesh)
        one, _ = next(stream)
        state, out = train_step(state, one)
        seconds: dict[str, list[float]] = {"pipeline": [], "one batch": []}
        for kind in turns * list(seconds):
            jax.block_until_ready(out)
            start = time.perf_counter()
            for _ in range(steps):
                state, out = train_step(state, next(stream)[0] if kind == "pipeline" else one)
            jax.block_until_ready(out)
            seconds[kind].append((time.perf_counter() - start) / steps)
        batches.close()
    fed, alone = (np.array(found) for found in seconds.values())
    ratio, (of_fed, of_alone) = np.median(fed / alone), (1e3 * np.median(found) for found in (fed, alone))
    print(
        f"a step from the pipeline takes {of_fed:.0f} ms, {ratio:.3f} times as long as one of a batch that"
    )
    print(f"is there ({of_alone:.0f} ms); median of {turns} pairs of {steps} steps")


def main() -> None:
    if "--stall" in sys.argv:
        stall()
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rate = images_per_core_second(60, source="glyphs", image_size=32, text_len=64)
        rows.append(("glyphs, 32 pixels", rate))
        for width, height in ((500, 375), (2000, 1500)):
            path = os.path.join(folder, f"{width}.tar")
            write_photos(path, width, height)
            size = os.path.getsize(path) // PHOTOS // 1000
            source = f"tar:{path}?split=all"
            batches = 6 if width < 1000 else 2
            rate = images_per_core_second(batches, source=source, image_size=224, text_len=77)
            rows.append((f"JPEG {width} × {height} ({size} kB) to 224", rate))
    need = {f"{name} at 100 TFLOP/s": 1e5 / (3 * cost) for name, cost in FORWARD_GFLOP.items()}
    print("| images | per second and core | needed per second | cores |\n|---|---|---|---|")
    for number, (name, rate) in enumerate(rows):
        for user, needed in need.items() if number else [("debug config", NEED_GLYPHS)]:
            print(f"| {name} | {rate:,.0f} | {user}: {needed:,.0f} | {needed / rate:.2f} |")


if __name__ == "__main__":
    main()
