"""An S3-compatible store of the test's own, in this process, on loopback."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from pyarrow import fs

from penstock.pipeline.connectors.object_store import S3


@contextlib.contextmanager
def running_store(bucket: str) -> Iterator[S3]:
    """The store, with an empty bucket, while it runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Another package's, on being imported.
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    try:
        host, port = server.get_host_and_port()
        found = S3(f"http://{host}:{port}", "us-east-1", "test", "secret")
        fs.S3FileSystem(
            access_key="test", secret_key="secret", region="us-east-1", scheme="http",
            endpoint_override=f"{host}:{port}", allow_bucket_creation=True,
        ).create_dir(bucket)  # fmt: skip
        yield found
    finally:
        server.stop()
