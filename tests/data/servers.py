"""A web server on this machine that counts what is fetched, also in the shape of the Hugging Face Hub."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.corpora import write_jsonl, write_parquet


class Server(http.server.ThreadingHTTPServer):
    """Serves the files of a folder.

    Attributes:
      url: without a slash at the end.
      fetched: (path, bytes) of every answer to GET.
      failures: so many GETs are answered with 503 before the next one succeeds.
      ranges: whether parts of files are sent.
    """

    def __init__(self, folder: Path, handler: type["Files"]):
        super().__init__(("127.0.0.1", 0), handler)
        self.folder, self.url = folder, f"http://127.0.0.1:{self.server_address[1]}"
        self.fetched: list[tuple[str, int]] = []
        self.failures, self.ranges = 0, True
        self.commits: dict[str, Path] = {}  # of a hub: the folder of each commit; the last one is `main`
        self.later: dict[str, Path] = {}

    def sizes(self) -> list[int]:
        """Bytes of each answer so far, and forgets them."""
        sizes = [size for _, size in self.fetched]
        self.fetched.clear()
        return sizes


class Files(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # one packet for headers and content, without waiting for an acknowledgement
    server: Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        file = self.server.folder / path.lstrip("/")
        if self.command == "GET" and self.server.failures:
            self.server.failures -= 1
            self.send(503, b"busy")
        elif "forbidden" in path:
            self.send(403, b"no")
        elif not file.is_file():
            self.send(404, b"nothing here")
        else:
            self.send_file(path, file)

    def send_file(self, path: str, file: Path, **headers: str) -> None:
        data, status = file.read_bytes(), 200
        headers["ETag"] = f'"{hashlib.md5(data).hexdigest()}"'
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.server.ranges:
            headers["Accept-Ranges"] = "bytes"
            if found:
                start, end = int(found[1]), min(int(found[2]) + 1, len(data))
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
                data, status = data[start:end], 206
        if self.command == "GET":
            self.server.fetched.append((path, len(data)))
        self.send(status, data, **headers)

    def send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Hub(Files):
    """The requests that reading a public dataset takes: `me/words`, revision `main` or a commit."""

    def do_GET(self) -> None:
        path, commits = self.path.partition("?")[0], self.server.commits
        newest = [*commits][-1]
        found = re.fullmatch(r"/api/datasets/me/words(?:/(revision|tree)/([^/]+)(/.*)?)?", path)
        if found and (commit := newest if found[2] in (None, "main") else found[2]) in commits:
            if found[1] == "tree" and not (commits[commit] / (found[3] or "").strip("/")).is_dir():
                self.send(404, b"{}", X_Error_Code="EntryNotFound")
            elif found[1] == "tree":
                self.send_json(self.tree(commits[commit], (found[3] or "").strip("/")))
            else:
                self.send_json({"id": "me/words", "sha": commit, "siblings": [], "private": False})
        elif match := re.fullmatch(r"/datasets/me/words/resolve/([^/]+)/(.*)", path):
            commit = newest if match[1] == "main" else match[1]
            file = commits[commit] / match[2]
            self.send_file(match[2], file, X_Repo_Commit=commit)
        else:
            self.send(404, b"{}", X_Error_Code="RepoNotFound")

    def do_POST(self) -> None:
        self.send(404, b"{}")

    def tree(self, folder: Path, below: str) -> list[dict]:
        paths = sorted(
            (folder / below).rglob("*")
            if "recursive=true" in self.path.lower()
            else (folder / below).iterdir()
        )
        return [
            {"type": "directory", "path": str(p.relative_to(folder)), "oid": "0" * 40, "size": 0}
            if p.is_dir()
            else {
                "type": "file",
                "path": str(p.relative_to(folder)),
                "oid": hashlib.sha1(p.read_bytes()).hexdigest(),
                "size": p.stat().st_size,
            }
            for p in paths
        ]

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), Content_Type="application/json")


@contextlib.contextmanager
def serving(folder: Path, handler: type[Files] = Files) -> Iterator[Server]:
    with Server(folder, handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A web server for a new folder."""
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local cache, and nothing remembered of URLs."""
    from maxlp.data import local_cache, remote

    folder = tmp_path / "cache"
    monkeypatch.setattr(local_cache, "folder", lambda: folder)
    monkeypatch.setattr(remote, "_entries", {})
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    return folder


@pytest.fixture
def hub_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub whose dataset `me/words` has one commit, 111…; `later` has another one, too."""
    from huggingface_hub import HfFileSystem, constants

    from maxlp.runtime import hub

    commits = {"1" * 40: tmp_path / "first", "2" * 40: tmp_path / "second"}
    for number, folder in enumerate(commits.values()):
        (folder / "data").mkdir(parents=True)
        for name in "ab":
            texts = [f"{name}{number}{i}" * 500 for i in range(30)]
            write_parquet(folder / "data" / f"{name}.parquet", texts, rows=10)
        write_jsonl(folder / "c.jsonl", [f"c{number}"] * 9)
    with serving(tmp_path, Hub) as server:
        server.commits, server.later = {"1" * 40: commits["1" * 40]}, commits
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub, "commits", {})
        HfFileSystem.clear_instance_cache()
        yield server
        HfFileSystem.clear_instance_cache()
