"""Checkpoints in a bucket. The same as on disk, except that nothing is renamed::

    DIR/300/                 complete as soon as it has a manifest, which is written last
        state/ ...           the arrays (Orbax), with a file ``commit_success.txt`` of its own
        checkpoint.json
        manifest.txt         ``md5:MD5 SIZE PATH`` of all files above, from the bucket's listing

The store computes MD5 sums of what arrives, so neither saving nor verifying reads the files back; where it
does not keep them (as with keys of a customer on S3), files are read and get CRC-32 sums as on disk. A step
without a manifest is being written, or was left behind by a kill, and is deleted at the next launch.
Functions take the local mirror of a step, see `mirror`, which gets the record and the manifest too.
"""

import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from absl import logging

from maxlp.runtime import files, manifest, mirror, storage

_THREADS = 8
_BLOCK_BYTES = 16 << 20


def location(root: Path) -> str:
    """Where Orbax writes and reads the arrays of a step."""
    url = _mirror(root).url_of(root)
    if url.startswith("s3://"):
        from maxlp.runtime import orbax_s3

        orbax_s3.enable()
    return url


def sweep(directory: Path) -> None:
    """Deletes what a killed run left unfinished in a directory of checkpoints."""
    url = _mirror(directory).url_of(directory)
    found = storage.find(url)
    steps = {name.partition("/")[0] for name in found if "/" in name}
    for step in sorted(step for step in steps if f"{step}/{manifest.NAME}" not in found):
        logging.warning("removing %s/%s, left behind by a killed run", url, step)
        storage.remove(f"{url}/{step}")


def commit(root: Path, record_name: str, record: str) -> None:
    """Adds record and manifest to a step whose arrays are written, which completes it.

    Raises:
      FileExistsError: another process has completed this step.
    """
    its_mirror = _mirror(root)
    its_mirror.push()  # metrics are never behind the checkpoint, and this process still holds the lock
    url = its_mirror.url_of(root)
    storage.write(f"{url}/{record_name}", record.encode())
    found = storage.find(url)
    keeps_md5 = found[record_name].md5 == manifest.md5(record.encode()).hexdigest()
    with ThreadPoolExecutor(_THREADS) as pool:
        checksums = pool.map(lambda name: _checksum(f"{url}/{name}", found[name], keeps_md5), found)
        sums = {name: (sum_, found[name].size) for name, sum_ in zip(found, checksums, strict=True)}
    content = manifest.text_of(sums)
    if its_mirror.holder:
        its_mirror.holder.end_if_lost()
    storage.write(f"{url}/{manifest.NAME}", content.encode(), create=True)
    root.mkdir(parents=True)
    files.write_text(root / record_name, record)
    files.write_text(root / manifest.NAME, content)


def delete(root: Path) -> None:
    """Deletes a step."""
    mirror.remove_folder(_mirror(root).url_of(root))
    shutil.rmtree(root, ignore_errors=True)


def find_faults(root: Path, index: int, count: int) -> list[str]:
    """As `manifest.find_faults`; what the listing shows is reported by the process of share 0."""
    url, sums = _mirror(root).url_of(root), manifest.read(root)
    if sums is None:
        return manifest.find_faults(root, index, count)
    found = storage.find(url)
    faults = {name: _fault(found.get(name), *sums[name]) for name in sums}
    unread = {
        name: size
        for name, (checksum, size) in sums.items()
        if not faults[name] and not checksum.startswith("md5:")
    }
    mine = manifest.share(unread, index, count)
    with ThreadPoolExecutor(_THREADS) as pool:
        crcs = pool.map(lambda name: _crc32(f"{url}/{name}", unread[name]), mine)
        wrong = [name for name, crc in zip(mine, crcs, strict=True) if crc != sums[name][0]]
    listed = [f"{name} {fault}" for name, fault in faults.items() if fault and index == 0]
    return listed + [f"{name} does not match its checksum" for name in wrong]


def _mirror(path: Path) -> mirror.Mirror:
    found = mirror.find(path)
    assert found is not None
    return found


def _fault(entry: storage.Entry | None, checksum: str, size: int) -> str | None:
    if entry is None:
        return "is missing"
    if entry.size != size:
        return f"has {entry.size} bytes instead of {size}"
    is_same = not checksum.startswith("md5:") or checksum == f"md5:{entry.md5}"
    return None if is_same else "does not match its checksum"


def _checksum(url: str, entry: storage.Entry, keeps_md5: bool) -> str:
    return f"md5:{entry.md5}" if keeps_md5 and entry.md5 else _crc32(url, entry.size)


def _crc32(url: str, size: int) -> str:
    crc = 0
    for start in range(0, size, _BLOCK_BYTES):
        crc = zlib.crc32(storage.read(url, start, min(start + _BLOCK_BYTES, size)), crc)
    return f"{crc:08x}"
