"""What the client warns of while a command runs, as the command says it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.errors import OWN_STEP, as_options, report


def say(message: str, level: str = "warning") -> None:
    """Say what the client has to say, on standard error, as the command's own."""
    what, _, step = as_options(message).partition(OWN_STEP)
    report(f"{level}: {what}" + (f"\nnext: {step}" if step else ""))


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), "error" if record.levelno >= logging.ERROR else "warning")


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
