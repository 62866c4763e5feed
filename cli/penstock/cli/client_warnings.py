"""What the client warns of while a command runs, as the command says it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.errors import OWN_STEP, as_options, report


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        what, _, step = as_options(record.getMessage()).partition(OWN_STEP)
        level = "error" if record.levelno >= logging.ERROR else "warning"
        report(f"{level}: {what}" + (f"\nnext: {step}" if step else ""))


@contextmanager
def client_warnings() -> Iterator[None]:
    """Inside, warnings of the client go to standard error, with what to do on a line of its own."""
    client = logging.getLogger("penstock.client")
    handler = _Handler(logging.WARNING)
    propagated = client.propagate
    client.addHandler(handler)
    client.propagate = False
    try:
        yield
    finally:
        client.propagate = propagated
        client.removeHandler(handler)
