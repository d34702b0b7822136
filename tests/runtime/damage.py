"""Ways to damage a file."""

import os


def flip_bit(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def extend(path, rng):
    path.write_bytes(path.read_bytes() + bytes([rng.randrange(256)]))


def swap_halves(path, rng):
    data = path.read_bytes()
    path.write_bytes(data[len(data) // 2 :] + data[: len(data) // 2])


def delete(path, rng):
    path.unlink()


DAMAGES = {
    "flip": flip_bit,
    "flip again": flip_bit,
    "truncate": truncate,
    "extend": extend,
    "swap": swap_halves,
    "delete": delete,
}
