"""What the source for PostgreSQL asks a database."""

from __future__ import annotations

import pytest
from psycopg import sql
from pyspark.sql.types import LongType

from penstock.pipeline.connectors.jdbc_queries import (
    Ordering,
    Position,
    SourceColumn,
    select_end,
    select_rows,
)

BOTH = Ordering("at", "id")
AT = "2026-01-01T00:00:00"


@pytest.mark.parametrize("start", [{}, {"timestamp": AT, "incrementing": 3}])
@pytest.mark.parametrize("most", [None, 5])
def test_a_row_without_a_number_is_never_read_wherever_batches_end(
    start: Position, most: int | None
) -> None:
    """``(at, id) > (x, y)`` is true of a NULL id where at is after x, and unknown where it is x."""
    end: Position = {"timestamp": AT, "incrementing": 9}
    orders = sql.Identifier("orders")
    asked = (
        select_rows(orders, [SourceColumn("id", LongType())], BOTH, start, end),
        select_end(orders, BOTH, start, most),
    )
    for query in asked:
        text = query.as_string(None)
        assert '"at" IS NOT NULL AND "id" IS NOT NULL' in text
