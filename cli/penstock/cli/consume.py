"""`penstock consume`: records on standard output, one a line, as they come."""

from __future__ import annotations

import base64
import concurrent.futures
import enum
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from penstock.cli.client_warnings import client_warnings, say
from penstock.cli.errors import with_step
from penstock.cli.interrupts import Interrupt
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.errors import InvalidPartitionsError, PenstockError
from penstock.wire.ids import TopicPartition
from penstock.wire.stalls import StallReason

if TYPE_CHECKING:
    from penstock.client import Consumer, ConsumerRecord
    from penstock.client.config import OffsetReset
    from penstock.client.model import OffsetAndMetadata

_MAX_WAIT_SECONDS: Final = 60.0
_COMMIT_SECONDS: Final = 1.0
_PASSING_SECONDS: Final = 3.0
"""What is in the way for so long at the end is not over in a moment."""
_LOOK_FOR_MARKS_SECONDS: Final = 5.0
"""A mark may come long after the last record, and ends no wait for records."""
_LOOK_AGAIN_SECONDS: Final = 0.1
_LEAST_ANSWER_SECONDS: Final = 5.0
"""However soon the end is to come, brokers that are busy are given so long for an answer."""
_SLOW_COMMIT_SECONDS: Final = 5.0
"""A commit that takes so long is told of: its coordinator is away."""
_BATCH: Final = 500


class Isolation(enum.StrEnum):
    """What of transactions is read."""

    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"


class RecordFormat(enum.StrEnum):
    """How a record is printed."""

    VALUE = "value"
    JSON = "json"


def consume(
    ctx: typer.Context,
    topic: Annotated[str, typer.Argument(help="The topic to read.", metavar="TOPIC")],
    *,
    group: Annotated[
        str | None,
        typer.Option("--group", help="Share the partitions with this group, and commit for it."),
    ] = None,
    from_beginning: Annotated[
        bool,
        typer.Option(
            "--from-beginning",
            help="Start at the log's start; a group does so where it has committed nothing.",
        ),
    ] = False,
    partition: Annotated[
        int | None, typer.Option("--partition", min=0, help="Read this partition alone.")
    ] = None,
    offset: Annotated[
        str | None,
        typer.Option("--offset", help="With --partition: an offset, earliest or latest."),
    ] = None,
    max_records: Annotated[
        int | None, typer.Option("--max-records", min=1, help="End after so many records.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, help="End after so many seconds without a record."),
    ] = None,
    record_format: Annotated[
        RecordFormat | None,
        typer.Option(
            "--format",
            help="value, or json with key, offset, time and headers.",
            show_default="value",
        ),
    ] = None,
    isolation_level: Annotated[
        Isolation,
        typer.Option(
            "--isolation-level",
            help="read_committed leaves out what is in open or aborted transactions.",
        ),
    ] = Isolation.READ_UNCOMMITTED,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Print the records of TOPIC, and wait for more until Ctrl-C.

    Without --from-beginning, --offset or a group's committed position, only what comes from now
    on is shown. A group is told what was printed, no more: Ctrl-C loses and repeats nothing.
    A partition without a leader is named on standard error; an end by --timeout is a failure then.
    """
    settings = resolve(ctx, bootstrap, output)
    start = _start_of(partition, offset, group, from_beginning)
    if record_format is None:
        record_format = RecordFormat.JSON if settings.as_json else RecordFormat.VALUE
    printer = _PRINTERS[record_format]
    interrupt = Interrupt()
    with client_warnings(), interrupt.installed():
        consumer = _connect(
            settings, group, _reset_of(start, from_beginning), timeout, isolation_level
        )
        session = Session(
            consumer,
            topic,
            printer,
            sys.stdout.buffer,
            interrupt,
            commits=group is not None,
            from_beginning=from_beginning,
        )
        try:
            session.begin(partition, start)
            session.run(max_records, timeout)
        finally:
            session.end()
    if interrupt.count:
        raise typer.Exit(interrupt.exit_status)


@dataclass(frozen=True, slots=True)
class Pending:
    """A commit under way, and what is in it."""

    future: concurrent.futures.Future[None]
    offsets: dict[TopicPartition, OffsetAndMetadata]


@dataclass(slots=True)
class Session:
    """One run: reads, prints, and commits what was printed."""

    consumer: Consumer
    topic: str
    printer: Callable[[ConsumerRecord], bytes]
    out: BinaryIO
    interrupt: Interrupt
    commits: bool
    from_beginning: bool = False
    printed: int = 0
    _uncommitted: dict[TopicPartition, OffsetAndMetadata] = field(default_factory=dict)
    _pending: Pending | None = None  # A commit that reading does not wait for.
    _warned: bool = False  # That the group is not told.
    # By partition, where the group stands once all of the above is committed.
    _reached: dict[TopicPartition, int] = field(default_factory=dict)
    _all_printed: bool = True  # All that was handed out.
    _polling: bool = False  # A signal may keep from us what was handed out already.
    _commit_failed: bool = False
    _last_commit: float = field(default_factory=time.monotonic)

    def begin(self, partition: int | None, start: int | str | None) -> None:
        """Subscribe to the topic, or stand at ``start`` of one partition."""
        with self.interrupt.may_break():
            # Asked first, so that a topic that does not exist is said at once.
            partitions = self.consumer.partitions_for(self.topic)
            if partition is None:
                self.consumer.subscribe([self.topic], self)
                return
            if partition not in partitions:
                raise with_step(
                    InvalidPartitionsError(
                        f"topic {self.topic!r} has no partition {partition}; it has "
                        f"{len(partitions)}, from 0 to {len(partitions) - 1}"
                    ),
                    "name one of these with --partition, or leave it out to read all",
                )
            chosen = TopicPartition(self.topic, partition)
            self.consumer.assign([chosen])
            if isinstance(start, int):
                self.consumer.seek(chosen, start)
            elif start == "earliest":
                self.consumer.seek_to_beginning(chosen)
            else:
                self.consumer.seek_to_end(chosen)

    def run(self, max_records: int | None, timeout: float | None) -> None:
        """Print until ``max_records`` are printed, or ``timeout`` seconds bring no record.

        Raises why, when it ends by the time and a partition could not be read: there may be more.
        """
        last_record = time.monotonic()
        while max_records is None or self.printed < max_records:
            wait = self._commit_due_in()
            if timeout is not None:
                left = last_record + timeout - time.monotonic()
                wait = min(wait, left if left > 0 else _LOOK_AGAIN_SECONDS)
            limit = _BATCH if max_records is None else min(_BATCH, max_records - self.printed)
            self._polling = True
            with self.interrupt.may_break():
                records = self.consumer.poll(timeout_ms=wait * 1000, max_records=limit)
            self._polling = False
            if records:
                self._print(records)
                last_record = time.monotonic()
            self._see_where_the_group_stands()
            self._go_past_marks()
            if timeout is not None and not records and time.monotonic() - last_record >= timeout:
                trouble = self.consumer.trouble()
                if trouble is None or self.interrupt.count:
                    return
                if trouble.reason is StallReason.OPEN_TRANSACTION:
                    say(trouble.message)  # All is read that is committed.
                    return
                # A leadership that moves just now is in the way for a moment only.
                if time.monotonic() - last_record >= timeout + _PASSING_SECONDS:
                    raise trouble
            self._commit_in_passing()

    def end(self) -> None:
        """Commit what was printed, leave the group, close.

        Raises where the group cannot be told. A commit that failed for good is not tried again: its
        caller is on the way out with the reason.
        """
        self._all_printed &= not self._polling
        try:
            if not self._commit_failed:
                self._go_past_marks()
                self._commit()
        finally:
            self.consumer.close()

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Commit what was printed before another member goes on from there."""
        self._go_past_marks()
        self._commit()
        for partition in partitions:
            self._reached.pop(partition, None)

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Nothing to do: reading goes on where the group stands."""

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Forget what can no longer be committed: the group gave this member up."""
        for partition in partitions:
            self._uncommitted.pop(partition, None)
            if self._pending is not None:
                self._pending.offsets.pop(partition, None)
            self._reached.pop(partition, None)

    def _print(self, records: Sequence[ConsumerRecord]) -> None:
        positions: dict[TopicPartition, OffsetAndMetadata] = {}
        self._all_printed = False
        for record in records:
            self.out.write(self.printer(record))
            self.printed += 1
            positions[record.topic_partition] = record.position_after
            if self.interrupt.count:
                break
        # What waits in our buffer, or met a closed pipe, was not printed and is not committed.
        self.out.flush()
        self._uncommitted |= positions
        self._reached |= {partition: entry.offset for partition, entry in positions.items()}
        self._all_printed = not self.interrupt.count

    def _see_where_the_group_stands(self) -> None:
        """Ask it, in partitions where reading has begun and nothing was printed.

        Where it has no position it is to have none of ours either, unless all was asked for:
        ``--from-beginning`` would not go there another time.
        """
        if not self.commits:
            return
        positions = self.consumer.positions()
        new = positions.keys() - self._reached.keys()
        if not new:
            return
        if self.from_beginning:
            self._reached |= dict.fromkeys(new, -1)
            return
        with self.interrupt.may_break():
            committed = self.consumer.committed(*new)
        self._reached |= {name: (committed.get(name) or positions[name]).offset for name in new}

    def _go_past_marks(self) -> None:
        """Have committed what comes after the last record and is none: marks of transactions, and
        what was aborted. The group's lag would never be 0 else.
        """
        if not self.commits or not self._all_printed:
            return
        for partition, position in self.consumer.positions().items():
            known = self._reached.get(partition)
            if known is not None and position.offset > known:
                self._uncommitted[partition] = position
                self._reached[partition] = position.offset

    def _commit_due_in(self) -> float:
        """Seconds until the next commit; with nothing to commit, the longest wait."""
        if not self.commits:
            return _MAX_WAIT_SECONDS
        if self._pending is not None:
            return _COMMIT_SECONDS  # Until it is looked at again.
        if not self._uncommitted:
            return _LOOK_FOR_MARKS_SECONDS
        return max(0.0, self._last_commit + _COMMIT_SECONDS - time.monotonic())

    def _commit_in_passing(self) -> None:
        """Commit when it is time to, without waiting: reading goes on where nobody takes it.

        What fails for a reason that passes is committed later with what comes then; its reason is
        said once. Raises what does not pass.
        """
        if self._pending is None and self._uncommitted and self._commit_due_in() <= 0:
            offsets, self._uncommitted = self._uncommitted, {}
            future = self.consumer.commit_async(dict(offsets))
            self._last_commit = time.monotonic()
            self._pending = Pending(future, offsets)
        if self._pending is None:
            return
        if self._pending.future.done():
            error = self._take_outcome()
            if error is not None:
                if not error.retriable:
                    self._commit_failed = True
                    raise error
                self._warn(error.message)
        elif time.monotonic() - self._last_commit >= _SLOW_COMMIT_SECONDS:
            self._warn("its coordinator does not answer")

    def _take_outcome(self) -> PenstockError | None:
        """Wait for the commit that is pending. What it did not commit is uncommitted again."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        try:
            pending.future.result()
        except PenstockError as error:
            self._uncommitted = pending.offsets | self._uncommitted
            return error
        if self._warned:
            self._warned = False
            say("the group is told again what was printed", "note")
        return None

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            say(f"reading goes on, but the group is not told yet what was printed: {reason}")

    def _commit(self) -> None:
        """Commit all that was printed, and wait for it."""
        if self._pending is not None:
            error = self._take_outcome()
            if error is not None:
                self._commit_failed = True
                raise error
        if self.commits and self._uncommitted:
            offsets, self._uncommitted = self._uncommitted, {}
            try:
                self.consumer.commit(offsets)
            except PenstockError:
                self._commit_failed = True
                self._uncommitted = offsets | self._uncommitted
                raise
        self._last_commit = time.monotonic()


def _reset_of(start: int | str | None, from_beginning: bool) -> OffsetReset:
    """Where reading begins without a position; an offset that was asked for has to be there."""
    if isinstance(start, int):
        return "none"
    return "earliest" if from_beginning else "latest"


def _connect(
    settings: Settings,
    group: str | None,
    reset: OffsetReset,
    timeout: float | None,
    isolation: Isolation,
) -> Consumer:
    """The consumer. With a ``timeout`` no answer, as to a commit, is waited for much longer."""
    from penstock.client import Consumer  # noqa: PLC0415 - it imports gRPC.

    seconds = _MAX_WAIT_SECONDS
    if timeout is not None:
        seconds = min(max(timeout, _LEAST_ANSWER_SECONDS), _MAX_WAIT_SECONDS)
    answer_ms = int(seconds * 1000)
    tls = settings.tls.client_settings()
    if group is None:
        return Consumer(
            settings.bootstrap,
            client_id="penstock-cli",
            auto_offset_reset=reset,
            isolation_level=isolation.value,
            default_api_timeout_ms=answer_ms,
            **tls,
        )
    return Consumer(
        settings.bootstrap,
        client_id="penstock-cli",
        auto_offset_reset=reset,
        isolation_level=isolation.value,
        default_api_timeout_ms=answer_ms,
        group_id=group,
        # Committed here, by what was printed.
        enable_auto_commit=False,
        **tls,
    )


def _start_of(
    partition: int | None, offset: str | None, group: str | None, from_beginning: bool
) -> int | str | None:
    """Where a single partition is read from. Raises BadParameter for what cannot be meant."""
    if partition is None:
        if offset is not None:
            raise typer.BadParameter(
                "an offset belongs to one partition; name it with --partition",
                param_hint="--offset",
            )
        return None
    if group is not None:
        raise typer.BadParameter(
            "a group chooses the partitions itself; leave --group or --partition out",
            param_hint="--partition",
        )
    if offset is None:
        return "earliest" if from_beginning else "latest"
    if from_beginning:
        raise typer.BadParameter(
            "choose one of --offset and --from-beginning", param_hint="--offset"
        )
    if offset in ("earliest", "latest"):
        return offset
    if not offset.isdecimal():
        raise typer.BadParameter(
            f"{offset!r} is neither an offset nor earliest nor latest", param_hint="--offset"
        )
    return int(offset)


def _print_value(record: ConsumerRecord) -> bytes:
    value: bytes | None = record.value
    return (b"null" if value is None else value) + b"\n"


def _print_json(record: ConsumerRecord) -> bytes:
    document: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        **_text_field("key", record.key),
        **_text_field("value", record.value),
        "headers": [{"key": key, **_text_field("value", value)} for key, value in record.headers],
    }
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _text_field(name: str, data: bytes | None) -> dict[str, str | None]:
    """The bytes as text, or under ``NAME_base64`` when they are not UTF-8."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


_PRINTERS: Final[dict[RecordFormat, Callable[[ConsumerRecord], bytes]]] = {
    RecordFormat.VALUE: _print_value,
    RecordFormat.JSON: _print_json,
}
