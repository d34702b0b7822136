from maxlp.data.readers import jsonl
from maxlp.data.sources import make_source
from tests.data.corpora import TEXTS, error_of, texts_of, write_jsonl


def test_round_trip(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:20], key="content")
    second = write_jsonl(tmp_path / "b.jsonl", TEXTS[20:], key="content")
    blank = b"\n\r\n   \t \r\n"
    second.write_bytes(blank + second.read_bytes().replace(b"\n", b"\n    \n").rstrip())  # no last newline
    for spec in (f"jsonl:{tmp_path}", f"jsonl:{tmp_path}/?.jsonl"):
        assert texts_of(make_source(spec + "?text_key=content", "all")) == TEXTS


def test_lines_are_found_across_blocks(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n" + b" " * 20 + b"\n"))
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 7)
    source = make_source(f"jsonl:{path}", "all")
    assert texts_of(source) == TEXTS
    assert source.where(len(TEXTS) - 1) == f"{path}:{2 * len(TEXTS) - 1}"


def test_a_file_is_scanned_once_unless_it_changes(tmp_path, monkeypatch):
    path, scan = write_jsonl(tmp_path / "a.jsonl", TEXTS), jsonl._scan_lines
    scanned = []
    monkeypatch.setattr(jsonl, "_scan_lines", lambda path: scanned.append(path) or scan(path))
    for split in ("train", "validation"):
        make_source(f"jsonl:{path}?validation=0.5", split)
    assert scanned == [str(path)]
    write_jsonl(path, TEXTS[:20])
    assert len(make_source(f"jsonl:{path}", "all")) == 20 and len(scanned) == 2


def test_a_text_and_a_conversation_exclude_each_other(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    spec = f"jsonl:{path}?text_key=a&messages_key=b"
    assert "text_key=a excludes messages_key=b; give one of them" in error_of(spec)


def test_errors_name_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"body": "b", "id": 1}\n{"text": 3}\n[1]\n{"text": "trunc')
    for index, line, word in (
        (1, 3, "body, id"),
        (2, 4, "int"),
        (3, 5, "an array, not"),
        (4, 6, "JSON"),
    ):
        message = error_of(f"jsonl:{path}", "all", index)
        assert f"{path}:{line}: " in message and word in message
    path.write_text('{"text": null}\n')
    assert "'text' is null, not text; remove the record" in error_of(f"jsonl:{path}", "all", 0)
    path.write_text('{"text": "a"}\n' + "[" * 100_000)
    assert f"{path}:2: not a complete JSON object (" in error_of(f"jsonl:{path}", "all", 1)
    path.write_bytes(b'{"text": "a"}\n{"text": "\xf6"}\n')
    assert f"{path}:2: byte 24 (0xf6) is not UTF-8; convert" in error_of(f"jsonl:{path}", "all", 1)
    path.write_text('[{"text": "a"},\n{"text": "b"}\n]\n')  # an array over several lines
    assert f"{path}:1: not a complete JSON object" in (message := error_of(f"jsonl:{path}", "all", 0))
    assert "as `jq -c '.[]' FILE` does of a file with an array" in message
    write_jsonl(path, TEXTS, key="body")
    assert "text_key" in error_of(f"jsonl:{path}")  # when it is opened, not when training reads it
