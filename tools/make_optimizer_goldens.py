"""Writes tests/optim/goldens/*.npz: what other people's optimizers do with the same gradients.

    pip install torch==2.13.0 torch-optimi==0.3.3 numpy
    pip install --no-deps galore-torch==1.0 bitsandbytes==0.50.2
    python tools/make_optimizer_goldens.py

* stable_adamw.npz: torch-optimi's StableAdamW, 40 steps with a burst of gradients 30 times as large.
"""

from pathlib import Path

import numpy as np
import optimi
import torch

OUT = Path(__file__).parent.parent / "tests" / "optim" / "goldens"


def stable_adamw() -> None:
    rng = np.random.default_rng(7)
    shapes, steps = {"kernel": (6, 4), "scale": (5,)}, 40
    out = {}
    for key, shape in shapes.items():
        burst = np.ones(steps)
        burst[12:15] = 30.0
        noise = 0.5 + rng.normal(size=(steps, *shape))
        # float32 values, so that both precisions start from the same numbers.
        start = rng.normal(size=shape).astype(np.float32)
        grads = (burst.reshape(-1, *[1] * len(shape)) * noise).astype(np.float32)
        out |= {f"{key}_0": start, f"{key}_grads": grads}
        for dtype in (torch.float64, torch.float32):
            p = torch.nn.Parameter(torch.tensor(start, dtype=dtype))
            decay = 0.1 if key == "kernel" else 0.0
            optimizer = optimi.StableAdamW(
                [p], lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay, foreach=False, triton=False
            )
            trajectory = []
            for g in grads:
                p.grad = torch.tensor(g, dtype=dtype)
                optimizer.step()
                trajectory.append(p.detach().numpy().copy())
            out[f"{key}_{str(dtype).removeprefix('torch.')}"] = np.stack(trajectory)
    np.savez_compressed(OUT / "stable_adamw.npz", **out)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    stable_adamw()
