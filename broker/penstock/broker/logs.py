"""Structured logs: one line an event, with what it is about bound to it."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog

from penstock.broker.journal import goes_to_journal, leveled
from penstock.raft_meta import tracing

_in_json: dict[str, object] = {}
"""What stands on each line in JSON beside what configure_logs was given."""


def configure_logs(log_format: str, level: str, **bound: object) -> None:
    """Send every log line of this process to standard error, with ``bound`` on each.

    Fields are named as the labels of metrics are (docs/operating/log-lines.md): in JSON a partition
    is its topic and its number, so that both can be looked for. What libraries log through the
    standard library (grpc, asyncio) looks the same, so that whoever reads JSON can read all of it.

    Where that is systemd's journal each line has its level for it: ``journalctl --priority``.

    Lines cost about 14 microseconds: none may be written per request on a hot path.
    """
    renderer: structlog.typing.Processor
    for_programs: list[structlog.typing.Processor] = [
        _binder(_in_json),
        _partition_in_parts,
        structlog.processors.format_exc_info,
    ]
    is_json = log_format == "json"
    _in_json.clear()
    if is_json:
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    filled: list[structlog.typing.Processor] = [
        _binder(bound),
        _trace,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *(for_programs if is_json else []),
    ]
    shown = [renderer, *([_leveled] if goes_to_journal(sys.stderr) else [])]
    structlog.configure(
        processors=[*filled, *shown],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # Typed for files, of which it uses these two methods.
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Unfailing(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_tells_of_more_than_a_broken_connection)
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[structlog.stdlib.add_logger_name, *filled],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *shown],
            )
        )


def bind_in_json(**fields: object) -> None:
    """Have ``fields`` on each line in JSON from now on, such as what is known only once it runs.

    Lines in JSON are gathered from many nodes and clusters; who reads a console knows whose it is.
    """
    _in_json.update(fields)


def _leveled(_logger: object, method: str, line: object) -> str:
    """The last processor: the rendered line, for the journal."""
    return leveled(str(line), "error" if method == "exception" else method)


def _tells_of_more_than_a_broken_connection(record: logging.LogRecord) -> bool:
    """Whether a library's line is worth its place.

    gRPC logs a traceback where a connection broke just before a call's status was sent. Strangers
    could fill the log with them, and they are nobody's fault. The class is gRPC's own and private,
    which is why it goes by its name.
    """
    raised = record.exc_info[0] if record.exc_info else None
    return raised is None or raised.__name__ != "ExecuteBatchError"


class _Unfailing:
    """A stream whose errors are nobody's: a log on a full disk must not stop what it tells of."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def _binder(bound: dict[str, object]) -> structlog.typing.Processor:
    """Adds ``bound`` on every thread; context variables would stay on the first one."""

    def bind(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        for key, value in bound.items():
            event.setdefault(key, value)
        return event

    return bind


def _partition_in_parts(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """What people read as ``orders-0`` programs read as a topic and a number."""
    topic, dash, number = str(event.get("partition", "")).rpartition("-")
    if dash and number.isdecimal() and "topic" not in event:
        event["topic"], event["partition"] = topic, int(number)
    return event


def _trace(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Adds the trace of the client's call that the line is about, if it has one."""
    for key, value in tracing.log_fields().items():
        event.setdefault(key, value)
    return event
