"""`penstock produce`: lines of a file or of standard input become records."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from penstock.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, explain, report
from penstock.cli.output import format_bytes, format_count
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.errors import (
    ConfigurationError,
    DeliveryFailedError,
    PenstockError,
    RecordTooLargeError,
    SerializationError,
)

if TYPE_CHECKING:
    from penstock.client import Producer

_COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
_ACKS: Final = ("all", "0", "1")
_DEFAULT_TIMEOUT_SECONDS: Final = 30.0
_BAR_STEP_BYTES: Final = 65_536

Split = Callable[[bytes], tuple[bytes | None, bytes]]
"""Takes a line to key and value; raises ValueError for a line that has no key."""


def produce(
    ctx: typer.Context,
    topic: Annotated[str, typer.Argument(help="The topic to write to.")],
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Read lines from here instead of standard input."),
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
        str, typer.Option("--acks", help="Who must hold a record: all (in-sync replicas), 1 or 0.")
    ] = "all",
    compression: Annotated[
        str, typer.Option("--compression", help=f"{', '.join(_COMPRESSIONS)}.")
    ] = "none",
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds until a record counts as failed.")
    ] = _DEFAULT_TIMEOUT_SECONDS,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Write each line to TOPIC as one record.

    A summary goes to standard error. The exit status is 1 when a record could not be delivered.
    """
    settings = resolve(ctx, bootstrap, output)
    _require_choice(acks, _ACKS, "--acks")
    _require_choice(compression, _COMPRESSIONS, "--compression")
    split = make_split(key_regex, key_separator)
    tally = Tally()
    interrupted = False
    with _open(file) as lines, _progress(file, lines) as advance:
        producer = _connect(settings, acks, compression, timeout)
        try:
            send_lines(producer, topic, lines, split=split, tally=tally, advance=advance)
        except KeyboardInterrupt:
            interrupted = True
            report("stopped; waiting for what was sent")
        except PenstockError as error:
            tally.abort(error)
        finally:
            _finish(producer, tally)
    _report(tally, settings)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if tally.failed or tally.first_error:
        raise typer.Exit(EXIT_FAILED)


@dataclass(slots=True)
class Tally:
    """What became of the lines. ``settle`` may be called by the client's thread."""

    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    sent: int = 0
    acknowledged: int = 0
    failed: int = 0
    acknowledged_bytes: int = 0
    first_error: PenstockError | None = None
    first_failure: str = ""

    def settle(self, line_number: int, size: int, future: Future[Any]) -> None:
        """Count one record that was acknowledged or failed."""
        error = future.exception() if not future.cancelled() else None
        if error is None and not future.cancelled():
            self.acknowledged += 1
            self.acknowledged_bytes += size
        else:
            self.refuse(line_number, error or RuntimeError("it was never sent"))

    def refuse(self, line_number: int, error: BaseException) -> None:
        """Count one line that could not become an acknowledged record."""
        self.failed += 1
        if not self.first_failure:
            self.first_failure = f"line {line_number}"
            self.first_error = _typed(error)

    def abort(self, error: PenstockError) -> None:
        """Remember what ended the run before its last line."""
        if self.first_error is None:
            self.first_error = error

    @property
    def seconds(self) -> float:
        """From the first line to the last acknowledgement."""
        return max((self.ended or time.monotonic()) - self.started, 1e-6)


def _typed(error: BaseException) -> PenstockError:
    return error if isinstance(error, PenstockError) else DeliveryFailedError(str(error))


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
) -> None:
    """Send every line; ``tally`` hears of each verdict. Blocks while the producer is full.

    A line without a key where one is wanted, and a record that is too large, count as failed
    and do not stop the rest. Any other refusal by the producer ends the run.
    """
    for line_number, raw in enumerate(lines, start=1):
        line = raw.removesuffix(b"\n")
        try:
            key, value = split(line)
            future = producer.send(topic, value=value, key=key)
        except ValueError as error:
            tally.refuse(line_number, ConfigurationError(f"line {line_number} has {error}"))
        except (RecordTooLargeError, SerializationError) as error:
            tally.refuse(line_number, error)
        else:
            tally.sent += 1
            future.add_done_callback(partial(tally.settle, line_number, len(value)))
        advance(len(raw))


def _connect(settings: Settings, acks: str, compression: Any, timeout: float) -> Producer:
    from penstock.client import Producer  # noqa: PLC0415 - it imports gRPC.

    return Producer(
        settings.bootstrap,
        client_id="penstock-cli",
        acks="all" if acks == "all" else 0 if acks == "0" else 1,
        compression=compression,
        # Lines come fast from a file: larger batches than the library's default cost less.
        batch_size=131_072,
        delivery_timeout_ms=int(timeout * 1000),
    )


def _finish(producer: Producer, tally: Tally) -> None:
    """Wait for every verdict; the failures among them are in the tally already."""
    try:
        producer.close()
    except PenstockError as error:
        tally.abort(error)
    tally.ended = time.monotonic()


def _report(tally: Tally, settings: Settings) -> None:
    if tally.first_error is not None and not tally.sent and not tally.failed:
        # It never began: the error says all there is.
        report(explain(tally.first_error))
        return
    if settings.as_json:
        import json  # noqa: PLC0415 - only here.

        report(json.dumps(_summary(tally)))
    else:
        rate = tally.acknowledged / tally.seconds
        report(
            f"{format_count(tally.acknowledged)} "
            f"{'record' if tally.acknowledged == 1 else 'records'}, "
            f"{format_bytes(tally.acknowledged_bytes)} in {tally.seconds:.2f} s "
            f"({rate:,.0f} records/s, {format_bytes(tally.acknowledged_bytes / tally.seconds)}/s)"
            + (f"; {format_count(tally.failed)} failed" if tally.failed else "")
        )
    if tally.first_error is not None:
        where = f" (first at {tally.first_failure})" if tally.first_failure else ""
        report(explain(tally.first_error).replace("error: ", f"error{where}: ", 1))


def _summary(tally: Tally) -> dict[str, Any]:
    return {
        "records": tally.acknowledged,
        "bytes": tally.acknowledged_bytes,
        "failed": tally.failed,
        "seconds": round(tally.seconds, 6),
        "records_per_second": round(tally.acknowledged / tally.seconds, 1),
        "bytes_per_second": round(tally.acknowledged_bytes / tally.seconds, 1),
    }


def _require_choice(text: str, allowed: tuple[str, ...], option: str) -> None:
    if text not in allowed:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(allowed)}", param_hint=option)


@contextmanager
def _open(file: Path | None) -> Iterator[BinaryIO]:
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
        return
    try:
        handle = file.open("rb")
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
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
