"""How many bits per byte do general-purpose compressors need for the held-out standard library?

    python benchmarks/xz_baseline.py

The debug run trains on the source of the Python standard library and reports bits per byte on about
2 % of its files. This is the number to hold that against. Each compressor is charged

    8 · (len(compress(train + held_out)) - len(compress(train))) / len(held_out)

so, like the model, it has seen the whole training text (its window is larger than the text) before
it meets the held-out bytes. Unlike the model's evaluation, a compressor may also use earlier held-out
files for later ones. Each one is also shown without the training text, as `alone`.
"""

import bz2
import json
import lzma
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path

HELD_OUT_ONE_IN = 50
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]


def read_stdlib() -> tuple[bytes, bytes]:
    """All `*.py` of the running standard library, concatenated in path order: (train, held out)."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if "site-packages" not in name.parts:
            is_held_out = zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0
            (held_out if is_held_out else train).append(path.read_bytes())
    return b"".join(train), b"".join(held_out)


def xz(data: bytes) -> bytes:
    """`xz -9e` with a 64 MiB window."""
    return lzma.compress(data, format=lzma.FORMAT_XZ, filters=XZ_FILTERS)


def bits_per_byte(compress: Callable[[bytes], bytes], train: bytes, held_out: bytes) -> float:
    """Bits that each byte of `held_out` adds to the compressed `train`."""
    added = len(compress(train + held_out)) - len(compress(train))
    return 8 * added / len(held_out)


def main() -> None:
    train, held_out = read_stdlib()
    assert len(train) + len(held_out) < XZ_FILTERS[0]["dict_size"], "the window must hold all text"
    result = {
        "train_bytes": len(train),
        "held_out_bytes": len(held_out),
        "xz_bits_per_byte": bits_per_byte(xz, train, held_out),
        "xz_alone_bits_per_byte": bits_per_byte(xz, b"", held_out),
        "bz2_bits_per_byte": bits_per_byte(bz2.compress, train, held_out),
        "zlib_bits_per_byte": bits_per_byte(lambda data: zlib.compress(data, 9), train, held_out),
    }
    for name, value in result.items():
        print(f"{name:24} {value:12,.3f}" if isinstance(value, float) else f"{name:24} {value:12,}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
