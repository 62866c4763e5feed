"""Checks of what is to be appended, all of them before anything is written. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.ports import AppendInfo, OlderEpochError
from penstock.broker.core.producer_stage import ProducerStage, staged_markers
from penstock.broker.core.producer_state import Duplicate, ProducerState
from penstock.broker.core.transactions import Marker
from penstock.broker.storage.batches import next_header
from penstock.broker.storage.disk import Buffer
from penstock.broker.storage.log_files import Batch
from penstock.broker.storage.placing import Limits
from penstock.broker.storage.settings import LogSettings, TopicLogConfig
from penstock.wire.errors import (
    CorruptRecordError,
    FencedLeaderEpochError,
    InvalidRecordError,
    InvalidTxnStateError,
    RecordTooLargeError,
)
from penstock.wire.markers import MarkerType, marker_type
from penstock.wire.records import (
    HEADER_BYTES,
    MAX_RECORDS_BYTES,
    BatchHeader,
    offset_patch,
    parse_header,
    set_log_append_time,
    verify_batch,
    verify_producer_batch,
)
from penstock.wire.rewriting import read_spans
from penstock.wire.topic_config import MAX_MESSAGE_BYTES

_AT_HAND_BYTES: Final = 1024 * 1024


class Checked(NamedTuple):
    """Batches that may be appended, the producer state once they are, and when they came.

    ``aborts`` are the last offsets of those that are marks of aborted transactions.
    """

    batches: list[Batch]
    producers: ProducerStage
    seen_ms: int
    aborts: Collection[int] = ()


def check_as_leader(
    records: Buffer,
    *,
    name: str,
    base_offset: int,
    leader_epoch: int,
    now_ms: int,
    seen_ms: int,
    config: TopicLogConfig,
    producers: ProducerState,
    keyed: bool = False,
    internal: bool = False,
    verified: tuple[int, int] | None = None,
) -> Checked | AppendInfo:
    """The batches as they are to stand from ``base_offset`` on; see Log.append_as_leader.

    ``now_ms`` is what records may be stamped with, ``seen_ms`` when their producers were heard.
    ``keyed``: every record must have a key, which is the one reason to look into batches here.
    ``internal``: batches of transactions may be without sequences. ``verified`` is the producer id
    and epoch of a transaction that the partition is in, as its coordinator has said.
    An AppendInfo when every batch is in the log already, or there is none.
    """
    stage = ProducerStage(producers)
    batches: list[Batch] = []
    duplicates: list[Duplicate] = []
    offset = base_offset
    try:
        for view in _split(records):
            header = verify_producer_batch(view, sequenced=not internal)
            _check_allowed(header, name, config)
            idempotent = header.producer_id >= 0
            found = stage.check(header) if idempotent else None
            if isinstance(found, Duplicate):
                duplicates.append(found)
                continue
            if idempotent:
                stage.check_transaction(header, verified)
            if keyed:
                _check_keyed(header, view, name)
            batch = _placed(header, view, config, now_ms, (offset, leader_epoch))
            if idempotent:
                stage.record(batch.header, offset, seen_ms)
            batches.append(batch)
            offset = batch.header.next_offset
    except CorruptRecordError as error:
        raise CorruptRecordError(f"{name}: {error.message}; nothing was appended") from None
    except InvalidTxnStateError as error:
        raise InvalidTxnStateError(f"{name}: {error.message}; nothing was appended") from None
    if batches and duplicates:
        raise InvalidRecordError(
            f"{name}: {len(duplicates)} batches of the append are in the log already and "
            f"{len(batches)} are not; nothing was appended, send them one by one"
        )
    if not batches:
        return _nothing_new(duplicates)
    return Checked(batches, stage, seen_ms)


def marks_as_leader(
    markers: Sequence[Marker],
    *,
    base_offset: int,
    leader_epoch: int,
    now_ms: int,
    seen_ms: int,
    producers: ProducerState,
) -> Checked:
    """The control batches as they are to stand from ``base_offset`` on; see Log.append_markers."""
    stage = ProducerStage(producers)
    placed = staged_markers(
        stage,
        markers,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        now_ms=now_ms,
        seen_ms=seen_ms,
    )
    aborts = [
        header.last_offset for header, data in placed if marker_type(data) is MarkerType.ABORT
    ]
    return Checked([Batch(header, (data,)) for header, data in placed], stage, seen_ms, aborts)


def _nothing_new(duplicates: list[Duplicate]) -> AppendInfo:
    if not duplicates:
        return AppendInfo(-1, -1, -1, 0)
    return AppendInfo(duplicates[0].base_offset, duplicates[-1].last_offset, -1, 0, duplicate=True)


def _split(records: Buffer) -> Iterator[memoryview]:
    """The batches by what their lengths say, still to be verified; the last may be cut off."""
    view = memoryview(records)
    position = 0
    while position < len(view):
        size = max(HEADER_BYTES, 12 + int.from_bytes(view[position + 8 : position + 12]))
        yield view[position : position + size]
        position += size


def _check_allowed(header: BatchHeader, name: str, config: TopicLogConfig) -> None:
    size = header.size_bytes
    if size > config.max_message_bytes or size > config.segment_bytes:
        raise _too_large(size, name, config)
    if header.is_log_append_time and not config.log_append_time:
        raise InvalidRecordError(
            f"{name}: the batch claims to have its time from the broker, but the topic's "
            "message.timestamp.type is CreateTime; clear attribute bit 3"
        )


def _too_large(size: int, name: str, config: TopicLogConfig) -> RecordTooLargeError:
    limits = {"max.message.bytes": config.max_message_bytes, "segment.bytes": config.segment_bytes}
    broken = {key: limit for key, limit in limits.items() if size > limit}
    step = "send smaller batches"
    if size <= MAX_MESSAGE_BYTES:
        topic, _, _ = name.rpartition("-")
        # A segment below the largest batch would be refused.
        wanted = {"max.message.bytes": size, "segment.bytes": max(size, config.max_message_bytes)}
        options = "".join(f" --config {key}={wanted[key]}" for key in broken)
        step += f", or let the topic take them: `penstock topics alter {topic}{options}`"
    told = " and ".join(f"{key} is {limit}" for key, limit in broken.items())
    return RecordTooLargeError(
        f"{name}: a batch has {size} bytes, but {told}; nothing was appended; next: {step}"
    )


def _check_keyed(header: BatchHeader, view: memoryview, name: str) -> None:
    for span in read_spans(view, header, max_bytes=MAX_RECORDS_BYTES).spans:
        if span.key is None:
            raise InvalidRecordError(
                f"{name}: record {span.offset - header.base_offset} of a batch has no key, but the "
                "topic is compacted (cleanup.policy): of a key the last record stays, and one "
                "without a key could never be replaced; nothing was appended; next: give every "
                "record a key (`penstock produce` has --key-separator and --key-regex), or don't "
                f"compact the topic: `penstock topics alter {name.rpartition('-')[0]} --reset "
                "cleanup.policy`"
            )


def _placed(
    header: BatchHeader,
    view: memoryview,
    config: TopicLogConfig,
    now_ms: int,
    place: tuple[int, int],
) -> Batch:
    offset, leader_epoch = place
    rest: Buffer = view[16:]
    if config.log_append_time:
        stamped = set_log_append_time(view, now_ms)
        header = parse_header(stamped)
        rest = memoryview(stamped)[16:]
    patch = offset_patch(header, offset, leader_epoch)
    header = BatchHeader(offset, header.batch_length, leader_epoch, *header[3:])
    return Batch(header, (patch, rest))


def at_hand(batches: list[Batch]) -> bytes:
    """The batches in one piece where copying them is cheaper than reading them again; else none."""
    if sum([batch.size_bytes for batch in batches]) > _AT_HAND_BYTES:
        return b""
    return b"".join([buffer for batch in batches for buffer in batch.buffers])


def limits_of(config: TopicLogConfig, settings: LogSettings, reserve_bytes: int) -> Limits:
    """What a log keeps to when it appends, and leaves free of what it gets in advance."""
    preallocate = settings.preallocate if config.preallocate is None else config.preallocate
    allocate_bytes = config.segment_bytes if preallocate else 0
    return Limits(config.segment_bytes, config.segment_ms, allocate_bytes, reserve_bytes)


def check_leader_epoch(name: str, leader_epoch: int, history: EpochHistory) -> None:
    """Refuse to write in an epoch older than the log has."""
    if leader_epoch < history.last_epoch:
        raise FencedLeaderEpochError(
            f"{name}: leader epoch {leader_epoch} may write no more, the log has epoch "
            f"{history.last_epoch} by now"
        )


def beginning_of(records: Buffer, *, start_offset: int, end_offset: int) -> int:
    """Where what the leader sent must begin: at the log's end.

    In an empty log the first batch may begin before: records were deleted up to within it, and
    batches are not split.
    """
    if start_offset == end_offset and len(records) >= HEADER_BYTES:
        first = parse_header(records)
        if 0 <= first.base_offset < end_offset <= first.last_offset:
            return first.base_offset
    return end_offset


def check_as_follower(
    records: Buffer,
    *,
    name: str,
    end_offset: int,
    seen_ms: int,
    epochs: EpochHistory,
    producers: ProducerState,
) -> Checked:
    """The batches as the leader sent them; see Log.append_as_follower."""
    stage = ProducerStage(producers)
    batches: list[Batch] = []
    aborts = []
    offset = end_offset
    epoch = max(
        (entry.leader_epoch for entry in epochs.entries if entry.start_offset < end_offset),
        default=0,
    )
    view = memoryview(records)
    position = 0
    try:
        while position < len(view):
            header = next_header(view, position, offset, len(view) - position)
            batch = view[position : position + header.size_bytes]
            verify_batch(batch)
            if header.leader_epoch < epoch:
                raise (CorruptRecordError if position else OlderEpochError)(
                    f"the batch at offset {offset} has leader epoch {header.leader_epoch}, but "
                    f"epoch {epoch} wrote before it"
                )
            is_mark = header.is_control and header.producer_id >= 0
            mark = marker_type(batch) if is_mark else None
            stage.record(header, offset, seen_ms, mark)
            if mark is MarkerType.ABORT:
                aborts.append(header.last_offset)
            batches.append(Batch(header, (batch,)))
            position += header.size_bytes
            offset, epoch = header.next_offset, header.leader_epoch
    except CorruptRecordError as error:
        kind = OlderEpochError if isinstance(error, OlderEpochError) else CorruptRecordError
        raise kind(
            f"{name}: {error.message}, at byte {position} of what the leader sent; nothing was "
            "appended"
        ) from None
    return Checked(batches, stage, seen_ms, aborts)
