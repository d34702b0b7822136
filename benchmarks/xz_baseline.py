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
import zlib
from collections.abc import Callable

from maxlp.data.sources import make_source

XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]


def read_stdlib(split: str) -> bytes:
    """All modules of one split of the running standard library, concatenated in path order."""
    source = make_source("stdlib", split)
    return b"".join(source[i]["text"] for i in range(len(source)))


def xz(data: bytes) -> bytes:
    """`xz -9e` with a 64 MiB window."""
    return lzma.compress(data, format=lzma.FORMAT_XZ, filters=XZ_FILTERS)


def bits_per_byte(compress: Callable[[bytes], bytes], train: bytes, held_out: bytes) -> float:
    """Bits that each byte of `held_out` adds to the compressed `train`."""
    added = len(compress(train + held_out)) - len(compress(train))
    return 8 * added / len(held_out)


def main() -> None:
    train, held_out = read_stdlib("train"), read_stdlib("validation")
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
