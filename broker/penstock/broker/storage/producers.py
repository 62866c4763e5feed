"""Producer state from a snapshot and the batches that follow it in the log."""

from __future__ import annotations

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.producer_state import ANY_PRODUCER, NEVER_FORGOT, ProducerState
from penstock.broker.storage.checkpoints import newest_snapshot
from penstock.broker.storage.log_files import LogFiles


def load_producers(
    files: LogFiles, end_offset: int, epochs: EpochHistory, now_ms: int
) -> ProducerState:
    """What the producers wrote below ``end_offset``.

    The clock of an append is not in the log, so those found there count as seen at ``now_ms``:
    they are remembered rather too long than too short. Without the log's beginning and a snapshot
    of it, any producer may have been forgotten. Raises CorruptRecordError for a damaged header.
    """
    first = files.segments[0].base_offset
    found = newest_snapshot(files.directory, end_offset, epochs)
    if found is None or found[1] < first:
        state = ProducerState(forgotten_up_to=ANY_PRODUCER if first else NEVER_FORGOT)
        offset = first
    else:
        state, offset = found
    for _, placed in files.walk(offset, end_offset):
        state.record(placed.header, placed.header.base_offset, now_ms)
    return state
