import numpy as np
import pyarrow.parquet

from maxlp.data.sources import make_source
from tests.data.corpora import TEXTS, error_of, write_parquet


def test_round_trip_in_any_order(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS[:21])
    write_parquet(tmp_path / "b.parquet", [], rows=5)
    write_parquet(tmp_path / "c.parquet", TEXTS[21:], rows=7)
    source = make_source(f"parquet:{tmp_path}", "all")
    order = np.random.default_rng(0).permutation(len(TEXTS))
    assert [source[i]["text"] for i in order] == [TEXTS[i] for i in order]


def test_errors(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, key="body")
    message = error_of(f"parquet:{path}")
    assert "id, body" in message and "text_key" in message
    assert f"{path}: row 0 of row group 0: 'id' is int, not text" in error_of(f"parquet:{path}?text_key=id")
    whole = path.read_bytes()
    with pyarrow.parquet.ParquetFile(path) as file:
        page = file.metadata.row_group(0).column(1).data_page_offset
    path.write_bytes(whole[:page] + bytes(20) + whole[page + 20 :])
    message = error_of(f"parquet:{path}?text_key=body", "all", 0)
    assert f"{path}: row 0 of row group 0: it cannot be read (" in message
    path.write_bytes(whole[:-100])
    assert f"{path} is not a readable Parquet file" in error_of(f"parquet:{path}?text_key=body")
