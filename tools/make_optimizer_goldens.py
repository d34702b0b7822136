"""Writes tests/optim/goldens/*.npz: trajectories of other libraries' optimizers with given gradients.

    pip install torch==2.13.0 torch-optimi==0.3.3 numpy
    pip install --no-deps galore-torch==1.0 bitsandbytes==0.50.2
    python tools/make_optimizer_goldens.py

* stable_adamw.npz: torch-optimi's StableAdamW, 40 steps with a burst of gradients 30 times as large.
* galore.npz: galore-torch's AdamW with `std` and `reverse_std` projection of a tall, a wide and a square
  weight, 24 steps in 3 subspaces. The sign of each singular vector is chosen so that its largest entry is
  positive: LAPACK leaves it open, and the trajectory depends on it because the momentum is kept. Nothing
  else is changed.
* dynamic8.npz: the tables of bitsandbytes' dynamic code, and 8 blocks of 256 values that it quantized.
"""

import sys
import types
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import optimi
import torch

# galore-torch imports transformers only to check the version of PyTorch.
versions = types.ModuleType("transformers.utils.versions")
versions.require_version = lambda requirement: None
sys.modules |= {
    "transformers": types.ModuleType("transformers"),
    "transformers.utils": types.ModuleType("transformers.utils"),
    "transformers.utils.versions": versions,
}
from galore_torch.adamw import AdamW as GaLoreAdamW  # noqa: E402
from galore_torch.galore_projector import GaLoreProjector  # noqa: E402

OUT = Path(__file__).parent.parent / "tests" / "optim" / "goldens"


def stable_adamw() -> None:
    rng = np.random.default_rng(7)
    shapes, steps = {"kernel": (6, 4), "scale": (5,)}, 40
    out = {}
    for key, shape in shapes.items():
        burst = np.ones(steps)
        burst[12:15] = 30.0
        noise = 0.5 + rng.normal(size=(steps, *shape))
        # Values of float32, so that both precisions start from the same numbers.
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


def with_fixed_signs(get_orthogonal_matrix):
    """The projector's basis, (short, rank) or (rank, short), with each vector's largest entry positive."""

    def fixed(self, weights, rank, type):
        basis = get_orthogonal_matrix(self, weights, rank, type)
        dim = 0 if type == "left" else 1
        largest = basis.gather(dim, basis.abs().argmax(dim, keepdim=True))
        return torch.where(largest < 0, -basis, basis)

    return fixed


def galore() -> None:
    GaLoreProjector.get_orthogonal_matrix = with_fixed_signs(GaLoreProjector.get_orthogonal_matrix)
    rng = np.random.default_rng(11)
    rank, steps, out = 3, 24, {}
    for name, (n_out, n_in) in {"tall": (10, 6), "wide": (6, 10), "square": (7, 7)}.items():
        # Resembles real gradients: a low-rank signal that changes slowly, plus noise.
        left, right = rng.normal(size=(2, steps + 4, max(n_out, n_in), 4)).cumsum(axis=1) / 2
        signal = np.einsum("tor,tir->toi", left[4:, :n_out], right[4:, :n_in])
        grads = (signal + 0.3 * rng.normal(size=signal.shape)).astype(np.float32)
        start = rng.normal(size=(n_out, n_in)).astype(np.float32)
        out |= {f"{name}_0": start, f"{name}_grads": grads}
        for proj_type in ("std", "reverse_std"):
            p = torch.nn.Parameter(torch.tensor(start))
            group = {"params": [p], "rank": rank, "update_proj_gap": 10, "scale": 0.25}
            optimizer = GaLoreAdamW(
                [group | {"proj_type": proj_type}],
                lr=1e-2,
                betas=(0.9, 0.95),
                eps=1e-12,
                no_deprecation_warning=True,
            )
            trajectory = []
            for g in grads:
                p.grad = torch.tensor(g)
                optimizer.step()
                trajectory.append(p.detach().numpy().copy())
            out[f"{name}_{proj_type}"] = np.stack(trajectory)
    np.savez_compressed(OUT / "galore.npz", **out)


def dynamic8() -> None:
    rng = np.random.default_rng(13)
    out = {
        "signed": bnb.create_dynamic_map(True).numpy(),
        "unsigned": bnb.create_dynamic_map(False).numpy(),
    }
    x = rng.normal(size=(4, 512)) * 10.0 ** rng.uniform(-4, 0, size=(4, 512))
    for name, values in (("signed", x), ("unsigned", x**2)):
        values = torch.tensor(values.astype(np.float32))
        codes, state = bnb.quantize_blockwise(values, code=torch.tensor(out[name]), blocksize=256)
        out |= {f"{name}_x": values.numpy(), f"{name}_codes": codes.numpy()}
        out[f"{name}_decoded"] = bnb.dequantize_blockwise(codes, state).numpy()
    np.savez_compressed(OUT / "dynamic8.npz", **out)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    stable_adamw()
    galore()
    dynamic8()
