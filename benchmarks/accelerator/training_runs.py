"""Whole train steps: what the planner predicts for them, what they take, and the same in PyTorch."""

import dataclasses
import gc
import importlib
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
from training import RANDOM_TEXT, CompiledRun, changed, matmul_types, random_batch

from benchmarks.accelerator.results import TOLERANCE, LeftOut, Result, is_of, load, path
from maxlp.families.llama.presets import LLAMA_3_2_ROPE, llama
from maxlp.planning import search, topologies
from maxlp.planning.compiled import read_memory
from maxlp.run.experiment import resolve_settings
from maxlp.run.settings import Settings, read
from maxlp.runtime import hardware

ROOT = Path(__file__).parents[2]


class Run(NamedTuple):
    """A training run.

    Attributes:
      model: a key of `PRESETS`, or one of the sizes in `make_config`.
      batch: sequences or pairs.
      tokens: of a sequence; 0 for CLIP.
      choices: the preset's argument, as after the colon of --config.
    """

    model: str
    batch: int
    tokens: int
    recipe: str = "bf16"
    choices: str = ""


RUNS = {
    "8b_fp8": Run("8b", 2, 8192, "fp8_delayed"),
    "8b_bf16": Run("8b", 2, 8192),
    "8b_int8": Run("8b", 2, 8192, "int8_switchback"),
    "8b_fp8_light": Run("8b", 2, 8192, "fp8_delayed", "precision=pure_bf16,low_bit=8bit"),
    "1.5b_fp8": Run("1.5b", 32, 1024, "fp8_delayed"),
    "1.5b_bf16": Run("1.5b", 32, 1024),
    "1b_fp8": Run("1b", 4, 8192, "fp8_delayed"),
    "1b_bf16": Run("1b", 4, 8192),
    "3b_fp8": Run("3b", 2, 8192, "fp8_delayed"),
    "3b_bf16": Run("3b", 2, 8192),
    "clip_b16": Run("clip_b16", 1024, 0),
    "clip_h14": Run("clip_h14", 256, 0),
    "clip_h14_fp8": Run("clip_h14", 256, 0, "fp8_switchback"),
    "clip_b16_131072": Run("clip_b16", 131072, 0),
}
PRESETS = {"8b": "llama.8b", "1b": "llama.llama3_2_1b", "clip_b16": "clip.b16", "clip_h14": "clip.h14"}
TINY_LLAMA = dict(
    vocab_size=256, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128
)
TINY_TOWER = dict(width=32, num_layers=1, num_heads=2, mlp_dim=64)
TINY_CLIP = {
    "model.embed_dim": 16,
    "model.visual": TINY_TOWER | dict(image_size=16, patch_size=8),
    "model.text": TINY_TOWER | dict(vocab_size=256),
    "data.image_size": 16,
}
STEPS, SECONDS = 20, 15.0  # at most


def make_config(run: Run, tiny: bool) -> ConfigDict:
    """The preset of a run, on random data."""
    if run.model in PRESETS:
        c = importlib.import_module(f"configs.{PRESETS[run.model]}").get_config(run.choices)
    elif run.model == "3b":  # Llama 3.2
        c = llama(
            embed_dim=3072,
            num_layers=28,
            num_heads=24,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=8192,
            rope_scaling=LLAMA_3_2_ROPE,
            tie_embeddings=True,
        )
    else:  # the sizes of Qwen2.5 1.5B, which LLM.Q trains
        c = llama(
            vocab_size=151936,
            embed_dim=1536,
            num_layers=28,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            mlp_dim=8960,
            tie_embeddings=True,
        )
    changes: dict[str, Any] = {"data.batch_size": min(run.batch, 16) if tiny else run.batch}
    if run.tokens:
        changes["data.seq_len"] = 64 if tiny else run.tokens
        changes |= {"model": TINY_LLAMA} if tiny else {}
    else:
        changes |= TINY_CLIP if tiny else {}
    all_blocks = {"precision.recipe": run.recipe, "precision.first_blocks": 0, "precision.last_blocks": 0}
    return changed(c, RANDOM_TEXT | all_blocks | changes)


# --- predictions ----------------------------------------------------------------------------------------


def predict(out: Result) -> None:
    """Records the settings that the planner chooses for every run, with their predicted time and memory."""
    for name in RUNS:
        out.add(run=name, candidates=list(itertools.islice(candidates(name, out.device, out.tiny), 1)))


def candidates(name: str, device: dict[str, Any], tiny: bool) -> Iterator[dict[str, Any]]:
    """Settings to try, with the run's batch, recipe and loss: changes, predicted peak (bytes) and seconds.

    First the fastest that fit by prediction; then, because the prediction may be too low, up to two others,
    each with at most 85 % of the memory of the one before. Tiny runs have one candidate. A generator,
    because each search takes seconds.
    """
    s, one = read(make_config(RUNS[name], tiny)), topology(device)
    fixed = {"precision.recipe", "data.batch_size", "loss.method"}
    for _ in range(1 if tiny else 3):
        found = search.find(s, one)
        options = [each for each in (*found.layouts, *found.numerics) if not fixed & each.changes.keys()]
        if not options:
            return
        best = min(options, key=lambda each: each.order)
        yield dict(changes=best.changes, peak=best.peak, seconds=best.seconds)
        one = dataclasses.replace(one, chip=dataclasses.replace(one.chip, memory=0.85 * best.peak))


def topology(device: dict[str, Any]) -> topologies.Topology:
    """A topology of one device like this one, with its memory; one H200 for an unknown kind or a CPU."""
    known = {chip.kind: name for name, chip in topologies.CHIPS.items()}
    name = known.get(device["kind"], "h200")
    one = topologies.parse(f"{name}:{'x'.join('1' * (topologies.CHIPS[name].torus or 2))}")
    memory = min(one.chip.memory, device["memory"] or one.chip.memory)
    return dataclasses.replace(one, chip=dataclasses.replace(one.chip, memory=memory))


# --- runs -----------------------------------------------------------------------------------------------


def train(out: Result) -> None:
    """Times the train step of the run in `RUNS` that has the piece's name, as `maxlp.train` compiles it."""
    found = load(path(out.folder, "predict"))
    rows = found["rows"] if found and is_of(found, out.device) else []
    predicted = next((row["candidates"] for row in rows if row["run"] == out.name), [])
    others = itertools.islice(candidates(out.name, out.device, out.tiny), len(predicted), None)
    s = read(config_for_device(out))
    row: dict[str, Any] = {}
    for choice in itertools.chain(predicted, others):
        try:
            row = measure(search.changed(s, choice["changes"]))
        except jax.errors.JaxRuntimeError as error:  # backends report out of memory by different messages
            traceback.print_exception(error)
            row = {"refused": " ".join(str(error).split())[:300]}
        named = {"flags": " ".join(search.flags(choice["changes"]))}
        out.add(run=out.name, **named, predicted=choice, **row)
        if "refused" not in row:
            return
        gc.collect()
    if not row:
        raise LeftOut("no settings of this run fit the device")
    raise RuntimeError(f"none of the planner's choices ran; the last one: {row['refused']}")


def config_for_device(out: Result) -> ConfigDict:
    """The config of the run; a Llama has cuDNN's attention if ``kernels`` found that ours fails here."""
    run, checked = RUNS[out.name], load(path(out.folder, "kernels"))
    c = make_config(run, out.tiny)
    rows = checked["rows"] if checked and is_of(checked, out.device) else []
    if run.tokens and any(row["kernel"] == "flash" and not row["error"] <= TOLERANCE for row in rows):
        return changed(c, {"model.attention": "cudnn", "data.max_documents": 16})
    return c


def measure(s: Settings) -> dict[str, Any]:
    """Time, memory and matmuls of a step; {"refused": why} if it needs more memory than the device has."""
    device = jax.devices()[0]
    before = peak_bytes(device)
    compiled = CompiledRun(resolve_settings(s, [device]))
    memories = (read_memory(program, device.platform) for program in compiled.programs)
    memory = max(memories, key=lambda one: one.needs)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit and memory.needs > limit:
        return {"refused": f"the program needs {memory.needs:.4g} of {limit:.4g} bytes"}
    batch = random_batch(compiled.run)
    seconds, metrics = compiled.time_steps(batch, STEPS, SECONDS)
    median = statistics.median(seconds)
    rate, flops = s.family.units_per_step(s.data) / median, s.flops_per_unit
    peak = hardware.published_flops(device.device_kind)
    text = compiled.program.as_text()
    assert text is not None
    matmuls = matmul_types(text)
    return {
        "unit": s.family.unit,
        "per_second": rate,
        "median_seconds": median,
        "seconds": seconds,
        "compile_seconds": compiled.compile_seconds,
        "num_params": s.num_params,
        "flops_per_unit": flops,
        "mfu": [rate * one / peak for one in flops] if peak else None,
        "compiled_peak": memory.peak,
        "peak": peak_bytes(device, before),
        "attention": compiled.run.settings.model.attention,
        "matmuls": dict(matmuls),
        "f8_matmuls": sum(n for types, n in matmuls.items() if types.count("f8") == 2),
        "int8_matmuls": matmuls["s8·s8"],
        "loss": float(metrics["loss"]),
    }


def peak_bytes(device: jax.Device, before: int | None = None) -> int | None:
    """The peak memory of this process in bytes; None if unknown, or if it is still that of ``before``."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak == before else peak


# --- PyTorch --------------------------------------------------------------------------------------------


def torch(out: Result) -> None:
    """The train step of benchmarks/torch_llama.py: same model, batch and tokens as `8b_bf16`.

    Parameters and moments are in bfloat16, without which AdamW of 8B parameters would need 128 GB.
    """
    needed = ["torch", "transformers", *["torchao"] * out.name.endswith("fp8")]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise LeftOut(f"{name} is not installed")
    if out.device["platform"] not in ("cpu", "gpu"):
        raise LeftOut("PyTorch is compared on GPUs")
    s = read(make_config(RUNS["8b_bf16"], out.tiny))
    sizes = {name: getattr(s.model, name) for name in TINY_LLAMA}
    sizes |= dict(seq_len=s.data.seq_len, batch_size=s.data.batch_size, steps=3 if out.tiny else 10)
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    flags += [
        "--dtype=bfloat16",
        "--param_dtype=bfloat16",
        "--remat",
        *["--fp8"] * out.name.endswith("fp8"),
    ]
    flags += [] if out.tiny else ["--compile"]
    command = [sys.executable, str(ROOT / "benchmarks" / "torch_llama.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"PyTorch: {reason[-1]}")
    row = json.loads(done.stdout.splitlines()[-1])
    out.add(
        run=out.name, unit="tokens", per_second=row["tokens_per_sec_median"], flags=" ".join(flags), **row
    )
