"""Where a PostgreSQL is and who we are there, and what is said when it refuses: no password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.pipeline.errors import ConnectorError

_SECRETS: Final = ("password", "sslpassword", "passfile")
_HIDDEN: Final = "***"
_SHOWN: Final = ("host", "hostaddr", "port", "dbname", "user", "service")
_LEAST_SECRET: Final = 4
"""A shorter one is part of words, and by what is hidden of them it can be guessed."""
_SERVER: Final = "see whether the server answers there"
_CONNECTION_STATES: Final = ("08", "28")
"""SQL's classes of states of connections that fail, and of users that are refused."""
_MEND: Final[tuple[tuple[type[psycopg.Error] | tuple[type[psycopg.Error], ...], str], ...]] = (
    (psycopg.errors.UndefinedTable, "name a table that is there, as schema.table"),
    (psycopg.errors.InsufficientPrivilege, "grant the user what it is refused"),
    (
        (
            psycopg.errors.DeadlockDetected,
            psycopg.errors.LockNotAvailable,
            psycopg.errors.SerializationFailure,
        ),
        "try again",
    ),
    (
        (
            psycopg.errors.AdminShutdown,
            psycopg.errors.CannotConnectNow,
            psycopg.errors.CrashShutdown,
        ),
        _SERVER,
    ),
)


@dataclass(frozen=True, slots=True)
class Database:
    """``url`` is whatever libpq connects by; ``user`` and ``password`` win over what it has."""

    url: str = field(repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @contextmanager
    def connect(self, doing: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection, whose transaction is committed at the end of the block.

        ``doing`` names the table and what is done with it, for messages. Raises ConnectorError in
        place of every error of the database's.
        """
        try:
            with psycopg.connect(self.url, **self._given()) as connection:
                yield connection
        except psycopg.Error as error:
            # Without its cause: libpq's text has the url with the password where it reads none.
            raise self._refused(doing, error) from None

    @property
    def shown(self) -> str:
        """Where it is, without any secret."""
        known = self._known()
        if known is None:
            return "the database of option url (which libpq cannot read, and is not shown)"
        return " ".join(f"{name}={known[name]}" for name in _SHOWN if name in known)

    def _given(self) -> dict[str, Any]:
        given = {"user": self.user, "password": self.password}
        return {name: value for name, value in given.items() if value is not None}

    def _known(self) -> dict[str, str] | None:
        try:
            found = conninfo_to_dict(self.url, **self._given())
        except psycopg.Error:
            return None
        return {name: str(value) for name, value in found.items() if value is not None}

    def _refused(self, doing: str, error: psycopg.Error) -> ConnectorError:
        known = self._known()
        if known is None:
            return ConnectorError(
                f"{doing}: url is nothing that libpq connects by; next: write "
                "postgresql://host:port/database, with options user and password beside it"
            )
        text = _without_secrets(str(error), [known.get(name, "") for name in _SECRETS])
        return ConnectorError(
            f"{doing} at {self.shown}: {type(error).__name__}: {text}; next: {_step(error)}"
        )


def _without_secrets(text: str, secrets: list[str]) -> str:
    """The text in a line."""
    given = sorted(filter(None, secrets), key=len, reverse=True)
    if given and len(given[-1]) < _LEAST_SECRET:
        return "the server's text is not shown, for the password is too short to be hidden in it"
    for secret in given:
        text = text.replace(secret, _HIDDEN)
    return " ".join(text.split())


def _step(error: psycopg.Error) -> str:
    """What to do about it."""
    for kind, step in _MEND:
        if isinstance(error, kind):
            return step
    # What libpq itself has to say of a connection has no state of SQL's.
    state = error.sqlstate
    if isinstance(error, psycopg.OperationalError) and (
        state is None or state.startswith(_CONNECTION_STATES)
    ):
        return f"{_SERVER}, and set url, user and password"
    return "mend what it says"
