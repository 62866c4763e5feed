"""Producer state from a snapshot and the batches that follow it in the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.producer_state import ANY_PRODUCER, NEVER_FORGOT, ProducerState
from penstock.broker.storage.checkpoints import newest_snapshot
from penstock.broker.storage.log_files import Batch, LogFiles


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


def states_at(
    offsets: Sequence[int], before: ProducerState, batches: Sequence[Batch], seen_ms: int
) -> Iterator[tuple[int, ProducerState]]:
    """The state ``before`` an append of ``batches`` as it is at each of the rising ``offsets``
    where one of them begins, a copy for each.
    """
    if not offsets:
        return
    state, at = before.copy(), 0
    for offset in offsets:
        while batches[at].header.base_offset < offset:
            header = batches[at].header
            state.record(header, header.base_offset, seen_ms)
            at += 1
        yield offset, state.copy()
