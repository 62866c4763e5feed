"""What is said of a database that refuses: where it is and what to do, and never a password."""

from __future__ import annotations

import traceback
from typing import Any

import psycopg
import pytest

from penstock.pipeline.connectors.database import Database
from penstock.pipeline.errors import ConnectorError, OptionError
from penstock.pipeline.option_map import OptionMap

SECRET = "hunter2"


def refused(monkeypatch: pytest.MonkeyPatch, where: Database, error: psycopg.Error) -> str:
    def connect(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(psycopg, "connect", connect)
    with pytest.raises(ConnectorError) as caught, where.connect("table orders"):
        pass
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in repr(where)
    return str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        Database(f"postgresql://ann:{SECRET}@db:5433/shop"),
        Database(f"host=db port=5433 dbname=shop user=ann password={SECRET}"),
        Database("postgresql://db:5433/shop", "ann", SECRET),
    ],
)
def test_a_refusal_says_where_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, where: Database
) -> None:
    error = psycopg.OperationalError(f"connection failed:\n{SECRET} is wrong for ann")
    said = refused(monkeypatch, where, error)
    assert "table orders at " in said
    assert all(part in said for part in ("host=db", "port=5433", "dbname=shop", "user=ann"))
    assert "OperationalError: connection failed: *** is wrong" in said
    assert "; next: see whether the server answers there, and set url, user and passw" in said


def test_a_table_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    error = psycopg.errors.UndefinedTable('relation "orders" does not exist')
    said = refused(monkeypatch, Database("host=db"), error)
    assert said.endswith("next: name a table that is there, as schema.table")


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (psycopg.errors.DeadlockDetected("deadlock detected"), "try again"),
        (psycopg.errors.QueryCanceled("statement timeout"), "mend what it says"),
        (psycopg.errors.InvalidPassword("no"), "see whether the server answers there, and set url"),
        (psycopg.errors.AdminShutdown("the server ends"), "see whether the server answers there"),
    ],
)
def test_only_of_a_connection_the_url_is_to_be_mended(
    monkeypatch: pytest.MonkeyPatch, error: psycopg.Error, step: str
) -> None:
    said = refused(monkeypatch, Database("host=db"), error)
    assert f"; next: {step}" in said
    assert ("set url" in said) == ("set url" in step)


def test_a_password_with_blanks_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "two  blanks\tand a tab"
    error = psycopg.OperationalError(f"{secret} is wrong")
    said = refused(monkeypatch, Database("host=db", "ann", secret), error)
    assert "OperationalError: *** is wrong; next" in said


def test_with_a_short_password_nothing_of_the_server_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each "e" by itself would be hidden, which says what the password is."""
    where = Database("host=db dbname=shop", "ann", "e")
    said = refused(monkeypatch, where, psycopg.OperationalError("wrong password: e"))
    assert "wrong" not in said
    assert "OperationalError: the server's text is not shown, for the password is too short" in said


def test_a_url_that_is_none_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Database(f"postgres//ann:{SECRET}@db/shop")
    said = refused(monkeypatch, where, psycopg.ProgrammingError(f'missing "=" after {SECRET}'))
    assert "next: write postgresql://host:port/database" in said


def test_an_option_that_is_given_twice_is_not_shown() -> None:
    given = {"url": f"postgresql://ann:{SECRET}@db", "URL": "postgresql://db"}
    with pytest.raises(OptionError, match="url and URL are the same option") as caught:
        OptionMap(given, where="here")
    assert SECRET not in str(caught.value)
