"""Feature levels: which metadata.version the cluster works at, and which this software knows."""

from __future__ import annotations

from typing import Final

from penstock.wire.errors import ErrorCode, UnsupportedMetadataVersionError

METADATA_VERSION: Final = 7
"""The newest metadata.version that this software knows; a new cluster starts with it.

1: what every cluster can do. 2: reassignments, settings that the cluster shares, deleted topics are
remembered, and a broker that still has replicas cannot be unregistered. 3: a live broker says which
of its replicas it can't serve. 4: an in-sync set that is refused for one of its members uses up the
partition epoch that it is based on. 5: a registration takes effect only after the one that it
names. 6: a broker can be drained of its leaderships. 7: a registration holds the address that
clients from outside are told.
"""

REFUSALS_USE_UP_EPOCHS_SINCE: Final = 4
"""The metadata.version from which on no sending of an in-sync set is judged after another."""

REGISTRATIONS_FOLLOW_SINCE: Final = 5
"""The metadata.version from which on no late registration takes the place of a later process."""

DRAINS_SINCE: Final = 6
"""The metadata.version from which on a broker can be drained of its leaderships."""

EXTERNAL_ADDRESSES_SINCE: Final = 7
"""The metadata.version from which on registrations hold addresses for clients from outside."""


class SoftwareTooOldError(
    UnsupportedMetadataVersionError, code=ErrorCode.UNSUPPORTED_METADATA_VERSION
):
    """This process must end: it would apply the log otherwise than the controllers that know it."""


def require_known(version: int) -> None:
    """Raise SoftwareTooOldError for a metadata.version in force that this software lacks."""
    if version > METADATA_VERSION:
        raise SoftwareTooOldError(
            f"the cluster works at metadata.version {version}, and this software knows 1 to "
            f"{METADATA_VERSION}: install a newer Penstock on this node and start it again"
        )
