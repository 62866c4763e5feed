"""The ids of transactions: those that programs choose, and those of engines' task attempts. Pure.

An attempt's id says what it is an attempt at::

    __attempt/EPOCH_NUMBER/TASK/ATTEMPT/GROUP

so that whoever sees one knows which coordinator keeps it (the group's), and nobody has to look it
up. Programs may not choose ids that begin so.

Where the same attempt begins again, the id stays and the producer id is another. What a writer
hands to its driver says both, so that a commit never takes the work of the second for that of the
first::

    PRODUCER_ID@__attempt/EPOCH_NUMBER/TASK/ATTEMPT/GROUP
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from penstock.wire.errors import InvalidTransactionalIdError

MAX_TRANSACTIONAL_ID_BYTES: Final = 512
ATTEMPT_PREFIX: Final = "__attempt/"

# Numbers are written in one way, so that no two texts name one attempt.
_NUMBER: Final = "(0|[1-9][0-9]{0,%d})"
_LONG: Final = _NUMBER % 18
_HANDLE: Final = re.compile(rf"{_LONG}@(.+)", re.DOTALL)
_MAX_INT32: Final = 2**31 - 1
_MAX_INT64: Final = 2**63 - 1
_ATTEMPT: Final = re.compile(rf"__attempt/{_LONG}/{_NUMBER % 9}/{_LONG}/(.+)", re.DOTALL)
_NUMBERS_BYTES: Final = len("__attempt/") + 19 + 10 + 19 + 3


class Attempt(NamedTuple):
    """One attempt of a task at what a group's epoch number commits; no number is below 0."""

    group: str
    epoch_number: int
    task: int
    attempt: int

    @property
    def transactional_id(self) -> str:
        """The id of its transaction."""
        return f"{ATTEMPT_PREFIX}{self.epoch_number}/{self.task}/{self.attempt}/{self.group}"


def parse_attempt(transactional_id: str) -> Attempt | None:
    """What an attempt's id says; None for any other id."""
    found = _ATTEMPT.fullmatch(transactional_id)
    if found is None:
        return None
    epoch_number, task, attempt, group = found.groups()
    return Attempt(group, int(epoch_number), int(task), int(attempt))


class AttemptHandle(NamedTuple):
    """One beginning of an attempt: what a writer hands to its driver. No two have a producer id."""

    attempt: Attempt
    producer_id: int

    @property
    def text(self) -> str:
        """As programs have it; ``parse_handle`` reads it back."""
        return f"{self.producer_id}@{self.attempt.transactional_id}"


def parse_handle(text: str) -> AttemptHandle | None:
    """The handle that was written so; None for any other text."""
    found = _HANDLE.fullmatch(text)
    attempt = None if found is None else parse_attempt(found[2])
    if found is None or attempt is None:
        return None
    handle = AttemptHandle(attempt, int(found[1]))
    fits = (
        handle.producer_id <= _MAX_INT64
        and attempt.epoch_number <= _MAX_INT64
        and attempt.task <= _MAX_INT32
        and attempt.attempt <= _MAX_INT64
    )
    return handle if fits else None


def coordinating_key(transactional_id: str) -> str:
    """The name by which the coordinator of the id is found: of an attempt its group's."""
    attempt = parse_attempt(transactional_id)
    return transactional_id if attempt is None else attempt.group


def check_transactional_id(transactional_id: str) -> None:
    """Raise InvalidTransactionalIdError for an id that no program may choose; it says why."""
    _check("transactional id", transactional_id, MAX_TRANSACTIONAL_ID_BYTES)
    _check_prefix("transactional id", transactional_id)


def check_writing_id(transactional_id: str) -> None:
    """Raise InvalidTransactionalIdError for an id that no batch can have been written under."""
    attempt = parse_attempt(transactional_id)
    if attempt is None:
        check_transactional_id(transactional_id)
    else:
        check_commit_group(attempt.group)


def check_commit_group(group: str) -> None:
    """Raise InvalidTransactionalIdError for a name that no group of commits can have."""
    _check("commit group", group, MAX_TRANSACTIONAL_ID_BYTES - _NUMBERS_BYTES)
    _check_prefix("commit group", group)


def _check_prefix(what: str, name: str) -> None:
    if name.startswith(ATTEMPT_PREFIX):
        raise InvalidTransactionalIdError(
            f"the {what} {name[:64]!r} begins with {ATTEMPT_PREFIX!r}, which is kept for the "
            "attempts of engines; choose another"
        )


def _check(what: str, name: str, max_bytes: int) -> None:
    if not name:
        raise InvalidTransactionalIdError(
            f"a {what} must not be empty; choose one of 1 to {max_bytes} bytes"
        )
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidTransactionalIdError(
            f"the {what} {name[:32]!r} is no text that UTF-8 can encode; choose another"
        ) from None
    if size_bytes > max_bytes:
        raise InvalidTransactionalIdError(
            f"the {what} {name[:32]!r}... has {size_bytes} bytes; {max_bytes} are allowed: choose "
            "a shorter one"
        )
