"""`penstock log`: look into the files that brokers write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.errors import EXIT_FAILED, report, with_step
from penstock.cli.output import format_count, print_json, print_table
from penstock.cli.settings import Output, resolve
from penstock.wire.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.broker.storage.dump import BatchDump, SegmentReport

_SEGMENT_NAME: Final = re.compile(r"\d{20}\.log")

app = typer.Typer(help="Look into the files that brokers write.", no_args_is_help=True)


@app.callback()
def _log() -> None:
    """Look into the files that brokers write."""


@app.command("dump")
def dump(
    ctx: typer.Context,
    segment: Annotated[Path, typer.Argument(help="A segment file: BASE.log.", metavar="SEGMENT")],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every checksum, and read every record.")
    ] = False,
    output: Output = None,
) -> None:
    """Print the record batches of one segment file; with --verify, judge it.

    Reads the file alone and needs no broker. The exit status is 1 when damage is found.
    """
    from penstock.broker.storage.dump import (  # noqa: PLC0415 - only this command needs it.
        dump_segment,
        verify_segment,
    )

    settings = resolve(ctx, None, output)
    try:
        batches = list(dump_segment(segment, verify=verify))
        verdict = verify_segment(segment) if verify else None
    except OSError as error:
        raise with_step(
            ConfigurationError(f"cannot read {segment}: {error.strerror}"), _segment_step(segment)
        ) from None
    if batches and not batches[0].size_bytes and not _SEGMENT_NAME.fullmatch(segment.name):
        # Neither its name nor its first bytes are a segment's: nothing was damaged.
        raise with_step(
            ConfigurationError(f"{segment} is not a segment file"), _segment_step(segment)
        )
    if settings.as_json:
        for batch in batches:
            print_json(batch.to_json())
        if verdict is not None:
            print_json(verdict.to_json())
    else:
        _print_batches(batches)
        if verdict is not None:
            _print_verdict(verdict)
    damaged = [batch for batch in batches if batch.error is not None]
    if damaged:
        report(
            f"error: {segment} is damaged at byte {damaged[0].position}: {damaged[0].error}\n"
            "next: see docs/operating/data-directory.md; another replica has the whole log"
        )
        raise typer.Exit(EXIT_FAILED)


def _segment_step(named: Path) -> str:
    try:
        found = min(path for path in named.iterdir() if _SEGMENT_NAME.fullmatch(path.name))
    except (OSError, ValueError):
        return "name a segment file, such as DIR/node-1/logs/TOPIC-0/00000000000000000000.log"
    return f"name a segment file in it, such as {found}"


def _print_batches(batches: Iterable[BatchDump]) -> None:
    print_table(
        (
            *("Position", "Bytes", "BaseOffset", "LastOffset", "Records", "LeaderEpoch"),
            *("Compression", "MaxTimestampMs", "ProducerId", "Epoch", "Sequence", "Transaction"),
            *("Crc", "Error"),
        ),
        [
            (
                batch.position,
                batch.size_bytes,
                batch.base_offset,
                batch.last_offset,
                batch.record_count,
                batch.leader_epoch,
                batch.compression,
                batch.max_timestamp_ms,
                batch.producer_id,
                batch.producer_epoch,
                batch.base_sequence,
                _transaction_of(batch),
                f"{batch.crc:08x}",
                batch.error,
            )
            for batch in batches
        ],
        right=("Position", "Bytes", "BaseOffset", "LastOffset", "Records", "LeaderEpoch"),
    )


def _transaction_of(batch: BatchDump) -> str | None:
    """What the batch has to do with its producer's transaction: it is in it, or ends it."""
    if batch.marker is not None:
        return f"{batch.marker} by coordinator epoch {batch.coordinator_epoch}"
    return "in it" if batch.is_transactional and not batch.is_control else None


def _print_verdict(verdict: SegmentReport) -> None:
    state = "sound" if verdict.ok else f"DAMAGED after {format_count(verdict.sound_bytes)} bytes"
    offsets = (
        f", offsets {verdict.first_offset} to {verdict.next_offset - 1}" if verdict.batches else ""
    )
    print(
        f"{verdict.path}: {state}: {format_count(verdict.batches)} batches, "
        f"{format_count(verdict.records)} records{offsets}, "
        f"{format_count(verdict.size_bytes)} bytes"
    )
