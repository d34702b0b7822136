"""Mistakes on the command line end in one line within seconds, before anything compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from maxlp import schema
from maxlp.run import cli
from maxlp.run.config import presets
from tests.commands import run_command
from tests.training_runs import ROOT

DEBUG = "--config=configs/llama/debug.py"
LINES = (ROOT / "configs/llama/debug.py").read_text().splitlines()
CHOICE = f"debug.py, line {1 + LINES.index('    return choose(arg, c)')}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            [DEBUG, "--config.optimizer.learning_rat=1"],
            "config.optimizer.learning_rat is unknown (did you mean learning_rate?)",
        ),
        (
            [DEBUG, "--config.data.heldout_source=x"],
            "config.data.heldout_source is now config.data.validation_source",
        ),
        (
            ["--config.train.seed=3"],
            "--config.train.seed needs --config=PRESET; the command that maxlp.report shows for a run",
        ),
        (
            [DEBUG, "--config.optimizer.name=lion", "--config.optimizer.options.nope=1"],
            "config.optimizer.options.nope is unknown; options of name='lion': mode, smooth_beta",
        ),
        ([DEBUG, "--config.train.steps=3"], "config.train.steps is unknown (did you mean total_steps?)"),
        ([DEBUG, "--train.steps=3"], "train.steps is unknown; did you mean --config.train.total_steps="),
        ([DEBUG, "train.seed=3"], "train.seed is unknown; did you mean --config.train.seed="),
        (["--confg=llama/debug"], "error: --confg is unknown; did you mean --config?"),
        ([DEBUG, "--nonsense=1"], "error: --nonsense is unknown; see --help"),
        ([DEBUG, DEBUG, "--config.train.seed=3"], "error: --config is given twice; give one"),
        (["--config=llama/debg"], "did you mean llama/debug? presets: clip/b16, "),
        ([DEBUG, "--config.train.total_steps=1.5"], "--config.train.total_steps=1.5 is not an integer"),
        (["--config.train.seed=x", DEBUG], "--config.train.seed=x is not an integer"),
        (["--config.train.seed=x", *DEBUG.split("=")], "--config.train.seed=x is not an integer"),
        ([DEBUG, "--config.mesh=fsdp"], "error: --config.mesh is a section; set --config.mesh.KEY=VALUE"),
        ([DEBUG, "--config.optimizer.galore=8"], "--config.optimizer.galore is a section; set"),
        ([DEBUG, "--config.optimizer.b1=nan"], "config.optimizer.b1=nan must be a finite number"),
        (["--config=configs/llama/debug.py:speed=fast"], f"{CHOICE}: config argument 'speed' is unknown"),
        (
            ["--config=configs/llama/none.py"],
            "--config=configs/llama/none.py is neither a file nor a preset; presets",
        ),
        ([DEBUG, "--config.mesh.fsdp=3"], "mesh.fsdp=3"),
        ([], "error: --config is missing; presets: clip/b16, "),
        ([DEBUG, "config.train.total_steps=3"], "'config.train.total_steps=3' is not a flag"),
        ([DEBUG, "--config.data.source=text:/nowhere/*.txt"], "/nowhere"),
        (["--config=configs/llama/8b.py"], "config.data.source is not set"),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) and v else "",
)
def test_a_mistake_ends_with_one_line(args, message, tmp_path):
    done = run_command("train", *args, f"--workdir={tmp_path}/run")
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_option_that_only_the_config_lacks_is_not_called_unknown(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "from maxlp.run.config import load_file\ndef get_config():\n"
        "    c = load_file('llama/debug').unlock()\n    del c.optimizer.options.nesterov\n    return c\n"
    )
    option = "--config.optimizer.options.nesterov=true"
    done = run_command("train", f"--config={config}", "--workdir=unused", option)
    assert (done.returncode, done.stderr) == (
        2,
        "error: --config.optimizer.options.nesterov is not in this config; set it in the config file, as "
        "c.optimizer.options.nesterov = VALUE\n",
    )


def run(program: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    """A process with these additional environment variables."""
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
    )


FLAGS = """
from absl import flags
from maxlp.run import cli
cli.define_config()
flags.DEFINE_float("rate", 1.0, "", lower_bound=0.0)
flags.DEFINE_integer("seed", 0, "")
flags.DEFINE_bool("fast", False, "")
cli.run(lambda: print("\\u00d7\\u2026"))
"""


@pytest.mark.parametrize(
    ("command", "argument", "message"),
    [
        ("evaluate", "--l2=nan", "--l2=nan must be a finite number"),
        ("evaluate", "--l2=x", "--l2=x is not a number"),
        ("evaluate", "--l2=-1", "--l2=-1: -1.0 is not a non-negative number"),
        ("generate", f"--seed={2**63}", f"--seed={2**63} does not fit into 64 bits; use a smaller number"),
        ("train", "--dry_run=maybe", "--dry_run=maybe is not true or false"),
        (
            "train",
            "--config=/nowhere.py",
            f"--config=/nowhere.py is neither a file nor a preset; presets: {', '.join(presets())}",
        ),
        (
            "train",
            "--config=/",
            f"--config=/ is neither a file nor a preset; presets: {', '.join(presets())}",
        ),
    ],
)
def test_a_flag_that_no_command_can_use_is_one_line(command, argument, message):
    done = run_command(command, argument, "--workdir=/nowhere")
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_a_command_without_a_config_does_not_advise_one():
    done = run_command("report", "--config.data.seq_len=4")
    said = "error: --config.data.seq_len is unknown; this command takes no --config, see --help\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_none_unsets_a_key_of_any_type():
    """As `configs/clip/low_precision.py` recommends."""
    keys = ["model.layer_scale", "optimizer.decay_with_clip", "train.total_steps", "optimizer.name"]
    program = FLAGS.rpartition("cli.run")[0] + (
        f"cli.run(lambda: print([v for k, v in sorted(cli.overrides().items()) if k in {keys}], "
        "flags.FLAGS.config.model.layer_scale))"
    )
    done = run(program, "--config=clip/low_precision", *(f"--config.{key}=None" for key in keys))
    assert (done.stdout, done.stderr) == ("[None, None, None, None] None\n", "")


def test_a_flag_gives_a_key_several_values():
    """Forks of one process parse the cases, because a preset's imports take longer than all of them."""
    tags = {
        ("a,b",): ("a", "b"),
        ("a", "b,c"): ("a", "b", "c"),
        ("('a', 'b,c')",): ("a", "b,c"),
        ("'a,b'",): ("a,b",),
        ("None",): (),
    }
    program = f"""
import os, sys
from maxlp.run.config import load_file
{FLAGS.rpartition("cli.run")[0]}
load_file("llama/debug")
for given in {[*tags]}:
    if os.fork() == 0:
        sys.argv += [f"--config.metrics.wandb_tags={{word}}" for word in given]
        cli.run(lambda: print(flags.FLAGS.config.metrics.wandb_tags))
    os.wait()
"""
    done = run(program, DEBUG)
    assert (done.stdout.splitlines(), done.stderr) == ([*map(str, tags.values())], "")


def test_an_argument_that_the_locale_cannot_read_is_refused(tmp_path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "maxlp.report", str(tmp_path / "zürich")]
    done = subprocess.run(command, env=os.environ | locale, capture_output=True, text=True)
    assert done.returncode == 2 and "cannot be read as ascii; give it in UTF-8" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_ascii_terminal_gets_every_line():
    """A locale without × and …, as containers often have."""
    done = run(FLAGS, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xd7\\u2026\n", "")


@pytest.mark.parametrize(("closed", "out", "err"), [("0", "ok\n", ""), ("1", "", ""), ("2", "ok\n", "")])
def test_a_command_runs_with_a_closed_standard_stream(closed, out, err):
    program = f"{HEAD}import sys\ndef main():\n  sys.stdin.read()\n  print('ok')\n  return 7\ncli.run(main)"
    command = ["sh", "-c", f'"$@" {closed}>&-', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (7, out, err)


@pytest.mark.parametrize(
    ("names", "listed"),
    [(["a"], "--a"), (["a", "b"], "--a or --b"), (["a", "b", "c"], "--a, --b or --c")],
)
def test_all_names_that_a_flag_may_have_meant_are_listed(names, listed):
    error = flags.UnrecognizedFlagError("x", suggestions=names)
    assert cli._one_line(error) == f"--x is unknown; did you mean {listed}?"


HEAD = "import pkgutil\nfrom maxlp.run import cli\n"
NOT_WRITTEN = "pkgutil.resolve_name('maxlp.runtime.checkpoint:NotWrittenError')"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("KeyboardInterrupt", 130, "error: interrupted"),
        ("PermissionError(13, 'Permission denied', '/w')", 2, "error: /w: Permission denied"),
        ("FileNotFoundError(2, 'No such file or directory', '/proc/x')", 2, "error: --w=/proc/x: No such"),
        ("OSError(36, 'File name too long', '/w')", 2, "error: /w: File name too long"),
        ("OSError(30, 'Read-only file system', '/w')", 2, "error: /w: Read-only file system"),
        # Launchers start again:
        ("OSError(24, 'Too many open files', '/w')", 2, "error: /w: Too many open files; raise"),
        ("OSError(5, 'Input/output error', '/w')", 1, "error: /w: Input/output error; once this"),
        ("OSError(28, 'No space left on device', '/w')", 1, "error: /w: No space left on device; once"),
        ('RuntimeError("can\'t start new thread")', 1, "error: the system allows no more threads; raise"),
        ("TimeoutError('/w did not appear')", 1, "error: /w did not appear"),
        ("ValueError('UNKNOWN: Gloo AllGather failed: closed by peer')", 1, "error: UNKNOWN: Gloo"),
        ("ValueError('RESOURCE_EXHAUSTED: Out of memory')", 2, "error: RESOURCE_EXHAUSTED: Out of memory"),
        (f"{NOT_WRITTEN}('/w/9 was not written: disk full')", 1, "error: /w/9 was not written"),
    ],
)
def test_exit_codes_distinguish_mistakes_from_failures(error, code, message):
    program = f"{HEAD}cli.flags.DEFINE_string('w', None, '')\ndef main():\n  raise {error}\ncli.run(main)"
    done = run(program, "--w=/proc/x")
    assert done.returncode == code and message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_process_that_loses_another_ends_with_one_line():
    lost = "UNKNOWN: Gloo AllGather failed: Connection reset by peer"
    program = f"import jax\n{HEAD}def main():\n  raise jax.errors.JaxRuntimeError('{lost}')\n"
    done = run(f"{program}jax.distributed.is_initialized = lambda: True\ncli.run(main)")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {lost}; if another process")
    assert done.stderr.count("\n") == 1
    alone = run(f"{program}cli.run(main)")  # a failure of its own
    assert alone.returncode == 1 and "Traceback" in alone.stderr


def test_without_devices_a_command_ends_with_one_line():
    done = run(f"import jax\n{HEAD}cli.run(lambda: print(jax.devices()))", JAX_PLATFORMS="gpuu")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("error: JAX_PLATFORMS=gpuu: ")
    assert last.endswith("; check the driver and JAX's plugin") and "Traceback" not in done.stderr


COLLECTING = f"""import gc, signal
{HEAD}signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
gc.callbacks.append(lambda phase, _: signal.raise_signal(signal.SIGINT))
def main():
  gc.collect()
  print("goes on", flush=True)
cli.run(main)"""


def test_ctrl_c_is_not_lost_where_python_drops_exceptions():
    """As in a callback of the garbage collector, of which JAX has one."""
    done = run(COLLECTING)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (lambda: schema.check_value("seed", -1, schema.Seed), True),
        (lambda: Path("/nowhere").read_bytes(), True),
        (lambda: json.loads("x"), False),
        (lambda: cli._suggestions(None), False),  # not by a `raise`
    ],
)
def test_a_message_of_maxlp_needs_no_hint_at_the_traceback(fail, expected):
    with pytest.raises(Exception) as caught:
        fail()
    assert cli._is_self_explanatory(caught.value) == expected


def test_a_long_message_loses_its_middle():
    program = f"{HEAD}def main():\n  raise ValueError('first ' + 'x' * 9999 + ' last')\ncli.run(main)"
    done = run(program)
    assert done.stderr.startswith("error: first x") and " last (MAXLP" in done.stderr
    assert len(done.stderr) < 1000 and done.stderr.count("\n") == 1


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_has_read_enough_ends_a_command_quietly(flush):
    """As in ``| head``."""
    program = f"{HEAD}def main():\n  for i in range(10**6): print(i, flush={flush})\ncli.run(main)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        done.stdout.readline()
        done.stdout.close()
        assert (done.stderr.read(), done.wait(60)) == (b"", 1)


RUN = """
import sys
from maxlp.run import run_dir
from maxlp.runtime.distributed import print_primary
def main():
  with run_dir.recording_errors(run_dir.Path(sys.argv[1])):
    for i in range(10**6): print_primary(i)
cli.run(lambda _: main(), 1)"""


@pytest.mark.parametrize("both", [False, True])
def test_a_run_that_ends_because_nobody_reads_its_output_says_so(tmp_path, both):
    """On standard error; if nobody reads that either (``2>&1 | head``), the exit code remains."""
    (tmp_path / "run.json").write_text('{"starts": [{}]}')
    command = [sys.executable, "-c", HEAD + RUN, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        done.stdout.readline()
        if both:
            done.stderr.close()
        done.stdout.close()
        text = b"" if both else done.stderr.read()
        assert done.wait(60) == 1
    if not both:
        assert text.startswith(b"error: the run has stopped because nobody") and text.count(b"\n") == 1


def test_an_error_does_not_wait_for_the_compiler():
    program = """
import concurrent.futures, jax, time
from maxlp.run import cli
def main():
    concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 600)
    raise ValueError("config.x=1 is wrong")
cli.run(main)"""
    done = run(program)
    assert done.returncode == 2 and "error: config.x=1 is wrong" in done.stderr


def test_a_dry_run_prints_the_config_and_leaves_nothing(tmp_path):
    options = [
        "--config.data.source=stdlib",
        "--config.data.tokenizer=bytes",
        "--config.optimizer.galore.rank=64",
    ]
    done = run_command("train", "--config=llama/405b", f"--workdir={tmp_path}/run", "--dry_run", *options)
    assert done.returncode == 0, done.stderr
    values, _, summary = done.stdout.partition("llama: 405,853,388,800 parameters")
    assert "rank: 64" in values and "rules: []" in values and "!!python" not in values
    assert summary.count("\n") < 24, "a terminal shows the summary"
    assert not (tmp_path / "run").exists()
