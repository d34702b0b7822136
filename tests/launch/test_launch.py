"""The commands that the launchers run, and their reactions to a process that ends.

Programs of clusters are replaced by stand-ins on PATH.
"""

import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import run_outputs
from tests.run_outputs import losses
from tests.training_runs import ROOT, SMALL, finish, wait_until

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
MANIFESTS = sorted(LAUNCH.glob("*.yaml"))
FLAG_FILES = sorted((LAUNCH / "xla_flags").glob("*.txt"))
TINY = [
    *SMALL,
    "--config.model.num_layers=1",
    "--config.train.eval_every=0",
    "--config.train.eval_batches=1",
    "--config.metrics.tensorboard=False",
]
FAST_COMPILATION = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}  # those of tests/conftest.py

# A shell cannot trap a signal that was ignored when it started, as Ctrl-C is for background jobs and SIGHUP
# under nohup.
WITH_SIGNALS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(**more):
    """An environment without a cluster."""
    clusters = ("MAXLP_", "SLURM_", "KUBERNETES_", "XLA_FLAGS", "LIBTPU_", "JAX_LOCAL_DEVICE_IDS", "CUDA_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(clusters)}
    return env | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)} | more


def start(script, *arguments, **env):
    return subprocess.Popen(
        [sys.executable, "-c", WITH_SIGNALS, LAUNCH / script, *map(str, arguments)],
        cwd=ROOT,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(script, *arguments, code=0, **env):
    return finish(start(script, *arguments, **env), code)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Options of a run that starts fast, because model and text are small."""
    corpus = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        (corpus / f"{i}.txt").write_text("".join(f"{i * n % 97} bottles of beer, " for n in range(200)))
    return [*TINY, f"--config.data.source=text:{corpus}?validation=0.05"]


def train(*options):
    return [sys.executable, "-m", "maxlp.train", *options]


def assert_equal_to_rounding(got, want):
    """Other numbers of devices sum float32 in another order; the difference grows with every update."""
    assert got.keys() == want.keys()
    assert all(math.isclose(got[n], want[n], rel_tol=1e-4) for n in want), (got, want)


def stand_in(directory, name, text):
    """Puts a program of this name on PATH; returns the value of PATH."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/usr/bin/env bash\n{text}")
    (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- All launchers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCRIPTS + MANIFESTS, ids=lambda p: p.name)
def test_scripts_are_short_and_contain_no_addresses(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert "http" not in text
    assert set(re.findall(r"\w+://", text)) <= {"gs://"}


@pytest.mark.parametrize("path", [p for p in SCRIPTS if p.name != "common.sh"], ids=lambda p: p.name)
def test_help_shows_the_usage(path):
    assert f"launch/{path.name} " in run(path.name, "--help")
    assert "--help" in run(path.name, "--bogus", code=2).splitlines()[-1]


def tool(name: str) -> str:
    """The path of a program that '.[dev]' installs."""
    if (path := shutil.which(name, path=Path(sys.executable).parent)) is None:
        pytest.skip(f"{name} is not installed: pip install '.[dev]'")
    return path


def test_dockerfile():
    done = subprocess.run([tool("hadolint"), ROOT / "launch/Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shellcheck():
    shellcheck = tool("shellcheck")
    done = subprocess.run([shellcheck, "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- This machine -------------------------------------------------------------------------------------


def test_local_dry_run_prints_the_commands(tmp_path):
    path = stand_in(tmp_path, "nvidia-smi", "for i in 0 1 2 3; do echo GPU $i; done")
    out = run("local_multiprocess.sh", 2, "--dry_run", "--", "python", "a b", PATH=path)
    several = ["MAXLP_COORDINATOR=localhost:PORT", "MAXLP_NUM_PROCESSES=2"]
    assert [shlex.split(line) for line in out.splitlines()] == [
        [*several, "MAXLP_PROCESS_ID=0", "JAX_LOCAL_DEVICE_IDS=0,1", "python", "a b"],
        [*several, "MAXLP_PROCESS_ID=1", "JAX_LOCAL_DEVICE_IDS=2,3", "python", "a b"],
    ]
    assert run("local_multiprocess.sh", 1, "--dry_run", "--", "true", PATH=path).strip() == "true"


@pytest.mark.parametrize(("visible", "ids"), [("4,6", ["0", "1"]), ("5", []), ("", [])])
def test_only_visible_gpus_are_divided(tmp_path, visible, ids):
    """JAX counts those of CUDA_VISIBLE_DEVICES from 0."""
    path = stand_in(tmp_path, "nvidia-smi", "for i in 0 1 2 3; do echo GPU $i; done")
    command = [2, "--dry_run", "--", "true"]
    out = run("local_multiprocess.sh", *command, PATH=path, CUDA_VISIBLE_DEVICES=visible)
    assert re.findall("JAX_LOCAL_DEVICE_IDS=(.*) true", out) == ids


def test_local_flags_of_a_file_precede_those_of_the_environment(tmp_path):
    (tmp_path / "gpu.txt").write_text("# A sentence.\n--file=1\n")
    command = [1, f"--xla_flags={tmp_path}/gpu.txt", "--", "printenv", "XLA_FLAGS"]
    assert run("local_multiprocess.sh", *command, XLA_FLAGS="--mine=1").split() == ["--file=1", "--mine=1"]
    command[1] = f"--xla_flags={LAUNCH}/xla_flags/tpu_v5p.txt"
    assert run("local_multiprocess.sh", *command[:-1], "LIBTPU_INIT_ARGS").startswith("--xla_")


def test_a_failed_process_ends_the_others_and_all_restart(tmp_path):
    """Even if one ignores signals and has a child process. The second start succeeds."""
    script = f"""
        echo $MAXLP_PROCESS_ID >> {tmp_path}/started
        if [[ -e {tmp_path}/killed ]]; then exit 0; fi
        if ((MAXLP_PROCESS_ID == 1)); then
            while [[ ! -s {tmp_path}/child ]]; do sleep 0.1; done
            touch {tmp_path}/killed; kill -KILL $$
        fi
        trap '' TERM INT
        sleep 1000 & echo $! >> {tmp_path}/child; wait"""
    out = run("local_multiprocess.sh", 2, "--restarts=1", "--", "bash", "-c", script)
    assert out.count("process 1 of 2 failed with exit code 137 (SIGKILL); ending the others") == 1
    assert out.count("restart 1 of 1 after exit code 137") == 1
    assert sorted(lines(tmp_path / "started")) == ["0", "0", "1", "1"]
    [child] = lines(tmp_path / "child")
    assert not alive(int(child))


@pytest.mark.parametrize("script", ["local_multiprocess.sh", "kubernetes.sh", "tpu_pod.sh"])
def test_an_empty_number_of_restarts_is_refused(script):
    first = {"local_multiprocess.sh": [1], "kubernetes.sh": ["gpu", "run"], "tpu_pod.sh": ["run", "pod"]}
    out = run(script, *first[script], "--restarts=", "--", "true", code=2)
    assert "--restarts= is not a whole number" in out


@pytest.mark.parametrize(
    ("script", "arguments", "env"),
    [
        ("local_multiprocess.sh", [1, "--restarts=08", "--", "true"], {}),
        ("local_multiprocess.sh", [1, "--", "true"], {"MAXLP_GRACE": "5m"}),
        ("slurm.sh", ["--dry_run", "--workdir=a"], {"MAXLP_RESTARTS": "x"}),
    ],
)
def test_what_bash_cannot_count_with_is_refused(script, arguments, env):
    """Otherwise nothing would be started, or a hanging process would never be killed."""
    assert "is not a whole number" in run(script, *arguments, code=2, **env)


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (1, 2), (2, 1), (75, 2), (130, 1)])
def test_which_exit_codes_restart(tmp_path, code, starts):
    script = f"echo >> {tmp_path}/started; exit {code}"
    run("local_multiprocess.sh", 1, "--restarts=1", "--", "bash", "-c", script, code=code)
    assert len(lines(tmp_path / "started")) == starts


def test_a_user_error_is_final_although_jax_aborts_the_processes_that_lose_the_first(tmp_path):
    """Both have ended when the launcher looks, so it meets the higher code first."""
    script = f"echo >> {tmp_path}/started; if ((MAXLP_PROCESS_ID)); then kill -ABRT $$; fi; exit 2"
    for _ in range(3):
        out = run("local_multiprocess.sh", 2, "--restarts=1", "--", "bash", "-c", script, code=2)
        assert "process 0 of 2 failed with exit code 2" in out
    assert len(lines(tmp_path / "started")) == 6


@pytest.mark.parametrize(
    ("number", "passed", "code"),
    [(signal.SIGTERM, "TERM", 75), (signal.SIGHUP, "TERM", 75), (signal.SIGINT, "INT", 130)],
)
def test_signals_reach_all_processes_and_nothing_restarts(tmp_path, number, passed, code):
    script = f"""
        trap 'echo $MAXLP_PROCESS_ID >> {tmp_path}/saved; exit {code}' {passed}
        echo >> {tmp_path}/started; while true; do sleep 0.1; done"""
    process = start("local_multiprocess.sh", 3, "--restarts=5", "--", "bash", "-c", script)
    wait_until(lambda: len(lines(tmp_path / "started")) == 3)
    process.send_signal(number)
    finish(process, code)
    assert sorted(lines(tmp_path / "saved")) == ["0", "1", "2"]


def test_a_process_that_does_not_exit_within_its_grace_period_is_killed(tmp_path):
    script = f"trap '' TERM; echo $$ >> {tmp_path}/started; while true; do sleep 0.1; done"
    process = start("local_multiprocess.sh", 2, "--", "bash", "-c", script, MAXLP_GRACE="0")
    wait_until(lambda: len(lines(tmp_path / "started")) == 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert not any(alive(int(pid)) for pid in lines(tmp_path / "started"))


def test_an_error_of_one_process_ends_both_immediately(tmp_path):
    """Without `hard_exit`, JAX would wait at exit for the other process, which waits in a collective."""
    program = """
from maxlp.runtime import distributed
distributed.initialize()
distributed.barrier("together")
if not distributed.is_primary():
    print("initialized", flush=True)
    raise RuntimeError("mine")
distributed.barrier("never")
"""
    command = ["--", sys.executable, "-c", program]
    process = start("local_multiprocess.sh", 2, f"--logs={tmp_path}", *command)
    out = finish(process, code=1, timeout=60)  # exiting through JAX would take 300 s
    assert re.search("process [01] of 2 failed with exit code 1;", out)
    assert lines(tmp_path / "process-1.log")[-1] == "RuntimeError: mine"


@pytest.mark.full
def test_a_process_that_loses_another_one_does_not_report_a_user_error(tmp_path):
    """Neither in a program on the devices nor in an exchange, where JAX raises a `ValueError`."""
    program = tmp_path / "program.py"
    program.write_text("""
import os
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from maxlp.run import cli
from maxlp.runtime import distributed

def main():
    distributed.initialize()
    rows = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
    x = jax.make_array_from_process_local_data(rows, np.ones(4, np.float32))
    total = jax.jit(lambda x: x.sum())
    exchange = {"program": lambda: float(total(x)), "exchange": lambda: distributed.barrier("next")}
    step = exchange[os.environ["WHAT"]]
    step()
    if not distributed.is_primary():
        os._exit(9)
    step()

cli.run(main)
""")
    for what in ("program", "exchange"):
        inner = f"{sys.executable} {program}; echo $? > {tmp_path}/$MAXLP_PROCESS_ID; sleep 3; exit 1"
        run("local_multiprocess.sh", 2, f"--logs={tmp_path}", "--", "bash", "-c", inner, code=1, WHAT=what)
        assert [lines(tmp_path / rank) for rank in "01"] == [["1"], ["9"]]


# --- Training through the launchers -------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tiny, tmp_path_factory):
    """The losses of a single process."""
    workdir = tmp_path_factory.mktemp("one")
    command = train(*tiny, f"--workdir={workdir}", "--config.train.total_steps=3")
    subprocess.run(command, cwd=ROOT, env=environment(**FAST_COMPILATION), check=True, capture_output=True)
    return losses(workdir)


@pytest.mark.full
def test_processes_with_different_configs_are_refused(tiny, tmp_path):
    command = " ".join([*train(*tiny), f"--workdir={tmp_path}/run", "--config.train.total_steps=3"])
    inner = f"exec {command} --config.optimizer.learning_rate=0.00$(($MAXLP_PROCESS_ID + 1))"
    arguments = [2, f"--logs={tmp_path}", "--", "bash", "-c", inner]
    out = run("local_multiprocess.sh", *arguments, code=2, **FAST_COMPILATION)
    assert "config.optimizer.learning_rate: 0.001 -> 0.002" in out and not (tmp_path / "run").exists()


@pytest.mark.full
def test_two_local_processes_train_as_one(one, tiny, tmp_path):
    options = [*tiny, f"--workdir={tmp_path}/run", "--config.train.total_steps=3"]
    launch = [2, f"--logs={tmp_path}", "--", *train(*options)]
    out = run("local_multiprocess.sh", *launch, **FAST_COMPILATION)
    assert "step 3/3" in out
    assert not any("step 3/3" in line for line in lines(tmp_path / "process-1.log"))
    assert_equal_to_rounding(losses(tmp_path / "run"), one)


@pytest.mark.full
def test_a_broken_document_of_one_process_ends_both_after_a_step_that_is_saved(tiny, tmp_path):
    """The first process, which reads the first half of the rows, does not meet it."""
    documents = [json.dumps({"text": f"{i} bottles of beer, " * 9}) for i in range(9000)]
    corpus, workdir = tmp_path / "a.jsonl", tmp_path / "run"
    broken = 162  # feeds the last of the eight rows, and is not among the 1,024 that are sampled
    corpus.write_text("\n".join([*documents[:broken], '{"text": "trunc', *documents[broken + 1 :]]))
    source = [f"--config.data.source=jsonl:{corpus}", "--config.data.shuffle=False"]
    smaller = ["--config.data.shuffle_tokens=1024", "--config.checkpoint.every_steps=1000"]
    options = [*tiny, *source, *smaller, f"--workdir={workdir}"]
    command = [2, f"--logs={tmp_path}", "--", *train(*options, "--config.train.total_steps=1000")]
    out = run("local_multiprocess.sh", *command, code=2, **FAST_COMPILATION)
    [message] = [line for line in out.splitlines() if line.startswith("error: ")]
    assert f"{corpus}:{broken + 1}: not a complete JSON object" in message
    saved = int(re.search(r"step (\d+) is saved: repair the data", message)[1])
    assert message == [line for line in lines(tmp_path / "process-1.log") if "error: " in line][-1]
    assert max(losses(workdir)) == saved > 10

    corpus.write_text("\n".join(documents))
    options += ["--allow_change", f"--config.train.total_steps={saved + 3}"]
    out = run("local_multiprocess.sh", 2, f"--logs={tmp_path}", "--", *train(*options), **FAST_COMPILATION)
    assert f"resuming at step {saved}" in out and f"step {saved + 3}/{saved + 3}" in out
    assert sorted(losses(workdir)) == list(range(1, saved + 4))


SRUN = """
killed=1 code=0 signal=0
while [[ $1 == -* ]]; do
  if [[ $1 == --kill-on-bad-exit=1 ]]; then killed=0; fi
  echo "$1" >> "$STAND_IN/srun"; shift
done
export SLURM_NTASKS=$TASKS SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_NODELIST=localhost,other
for ((i = 0; i < TASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!); done
while ((${#pids[@]})); do
  for i in "${!pids[@]}"; do
    if kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
    wait "${pids[i]}"; status=$?
    unset "pids[i]"
    if ((status > 128 && status > signal)); then signal=$status; fi
    if ((status < 128 && status > code)); then code=$status; fi
    if ((status && !killed++)); then kill -TERM "${pids[@]}"; fi
  done
  sleep 0.05
done
exit "$((signal ? signal : code))" # as srun: a signal before any exit code
"""


def slurm(tmp_path, tasks):
    """The environment of a batch script in an allocation, with stand-ins for the programs of Slurm."""
    while True:  # a job whose port (see jax/_src/clusters/slurm_cluster.py) is free
        job = random.randrange(4096)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 65536 - 4096 + job)):
                break
    stand_in(tmp_path / "bin", "srun", SRUN)
    path = stand_in(tmp_path / "bin", "scontrol", 'echo "$@" >> "$STAND_IN/scontrol"')
    ours = {"STAND_IN": str(tmp_path), "TASKS": str(tasks), "PATH": path, "MAXLP_PYTHON": sys.executable}
    return ours | {"SLURM_JOB_ID": str(job), "SLURM_SUBMIT_DIR": str(ROOT)}


FIND_EACH_OTHER = """
import sys
import jax
from maxlp.runtime import distributed
distributed.initialize()
distributed.print_primary([distributed.gather_json(jax.process_index()), jax.device_count(), *sys.argv[1:]])
"""


def spooled(tmp_path):
    """A copy of slurm.sh, as Slurm runs it."""
    script = tmp_path / "slurm_script"
    shutil.copy(LAUNCH / "slurm.sh", script)
    return script


def test_two_slurm_tasks_find_each_other(tmp_path):
    """JAX's own detection of Slurm, from the environment that srun sets; with the flags for GPUs."""
    program = tmp_path / "program.py"
    program.write_text(FIND_EACH_OTHER)
    env = slurm(tmp_path, tasks=2)
    stand_in(tmp_path / "bin", "python", f'exec {sys.executable} {program} "$@"')
    out = run(spooled(tmp_path), "--workdir=x", **env | {"MAXLP_PYTHON": f"{tmp_path}/bin/python"})
    assert out.splitlines().count("[[0, 1], 2, '-m', 'maxlp.train', '--workdir=x']") == 1
    assert {"--kill-on-bad-exit=0", "--wait=30"} <= {*lines(tmp_path / "srun")}


@pytest.mark.slow
def test_two_slurm_tasks_train_as_one(one, tiny, tmp_path):
    options = [*tiny, f"--workdir={tmp_path}/run", "--config.train.total_steps=3"]
    out = run(spooled(tmp_path), *options, **slurm(tmp_path, tasks=2))
    assert "step 3/3" in out
    assert_equal_to_rounding(losses(tmp_path / "run"), one)
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("codes", "ends", "requeued"),
    [
        ([0], 0, False),
        ([2], 2, False),
        ([75], 75, True),  # saved at the time limit
        ([137, 1, 0], 0, False),
        ([1, 1, 1], 1, False),
        ([1, 75], 75, True),
    ],
)
def test_slurm_restarts_and_requeues(tmp_path, codes, ends, requeued):
    for n, code in enumerate(codes):
        (tmp_path / f"code{n}").write_text(str(code))
    stand_in(
        tmp_path / "bin",
        "train",
        """n=$(cat "$STAND_IN"/started 2>/dev/null | wc -l)
        echo >> "$STAND_IN/started"; exit "$(cat "$STAND_IN/code$n")" """,
    )
    env = slurm(tmp_path, tasks=1) | {"MAXLP_PYTHON": f"{tmp_path}/bin/train", "MAXLP_RESTARTS": "2"}
    run("slurm.sh", "--workdir=x", code=ends, **env)
    assert len(lines(tmp_path / "started")) == len(codes)
    assert lines(tmp_path / "scontrol") == ([f"requeue {env['SLURM_JOB_ID']}"] if requeued else [])


def test_slurm_requeues_although_a_task_ends_later_than_the_others(tmp_path):
    program = "if ((SLURM_PROCID)); then sleep 1; fi; exit 75"
    stand_in(tmp_path / "bin", "train", program)
    env = slurm(tmp_path, tasks=3) | {"MAXLP_PYTHON": f"{tmp_path}/bin/train"}
    run("slurm.sh", "--workdir=x", code=75, **env)
    assert lines(tmp_path / "scontrol") == [f"requeue {env['SLURM_JOB_ID']}"]


def test_slurm_dry_run_prints_the_command():
    out = run("slurm.sh", "--dry_run", "--config=a", "--workdir=b c", MAXLP_PYTHON="python")
    assert (
        out.splitlines()[0].startswith("srun ")
        and "python -m maxlp.train --config=a --workdir=b\\ c" in out
    )


@pytest.mark.slow
def test_processes_killed_at_random_do_not_change_the_run(tiny, tmp_path):
    """Kills one process with SIGKILL at random moments, at least ten times; the launcher restarts all.

    Weights, optimizer, data position and records are bit for bit those of an uninterrupted run.
    """
    options = [*tiny, "--config.train.total_steps=300", "--config.checkpoint.every_steps=10"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    metrics = killed / "metrics.jsonl"
    run("local_multiprocess.sh", 2, f"--logs={tmp_path}", "--", *train(*options, f"--workdir={whole}"))

    rng, began, start_up, ends = random.Random(0), time.time(), math.inf, []
    command = ["--restarts=100", f"--logs={tmp_path}", "--", *train(*options, f"--workdir={killed}")]
    with (tmp_path / "output").open("w") as output:
        launcher = subprocess.Popen(
            [LAUNCH / "local_multiprocess.sh", "2", *command],
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while len(ends) < 10 and launcher.poll() is None:
            wait_until(lambda: len(processes(launcher)) == 2)
            pair, since = processes(launcher), time.time()
            # In turn after some steps, whether saved or not, and at a random moment of the start-up.
            if not ends or len(ends) % 2:
                target = len(lines(metrics)) + rng.randint(1, 20)
                wait_until(lambda n=target: launcher.poll() is not None or len(lines(metrics)) >= n, 300)
                start_up = min(start_up, time.time() - since)
                time.sleep(rng.random() * 0.3)
            else:
                time.sleep(rng.random() * start_up)
            if launcher.poll() is not None:
                break
            rng.choice(pair).kill()
            at = time.time()
            wait_until(lambda p=pair: not any(alive(process.pid) for process in p))
            ends.append(time.time() - at)
        assert launcher.wait(timeout=600) == 0, (tmp_path / "output").read_text()[-4000:]
    out = (tmp_path / "output").read_text()
    print(
        f"{len(ends)} kills, {out.count(': restart ')} restarts, the others ended within {max(ends):.1f} s "
        f"(mean {sum(ends) / len(ends):.1f} s), {time.time() - began:.0f} s in all"
    )
    assert len(ends) >= 10 and out.count("(SIGKILL); ending the others") == len(ends)
    assert run_outputs.checkpoint(killed, 300) == run_outputs.checkpoint(whole, 300)
    assert run_outputs.records(killed) == run_outputs.records(whole)


def processes(launcher):
    """The running training processes of a launcher."""
    try:
        children = psutil.Process(launcher.pid).children()
        return [child for child in children if "maxlp.train" in child.cmdline() and alive(child.pid)]
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@pytest.mark.slow
def test_a_run_continues_with_other_numbers_of_processes_and_devices(tiny, tmp_path):
    """Two processes, then one with four devices, then four: the same global batches and losses."""
    common = [*tiny, "--config.optimizer.schedule=constant"]
    for processes, devices, steps in ((2, 1, 3), (1, 4, 6), (4, 1, 9)):
        options = [*common, f"--config.train.total_steps={steps}", f"--workdir={tmp_path}/elastic"]
        launch = [processes, f"--logs={tmp_path}", "--", *train(*options)]
        run("local_multiprocess.sh", *launch, JAX_NUM_CPU_DEVICES=str(devices))
    alone = train(*common, "--config.train.total_steps=9", f"--workdir={tmp_path}/one")
    run("local_multiprocess.sh", 1, "--", *alone)
    assert_equal_to_rounding(losses(tmp_path / "elastic"), losses(tmp_path / "one"))


# --- Clusters -----------------------------------------------------------------------------------------

GCLOUD = """
echo "$*" >> "$STAND_IN/gcloud"
for argument; do
  case $argument in --worker=*) worker=${argument#*=} ;; --command=*) command=${argument#*=} ;; esac
done
for host in 0 1; do
  if [[ $worker == all || $worker == "$host" ]]; then (cd "$STAND_IN/host$host" && bash -c "$command"); fi
done
"""


def test_tpu_pod_runs_on_all_hosts_and_stops_them(tmp_path):
    """The stand-in for `gcloud … ssh` is a shell in the directory of each host."""
    for host in ("host0", "host1"):
        (tmp_path / host / "maxlp" / ".venv").mkdir(parents=True)
        (tmp_path / host / "maxlp" / "launch").symlink_to(LAUNCH)
        program = (
            'trap "echo saved; exit 75" TERM; echo "$LIBTPU_INIT_ARGS" "$@"; while true; do sleep 0.1; done'
        )
        stand_in(tmp_path / host / "maxlp" / ".venv" / "bin", "python", program)
    path = stand_in(tmp_path / "bin", "gcloud", GCLOUD)
    logs = [tmp_path / host / "maxlp" / "run.log" for host in ("host0", "host1")]

    def pod(*arguments):
        return run("tpu_pod.sh", *arguments, PATH=path, STAND_IN=str(tmp_path))

    flags = f"--xla_flags={LAUNCH}/xla_flags/tpu_v5e.txt"
    pod("run", "pod", "--zone=z", flags, "--", "--config=a", "--workdir=gs://b c")
    wait_until(lambda: all(lines(log) for log in logs))
    again = run(
        "tpu_pod.sh", "run", "pod", "--zone=z", "--", "b", code=2, PATH=path, STAND_IN=str(tmp_path)
    )
    assert "stop it first: launch/tpu_pod.sh stop pod --zone=z" in again
    pod("stop", "pod", "--zone=z")
    wait_until(lambda: all(lines(log)[-1] == "saved" for log in logs))
    for log in logs:
        printed = lines(log)
        assert len(printed) == 2 and "-m maxlp.train --config=a --workdir=gs://b c" in printed[0]
        assert printed[0].startswith("--xla_")
    assert all("--zone=z" in line for line in lines(tmp_path / "gcloud"))
    dry = pod("install", "pod", "--zone=z", "--dry_run").splitlines()
    assert [line.split()[:5] for line in dry[1:3]] == [
        ["gcloud", "compute", "tpus", "tpu-vm", "scp"],
        ["gcloud", "compute", "tpus", "tpu-vm", "ssh"],
    ]
    assert len(lines(tmp_path / "gcloud")) == 3
    assert "name of a TPU, which begins with a-z, not 'NAME'" in run("tpu_pod.sh", "stop", "NAME", code=2)


ARGUMENTS = ['--config=a"b\\c', "--workdir=gs://r é'", "--x=$HOME $(NAME) ${name} $$", "--y=a\n\tb"]


def manifest(*arguments):
    yaml = pytest.importorskip("yaml")
    text = run("kubernetes.sh", *arguments, "--image=i", "--dry_run", "--", *ARGUMENTS)
    assert "${" not in re.sub("(?m)#.*", "", text).replace("$${", "")
    jobset = yaml.safe_load(text)
    [job] = jobset["spec"]["replicatedJobs"]
    [ends] = job["template"]["spec"]["podFailurePolicy"]["rules"]
    patterns = [rule["onJobFailureMessagePatterns"][0] for rule in jobset["spec"]["failurePolicy"]["rules"]]
    for code, rules in {1: [False, False], 2: [True, False], 75: [False, True], 143: [False, True]}.items():
        assert [bool(re.match(pattern, f"exit code {code} x")) for pattern in patterns] == rules
        assert (code in ends["onExitCodes"]["values"]) == any(rules)
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["shareProcessNamespace"]  # process 1 would miss a SIGTERM that comes early
    return jobset, job, pod, pod["containers"][0]


@pytest.mark.parametrize(
    ("type_", "topology", "hosts", "chips", "accelerator"),
    [  # Google's tables of machine types and topologies
        ("v4", "2x2x4", 4, 4, "tpu-v4-podslice"),
        ("v5e", "1x1", 1, 1, "tpu-v5-lite-podslice"),
        ("v5e", "4x8", 8, 4, "tpu-v5-lite-podslice"),
        ("v5p", "2x2x1", 1, 4, "tpu-v5p-slice"),
        ("v5p", "4x4x8", 32, 4, "tpu-v5p-slice"),
        ("v6e", "16x16", 64, 4, "tpu-v6e-slice"),
    ],
)
def test_tpu_jobset(type_, topology, hosts, chips, accelerator):
    jobset, job, pod, container = manifest(
        "tpu", "run", f"--type={type_}", f"--topology={topology}", "--slices=3"
    )
    assert job["replicas"] == 3
    spec = job["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == hosts
    assert spec["completionMode"] == "Indexed" and spec["backoffLimit"] == 0
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert math.prod(map(int, topology.split("x"))) == hosts * chips
    assert set(pod["nodeSelector"].values()) == {accelerator, topology}
    assert [word.replace("$$", "$") for word in container["args"]] == ARGUMENTS  # as Kubernetes does
    assert container["args"][2] == "--x=$$HOME $$(NAME) $${name} $$$$"
    env = {e["name"]: e["value"] for e in container["env"]}
    assert env["MAXLP_DISTRIBUTED"] == "1"
    assert env["LIBTPU_INIT_ARGS"].startswith("--xla_") or type_ == "v4"
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 10


def test_gpu_jobset():
    jobset, job, _, container = manifest("gpu", "run", "--hosts=4", "--restarts=7")
    spec = job["template"]["spec"]
    assert job["replicas"] == 1 and spec["completions"] == spec["parallelism"] == 4
    env = {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}
    assert env["MAXLP_COORDINATOR"] == "run-train-0-0.run:8476"  # JobSet: name-job-index-pod.name
    assert env["MAXLP_NUM_PROCESSES"] == "4"
    assert "job-completion-index" in env["MAXLP_PROCESS_ID"]["fieldRef"]["fieldPath"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7


@pytest.mark.parametrize(
    "kind", [["gpu", "run", "--hosts=1"], ["tpu", "run", "--type=v4", "--topology=2x2x1"]]
)
def test_a_jobset_without_the_compiler_flags_that_it_was_given_is_refused(kind):
    end = ["--image=i", "--dry_run", "--", "--config=a", "--workdir=gs://b"]
    assert "/nowhere.txt cannot be read" in run(
        "kubernetes.sh", *kind, "--xla_flags=/nowhere.txt", *end, code=2
    )
    assert 'value: ""' in run("kubernetes.sh", *kind, "--xla_flags=", *end)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpu", "run", "--hosts=2", "--slices=2"], "--slices=2 is not an option of gpu"),
        (["tpu", "run", "--type=v5e", "--topology=4x4", "--hosts=2"], "--hosts=2 is not an option of tpu"),
        (["gpu", "run", "--hosts=0"], "--hosts=0 is not a positive number"),
        (["tpu", "run", "--type=v5e", "--topology=4x4x4"], "is not that of a slice of v5e, such as 4x8"),
        (["tpu", "run", "--type=v5p", "--topology=4x4"], "is not that of a slice of v5p, such as 4x4x8"),
        (["tpu", "run", "--type=v6e", "--topology=3x3"], "has 9 chips, but hosts have 4"),
    ],
)
def test_a_jobset_that_could_not_be_what_was_asked_for_is_refused(arguments, message):
    end = ["--image=i", "--dry_run", "--", "--config=a", "--workdir=gs://b"]
    assert message in run("kubernetes.sh", *arguments, *end, code=2)


def test_a_workdir_that_a_restarted_pod_would_not_find_is_refused():
    tpu, gpu = ["tpu", "run", "--type=v4", "--topology=2x2x1"], ["gpu", "run", "--hosts=1"]
    end = ["--image=i", "--dry_run", "--", "--config=a"]
    for kind, workdir in [(tpu, "/data/run"), (gpu, "/tmp/run"), (gpu, "/database/run"), (gpu, "run")]:
        out = run("kubernetes.sh", *kind, *end, f"--workdir={workdir}", code=2)
        assert f"--workdir={workdir} is on no volume of launch/jobset_{kind[0]}.yaml" in out
        assert ("as in gs://bucket/run, or a folder in /data; see" in out) == (kind is gpu)
    for workdir in ("/data/a run", "s3://b/run"):
        run("kubernetes.sh", *gpu, *end, f"--workdir={workdir}")
    for other in ([], ["--workdir", "/tmp/run"], ["-workdir=/tmp/run"]):
        assert "--workdir=FOLDER is needed: pods lose" in run("kubernetes.sh", *gpu, *end, *other, code=2)


def test_flags_of_any_file_reach_the_hosts_of_a_tpu_pod(tmp_path):
    """libtpu reads LIBTPU_INIT_ARGS alone."""
    (tmp_path / "mine.txt").write_text("# A sentence.\n--file=1\n")
    end = [f"--xla_flags={tmp_path}/mine.txt", "--dry_run", "--", "--config=a"]
    assert "LIBTPU_INIT_ARGS=" in (out := run("tpu_pod.sh", "run", "pod", *end)) and "--file=1" in out


# --- Compiler flags ------------------------------------------------------------------------------------


def flags_of(path):
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("path", FLAG_FILES, ids=lambda p: p.stem)
def test_every_flag_is_explained_by_a_sentence(path):
    text = path.read_text().splitlines()
    for above, line in itertools.pairwise(text):
        if not line.startswith("#"):
            assert re.fullmatch(r"--xla_[a-z0-9_]+=\S+", line)
            assert above.startswith("# ") and above.endswith(".")


COMPILE = """
import math, sys
import jax, numpy as np
from maxlp.planning import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = topologies.devices(topologies.parse(sys.argv[1]))
mesh = Mesh(np.array(devices), ("fsdp",))
x = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=NamedSharding(mesh, P("fsdp")))
jax.jit(lambda x: x @ x).lower(x).compile()
"""


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(
    ("name", "topology"), [("tpu_v5e", "v5e:2x2"), ("tpu_v5p", "v5p:2x2x1"), ("tpu_v6e", "v6e:2x2")]
)
def test_flags_are_accepted_by_the_compiler(name, topology):
    """An unknown flag or value ends the process before it compiles."""
    flags = " ".join(flags_of(LAUNCH / "xla_flags" / f"{name}.txt"))
    command = [sys.executable, "-c", COMPILE, topology]
    for extra, code in (("", 0), (" --xla_bogus=true", 1)):
        env = environment(LIBTPU_INIT_ARGS=flags + extra)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert bool(done.returncode) == bool(code), done.stderr[-2000:]
