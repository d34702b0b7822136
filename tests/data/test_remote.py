"""Data at URLs: what is fetched of it, and what happens when a store fails."""

import json
import os

import numpy as np
import pytest

from maxlp.data import local_cache, remote
from maxlp.data.readers import jsonl, parquet, tars
from maxlp.data.sources import make_source, open_source, parse_spec
from tests.data.corpora import TEXTS, error_of, texts_of, write_jsonl, write_parquet, write_pictures
from tests.data.servers import cache, server  # noqa: F401  # fixtures

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
