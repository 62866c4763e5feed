"""Standard streams that say what became of them: full, closed, or never there."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Final

_STDOUT: Final = 1
_NAMES: Final = ("stdin", "stdout", "stderr")


class OutputError(Exception):
    """Standard output took no more.

    It is no OSError on purpose: libraries that print for us take a closed pipe for the end of the
    program and choose an exit status of their own.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"cannot write to standard output: {cause.strerror}")
        self.is_closed_pipe = cause.errno == errno.EPIPE


class _Output(io.FileIO):
    """Standard output's descriptor; what goes wrong there can be told from all other trouble."""

    def write(self, data: object, /) -> int:
        """Write some of ``data``. Raises OutputError."""
        try:
            return super().write(data)  # type: ignore[arg-type]  # A buffer; our caller is C code.
        except OSError as error:
            raise OutputError(error) from error


def guard_streams() -> None:
    """From now on a failing write to standard output raises OutputError.

    A standard stream that the process was started without reads as empty, or forgets. What the
    output's encoding lacks is printed as an escape.
    """
    for descriptor, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            # Whatever is opened next would take its number, and be written to as output.
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(_STDOUT, "w", closefd=False)),
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        line_buffering=sys.stdout.isatty(),
    )


def silence_stdout() -> None:
    """Point standard output nowhere, so that what it still holds raises nothing at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
