"""What to do where the operating system refuses a file or a directory."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path
from typing import Final

_NOT_PERMITTED: Final = frozenset({errno.EACCES, errno.EPERM})


def said(error: OSError, path: Path) -> str:
    """What ``error`` says, and behind "; " what to do where that can be told from it.

    ``path`` is what has to be changed: the file that was asked for, or the directory that is
    somebody's as a whole.
    """
    reason = error.strerror or str(error)
    step = what_to_do(error, path)
    return f"{reason}; {step}" if step else reason


def what_to_do(error: OSError, path: Path) -> str:
    """The step alone; nothing where the error is about something else than rights."""
    if error.errno in _NOT_PERMITTED:
        return _let(_user(), path)
    if error.errno == errno.EROFS:
        return (
            f"see how it is mounted (`findmnt --target {path}`), and that ReadWritePaths= of the "
            "service's unit names it, where systemd runs this"
        )
    return ""


def _let(user: str, path: Path) -> str:
    there = (up for up in reversed(path.absolute().parents) if os.path.lexists(up))
    closed = next((up for up in there if not os.access(up, os.X_OK)), None)
    if closed is not None:
        return (
            f"let the user {user} pass through {closed}, run this as the user who may, or keep it "
            "in another directory"
        )
    if not os.path.lexists(path):
        above = next(up for up in path.absolute().parents if os.path.lexists(up))
        return f"let the user {user} write to {above}, or run this as the user who may"
    option = "--recursive " if os.path.isdir(path) else ""  # noqa: PTH112 - raises nothing.
    return f"have it belong to the user that runs this: `chown {option}{user} {path}`"


def _user() -> str:
    number = os.geteuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
