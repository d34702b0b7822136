"""Data at URLs: what is fetched of it, and what happens when a store fails."""

import errno
import gzip
import itertools
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from maxlp.data import local_cache, remote, text
from maxlp.data.readers import parquet
from maxlp.data.sources import make_source, open_source, parse_spec
from maxlp.prepare import prepare_text
from maxlp.runtime import hub, storage
from tests.data.corpora import (
    TEXTS,
    assert_same_batches,
    error_of,
    texts_of,
    write_jsonl,
    write_parquet,
    write_pictures,
)

pytestmark = pytest.mark.usefixtures("cache")


def test_a_line_of_json_is_fetched_by_itself(server):
    path = write_jsonl(server.folder / "a.jsonl", TEXTS)
    source = make_source(f"jsonl:{server.url}/a.jsonl", "all")
    assert server.sizes()[0] == path.stat().st_size, "read once, to find the lines"
    lines = path.read_bytes().splitlines(keepends=True)
    order = np.random.default_rng(0).permutation(len(TEXTS)).tolist()
    assert [source[i]["text"] for i in order] == [TEXTS[i] for i in order]
    assert server.sizes() == [len(lines[i]) for i in order]
    again = make_source(f"jsonl:{server.url}/a.jsonl", "all")
    assert server.sizes() == [len(lines[0])], "the lines are known"
    assert again.fingerprint == source.fingerprint


def test_of_parquet_the_footer_and_one_column_of_a_group_are_fetched(server):
    rng = np.random.default_rng(0)
    texts = [rng.bytes(500).hex() for _ in range(1600)]
    path = write_parquet(server.folder / "a.parquet", texts, rows=200)
    source = make_source(f"parquet:{server.url}/a.parquet", "all")
    server.sizes()
    parquet._column.cache_clear()
    parquet._footer.cache_clear()
    assert source[500]["text"] == texts[500]
    with parquet._open(str(path)) as file:
        column = file.metadata.row_group(2).column(1)
    assert server.sizes() == [2**16, column.total_compressed_size]
    parquet._column.cache_clear()
    assert source[599]["text"] == texts[599] and not server.sizes(), "kept in the local cache"
    assert source[600]["text"] == texts[600] and len(server.sizes()) == 1
    assert parquet._column(f"{server.url}/a.parquet", 2, "id")[0].as_py() == 400, "another column"


def test_without_a_tag_both_ends_of_a_file_tell_whether_it_has_changed(server, monkeypatch):
    monkeypatch.setattr(remote, "ENDS_BYTES", 4)
    url, tags = f"{server.url}/a", set()
    for data in (b"begin, end", b"Begin, end", b"begin, enD"):
        (server.folder / "a").write_bytes(data)
        monkeypatch.setitem(remote._entries, url, storage.Entry(len(data), None, "", 0.0))
        tags.add(remote.stat(url).tag)
    assert len(tags) == 3


def test_without_room_on_the_disk_row_groups_are_not_kept(server, cache, monkeypatch):
    monkeypatch.setattr(local_cache, "SPARE_BYTES", 2**63)
    write_parquet(server.folder / "a.parquet", TEXTS, rows=5)
    assert texts_of(make_source(f"parquet:{server.url}/a.parquet", "all")) == TEXTS
    assert not cache.exists()


def test_a_sample_of_a_tar_is_fetched_by_itself(server):
    spec = write_pictures(server.folder / "a.tar", 20)
    local = open_source(parse_spec(spec, "all", "image_text"))
    url = f"tar:{server.url}/a.tar?split=all"
    source = open_source(parse_spec(url, "all", "image_text"))
    assert sum(server.sizes()) == (server.folder / "a.tar").stat().st_size
    for i in (3, 19, 0):
        assert source[i] == local[i]
        assert server.sizes() == [len(local[i]["image"]), len(local[i]["text"])]
    assert source.where(7) == f"{server.url}/a.tar: 007"
    server.sizes()
    open_source(parse_spec(url, "all", "image_text"))
    assert not server.sizes(), "its index is known"


# --- failures -------------------------------------------------------------------------------------


def test_failures_that_may_pass_are_tried_again_and_told(server, caplog):
    write_jsonl(server.folder / "a.jsonl", TEXTS)
    source = make_source(f"jsonl:{server.url}/a.jsonl", "all")
    time.sleep(1)  # at most one line a second is logged, and another test may just have logged one
    server.failures = 2
    assert source[1]["text"] == TEXTS[1]
    assert f"{server.url}/a.jsonl: 503" in caplog.text and "trying again in 0 s" in caplog.text
    server.failures = 3
    with pytest.raises(
        OSError, match="503"
    ) as caught:  # the run ends with an exit code after which launchers restart it
        source[2]
    assert caught.value.errno == errno.EIO and caught.value.filename == f"{server.url}/a.jsonl"
    os.rename(server.folder / "a.jsonl", server.folder / "b.jsonl")
    with pytest.raises(FileNotFoundError):
        source[3]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "jsonl:{url}/none.jsonl",
            "no file or folder {url}/none.jsonl; check the URL; a web server has no",
        ),
        ("jsonl:{url}/a{{0..2}}.jsonl", "no file or folder {url}/a1.jsonl; check the URL"),
        ("jsonl:{url}/forbidden/a.jsonl", "{url}/forbidden/a.jsonl: access refused (403"),
        ("jsonl:http://127.0.0.1:1/a.jsonl", "http://127.0.0.1:1/a.jsonl: Cannot connect to host"),
        ("jsonl:http://no-such-host.invalid/a.jsonl", "Cannot connect to host no-such-host.invalid"),
        ("jsonl:ftp://host/a.jsonl", "ftp://host/a.jsonl has an unknown protocol; URLs begin with gs://"),
        ("parquet:{url}/a0.jsonl", "{url}/a0.jsonl is not a readable Parquet file"),
        ("jsonl:{url}/*.jsonl", "check the URL"),
        ("text:{url}/forbidden/*", "{url}/forbidden"),
    ],
)
def test_errors_are_one_line_and_name_the_url(server, spec, message):
    write_jsonl(server.folder / "a0.jsonl", TEXTS)
    with pytest.raises((ValueError, OSError)) as caught:
        make_source(spec.format(url=server.url), "all")
    assert message.format(url=server.url) in str(caught.value), caught.value
    assert "\n" not in str(caught.value)


def test_a_server_that_does_not_send_parts_is_named(server):
    write_jsonl(server.folder / "a.jsonl", TEXTS)
    server.ranges = False
    message = error_of(f"jsonl:{server.url}/a.jsonl")
    assert f"{server.url}/a.jsonl: asked for" in message and "copy it to a disk or a bucket" in message


def test_changed_files_have_another_fingerprint(server, monkeypatch):
    found = set()
    for texts in (TEXTS, TEXTS[::-1], TEXTS[:9]):
        write_jsonl(server.folder / "a.jsonl", texts)
        monkeypatch.setattr(remote, "_entries", {})  # as in another process
        source = make_source(f"jsonl:{server.url}/{{a,a}}.jsonl", "all")
        assert texts_of(source) == texts, "the lines are found anew"
        found.add(source.fingerprint)
    assert len(found) == 3


def test_a_prepared_shard_that_is_gone_ends_the_run(tmp_path, buckets):
    """Not counted as a broken example, nor blamed on how it was prepared."""
    output = f"{buckets['gs']}/gone"
    manifest = prepare_text(f"jsonl:{write_jsonl(tmp_path / 'a.jsonl', TEXTS)}", output, shards=2)
    source = make_source(f"array_record:{output}", "all")
    storage.remove(f"{output}/{manifest['shards'][1]['file']}")
    with pytest.raises(OSError, match="Not Found") as caught:
        source[len(source) - 1]
    assert caught.value.errno == errno.EIO and caught.value.filename == output


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.full
def test_worker_processes_read_urls(server):
    write_jsonl(server.folder / "a.jsonl", TEXTS)
    config = dict(tokenizer="bytes", seq_len=64, batch_size=4, source=f"jsonl:{server.url}/a.jsonl")
    expected = list(itertools.islice(text.make_data(text.TextDataConfig(**config), split="train"), 6))
    data = iter(text.make_data(text.TextDataConfig(**config, num_workers=2), split="train"))
    assert_same_batches(list(itertools.islice(data, 6)), expected)
    data.close()


# --- the Hugging Face Hub -------------------------------------------------------------------------


def test_a_dataset_of_the_hub_stays_at_its_commit(hub_server, monkeypatch):
    spec = "parquet:hf://datasets/me/words/data/*.parquet"
    source = make_source(spec, "all")
    assert len(source) == 60 and source[35]["text"] == "b05" * 500
    hub_server.sizes()
    hub_server.commits = hub_server.later
    commits = dict(hub.commits)
    assert commits == {"hf://datasets/me/words": "1" * 40}, "what run.json records"
    monkeypatch.setattr(remote, "_entries", {})
    assert make_source(spec, "all").fingerprint == source.fingerprint
    hub.commits.clear()
    newer = make_source(spec, "all")
    assert newer[35]["text"] == "b15" * 500 and newer.fingerprint != source.fingerprint
    older = make_source(f"parquet:hf://datasets/me/words@{'1' * 40}/data", "all")
    assert older[35]["text"] == "b05" * 500 and older.fingerprint == source.fingerprint
    lines = make_source("jsonl:hf://datasets/me/words@main/c.jsonl", "all")
    hub_server.sizes()
    assert lines[3]["text"] == "c1" and hub_server.sizes() == [len('{"id": 1, "text": "c1"}\n')]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://datasets/me/none/a.jsonl", "hf://datasets/me/none: there is no such dataset or revision"),
        ("hf://datasets/me/words@v9/a.jsonl", "hf://datasets/me/words@v9: there is no such dataset"),
        ("hf://datasets/me/words/none.jsonl", "no file or folder hf://datasets/me/words@111"),
        ("hf://datasets/me/words/*.txt", "no file matches hf://datasets/me/words@111"),
        ("hf://words", "hf://words names no file of the Hub; write hf://datasets/OWNER/NAME@REVISION/FILE"),
    ],
)
def test_errors_of_the_hub(hub_server, path, message):
    assert message in error_of(f"jsonl:{path}")


def test_without_network_files_come_from_the_cache_of_the_hub(hub_server, tmp_path, monkeypatch):
    from huggingface_hub import constants, snapshot_download

    spec = "parquet:hf://datasets/me/words/data/*.parquet"
    before = make_source(spec, "all").fingerprint
    commits = dict(hub.commits)
    hub.commits.clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (
        "is not in the cache of the Hub" in (message := error_of(spec))
        and "hf download me/words" in message
    )
    snapshot_download("me/words", repo_type="dataset", cache_dir=tmp_path / "hub", endpoint=hub_server.url)
    hub_server.sizes()
    source = make_source(spec, "all")
    assert source[35]["text"] == "b05" * 500 and not hub_server.sizes()
    assert (source.fingerprint, hub.commits) == (before, commits), "a run may go on without network"
    assert len(make_source("parquet:hf://datasets/me/words/data/{b,a}.parquet", "all")) == len(source)


# --- the documentation ----------------------------------------------------------------------------

DOCS = (Path(__file__).parents[2] / "docs" / "configs.md").read_text()
DOCUMENTED = re.findall(r"^\| `(\w+:\w+://[^`]+)` \|", DOCS, re.M)


def write_documented(path, kind):
    """The files that a documented source of this kind and name would read."""
    folder = path.parent if path.suffix else path
    folder.mkdir(parents=True)
    stems = ["000", "001"]
    for stem in stems:
        if kind == "jsonl":
            write_jsonl(folder / f"{stem}.jsonl", TEXTS)
        elif kind == "parquet":
            write_parquet(folder / f"{stem}.parquet", TEXTS)
        elif kind == "text":
            (folder / f"{stem}.txt").write_text(stem)
        elif kind == "tar":
            write_pictures(folder / f"{stem}.tar", 6)
    for file in list(folder.iterdir()) if path.suffix == ".gz" else []:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    if kind == "array_record":
        corpus = write_jsonl(path.parent / "corpus", TEXTS)
        prepare_text(f"jsonl:{corpus}", str(path), shards=2)
        corpus.unlink()


def test_the_documentation_has_every_kind():
    assert {spec.partition(":")[0] for spec in DOCUMENTED} == {
        "jsonl",
        "parquet",
        "text",
        "tar",
        "array_record",
    }
    assert {spec.split(":")[1] for spec in DOCUMENTED} == {"https", "gs", "s3", "hf"}


@pytest.mark.parametrize("spec", DOCUMENTED)
def test_documented_sources(spec, server, hub_server, buckets):
    kind, _, url = spec.partition(":")
    protocol, place = url.split("://")
    if protocol == "hf":
        spec = spec.replace("OWNER/NAME", "me/words")
    else:
        path = place.partition("/")[2]
        write_documented(server.folder / path.replace("**/", ""), kind)
        here = server.url if protocol == "https" else buckets[protocol]
        spec = f"{kind}:{here}/{path}"
        if protocol != "https":
            for file in filter(Path.is_file, server.folder.rglob("*")):
                storage.upload(file, f"{here}/{file.relative_to(server.folder)}")
    content = "image_text" if kind == "tar" else "text"
    source = open_source(parse_spec(spec, "train", content))
    assert len(source) > 0 and source[len(source) - 1] and source.fingerprint
    assert not any(word in source.where(0) for word in ("cache", "*"))
