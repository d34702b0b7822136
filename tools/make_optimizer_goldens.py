"""Writes tests/optim/goldens/*.npz: trajectories of other libraries' optimizers with given gradients.

    pip install torch==2.13.0 torch-optimi==0.3.3 schedulefree==1.4.1 numpy packaging
    pip install --no-deps adamp==0.3.0 apollo-torch==1.0.3 bitsandbytes==0.50.2 galore-torch==1.0 \
        pytorch_optimizer==4.1.0
    python tools/make_optimizer_goldens.py

* stable_adamw.npz: torch-optimi's StableAdamW, 40 steps with a burst of gradients 30 times as large.
* galore.npz: galore-torch's AdamW with `std` and `reverse_std` projection of a tall, a wide and a square
  weight, 24 steps in 3 subspaces. The sign of each singular vector is chosen so that its largest entry is
  positive: LAPACK leaves it open, and the trajectory depends on it because the momentum is kept. Nothing
  else is changed.
* dynamic8.npz: the tables of bitsandbytes' dynamic code, and 8 blocks of 256 values that it quantized.
* matrices.npz: weights and gradients of 10 steps for two matrices of each of three shapes, one shape with a
  spike in one entry and one with a step of large gradients. The rest are trajectories of these, in float64:
* muon.npz, normuon.npz: torch.optim.Muon and pytorch_optimizer's NorMuon, with Newton-Schulz iterations in
  float64 instead of bfloat16.
* soap.npz, stable_spam.npz, adagc.npz: pytorch_optimizer's.
* adamp.npz, schedule_free_adamw.npz: the authors' packages adamp and schedulefree.
* apollo.npz, apollo_mini.npz: the authors' package apollo-torch, with the projections of apollo_draws.npy.
"""

import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import optimi
import pytorch_optimizer
import schedulefree
import torch
from adamp import AdamP
from pytorch_optimizer.optimizer.muon import normuon as normuon_module

# galore-torch and apollo-torch import transformers only to check the version of PyTorch.
versions = types.ModuleType("transformers.utils.versions")
versions.require_version = lambda requirement: None
sys.modules |= {
    "transformers": types.ModuleType("transformers"),
    "transformers.utils": types.ModuleType("transformers.utils"),
    "transformers.utils.versions": versions,
}
from apollo_torch import APOLLOAdamW, random_projector  # noqa: E402
from galore_torch.adamw import AdamW as GaLoreAdamW  # noqa: E402
from galore_torch.galore_projector import GaLoreProjector  # noqa: E402

OUT = Path(__file__).parent.parent / "tests" / "optim" / "goldens"
LR, B1, B2, EPS, DECAY = 0.02, 0.8, 0.9, 1e-10, 0.1  # of the optimizers for matrices.npz


def trajectory(
    optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], grads: list[np.ndarray]
) -> list[np.ndarray]:
    """Each parameter after each step, (steps, *shape); so are the gradients of each."""
    seen: list[list[np.ndarray]] = [[] for _ in params]
    for step in range(len(grads[0])):
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g[step], dtype=p.dtype)
        optimizer.step()
        for p, values in zip(params, seen, strict=True):
            values.append(p.detach().numpy().copy())
    return [np.stack(values) for values in seen]


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
            [out[f"{key}_{str(dtype).removeprefix('torch.')}"]] = trajectory(optimizer, [p], [grads])
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
            [out[f"{name}_{proj_type}"]] = trajectory(optimizer, [p], [grads])
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


def matrices() -> None:
    rng = np.random.default_rng(17)
    steps, out = 10, {}
    for name, (n_out, n_in) in {"wide": (4, 7), "tall": (7, 4), "square": (5, 5)}.items():
        signal, noise = rng.normal(size=(2, n_out, n_in)), rng.normal(size=(steps, 2, n_out, n_in))
        grads = signal + noise
        if name == "wide":
            grads[6, :, 1, 2] = 50.0
        if name == "tall":
            grads[4] *= 20.0
        start = rng.normal(size=(2, n_out, n_in))
        out |= {f"{name}_0": start.astype(np.float32), f"{name}_grads": grads.astype(np.float32)}
    np.savez_compressed(OUT / "matrices.npz", **out)


def save_trajectory(name: str, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    """Saves each matrix of matrices.npz after each step, in float32: (steps, 2, out, in)."""
    inputs = np.load(OUT / "matrices.npz")
    stacks = [key.removesuffix("_0") for key in inputs if key.endswith("_0")]
    params = [torch.nn.Parameter(torch.tensor(x).double()) for key in stacks for x in inputs[f"{key}_0"]]
    grads = [g for key in stacks for g in inputs[f"{key}_grads"].swapaxes(0, 1)]
    values = trajectory(optimizer(params, lr=LR, **options), params, grads)
    pairs = zip(stacks, values[::2], values[1::2], strict=True)
    out = {key: np.stack(pair, axis=1).astype(np.float32) for key, *pair in pairs}
    np.savez_compressed(OUT / f"{name}.npz", **out)


def muon() -> None:
    torch.Tensor.bfloat16 = lambda self: self.clone()  # the iteration works in place
    options = dict(weight_decay=DECAY, momentum=B1, adjust_lr_fn="match_rms_adamw")
    save_trajectory("muon", torch.optim.Muon, **options)


def normuon() -> None:
    iteration = normuon_module.zero_power_via_newton_schulz_5
    normuon_module.zero_power_via_newton_schulz_5 = functools.partial(iteration, dtype=torch.float64)

    def make(params: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        return pytorch_optimizer.NorMuon([{"params": params, "use_muon": True}], **options)

    options = dict(momentum=B1, beta2=B2, weight_decay=DECAY, update_scale="match_rms", foreach=False)
    save_trajectory("normuon", make, **options)


def soap() -> None:
    options = dict(precondition_frequency=3, max_precondition_dim=5, weight_decay=0.0)
    save_trajectory("soap", pytorch_optimizer.SOAP, betas=(B1, B2), eps=EPS, **options)


def adamp() -> None:
    # With this delta all three branches are taken.
    options = dict(delta=1.5, wd_ratio=0.1, weight_decay=DECAY)
    save_trajectory("adamp", AdamP, betas=(B1, B2), eps=EPS, **options)


def schedule_free_adamw() -> None:
    def make(params: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        optimizer = schedulefree.AdamWScheduleFree(params, foreach=False, **options)
        optimizer.train()
        return optimizer

    options = dict(warmup_steps=4, weight_decay=DECAY)
    save_trajectory("schedule_free_adamw", make, betas=(B1, B2), eps=EPS, **options)


def stable_spam() -> None:
    options = dict(gamma1=0.7, gamma2=0.9, theta=0.95, update_proj_gap=4, weight_decay=DECAY)
    save_trajectory("stable_spam", pytorch_optimizer.StableSPAM, betas=(B1, B2), eps=EPS, **options)


def adagc() -> None:
    options = dict(beta=0.9, lambda_abs=2.0, lambda_rel=1.05, warmup_steps=4, weight_decay=DECAY)
    save_trajectory("adagc", pytorch_optimizer.AdaGC, betas=(B1, B2), eps=EPS, **options)


def apollo() -> None:
    draws = np.random.default_rng(19).normal(size=(3, 2, 5)).astype(np.float32)
    np.save(OUT / "apollo_draws.npy", draws)

    def randn(shape: tuple[int, int], seed: int, **_: Any) -> torch.Tensor:
        """Rank first or last: the first entries of the draw that a seed counts."""
        rank, side = sorted(shape)
        draw = torch.tensor(draws[seed, :rank, :side]).double()
        return draw if shape == (rank, side) else draw.T

    random_projector.stable_randn = randn
    random_projector.next_seed = lambda seed: seed + 1

    def make(params: list[torch.nn.Parameter], *, disable_nl: bool, **group: Any) -> torch.optim.Optimizer:
        group |= dict(params=params, eps=EPS, update_proj_gap=4, proj="random", proj_type="std")
        optimizer = APOLLOAdamW([group], disable_nl=disable_nl)
        for p in params:
            optimizer.state[p]["seed"] = 0
        return optimizer

    channels = dict(rank=2, scale=0.25, scale_type="channel", betas=(B1, B2), disable_nl=True)
    save_trajectory("apollo", make, **channels)
    # Without moments the correction for their bias, which comes after the limit of the growth, is 1.
    mini = dict(rank=1, scale=128, scale_type="tensor", betas=(0.0, 0.0), disable_nl=False)
    save_trajectory("apollo_mini", make, **mini)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    stable_adamw()
    galore()
    dynamic8()
    matrices()
    muon()
    normuon()
    soap()
    adamp()
    schedule_free_adamw()
    stable_spam()
    adagc()
    apollo()
