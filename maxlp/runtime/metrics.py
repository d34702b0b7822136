"""How fast a run is, and where its numbers go.

Records are flat dicts of scalars with names like `train/loss`, at a step: the number of finished
updates. `MetricWriter` sends each to the console, to `metrics.jsonl` and to TensorBoard or W&B.
`Throughput` turns finished steps into tokens/s and MFU. `DelayedFetch` brings the metrics of a
step to the host one step later, so that the host waits for a step only when the next is queued.

The loop that belongs to them:

    for step in range(start + 1, total_steps + 1):
        state, metrics = train_step(state, next(batches))
        for done, values in fetch.push(step, metrics, wait=evaluate_or_save_now):
            throughput.tick(done)
            if done % log_every == 0:
                writer.write(done, values | throughput.report() | memory_metrics())
        if evaluate_or_save_now:
            with throughput.paused():
                ...  # evaluate, write the result, then save
"""

import contextlib
import functools
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")

# --- FLOPs and peaks ------------------------------------------------------------------------------


def train_flops_per_token(
    num_matmul_params: int, num_layers: int, num_heads: int, head_dim: int, seq_len: int
) -> tuple[float, float]:
    """FLOPs of one training token, forward and backward, with full and with causal attention.

    6 FLOPs for each parameter that multiplies the token, and 12 S N H a layer for the two
    attention products: Chowdhery et al. 2022 (PaLM), appendix B. That counts every query against
    every key, as nanoGPT and TorchTitan do. A causal mask leaves half of them; MaxText has counted
    that half since July 2025. Recomputation is not counted in either.

    Args:
        num_matmul_params: all parameters but the embedding lookup: the output head counts, tied
            or not. (Norm scales may be in or out, they are 4e-5 of the sum at 8B.)
        num_layers: L.
        num_heads: N, query heads.
        head_dim: H.
        seq_len: S.

    Returns:
        (full, causal), in FLOPs per token.
    """
    attention = 12 * num_layers * num_heads * head_dim * seq_len
    return float(6 * num_matmul_params + attention), float(6 * num_matmul_params + attention / 2)


# Published dense peaks of one JAX device in TFLOP/s, by a part of `device_kind`; the first that
# fits counts, so narrow names stand before wide ones. Sparsity is never counted.
# TPU: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. A TPU v4 or v5p device is a chip (two
# cores together); a TPU7x chip is two devices, so its 2307 and 4614 are halved here.
# GPU: the data sheets of A100, H100 (SXM, PCIe, NVL), H200, and of DGX and HGX B200 and GB200
# NVL72, whose "with sparsity" figures are halved.
PEAK_TFLOPS = {
    "TPU v4": {"bfloat16": 275, "int8": 275},
    "TPU v5 lite": {"bfloat16": 197, "int8": 394},
    "TPU v5e": {"bfloat16": 197, "int8": 394},
    "TPU v5": {"bfloat16": 459, "int8": 918},
    "TPU v6": {"bfloat16": 918, "int8": 1836},
    "TPU7x": {"bfloat16": 2307 / 2, "float8": 4614 / 2},
    "A100": {"bfloat16": 312, "int8": 624},
    "H100 PCIe": {"bfloat16": 756, "float8": 1513, "int8": 1513},
    "H100 NVL": {"bfloat16": 835, "float8": 1671, "int8": 1671},
    "H100": {"bfloat16": 989, "float8": 1979, "int8": 1979},
    "H200": {"bfloat16": 989, "float8": 1979, "int8": 1979},
    "GB200": {"bfloat16": 2500, "float8": 5000, "int8": 5000},
    "B200": {"bfloat16": 2250, "float8": 4500, "int8": 4500},
}


class Peak(NamedTuple):
    """FLOP/s that one device can reach, published or measured by a matmul in this process."""

    flops: float
    measured: bool


def peak_flops(device: jax.Device | None = None, dtype: str = "bfloat16") -> Peak:
    """Peak matmul rate of a device (default: the first local one).

    Args:
        device: its `device_kind` is looked up in `PEAK_TFLOPS`; a kind without a row, a CPU among
            them, is measured once per process (0.2 s).
        dtype: "bfloat16", "float8" or "int8". A published device without units for it multiplies
            in bfloat16, and gets that rate; a measured one has a single rate.
    """
    device = jax.local_devices()[0] if device is None else device
    for kind, peaks in PEAK_TFLOPS.items():
        if kind in device.device_kind:
            return Peak(1e12 * peaks.get(dtype, peaks["bfloat16"]), measured=False)
    return Peak(_measured_flops(device), measured=True)


@functools.cache
def _measured_flops(device: jax.Device) -> float:
    """Best rate of a square matmul within 0.2 s: float32 on CPU, bfloat16 elsewhere."""
    on_cpu = device.platform == "cpu"
    size, dtype = (1024, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    matmul = jax.jit(jnp.matmul)
    matmul(x, x).block_until_ready()
    seconds = []
    while sum(seconds) < 0.2:
        start = time.perf_counter()
        matmul(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    # Simulated CPU devices share the cores, which one matmul takes all of.
    sharers = jax.local_device_count("cpu") if on_cpu else 1
    return 2 * size**3 / min(seconds) / sharers


# --- Speed ----------------------------------------------------------------------------------------


class DelayedFetch:
    """Holds the metrics of the newest step on the device until the next step is queued."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, Any]] = []

    def push(self, step: int, metrics: Any, wait: bool = False) -> Iterator[tuple[int, Any]]:
        """Takes a step's device metrics and yields what has come to the host, each when it comes.

        Args:
            step: finished updates.
            metrics: tree of JAX arrays.
            wait: whether to wait for this step too, as before a pause and after the last step.

        Returns:
            (step, tree of numpy arrays) of the step before, unless it was waited for, and with
            `wait` of this one. Take them all before the next push.
        """
        for leaf in jax.tree.leaves(metrics):
            leaf.copy_to_host_async()
        done, self._pending = [*self._pending, (step, metrics)], []
        if not wait:
            self._pending = [done.pop()]
        return ((step, jax.device_get(metrics)) for step, metrics in done)


class Throughput:
    """Tokens (or images) per second, step time, MFU and ETA of finished steps.

    Counted are the seconds between ticks, less those in `paused`. The first tick only starts the
    clock: what came before it is the compilation.
    """

    def __init__(
        self,
        *,
        units_per_step: int,
        flops_per_unit: tuple[float, float],
        peak: Peak,
        num_devices: int,
        total_steps: int,
        unit: str = "tokens",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Sets the constants of a run.

        Args:
            units_per_step: tokens or images of all processes together.
            flops_per_unit: (full, causal) attention, as from `train_flops_per_token`.
            peak: of one device, from `peak_flops`.
            num_devices: of all processes together.
            total_steps: of the whole run, for the ETA.
            unit: what is counted; the metric is ``perf/<unit>_per_sec``.
            clock: seconds that never go back.
        """
        self._unit, self._units_per_step, self._flops_per_unit = unit, units_per_step, flops_per_unit
        self._peak, self._num_devices, self._total_steps = peak, num_devices, total_steps
        self._clock = clock
        self._start: tuple[int, float] | None = None
        self._mark = self._waited = 0.0

    def tick(self, step: int) -> None:
        """Notes that the result of `step` has just reached the host."""
        now = self._clock()
        if self._start is None:
            self._start = (step, now)
            self._reported_step, self._seconds, self._waited = step, 0.0, 0.0
        else:
            self._seconds += now - self._mark
        self._step, self._mark = step, now

    def waiting_for(self, batches: Iterator[T]) -> Iterator[T]:
        """The batches, while the seconds until each is there are counted.

        The device works on the step before meanwhile, so that they are the most that data can have cost.
        """
        while True:
            start = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited += self._clock() - start
            yield batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Takes the time inside out of the count. Wait for the last step and tick it first."""
        start = self._clock()
        yield
        self._mark += self._clock() - start

    def report(self) -> dict[str, float]:
        """The `perf/` metrics of the steps since the last report; {} if there are none.

        `perf/data_wait` is the fraction of the time in which the loop waited for data, see `waiting_for`.
        `perf/eta` is in seconds and, unlike the others, expects pauses to go on as before.
        """
        if self._start is None or self._step == self._reported_step:
            return {}
        step_time = self._seconds / (self._step - self._reported_step)
        data_wait = self._waited / self._seconds
        self._reported_step, self._seconds, self._waited = self._step, 0.0, 0.0
        units_per_sec = self._units_per_step / step_time
        per_flop = units_per_sec / (self._peak.flops * self._num_devices)
        full, causal = self._flops_per_unit
        first_step, start = self._start
        wall_per_step = (self._mark - start) / (self._step - first_step)
        return {
            f"perf/{self._unit}_per_sec": units_per_sec,
            "perf/step_time": step_time,
            "perf/data_wait": data_wait,
            "perf/mfu": full * per_flop,
            "perf/mfu_causal": causal * per_flop,
            "perf/peak_tflops": self._peak.flops / 1e12,
            "perf/peak_measured": float(self._peak.measured),
            "perf/eta": wall_per_step * (self._total_steps - self._step),
        }


def memory_metrics() -> dict[str, float]:
    """Memory in GiB: of the fullest local device where the backend tells, and of this process."""
    # ru_maxrss is in KiB, on macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    metrics = {"memory/host_peak_gib": rss / 2**30}
    stats = [s for device in jax.local_devices() if (s := device.memory_stats())]
    for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit"):
        if values := [s[name] for s in stats if name in s]:
            metrics[f"memory/device_{name.replace('bytes', 'gib')}"] = max(values) / 2**30
    return metrics


# --- Writers --------------------------------------------------------------------------------------


class MetricWriter:
    """Sends records to every output of a run; does nothing in processes other than the first."""

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        total_steps: int,
        resume_step: int = 0,
        run_config: Mapping[str, Any] | None = None,
        console: bool = True,
        tensorboard: bool = True,
        wandb_project: str | None = None,
    ) -> None:
        """Opens the outputs.

        Args:
            workdir: gets `metrics.jsonl` and `tensorboard/`.
            total_steps: of the whole run, for the console.
            resume_step: finished updates of the restored checkpoint, 0 for a fresh start. Records
                of later steps are removed from `metrics.jsonl`: they will be written again. (So
                write the records of a step before its checkpoint.)
            run_config: shown by W&B.
            console: whether to print progress to standard output.
            tensorboard: whether to write event files.
            wandb_project: the W&B project; None or "" for no W&B.

        Raises:
            ValueError: tensorboardX or wandb is asked for and not installed.
        """
        self._writers: list[Any] = []
        if jax.process_index() != 0:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._writers.append(JsonlWriter(workdir / "metrics.jsonl", resume_step))
        if console:
            self._writers.append(ConsoleWriter(total_steps, sys.stdout))
        if tensorboard:
            self._writers.append(TensorBoardWriter(workdir / "tensorboard", resume_step))
        if wandb_project:
            self._writers.append(WandbWriter(wandb_project, workdir, run_config))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one record.

        Args:
            step: finished updates.
            metrics: names to scalars (Python, numpy or finished JAX arrays).
        """
        if not self._writers:
            return
        scalars = {name: np.asarray(value).item() for name, value in metrics.items()}
        record = {"step": int(step), "time": time.time(), **scalars}
        for writer in self._writers:
            writer.write(record)

    def close(self) -> None:
        """Flushes and closes every output; `contextlib.closing` does it on errors too."""
        for writer in self._writers:
            writer.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl` in order, less lines cut off by a crash; [] if no file."""
    return [record for _, record in _parsed_lines(Path(path))]


def _parsed_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            yield line, record


class JsonlWriter:
    """One JSON object a line, complete on disk after each write (NaN and Infinity as Python's)."""

    def __init__(self, path: Path, resume_step: int) -> None:
        if path.exists():
            # A fresh start repeats step 0 too; a resumed one does not repeat its first step.
            last = resume_step if resume_step > 0 else -1
            kept = [line + "\n" for line, r in _parsed_lines(path) if r["step"] <= last]
            part = path.with_suffix(".part")
            part.write_text("".join(kept))
            os.replace(part, path)
        self._file = path.open("a", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


class ConsoleWriter:
    """One line that renews itself on a terminal; a line for each record elsewhere."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._total_steps, self._stream = total_steps, stream
        self._live = stream.isatty()
        self._line_is_open = False

    def write(self, record: Mapping[str, Any]) -> None:
        line = _format_record(record, self._total_steps)
        if not self._live:
            print(line, file=self._stream, flush=True)
            return
        # Records other than training progress stay on the screen.
        self._line_is_open = "train/loss" in record
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[K{line[:width]}" + ("" if self._line_is_open else "\n"))
        self._stream.flush()

    def close(self) -> None:
        if self._line_is_open:
            print(file=self._stream, flush=True)


WORTH_A_WORD = 0.05  # of the time waited for data
MAX_DEPTH = 2  # names with more slashes are of single layers, too many for a line


def _format_record(record: Mapping[str, Any], total_steps: int) -> str:
    """A progress line for training records, `name value` pairs for others."""
    parts = [f"step {record['step']}/{total_steps}"]
    if "train/loss" not in record:
        return "  ".join(
            parts
            + [
                f"{k} {v:,.0f}" if abs(v) >= 1000 else f"{k} {v:.4g}"
                for k, v in record.items()
                if k not in ("step", "time") and k.count("/") <= MAX_DEPTH
            ]
        )
    of_what = " of measured peak" if record.get("perf/peak_measured") else ""
    formats: dict[str, Callable[[Any], str]] = {
        "train/loss": lambda v: f"loss {v:.4f}",
        "perf/tokens_per_sec": lambda v: f"{v:,.0f} tok/s",
        "perf/images_per_sec": lambda v: f"{v:,.0f} img/s",
        "perf/mfu": lambda v: f"mfu {v:.1%}{of_what}",
        "perf/data_wait": lambda v: f"data wait {v:.0%}",
        "data/skipped": lambda v: f"{v:,.0f} broken skipped",
        "train/learning_rate": lambda v: f"lr {v:.2e}",
        "train/grad_norm": lambda v: f"grad {v:.3g}",
        "perf/eta": lambda v: f"eta {format_seconds(v)}",
    }
    if record.get("perf/data_wait", 0.0) < WORTH_A_WORD:
        del formats["perf/data_wait"]
    return "  ".join(parts + [f(record[k]) for k, f in formats.items() if k in record])


def format_seconds(seconds: float) -> str:
    """Hours, minutes and seconds as in 1:02:03, without the hours below one."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class TensorBoardWriter:
    """Event files for TensorBoard; after a resume it hides the steps that were cut off."""

    def __init__(self, logdir: Path, resume_step: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ValueError(
                "tensorboard=True needs tensorboardX: pip install tensorboardX, or set it to False"
            ) from None
        self._writer = SummaryWriter(str(logdir), purge_step=resume_step and resume_step + 1, flush_secs=10)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, record["step"], walltime=record["time"])

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A W&B run that goes on when training does: its id lies in the workdir."""

    def __init__(self, project: str, workdir: Path, run_config: Mapping[str, Any] | None) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError(
                f"wandb_project={project!r} needs wandb: pip install wandb, or set it to None"
            ) from None
        id_file = workdir / "wandb_id"
        run_id = id_file.read_text() if id_file.exists() else None
        self._run = wandb.init(
            project=project,
            name=workdir.resolve().name,
            dir=str(workdir),
            id=run_id,
            resume="allow",
            config=dict(run_config or {}),
        )
        id_file.write_text(self._run.id)

    def write(self, record: Mapping[str, Any]) -> None:
        metrics = {name: v for name, v in record.items() if name not in ("step", "time")}
        self._run.log(metrics, step=record["step"])

    def close(self) -> None:
        self._run.finish()
