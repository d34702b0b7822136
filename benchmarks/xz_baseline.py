"""How many bits per byte do general-purpose compressors need for the validation files?

    python benchmarks/xz_baseline.py    # 35 seconds of CPU time

The debug run trains on the source code of Python's standard library and reports bits per byte on about 2 %
of its files, its validation split. These are the numbers to compare it with. A compressor's score is

    8 · (len(compress(train + validation)) - len(compress(train))) / len(validation)

so that, like the model, it has seen the whole training text (its window is larger than the text) before the
validation text. Unlike the model in evaluation, it may also use earlier validation files for later ones.
`alone` is the score of xz without the training text.
"""

import argparse
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


def bits_per_byte(compress: Callable[[bytes], bytes], train: bytes, validation: bytes) -> float:
    """Bits that each byte of ``validation`` adds to the compressed ``train``."""
    added = len(compress(train + validation)) - len(compress(train))
    return 8 * added / len(validation)


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=how).parse_args()
    train, validation = read_stdlib("train"), read_stdlib("validation")
    assert len(train) + len(validation) < XZ_FILTERS[0]["dict_size"], "the window must hold all text"
    result = {
        "train_bytes": len(train),
        "validation_bytes": len(validation),
        "xz_bits_per_byte": bits_per_byte(xz, train, validation),
        "xz_alone_bits_per_byte": bits_per_byte(xz, b"", validation),
        "bz2_bits_per_byte": bits_per_byte(bz2.compress, train, validation),
        "zlib_bits_per_byte": bits_per_byte(lambda data: zlib.compress(data, 9), train, validation),
    }
    for name, value in result.items():
        print(f"{name:24} {value:12,.3f}" if isinstance(value, float) else f"{name:24} {value:12,}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
