"""A Hugging Face Hub on this machine: as much of its HTTP interface as downloads need."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class FakeHub:
    """Serves folders as repositories of models.

    Attributes:
      url: for HF_ENDPOINT.
      requests: paths of all requests so far.
      gated: names of repositories that need an account.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Path]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.requests: list[str] = []
        self.gated: set[str] = set()
        self.url = ""

    def push(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Makes a folder's present files the newest commit of a revision; returns the commit."""
        content = "".join(f"{p.name} {hashlib.sha1(p.read_bytes()).hexdigest()}" for p in _files(folder))
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.repos.setdefault(repo, {})[commit] = folder
        self.refs.setdefault(repo, {})[revision] = commit
        return commit

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to a request."""
        path = path.partition("?")[0].strip("/")
        self.requests.append(path)
        is_api, parts = path.startswith("api/models/"), path.removeprefix("api/models/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self.refs[repo].get(revision, revision)
        if commit not in self.repos[repo]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        folder = self.repos[repo][commit]
        if is_api:
            return 200, {}, json.dumps(_listing(repo, commit, folder, rest[0] == "tree")).encode()
        if not (file := folder / "/".join(rest[2:])).is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        body = file.read_bytes()
        return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit}, body


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _listing(repo: str, commit: str, folder: Path, is_tree: bool) -> object:
    files = _files(folder)
    if is_tree:
        return [
            dict(
                type="file",
                path=p.name,
                size=p.stat().st_size,
                oid=hashlib.sha1(p.read_bytes()).hexdigest(),
            )
            for p in files
        ]
    return dict(id=repo, modelId=repo, sha=commit, siblings=[dict(rfilename=p.name) for p in files])


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            if (wanted := self.headers.get("Range")) and status == 200:
                start, _, end = wanted.removeprefix("bytes=").partition("-")
                last = min(int(end or len(body)), len(body) - 1)
                headers |= {"Content-Range": f"bytes {start}-{last}/{len(body)}"}
                status, body = 206, body[int(start) : last + 1]
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def fake_hub(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    """A hub for this process, with an empty cache."""
    from huggingface_hub import constants

    from maxlp.runtime import hub

    with serving(FakeHub()) as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf_cache"))
        monkeypatch.setattr(hub, "commits", {})
        yield fake
