"""`penstock produce`: lines of a file or of standard input become records."""

from __future__ import annotations

import enum
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, Literal

import typer

from penstock.cli.client_warnings import client_warnings
from penstock.cli.errors import EXIT_FAILED, report, with_step
from penstock.cli.interrupts import Interrupt
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.cli.tally import Tally, format_records, report_tally
from penstock.wire.errors import (
    ConfigurationError,
    PenstockError,
    RecordTooLargeError,
    RequestTimedOutError,
    SerializationError,
)

if TYPE_CHECKING:
    from penstock.client import Producer

_DEFAULT_TIMEOUT_SECONDS: Final = 30.0
# Less than what a container is commonly given to stop in.
_STOP_SECONDS: Final = 5.0
_BAR_STEP_BYTES: Final = 65_536
_ON_THEIR_WAY_BYTES: Final = 32 * 1024 * 1024

# Those of the client's max_request_size; importing the client would take too long for --help.
MIN_REQUEST_SIZE: Final = 128
DEFAULT_REQUEST_SIZE: Final = 1_048_576
MAX_REQUEST_SIZE: Final = 32 * 1024 * 1024

_LARGER_STEP: Final = (
    "send smaller records, or pass --max-request-size BYTES; if the topic takes no such record "
    "either, the broker says which of its configs to raise"
)


class Acks(enum.StrEnum):
    """Who must hold a record before it is acknowledged."""

    ALL = "all"
    LEADER = "1"
    NOBODY = "0"


class Compression(enum.StrEnum):
    """The compression of record batches."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


ACKS: Final[Mapping[Acks, Literal["all", 0, 1]]] = {
    Acks.ALL: "all",
    Acks.LEADER: 1,
    Acks.NOBODY: 0,
}

Split = Callable[[bytes], tuple[bytes | None, bytes]]
"""Takes a line to key and value; raises ValueError for a line that has no key."""


def produce(
    ctx: typer.Context,
    topic: Annotated[str, typer.Argument(help="The topic to write to.", metavar="TOPIC")],
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="The lines, each a record.", show_default="standard input"),
    ] = None,
    key_regex: Annotated[
        str | None,
        typer.Option(
            "--key-regex",
            help="The key is the first group of this expression's first match in the line (the "
            "whole match without a group); the value is the whole line.",
        ),
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(
            "--key-separator",
            help="The key stands before the first one of these, the value after it.",
        ),
    ] = None,
    acks: Annotated[
        Acks,
        typer.Option(
            "--acks",
            help="Who must hold a record: all in-sync replicas, 1 (the leader), or 0 (nobody).",
        ),
    ] = Acks.ALL,
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
            help="The largest record and request (the client's max_request_size): raise it where "
            f"a topic's max.message.bytes is larger, up to {MAX_REQUEST_SIZE}.",
        ),
    ] = DEFAULT_REQUEST_SIZE,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds until a record counts as failed.")
    ] = _DEFAULT_TIMEOUT_SECONDS,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Write each line to TOPIC as one record.

    A summary goes to standard error. The exit status is 1 when a record could not be delivered.
    Ctrl-C or SIGTERM flush what was sent, for a few seconds; a second one gives it up.
    """
    settings = resolve(ctx, bootstrap, output)
    split = make_split(key_regex, key_separator)
    tally = Tally(acknowledging=acks is not Acks.NOBODY)
    interrupt = Interrupt()
    with client_warnings(), interrupt.installed(), _open(file) as lines:
        producer = _connect(settings, acks, compression, timeout, max_request_size)
        try:
            with _progress(file, lines) as advance:
                _send_and_flush(
                    producer,
                    topic,
                    lines,
                    split=split,
                    tally=tally,
                    advance=advance,
                    interrupt=interrupt,
                )
            if interrupt.count:
                _flush_bounded(producer, tally)
        finally:
            _close(producer, tally)
    report_tally(tally, as_json=settings.as_json, stopped=bool(interrupt.count))
    if interrupt.count:
        raise typer.Exit(interrupt.exit_status)
    if tally.failed or tally.first_error:
        raise typer.Exit(EXIT_FAILED)


def make_split(key_regex: str | None, key_separator: str | None) -> Split:
    """How lines are taken apart. Raises BadParameter for options that cannot be meant."""
    if key_regex is not None and key_separator is not None:
        raise typer.BadParameter(
            "choose one of --key-regex and --key-separator", param_hint="--key-regex"
        )
    if key_regex is not None:
        return _regex_split(key_regex)
    if key_separator is not None:
        return _separator_split(key_separator)
    return lambda line: (None, line)


def _regex_split(expression: str) -> Split:
    try:
        pattern = re.compile(expression.encode())
    except re.error as error:
        raise typer.BadParameter(
            f"{expression!r} is not a regular expression: {error}", param_hint="--key-regex"
        ) from None
    group = 1 if pattern.groups else 0

    def split(line: bytes) -> tuple[bytes | None, bytes]:
        match = pattern.search(line)
        if match is None or match.group(group) is None:
            raise ValueError(f"no match of --key-regex {expression!r}")
        return match.group(group), line

    return split


def _separator_split(separator: str) -> Split:
    if not separator:
        raise typer.BadParameter("it is empty", param_hint="--key-separator")
    mark = separator.encode()

    def split(line: bytes) -> tuple[bytes | None, bytes]:
        key, found, value = line.partition(mark)
        if not found:
            raise ValueError(f"no --key-separator {separator!r}")
        return key, value

    return split


def send_lines(
    producer: Producer,
    topic: str,
    lines: Iterable[bytes],
    *,
    split: Split,
    tally: Tally,
    advance: Callable[[int], None],
    interrupt: Interrupt,
) -> None:
    """Send every line; ``tally`` hears of each verdict. Blocks while too much is on its way.

    A line without a key where one is wanted, and a record that is too large, count as failed
    and do not stop the rest. Any other refusal by the producer ends the run. A stop signal breaks
    the reading and the blocking; a record is sent and counted, or neither.
    """
    for line_number, raw in enumerate(lines, start=1):
        tally.wait_below(_ON_THEIR_WAY_BYTES)
        interrupt.hold()
        line = raw.removesuffix(b"\n")
        try:
            key, value = split(line)
            future = producer.send(topic, value=value, key=key)
        except ValueError as error:
            tally.refuse(line_number, ConfigurationError(f"line {line_number} has {error}"))
        except RecordTooLargeError as error:
            tally.refuse(line_number, with_step(error, _LARGER_STEP))
        except SerializationError as error:
            tally.refuse(line_number, error)
        else:
            size = len(key or b"") + len(value)
            tally.send(size)
            future.add_done_callback(partial(tally.settle, line_number, size, len(value)))
        interrupt.release()
        advance(len(raw))


def _connect(
    settings: Settings,
    acks: Acks,
    compression: Compression,
    timeout: float,
    max_request_size: int,
) -> Producer:
    from penstock.client import Producer  # noqa: PLC0415 - it imports gRPC.

    return Producer(
        settings.bootstrap,
        client_id="penstock-cli",
        acks=ACKS[acks],
        compression=compression.value,
        max_request_size=max_request_size,
        # Never full: send_lines waits before, and where it can be interrupted.
        buffer_memory=2 * _ON_THEIR_WAY_BYTES + max_request_size,
        # Lines come fast from a file: larger batches than the library's default cost less.
        batch_size=131_072,
        delivery_timeout_ms=int(timeout * 1000),
        **settings.tls.client_settings(),
    )


def _send_and_flush(
    producer: Producer,
    topic: str,
    lines: Iterable[bytes],
    *,
    split: Split,
    tally: Tally,
    advance: Callable[[int], None],
    interrupt: Interrupt,
) -> None:
    """Send every line and wait for every verdict, or until the first stop signal."""
    try:
        with interrupt.may_break():
            try:
                # What waits for the cluster waits here, where nothing is half done.
                producer.partitions_for(topic)
                tally.started = time.monotonic()
                send_lines(
                    producer,
                    topic,
                    lines,
                    split=split,
                    tally=tally,
                    advance=advance,
                    interrupt=interrupt,
                )
            except PenstockError as error:
                tally.abort(error)
            producer.flush()
    except PenstockError as error:
        tally.abort(error)
    except KeyboardInterrupt:
        if interrupt.count != 1:
            raise


def _flush_bounded(producer: Producer, tally: Tally) -> None:
    if not tally.on_their_way:
        return
    report(f"stopping: flushing {format_records(tally.on_their_way)}, Ctrl-C again to give up")
    try:
        producer.flush(timeout_ms=_STOP_SECONDS * 1000)
    except RequestTimedOutError:
        report(f"gave up after {_STOP_SECONDS:.0f} s")
    except PenstockError as error:
        tally.abort(error)


def _close(producer: Producer, tally: Tally) -> None:
    """Give up what is left, and end."""
    tally.ended = time.monotonic()
    with suppress(PenstockError):  # What failed is in the tally.
        producer.close(timeout_ms=0)


@contextmanager
def _open(file: Path | None) -> Iterator[BinaryIO]:
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
        return
    try:
        handle = file.open("rb")
    except OSError as error:
        raise with_step(
            ConfigurationError(f"cannot read {file}: {error.strerror}"),
            "name a file that can be read, or leave --file out to read standard input",
        ) from None
    with handle:
        yield handle


@contextmanager
def _progress(file: Path | None, lines: BinaryIO) -> Iterator[Callable[[int], None]]:
    """A bar on standard error when it is a terminal and nobody types the lines there."""
    if not sys.stderr.isatty() or lines.isatty():
        yield lambda _size: None
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it.
    from rich.progress import (  # noqa: PLC0415 - only a terminal needs it.
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    total = file.stat().st_size if file is not None and file.is_file() else None
    columns = (
        TextColumn("sending"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("sending", total=total)
        unshown = 0

        def advance(size: int) -> None:
            # Telling the bar of each line would cost more than sending it.
            nonlocal unshown
            unshown += size
            if unshown >= _BAR_STEP_BYTES:
                progress.advance(task, unshown)
                unshown = 0

        yield advance
        progress.advance(task, unshown)
