"""What becomes of records that a query was to read and that are not there."""

from __future__ import annotations

import logging
from typing import Final

from penstock.pipeline.errors import DataLossError

_LOG: Final = logging.getLogger("penstock.pipeline")
_NEXT: Final = (
    "; next: see whether retention is long enough for this query; to read on without what is "
    "lost, set failOnDataLoss to false, or begin with a new checkpoint"
)


def lost(what: str, *, fail: bool) -> None:
    """Raise DataLossError, or log a warning where the query is to go on (``fail`` False)."""
    if fail:
        raise DataLossError(what + _NEXT)
    _LOG.warning("%s; reading on without them, since failOnDataLoss is false", what)
