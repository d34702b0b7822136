"""Prints the first device of this machine as JSON, from a process of its own, which frees the device."""

import json

import jax


def main() -> None:
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    found = dict(platform=device.platform, kind=device.device_kind, count=jax.device_count())
    print(json.dumps(found | {"memory": stats.get("bytes_limit")}))


if __name__ == "__main__":
    main()
