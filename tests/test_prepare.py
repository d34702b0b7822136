import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types

import numpy as np
import psutil
import pytest
from array_record.python import array_record_module

from maxlp import prepare
from maxlp.data import shards
from maxlp.data.sources import make_source
from maxlp.data.tokenizers import make_tokenizer
from maxlp.data.tokenizers.training import train_bpe
from maxlp.prepare import prepare_text
from maxlp.runtime import storage
from tests.commands import run_command
from tests.data.chats import CHATML, write_tokenizer
from tests.data.servers import cache  # noqa: F401  # a fixture

TEXTS = [f"document {i}: äöü 漢字 🎉\n" * (i % 7) for i in range(100)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return f"jsonl:{path}"


def documents(folder, split="all"):
    source = make_source(f"array_record:{folder}", split)
    return [source[i] for i in range(len(source))]


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 1000])
def test_text_round_trip(corpus, tmp_path, shards):
    output = str(tmp_path / "out")
    manifest = prepare_text(corpus, output, shards=shards)
    expected = [{"text": text.encode()} for text in TEXTS if text]
    assert documents(output) == expected
    assert json.loads((tmp_path / "out/dataset.json").read_text()) == manifest
    assert manifest["documents"] == len(expected) and manifest["empty_documents"] == 15
    assert manifest["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert len(manifest["shards"]) == min(shards, 100)
    for shard in manifest["shards"]:
        assert os.path.getsize(os.path.join(output, shard["file"])) == shard["file_size"]
    assert prepare_text(f"{corpus}?split=train", f"{output}/train")["split"] == "train"
    train, validation = documents(output, "train"), documents(output, "validation")
    assert train + validation == [*expected[:49], *expected[50:], expected[49]]


def test_bytes_that_are_not_utf8_are_kept_by_the_byte_tokenizer_alone(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_bytes(bytes(range(256)))
    prepare_text(f"text:{tmp_path}/in", str(tmp_path / "out"), tokenizer="bytes")
    assert documents(tmp_path / "out")[0]["tokens"].tolist() == [*range(256)]
    with pytest.raises(ValueError, match=r"in/a: byte 128 \(0x80\) is not UTF-8; convert the text"):
        prepare_text(f"text:{tmp_path}/in", str(tmp_path / "text"))


@pytest.mark.parametrize("wide", [False, True])
def test_token_round_trip(corpus, tmp_path, wide, monkeypatch):
    if wide:  # as if the vocabulary had more than 65,536 ids
        monkeypatch.setattr(prepare, "_token_dtype", lambda encoder: np.dtype("<u4"))
    output = str(tmp_path / "out")
    manifest = prepare_text(corpus, output, tokenizer="bytes", shards=3)
    tokens = [each["tokens"] for each in documents(output)]
    assert [bytes(ids.astype(np.uint8)).decode() for ids in tokens] == [t for t in TEXTS if t]
    assert {ids.dtype for ids in tokens} == {np.dtype("uint32" if wide else "uint16")}
    assert manifest["tokens"] == manifest["bytes"] == sum(map(len, tokens))
    source = make_source(f"array_record:{output}", "all")
    assert source.tokenizer == {"spec": "bytes", "fingerprint": "bytes", "vocab_size": 259}


def test_token_dtype_by_vocabulary():
    class Encoder:
        vocab_size = 65_536

    assert prepare._token_dtype(Encoder()) == np.uint16  # ids up to 65,535
    Encoder.vocab_size = 65_537
    assert prepare._token_dtype(Encoder()) == np.uint32


def test_tokenizer_is_kept_beside_the_tokens(corpus, tmp_path):
    path, tokenizer = tmp_path / "tokenizer.json", train_bpe(TEXTS, 300)
    path.write_bytes(tokenizer.files["tokenizer.json"])
    prepare_text(corpus, str(tmp_path / "out"), tokenizer=f"{path}?pad=a")
    os.remove(path)
    source = make_source(f"array_record:{tmp_path}/out", "all")
    again = make_tokenizer(source.tokenizer["spec"])
    assert again.fingerprint == source.tokenizer["fingerprint"] == tokenizer.fingerprint
    assert again.decode([again.pad_id]) == "a"
    assert [again.decode(each["tokens"]) for each in source] == [text for text in TEXTS if text]


def test_train_tokenizer(corpus, tmp_path):
    manifest = prepare_text(corpus, str(tmp_path / "out"), train_tokenizer=300)
    source = make_source(f"array_record:{tmp_path}/out", "all")
    tokenizer = make_tokenizer(source.tokenizer["spec"])
    assert tokenizer.vocab_size == 300 and manifest["tokens"] < manifest["bytes"] / 2
    assert [tokenizer.decode(each["tokens"]) for each in source] == [text for text in TEXTS if text]


def test_workers_write_the_same_files(corpus, tmp_path):
    for workers in (1, 2):
        folder = str(tmp_path / str(workers))
        prepare_text(corpus, folder, tokenizer="bytes", shards=5, num_workers=workers)
    names = sorted(os.listdir(tmp_path / "1"))
    assert names == sorted(os.listdir(tmp_path / "2")) and len(names) == 6
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_stdlib_split_is_the_requested_one(tmp_path):
    prepare_text("stdlib", str(tmp_path), split="validation", shards=2)
    source = make_source("stdlib", "validation")
    assert documents(tmp_path) == [each for each in source if each["text"]]


# --- existing, incomplete and wrong data ----------------------------------------------------------


def test_overwrite(corpus, tmp_path):
    output = str(tmp_path / "out")
    prepare_text(corpus, output, shards=7, tokenizer="bytes")
    with pytest.raises(ValueError, match="holds a dataset already; pass --overwrite"):
        prepare_text(corpus, output)
    prepare_text(corpus, output, shards=2, overwrite=True)
    assert len(os.listdir(output)) == 3  # none of the seven is left
    assert "text" in documents(output)[0]


@pytest.mark.parametrize(
    ("name", "kwargs"), [("mine.array_record", {}), ("tokenizer_config.json", {"train_tokenizer": 300})]
)
def test_files_of_others_are_replaced_only_if_asked(corpus, tmp_path, name, kwargs):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("precious")
    with pytest.raises(ValueError, match=f"out holds {name}, and no dataset.json .* pass --overwrite"):
        prepare_text(corpus, str(tmp_path / "out"), **kwargs)
    assert os.listdir(tmp_path / "out") == [name]
    prepare_text(corpus, str(tmp_path / "out"), overwrite=True, **kwargs)
    prepare_text(corpus, str(tmp_path / "out"), overwrite=True)


def test_the_workdir_of_a_run_is_refused(corpus, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("precious")
    with pytest.raises(ValueError, match="is the workdir of a run; choose another folder"):
        prepare_text(corpus, str(tmp_path), train_tokenizer=300, overwrite=True)


def test_a_file_as_output_is_refused_before_a_tokenizer_is_trained(corpus):
    output = corpus.removeprefix("jsonl:")
    with pytest.raises(ValueError, match="is not a directory; choose another name"):
        prepare_text(corpus, output, train_tokenizer=2**20, overwrite=True)  # too many ids for it


def test_a_tokenizer_of_more_tokens_than_the_text_has_names_the_flag(tmp_path):
    (tmp_path / "a.txt").write_text("aab aab")
    with pytest.raises(ValueError, match=r"gave only 262 tokens; set --train_tokenizer=262, or"):
        prepare_text(f"text:{tmp_path}/a.txt", str(tmp_path / "out"), train_tokenizer=5000)


def test_a_new_tokenizer_does_not_take_over_the_chat_template_of_the_old_one(corpus, tmp_path):
    old, new = (
        write_tokenizer(tmp_path / name, template) for name, template in (("old", CHATML), ("new", None))
    )
    prepare_text(corpus, str(tmp_path / "out"), tokenizer=old)
    prepare_text(corpus, str(tmp_path / "out"), tokenizer=new, overwrite=True)
    assert [*make_tokenizer(str(tmp_path / "out")).files] == ["tokenizer.json"]


def test_a_tokenizer_beside_shards_of_text_is_left_alone(corpus, tmp_path):
    (tmp_path / "tokenizer.json").write_text("precious")
    prepare_text(corpus, str(tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "precious"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_leaves_the_old_dataset_unchanged(corpus, tmp_path, num_workers):
    output = str(tmp_path / "out")
    prepare_text(corpus, output)
    before = {name: (tmp_path / "out" / name).read_bytes() for name in os.listdir(output)}
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n' * 50 + '{"text": "trunc')
    with pytest.raises(ValueError, match=f"{broken}:51: not a complete JSON object"):
        prepare_text(f"jsonl:{broken}", output, overwrite=True, num_workers=num_workers)
    after = {name: (tmp_path / "out" / name).read_bytes() for name in os.listdir(output)}
    assert after == before


@contextlib.contextmanager
def running(tmp_path, num_workers):
    """A `prepare` process that has written one of its eight shards, with its output folder."""
    corpus, output = tmp_path / "big.jsonl", tmp_path / "out"
    corpus.write_text("".join(json.dumps({"text": f"{i} " * 100_000}) + "\n" for i in range(200)))
    args = ["text", f"--source=jsonl:{corpus}", f"--output={output}", "--tokenizer=bytes"]
    args += ["--shards=8", f"--num_workers={num_workers}"]
    # Under nohup this process would inherit from the tests that SIGHUP is ignored.
    start = "import runpy, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    start += "runpy.run_module('maxlp.prepare', run_name='__main__', alter_sys=True)"
    process = subprocess.Popen([sys.executable, "-c", start, *args], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(output.glob("*.partial"))) <= num_workers:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    with process:
        try:
            yield psutil.Process(process.pid), process, output
        finally:
            process.kill()  # a failed test would wait for it


@pytest.mark.parametrize("num_workers", [1, 2])
def test_killed_run_leaves_nothing_that_looks_complete(corpus, tmp_path, num_workers):
    with running(tmp_path, num_workers) as (handle, process, output):
        workers = handle.children(recursive=True)
        assert len(workers) >= num_workers - 1
        process.kill()
    assert not psutil.wait_procs(workers, timeout=10)[1]  # they exit with their parent
    names = os.listdir(output)
    assert names and all(name.endswith(".partial") for name in names)
    with pytest.raises(ValueError, match=r"holds no dataset\.json"):
        make_source(f"array_record:{output}", "all")
    prepare_text(corpus, str(output))
    assert documents(output) == [{"text": text.encode()} for text in TEXTS if text]
    assert not list(output.glob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_after_a_signal_nothing_remains(tmp_path, number):
    with running(tmp_path, num_workers=2) as (handle, process, output):
        workers = handle.children(recursive=True)
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
    assert not output.exists() and not psutil.wait_procs(workers, timeout=10)[1]


def test_a_folder_that_another_process_writes_is_refused_and_stays_as_it_is(corpus, tmp_path):
    with running(tmp_path, num_workers=1) as (_, process, output):
        before = {path.name for path in output.iterdir()}
        with pytest.raises(ValueError, match=rf"^--output={output} is being written by another process; "):
            prepare_text(corpus, str(output))
        assert before and before <= {path.name for path in output.iterdir()}
        process.kill()


def test_a_shard_that_is_deleted_meanwhile_is_an_error_of_the_file(corpus, tmp_path, monkeypatch):
    make_record = prepare._text_record

    def delete_and_make(*args, **kwargs):
        for path in tmp_path.glob("data/*.partial"):
            path.unlink()
        return make_record(*args, **kwargs)

    monkeypatch.setattr(prepare, "_text_record", delete_and_make)
    with pytest.raises(OSError, match=r"No such file or directory.*\.partial"):
        prepare_text(corpus, str(tmp_path / "data"))


def test_a_shard_that_lacks_records_is_refused(corpus, tmp_path, monkeypatch):
    empty = types.SimpleNamespace(num_records=lambda: 0, close=lambda: None)
    monkeypatch.setattr(array_record_module, "ArrayRecordReader", lambda path: empty)
    with pytest.raises(ValueError, match=r"lacks some of its \d+ records; is the disk full\?$"):
        prepare_text(corpus, str(tmp_path / "data"))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", [".array_record", "tokenizer.json"])
def test_an_interrupted_replacement_leaves_no_manifest(corpus, tmp_path, monkeypatch, name):
    """It goes before any shard is replaced, and comes after all files: it never describes others."""
    prepare_text(corpus, str(tmp_path / "data"), train_tokenizer=300)
    replace = os.replace

    def fail(source, target):
        if str(target).endswith(name):
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        prepare_text(corpus, str(tmp_path / "data"), train_tokenizer=300, overwrite=True)
    assert not (tmp_path / "data/dataset.json").exists()


def test_killed_worker_is_reported_and_nothing_is_left(tmp_path):
    with running(tmp_path, num_workers=2) as (handle, process, output):
        next(each for each in handle.children() if "spawn_main" in " ".join(each.cmdline())).kill()
        message = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 2 and message.startswith("error: a worker process died")
    assert not output.exists()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"shards": 0}, "^--shards=0 must be at least 1$"),
        ({"shards": 2.5}, "^--shards=2.5 is of type float, expected int$"),
        ({"num_workers": -1}, "^--num_workers=-1 must be at least 1$"),
        ({"tokenizer": "bytes", "train_tokenizer": 300}, "not both"),
        ({"tokenizer": "/nowhere.json"}, "/nowhere.json"),
        ({"train_tokenizer": 100_000}, "train on more"),
        ({"split": "test"}, "train, validation, all"),
        ({"split": "heldout"}, "split 'heldout' was renamed; write 'validation'"),
        ({"source": "stdlib?weight=1;stdlib?validation=0.1"}, "is a mixture"),
    ],
)
def test_wrong_arguments_write_nothing(corpus, tmp_path, kwargs, words):
    with pytest.raises(ValueError, match=words):
        prepare_text(**{"source": corpus, "output": str(tmp_path / "out"), **kwargs})
    assert not (tmp_path / "out").exists()


def test_sources_that_cannot_be_prepared(corpus, tmp_path):
    prepare_text(corpus, str(tmp_path / "tokens"), tokenizer="bytes")
    with pytest.raises(ValueError, match="holds tokens already"):
        prepare_text(f"array_record:{tmp_path}/tokens", str(tmp_path / "out"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"no text in 1 document of split '\w+'"):
        prepare_text(f"text:{tmp_path}/empty.txt", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- the command ----------------------------------------------------------------------------------


def test_command(corpus, tmp_path):
    output = tmp_path / "out"
    flags = (f"--source={corpus}", f"--output={output}")
    done = run_command("prepare", "text", *flags, "--tokenizer=bytes", "--shards=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrote 85 documents, ")
    assert f" tokens in 1 shard; use them as array_record:{output}" in done.stdout
    assert done.stderr.count("\n") == 1 and "100 of 100 documents (100%)" in done.stderr
    again = run_command("prepare", "text", *flags)
    assert again.returncode == 2 and again.stderr.count("\n") == 1
    assert "--overwrite" in again.stderr


def test_a_failure_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 50 + "\r\n\n7\n")
    done = run_command(
        "prepare", "text", f"--source=jsonl:{tmp_path}/a.jsonl", f"--output={tmp_path}/new/out"
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: {tmp_path}/a.jsonl:53: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, workers):
    """Simulated by a limit on the size of files."""
    lines = [json.dumps({"text": np.random.default_rng(i).bytes(300).hex()}) for i in range(400)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = f"--source=jsonl:{tmp_path}/a.jsonl --shards=2 --num_workers={workers}"
    command = f"ulimit -f 16; exec {sys.executable} -m maxlp.prepare text {options} --output={tmp_path}/new"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and error.startswith("error: write() failed: File too large"), done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "new").exists()


@pytest.mark.parametrize("value", ["many", "1.5"])
def test_wrong_flags_are_one_line(value):
    done = run_command("prepare", "text", f"--shards={value}")
    assert (done.returncode, done.stderr) == (2, f"error: --shards={value} is not an integer\n")


def test_subcommand_errors_are_one_line():
    for words in ((), ("video",)):
        with pytest.raises(ValueError) as caught:
            prepare.main(*words)
        given = f", not {words[0]!r}" if words else ""
        assert str(caught.value) == f"the first argument must be one of text, image_text{given}"


def test_partial_files_of_other_programs_stay(corpus, tmp_path):
    (tmp_path / "film.partial").touch()
    prepare_text(corpus, str(tmp_path))
    assert (tmp_path / "film.partial").exists()


# --- buckets --------------------------------------------------------------------------------------


def test_a_bucket_takes_the_same_files(corpus, tmp_path, bucket, cache):  # noqa: F811
    output, local = f"{bucket}/out", str(tmp_path / "out")
    prepare_text(corpus, output, tokenizer=write_tokenizer(tmp_path / "chat"))
    manifest = prepare_text(corpus, output, train_tokenizer=300, shards=3, overwrite=True)
    prepare_text(corpus, local, train_tokenizer=300, shards=3)
    names = sorted(os.listdir(local))
    assert sorted(storage.find(output)) == names
    for name in names:
        assert storage.read(f"{output}/{name}") == (tmp_path / "out" / name).read_bytes()
    source = make_source(f"array_record:{output}", "all")
    expected = make_source(f"array_record:{local}", "all")
    for i in range(len(expected)):
        assert source[i]["tokens"].tolist() == expected[i]["tokens"].tolist()
    tokenizer = make_tokenizer(source.tokenizer["spec"])
    assert tokenizer.fingerprint == manifest["tokenizer"]["fingerprint"]
    with pytest.raises(ValueError, match=f"{output} holds a dataset already; pass --overwrite"):
        prepare_text(corpus, output)
    prepare_text(corpus, output, shards=2, overwrite=True)
    assert len([name for name in storage.find(output) if name.endswith(".array_record")]) == 2


def test_a_bucket_that_does_not_exist_is_refused_first(corpus, bucket):
    other = bucket.replace("bucket", "nobody", 1)
    with pytest.raises(ValueError, match=rf"^--output={other}: .*nobody.* does not exist"):
        prepare_text(corpus, other)


def test_a_dataset_in_a_folder_below_the_output_stays(corpus, bucket, cache):  # noqa: F811
    prepare_text(corpus, f"{bucket}/out/en", shards=2)
    below = storage.find(f"{bucket}/out/en")
    for overwrite in (False, True):
        prepare_text(corpus, f"{bucket}/out", shards=3, overwrite=overwrite)
        assert storage.find(f"{bucket}/out/en") == below


@pytest.mark.parametrize("reason", ["the connection was reset", "is not what was uploaded"])
def test_an_upload_that_fails_leaves_the_dataset_on_disk(
    corpus,
    tmp_path,
    bucket,
    cache,  # noqa: F811
    monkeypatch,
    reason,
):
    output, upload = f"{bucket}/out", storage.upload
    prepare_text(corpus, output, shards=3)

    def fail_at_the_second(path, url):
        if "00001-of-" not in url:
            upload(path, url)
        elif "reset" in reason:
            raise storage.StorageError(f"{url}: {reason}")
        else:
            storage.write(url, bytes(path.stat().st_size))

    monkeypatch.setattr(storage, "upload", fail_at_the_second)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        storage.StorageError, match=rf"{reason}; the dataset is complete in /.*: copy its"
    ) as caught:
        prepare_text(corpus, output, shards=4, overwrite=True)
    with pytest.raises(ValueError, match=r"out holds no dataset\.json"):
        make_source(f"array_record:{output}", "all")
    folder = re.search("complete in (.*): copy", str(caught.value))[1]
    assert len(documents(folder)) == len([text for text in TEXTS if text])


def test_a_truncated_upload_is_noticed_in_a_store_without_checksums(corpus, tmp_path, bucket, monkeypatch):
    stat = storage.stat
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(storage, "stat", lambda url: stat(url)._replace(md5=None))
    prepare_text(corpus, f"{bucket}/whole")
    monkeypatch.setattr(storage, "upload", lambda path, url: storage.write(url, path.read_bytes()[:-1]))
    with pytest.raises(storage.StorageError, match="is not what was uploaded"):
        prepare_text(corpus, f"{bucket}/truncated")


def test_what_fails_before_the_upload_leaves_nothing(corpus, tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(ValueError, match="no such file"):
        prepare_text(corpus, f"{bucket}/out", tokenizer="none")
    monkeypatch.setattr(prepare, "_text_record", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_text(corpus, f"{bucket}/out")
    assert not storage.find(f"{bucket}/out") and not list((tmp_path / "temporary").iterdir())


def test_an_interrupted_upload_leaves_no_temporary_folder(corpus, tmp_path, bucket, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "upload", interrupt)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(KeyboardInterrupt):
        prepare_text(corpus, f"{bucket}/out")
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.slow
def test_a_killed_upload_leaves_nothing_that_looks_complete(corpus, bucket, cache):  # noqa: F811
    for attempt in range(20):
        output = f"{bucket}/out{attempt}"
        command = [
            sys.executable,
            "-m",
            "maxlp.prepare",
            "text",
            f"--source={corpus}",
            f"--output={output}",
        ]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and len(storage.find(output)) <= attempt:
                time.sleep(0.01)
            process.kill()
        try:
            assert len(documents(output)) == len([text for text in TEXTS if text])
        except ValueError as error:
            assert "holds no dataset.json" in str(error)


def test_the_progress_of_a_billion_documents_fits_on_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    with shards.ProgressLine(10**9) as progress:
        progress.shown -= 1
        progress.add(123_456_789, 4 * 10**11)
        progress.start -= 7200
        progress.shown -= 1
        progress.add(1, 0)
    first, second, last = capsys.readouterr().err.removeprefix("\r").removesuffix("\n").split("\r")
    assert second.startswith("123,456,790 of 1,000,000,000 documents (12%), 400.0 GB, ")
    assert len(first) == len(second) == len(last) == 59
