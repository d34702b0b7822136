"""Checksums and manifests of plain folders."""

import os
import random
import subprocess
import sys
import zlib

import pytest

from maxlp.runtime import manifest
from tests.runtime.damage import DAMAGES

CONTENT = {
    "a": b"0123456789",
    "b/large": bytes(range(256)) * 40 + b"!",
    "b/c d": b"name with a space",
    "empty": b"",
}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "folder"
    for name, data in CONTENT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def signed(folder):
    """The folder with its manifest."""
    manifest.write(folder, manifest.checksums(folder, manifest.file_sizes(folder)))
    return folder


def test_the_format_on_disk(signed):
    lines = [f"{zlib.crc32(CONTENT[n]):08x} {len(CONTENT[n])} {n}\n" for n in sorted(CONTENT)]
    own = f"{zlib.crc32(''.join(lines).encode()):08x}\n"
    assert (signed / "manifest.txt").read_text() == "".join(lines) + own
    assert manifest.read(signed) == {n: (f"{zlib.crc32(d):08x}", len(d)) for n, d in CONTENT.items()}
    assert manifest.find_faults(signed) == []


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["a", "b/large", "b/c d"])
def test_every_damage_is_found_by_the_process_that_checks_the_file(signed, damage, name):
    DAMAGES[damage](signed / name, random.Random(damage))
    [fault] = manifest.find_faults(signed)
    assert fault.startswith(f"{name} ")
    found = [manifest.find_faults(signed, index, 3) for index in range(3)]
    assert sorted(found) == [[], [], [fault]]


def test_a_file_that_cannot_be_read_is_a_fault(signed):
    (signed / "a").unlink()
    (signed / "a").symlink_to("a")  # a loop; permissions would not stop root
    [fault] = manifest.find_faults(signed)
    assert fault.startswith("a cannot be read (")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_the_only_fault_and_found_once(signed, damage):
    DAMAGES[damage](signed / "manifest.txt", random.Random(damage))
    (signed / "a").unlink()
    assert manifest.read(signed) is None
    fault = "is missing" if damage == "delete" else "does not match its own checksum"
    assert [manifest.find_faults(signed, i, 2) for i in range(2)] == [[f"manifest.txt {fault}"], []]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_cover_every_file_once(folder, count):
    sizes = manifest.file_sizes(folder)
    shares = [manifest.share(sizes, index, count) for index in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(CONTENT)
    assert shares[0][0] == "b/large"


def test_processes_split_the_work_and_the_first_gets_all_checksums(folder):
    whole = manifest.checksums(folder, CONTENT)
    parts = [manifest.shared_checksums(folder, index, 3, timeout=5) for index in (2, 1)]
    assert all(0 < len(part) < len(whole) for part in parts)
    assert manifest.shared_checksums(folder, 0, 3, timeout=5).keys() == whole.keys()
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_missing_checksums_of_a_process_are_named(folder):
    with pytest.raises(TimeoutError, match=r"folder\.sums-1 did not appear within 0 s"):
        manifest.shared_checksums(folder, 0, 2, timeout=0.0)


@pytest.mark.parametrize("block_bytes", [1, 16, 4 << 20])
def test_checksums_do_not_depend_on_how_much_is_read_at_a_time(folder, monkeypatch, block_bytes):
    monkeypatch.setattr(manifest, "_BLOCK_BYTES", block_bytes)
    found = manifest.checksums(folder, CONTENT)
    assert found == {name: (f"{zlib.crc32(data):08x}", len(data)) for name, data in CONTENT.items()}


def test_files_are_on_disk_when_their_checksums_are_known(folder, monkeypatch):
    synced = []
    monkeypatch.setattr(manifest.files, "sync", synced.append)
    manifest.checksums(folder, CONTENT)
    assert sorted(synced) == sorted(folder / name for name in CONTENT)


def test_systems_in_fips_mode_compute_the_checksums_of_buckets(tmp_path):
    config = tmp_path / "openssl.cnf"
    config.write_text("openssl_conf = a\n[a]\nalg_section = b\n[b]\ndefault_properties = fips=yes\n")
    code = "from maxlp.runtime import manifest; print(manifest.md5(b'0123456789').hexdigest())"
    environment = os.environ | {"OPENSSL_CONF": str(config)}
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert found == "781e5e245d69b566979b86e28d23f2c7\n"
