"""What becomes of records that a query was to read and that are not there."""

from __future__ import annotations

import logging
from typing import Final

from penstock.pipeline.errors import DataLossError
from penstock.pipeline.source.offsets import Offsets

_LOG: Final = logging.getLogger("penstock.pipeline")
_NEXT: Final = (
    "; next: see whether retention is long enough for this query; to read on without what is "
    "lost, set failOnDataLoss to false, or begin with a new checkpoint"
)
_NEXT_IF_NEVER_THERE: Final = (
    ": its log has never come so far, the topic was deleted and made anew since the offset was "
    "noted, or a transaction is open before it (with read_committed nothing behind that can be "
    "read yet); next: write an offset that is not beyond the end, or -1, which is the end; to read "
    "only what there is, set failOnDataLoss to false"
)


def lost(what: str, *, fail: bool) -> None:
    """Raise DataLossError, or log a warning where the query is to go on (``fail`` False)."""
    _lost(what, _NEXT, fail=fail)


def never_there(option: str, wanted: Offsets, latest: Offsets, *, fail: bool) -> None:
    """The same where an option's offsets are beyond what can be read (``latest``)."""
    for partition, end in latest.items():
        if (offset := wanted[partition]) > end:
            what = (
                f"{option}: partition {partition}: offset {offset} was asked for, and what can be "
                f"read ends at {end}"
            )
            _lost(what, _NEXT_IF_NEVER_THERE, fail=fail)


def _lost(what: str, following: str, *, fail: bool) -> None:
    if fail:
        raise DataLossError(what + following)
    _LOG.warning("%s; reading on without them, since failOnDataLoss is false", what)
