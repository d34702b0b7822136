"""Lets Orbax write arrays to S3, and read them: TensorStore can, but Orbax has no way to ask it for that.

Replaces three private functions of orbax-checkpoint 0.12, which `pyproject.toml` pins; a test fails when a
name is gone. See https://github.com/google/orbax/issues/359.
"""

import functools
import os
from typing import Any


@functools.cache
def enable() -> None:
    """Makes Orbax treat ``s3://`` as it does ``gs://``, with TensorStore's driver for S3."""
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    of_gcs = gcs_utils.get_kvstore_for_gcs

    def kvstore(path: str) -> dict[str, Any]:
        if not path.startswith("s3://"):
            return of_gcs(path)
        bucket, _, key = path.removeprefix("s3://").partition("/")
        spec = {"driver": "s3", "bucket": bucket, "path": key}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):  # which the driver does not read
            spec |= {"endpoint": endpoint, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}
        return spec

    def normalized(path: str) -> str:
        scheme, separator, rest = path.rpartition("://")
        return scheme + separator + os.path.normpath(rest)

    def in_bucket(path: str) -> bool:
        return path.startswith(("gs://", "s3://"))

    gcs_utils.get_kvstore_for_gcs = kvstore
    tensorstore_utils._use_gcs_driver = in_bucket
    tensorstore_utils._normalize_path = normalized
