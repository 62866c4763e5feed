"""A node whose software knows no metadata.version above 6, before external addresses were told."""

from __future__ import annotations

import sys

from penstock.raft_meta.core import versions

versions.METADATA_VERSION = 6  # type: ignore[misc]  # Before anything takes it from there.

from penstock.broker.__main__ import main  # noqa: E402 - as said above.

if __name__ == "__main__":
    sys.exit(main())
