"""`penstock replay`: the records of one topic into another, of this cluster or of another one."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.client_warnings import client_warnings
from penstock.cli.connections import admin_client
from penstock.cli.errors import report, with_step
from penstock.cli.interrupts import Interrupt
from penstock.cli.output import format_bytes, format_count, print_json
from penstock.cli.pace import Progress, Schedule
from penstock.cli.places import TIME_HELP, parse_time_ms
from penstock.cli.produce import (
    DEFAULT_REQUEST_SIZE,
    MAX_REQUEST_SIZE,
    MIN_REQUEST_SIZE,
    Compression,
)
from penstock.cli.replay_run import ON_THEIR_WAY_BYTES, Replay, Span
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT32, MAX_INT64
from penstock.wire.errors import (
    InvalidPartitionsError,
    InvalidRequestError,
    PenstockError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import counted

if TYPE_CHECKING:
    from penstock.client import AdminClient, Consumer, Producer
    from penstock.client.aio_admin import OffsetSpec

_CLIENT_ID: Final = "penstock-replay"
_BATCH_BYTES: Final = 131_072


class PartitionBy(enum.StrEnum):
    """Which partition of the destination a record goes to."""

    SAME = "same"
    KEY = "key"


Offsets = Mapping[int | None, int]
"""By partition; None is for all that are not named."""


def replay(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="The topic to read.", metavar="SOURCE")],
    dest: Annotated[str, typer.Argument(help="The topic to write to.", metavar="DEST")],
    *,
    to_bootstrap: Annotated[
        str | None,
        typer.Option(
            "--to-bootstrap",
            metavar="HOST:PORT,...",
            help="Brokers of the cluster that DEST is in.",
            show_default="the cluster that SOURCE is in",
        ),
    ] = None,
    partition_by: Annotated[
        PartitionBy,
        typer.Option(
            "--partition-by",
            help="same: the partition of the same number, which keeps all order; key: as a "
            "producer chooses, for topics with another number of partitions.",
        ),
    ] = PartitionBy.SAME,
    begin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PLACE",
            help=f"Begin at earliest, latest, or {TIME_HELP}: the first record of that time or "
            "later.",
        ),
    ] = "earliest",
    end: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="End before this place, named alike; latest is the end at the start of the run.",
        ),
    ] = "latest",
    from_offset: Annotated[
        list[str] | None,
        typer.Option(
            "--from-offset",
            metavar="[PARTITION=]OFFSET",
            help="Begin at this offset, in one partition or in all; may be repeated.",
            show_default=False,
        ),
    ] = None,
    to_offset: Annotated[
        list[str] | None,
        typer.Option(
            "--to-offset",
            metavar="[PARTITION=]OFFSET",
            help="End before this offset, in one partition or in all; may be repeated.",
            show_default=False,
        ),
    ] = None,
    max_records: Annotated[
        int | None,
        typer.Option("--max-records", min=1, help="End after so many records.", show_default=False),
    ] = None,
    rate: Annotated[
        float,
        typer.Option("--rate", min=0, help="Records a second; 0 for as many as there can be."),
    ] = 0,
    compression: Annotated[
        Compression, typer.Option("--compression", help="How batches of records are compressed.")
    ] = Compression.NONE,
    max_request_size: Annotated[
        int,
        typer.Option(
            "--max-request-size",
            metavar="BYTES",
            min=MIN_REQUEST_SIZE,
            max=MAX_REQUEST_SIZE,
            help="The largest record, as of `penstock produce`.",
        ),
    ] = DEFAULT_REQUEST_SIZE,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Copy the records of SOURCE to DEST: key, value, headers and time.

    What is there when it begins is copied, between --from and --to, partition by partition in
    order; DEST has to be there. Ctrl-C waits for what is on its way, and says how to go on from
    there. So does a failure.
    """
    settings = resolve(ctx, bootstrap, output)
    target = settings if to_bootstrap is None else replace(settings, bootstrap=to_bootstrap)
    if source == dest and target.bootstrap == settings.bootstrap:
        raise typer.BadParameter("it is SOURCE; choose another topic", param_hint="DEST")
    begins, ends = _place(begin, "--from"), _place(end, "--to")
    from_offsets = parse_offsets(from_offset or [], "--from-offset")
    to_offsets = parse_offsets(to_offset or [], "--to-offset")
    with admin_client(settings) as admin:
        count = _partition_count(admin, source)
        _check_target(admin, target, source, dest, count, partition_by)
        named = sorted(key for key in {*from_offsets, *to_offsets} if key is not None)
        if named and named[-1] >= count:
            raise UnknownTopicOrPartitionError(
                f"{source} has no partition {named[-1]}; it has {count}, from 0 to {count - 1}"
            )
        partitions = [TopicPartition(source, number) for number in range(count)]
        spans = _spans(admin, partitions, (begins, from_offsets), (ends, to_offsets))
    interrupt = Interrupt()
    with (
        client_warnings(),
        interrupt.installed(),
        _consumer(settings) as consumer,
        _producer(target, compression, max_request_size) as producer,
    ):
        total = sum(span.length for span in spans.values())
        run = Replay(
            consumer=consumer,
            producer=producer,
            dest=dest,
            spans=spans,
            same_partition=partition_by is PartitionBy.SAME,
            limit=max_records,
            schedule=Schedule(rate, interrupt),
            interrupt=interrupt,
            progress=Progress("replayed", min(total, max_records or total)),
        )
        failed = True
        try:
            run.run()
            failed = False
        finally:
            _tell(settings, run, source, dest)
            if failed or not run.is_complete:
                report(how_to_go_on(ctx, run, settings.bootstrap))
    if interrupt.count:
        raise typer.Exit(interrupt.exit_status)


def parse_offsets(texts: list[str], option: str) -> dict[int | None, int]:
    """``OFFSET`` and ``PARTITION=OFFSET`` by partition, None for all that are not named."""
    found: dict[int | None, int] = {}
    for text in texts:
        number, equals, offset = text.rpartition("=")
        parts = (number, offset) if equals else (offset,)
        limits = (MAX_INT32, MAX_INT64)[-len(parts) :]
        if not all(
            part.isascii() and part.isdecimal() and int(part) <= most
            for part, most in zip(parts, limits, strict=True)
        ):
            raise typer.BadParameter(
                f"{text!r} is not OFFSET, nor PARTITION=OFFSET such as 0=42", param_hint=option
            )
        key = int(number) if equals else None
        if key in found:
            raise typer.BadParameter(
                f"{text!r}: the partition is there twice; which one is meant?", param_hint=option
            )
        found[key] = int(offset)
    return found


def how_to_go_on(ctx: typer.Context, run: Replay, bootstrap: str) -> str:
    """The command that replays the rest, after what is already there."""
    words = ["penstock", "replay", "--bootstrap", bootstrap]
    told = {"bootstrap", "begin", "from_offset", "end", "to_offset", "max_records"}
    for parameter in ctx.command.params:
        value = ctx.params.get(str(parameter.name))
        if parameter.name in told or value is None or value == parameter.default:
            continue
        shown = str(getattr(value, "value", value))
        words += [shown] if not parameter.opts[0].startswith("-") else [parameter.opts[0], shown]
    for where, span in sorted(run.spans.items()):
        words += ["--from-offset", f"{where.partition}={run.next_offsets[where]}"]
        words += ["--to-offset", f"{where.partition}={span.end}"]
    if run.limit is not None:
        # So many as are left of it, or as many again.
        words += ["--max-records", str(run.limit - run.records or run.limit)]
    again = (
        f"; {counted(run.unacknowledged, 'record')} of these may be there already"
        if run.unacknowledged
        else ""
    )
    return f"to go on{again}: {shlex.join(words)}"


def _place(text: str, option: str) -> OffsetSpec:
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    return parse_time_ms(text, option)


def _spans(
    admin: AdminClient,
    partitions: list[TopicPartition],
    begin: tuple[OffsetSpec, Offsets],
    end: tuple[OffsetSpec, Offsets],
) -> dict[TopicPartition, Span]:
    """What is to be replayed of each partition, within what its log has now."""
    first = admin.list_offsets(dict.fromkeys(partitions, "earliest"))
    last = admin.list_offsets(dict.fromkeys(partitions, "latest"))

    def places(spec: OffsetSpec, offsets: Offsets) -> dict[TopicPartition, int]:
        found = admin.list_offsets(dict.fromkeys(partitions, spec))
        chosen = {}
        for where in partitions:
            # Where no record is that late, it is the end.
            by_place = found[where].offset if found[where].offset >= 0 else last[where].offset
            wanted = offsets.get(where.partition, offsets.get(None, by_place))
            chosen[where] = min(max(wanted, first[where].offset), last[where].offset)
        return chosen

    begins, ends = places(*begin), places(*end)
    return {where: Span(begins[where], max(begins[where], ends[where])) for where in partitions}


def _partition_count(admin: AdminClient, topic: str) -> int:
    [found] = admin.describe_topics([topic])
    return found.partition_count


def _check_target(  # noqa: PLR0917 - what is compared is six things.
    admin: AdminClient,
    target: Settings,
    source: str,
    dest: str,
    source_count: int,
    partition_by: PartitionBy,
) -> None:
    """Raise what is in the way of writing to the destination."""
    with admin_client(target) as other:
        count = _partition_count(other, dest)
        is_same = other.describe_cluster().cluster_id == admin.describe_cluster().cluster_id
    if is_same and source == dest:
        raise with_step(
            InvalidRequestError(f"{source} is in this very cluster: it would be copied to itself"),
            "name another topic, or another cluster with --to-bootstrap",
        )
    if partition_by is PartitionBy.SAME and count < source_count:
        raise with_step(
            InvalidPartitionsError(
                f"{dest} has {counted(count, 'partition')}, and {source} has {source_count}"
            ),
            "choose --partition-by key, or give it more: "
            "`penstock topics alter NAME --partitions N`",
        )


@contextmanager
def _consumer(settings: Settings) -> Iterator[Consumer]:
    from penstock.client import Consumer  # noqa: PLC0415 - it imports gRPC.

    tls = settings.tls.client_settings()
    with Consumer(
        settings.bootstrap, client_id=_CLIENT_ID, auto_offset_reset="none", **tls
    ) as consumer:
        yield consumer


@contextmanager
def _producer(
    settings: Settings, compression: Compression, max_request_size: int
) -> Iterator[Producer]:
    from penstock.client import Producer  # noqa: PLC0415 - it imports gRPC.

    tls = settings.tls.client_settings()
    producer = Producer(
        settings.bootstrap,
        client_id=_CLIENT_ID,
        compression=compression.value,
        max_request_size=max_request_size,
        # Never full: Replay waits before, and where it can be interrupted.
        buffer_memory=2 * ON_THEIR_WAY_BYTES + max_request_size,
        batch_size=_BATCH_BYTES,
        **tls,
    )
    try:
        yield producer
    finally:
        with suppress(PenstockError):  # What failed was found at its future.
            producer.close(timeout_ms=0)


def _tell(settings: Settings, run: Replay, source: str, dest: str) -> None:
    seconds = max(run.seconds, 1e-6)
    if settings.as_json:
        print_json(_summary(run, source, dest))
        return
    print(
        f"replayed {format_count(run.records)} {'record' if run.records == 1 else 'records'}, "
        f"{format_bytes(run.value_bytes)} in {run.seconds:.2f} s "
        f"({run.records / seconds:,.0f} records/s) from {source} to {dest}"
    )


def _summary(run: Replay, source: str, dest: str) -> dict[str, Any]:
    return {
        "source": source,
        "dest": dest,
        "records": run.records,
        "bytes": run.value_bytes,
        "unacknowledged": run.unacknowledged,
        "seconds": round(run.seconds, 6),
        "complete": run.is_complete,
        "partitions": [
            {
                "partition": where.partition,
                "start_offset": span.start,
                "next_offset": run.next_offsets[where],
                "end_offset": span.end,
            }
            for where, span in sorted(run.spans.items())
        ],
    }
