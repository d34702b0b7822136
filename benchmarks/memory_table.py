r"""The tables of docs/memory.md: the state of each optimizer and precision, and the GPU that it needs.

    python benchmarks/memory_table.py                    # closed form; half a minute on 2 cores
    pip install 'maxlp[aot]'
    python benchmarks/memory_table.py --compile          # and compiled for an H100; 10 minutes of CPU time
    python benchmarks/memory_table.py --compile --topology=h200:1x1

The first table is the state of a training run in bytes per parameter, from the shapes of the 8B's state;
after a plus, those in the host's memory. The second, which the page leaves out, is the peak memory of a
step of one sequence on one device by the planner's closed form. The third, with ``--compile``, is that peak
by the compiler's memory analysis, and by how much the closed form is above or below it. Nothing runs on a
GPU.
"""

import argparse
from collections.abc import Callable
from typing import Any

from training import topology

from maxlp.families.llama.presets import llama
from maxlp.plan import make_plan
from maxlp.planning import cost_model, topologies
from maxlp.planning.topologies import Topology
from maxlp.run.config import ConfigError
from maxlp.run.presets import LOW_BIT
from maxlp.run.settings import Settings, read

Plan = dict[str, Any]  # of `make_plan`
# vocab_size, embed_dim, num_layers, num_heads, num_kv_heads, head_dim, mlp_dim, tie_embeddings
MODELS = {
    "1B": (128256, 2048, 16, 32, 8, 64, 8192, True),  # Llama 3.2 1B
    "7B": (32000, 4096, 32, 32, 32, 128, 11008, False),  # Llama 2 7B
    "8B": (128256, 4096, 32, 32, 8, 128, 14336, False),  # Llama 3 8B
    "14B": (151936, 5120, 40, 40, 8, 128, 17408, False),  # the sizes of Qwen3 14B
}
GPUS = ("rtx4090", "h100", "h200")  # 24, 80 and 141 GB

BFLOAT16 = {"model.param_dtype": "bfloat16"}
PURE_BF16 = BFLOAT16 | {"optimizer.param_rounding": "stochastic"}
FP8, EIGHT_BIT, COMPANDED = (
    {f"optimizer.low_bit.{key}": value for key, value in LOW_BIT[name].items()}
    for name in ("fp8", "8bit", "companded")
)
GALORE = {"optimizer.galore.rank": 1024}
RELEASED = {"train.release_gradients": True, "optimizer.clip_norm": 0.0}  # not: all gradients
OFFLOADED = RELEASED | {"optimizer.offload": True}


def optimizer(name: str) -> dict[str, Any]:
    """The settings that choose an optimizer."""
    return {"optimizer.name": name}


PARAMETERS = {  # columns of the first table
    "float32": {},
    "bfloat16, stochastic": PURE_BF16,
    "bfloat16, residual": BFLOAT16 | {"optimizer.param_rounding": "residual"},
    "bfloat16, kahan": BFLOAT16 | {"optimizer.param_rounding": "kahan"},
    "bfloat16, float16 master": BFLOAT16 | {"optimizer.param_rounding": "float16_master"},
}
STATES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, offloaded": OFFLOADED,
    "StableAdamW": optimizer("stable_adamw"),
    "Stable-SPAM": optimizer("stable_spam"),
    "AdamP": optimizer("adamp"),
    "schedule-free AdamW": optimizer("schedule_free_adamw") | {"optimizer.schedule": "constant"},
    "AdamW, FP8 moments": FP8,
    "AdamW, 8-bit moments": EIGHT_BIT,
    "AdamW, companded moments": COMPANDED,
    "AdamW, companded moments, offloaded": COMPANDED | OFFLOADED,
    "Lion": optimizer("lion"),
    "Lion, 8-bit moments": optimizer("lion") | EIGHT_BIT,
    "Muon, NorMuon": optimizer("muon"),
    "Muon, 8-bit moments": optimizer("muon") | EIGHT_BIT,
    "SOAP": optimizer("soap"),
    "SOAP, one-sided": optimizer("soap") | {"optimizer.options.one_sided": True},
    "SGD": optimizer("sgd"),
    "Adafactor": optimizer("adafactor"),
    "GaLore, rank 1024": GALORE,
    "GaLore, rank 1024, 8-bit moments": GALORE | EIGHT_BIT,
    "APOLLO, rank 256": optimizer("apollo"),
    "APOLLO-Mini": optimizer("apollo_mini"),
}
STEPS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, released": RELEASED,
    "AdamW, offloaded": OFFLOADED,
    "AdamW, 8-bit moments": EIGHT_BIT,
    "GaLore, 8-bit moments": GALORE | EIGHT_BIT,
    "AdamW, bf16": PURE_BF16,
    "AdamW, bf16, FlashOptim": PARAMETERS["bfloat16, residual"] | COMPANDED,
    "FlashOptim, released": PARAMETERS["bfloat16, residual"] | COMPANDED | RELEASED,
    "FlashOptim, offloaded": PARAMETERS["bfloat16, residual"] | COMPANDED | OFFLOADED,
    "AdamW, bf16, 8-bit moments": PURE_BF16 | EIGHT_BIT,
    "the same, released": PURE_BF16 | EIGHT_BIT | RELEASED,
    "GaLore, bf16, 8-bit moments, released": PURE_BF16 | GALORE | EIGHT_BIT | RELEASED,
    "Muon": optimizer("muon"),
    "APOLLO, rank 256": optimizer("apollo"),
    "APOLLO-Mini, bf16, released": PURE_BF16 | optimizer("apollo_mini") | RELEASED,
}


def settings(model: str, overrides: dict[str, Any]) -> Settings:
    """A step of one sequence of 2,048 tokens."""
    vocab, embed, layers, heads, kv_heads, head, mlp, tied = MODELS[model]
    c = llama(
        vocab_size=vocab,
        embed_dim=embed,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        mlp_dim=mlp,
        tie_embeddings=tied,
    )
    c.data.update(source="unread", tokenizer="bytes", seq_len=2048, batch_size=1)
    with c.unlocked():
        c.update_from_flattened_dict(overrides)
    return read(c)


def state_bytes(overrides: dict[str, Any], topology: Topology) -> str:
    """Bytes per parameter of the 8B on the device, and on the host; a dash if `train` refuses them."""
    try:
        s = settings("8B", overrides)
    except ConfigError:
        return "–"
    machine = topology.machine(s)
    state, mesh = cost_model.state_shapes(s, machine), cost_model.abstract_mesh(machine.axes)
    device = sum(state.bytes_on(mesh, part) for part in ("params", "opt_state"))
    host = state.offloaded_on(mesh)
    return f"{device / s.num_params:.2f}{f' + {host / s.num_params:.2f}' if host else ''}"


def print_states(topology: Topology) -> None:
    """The first table."""
    print(f"| optimizer | {' | '.join(PARAMETERS)} |\n|---{'|---:' * len(PARAMETERS)}|")
    for name, overrides in STATES.items():
        cells = (state_bytes(overrides | parameters, topology) for parameters in PARAMETERS.values())
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def print_steps(plans: dict[tuple[str, str], Plan], cell: Callable[[Plan], str]) -> None:
    """The second and the third table: a cell for the plan of each step and model."""
    print(f"| step | {' | '.join(MODELS)} |\n|---{'|---:' * len(MODELS)}|")
    for name in STEPS:
        print(f"| {name} | {' | '.join(cell(plans[name, model]) for model in MODELS)} |")


def estimated(plan: Plan) -> str:
    """The peak by the closed form in GB, and the smallest GPU that has room for it."""
    peak = plan["estimate"]["peak"]
    return f"{peak / 1e9:.1f}{smallest_gpu(peak)}"


def compiled(plan: Plan) -> str:
    """The peak of the compiled step in GB, the smallest GPU, and by how much the closed form is off."""
    peak = plan["compiled"]["peak"]
    deviation = 100 * (plan["estimate"]["peak"] / peak - 1)
    return f"{peak / 1e9:.1f}{smallest_gpu(plan['compiled']['needs'])} {deviation:+.0f} %"


def smallest_gpu(needed: float) -> str:
    """The nominal memory of the smallest GPU that has room for so many bytes, in brackets."""
    for gpu, nominal in zip(GPUS, (24, 80, 141), strict=True):
        if needed <= topologies.parse(f"{gpu}:1x1").chip.memory:
            return f" ({nominal})"
    return " (–)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also compile the steps")
    parser.add_argument(
        "--topology", type=topology, default="h100:1x1", help="the device that the steps are planned for"
    )
    args = parser.parse_args()
    topologies.compile_without_devices()
    print("Bytes per parameter, Llama 3 8B\n")
    print_states(args.topology)
    plans = {
        (name, model): make_plan(settings(model, overrides), args.topology, compiles=args.compile)
        for name, overrides in STEPS.items()
        for model in MODELS
    }
    print("\nGB at the peak of a step, closed form\n")
    print_steps(plans, estimated)
    if args.compile:
        print("\nGB at the peak of a step, compiled\n")
        print_steps(plans, compiled)


if __name__ == "__main__":
    main()
