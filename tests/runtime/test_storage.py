import importlib.util
import time

import pytest

from maxlp.runtime import files, storage


def test_a_file_is_written_found_read_in_ranges_and_removed(bucket):
    storage.write(f"{bucket}/a/1.txt", b"0123456789")
    storage.write(f"{bucket}/a/b/2.txt", b"x")
    found = storage.find(f"{bucket}/a")
    assert {name: entry.size for name, entry in found.items()} == {"1.txt": 10, "b/2.txt": 1}
    assert found["1.txt"].md5 == "781e5e245d69b566979b86e28d23f2c7"  # of the ten digits
    assert storage.stat(f"{bucket}/a/1.txt") == found["1.txt"]
    assert storage.read(f"{bucket}/a/1.txt", 2, 5) == b"234"
    assert storage.glob(f"{bucket}/a/*") == {f"{bucket}/a/1.txt": found["1.txt"]}
    storage.write(f"{bucket}/a/1.txt", b"another")
    assert storage.find(f"{bucket}/a")["1.txt"].tag != found["1.txt"].tag
    storage.remove(f"{bucket}/a")
    assert storage.find(f"{bucket}/a") == {}
    storage.remove(f"{bucket}/a")


def test_only_one_writer_creates_a_file(bucket):
    storage.write(f"{bucket}/a", b"1", create=True)
    with pytest.raises(FileExistsError, match="/a exists already"):
        storage.write(f"{bucket}/a", b"2", create=True)
    assert storage.read(f"{bucket}/a") == b"1"


def test_errors_name_the_url_in_one_line(bucket):
    with pytest.raises(FileNotFoundError, match=f"{bucket}/none does not exist"):
        storage.read(f"{bucket}/none")
    other = bucket.replace("bucket", "nobody", 1)
    with pytest.raises(FileNotFoundError, match=r"nobody.* does not exist"):
        storage.check(other)
    storage.check(bucket)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://server/file", r"ftp://server/file has an unknown protocol; URLs begin with gs://, s3://"),
        ("gs://", "gs:// names no bucket"),
        ("s3:///key", "names no bucket"),
    ],
)
def test_unusable_urls_are_refused(url, message):
    with pytest.raises(ValueError, match=message):
        storage.file_system(url)


@pytest.mark.parametrize(("protocol", "extra"), [(p, extra) for p, (_, extra) in storage.EXTRAS.items()])
def test_a_missing_library_is_named(monkeypatch, protocol, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"pip install 'maxlp\[{extra}\]'$"):
        storage.file_system(f"{protocol}://a/b")


def test_a_store_that_does_not_answer_is_given_up(monkeypatch):
    class Silent:
        def call(self, *_, **__):
            time.sleep(60)

    monkeypatch.setattr(storage, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(storage, "file_system", lambda url: Silent())
    with pytest.raises(storage.StorageError, match=r"^gs://a: no answer within"):
        storage.check("gs://a/b")


@pytest.mark.parametrize("path", ["/a/b", "a", "", "C:/a", "text:/data/a.txt", "~/gs:/x"])
def test_paths_are_not_urls(path):
    assert not files.is_url(path)
