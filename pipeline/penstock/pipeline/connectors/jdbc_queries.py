"""The SQL of the database source and sink, and PostgreSQL's types in Spark. Opens nothing."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from penstock.pipeline.errors import ConnectorError, OptionError

_TYPES: Final[dict[str, DataType]] = {
    "bool": BooleanType(),
    "int2": ShortType(),
    "int4": IntegerType(),
    "int8": LongType(),
    "float4": FloatType(),
    "float8": DoubleType(),
    "text": StringType(),
    "varchar": StringType(),
    "bpchar": StringType(),
    "bytea": BinaryType(),
    "date": DateType(),
    "timestamp": TimestampNTZType(),
    "timestamptz": TimestampType(),
}
_MOST_DIGITS: Final = 38

Position = dict[str, Any]
"""How far a source has read, by ``timestamp`` (text) and ``incrementing`` (a number, or the text of
a NUMERIC, which JSON's numbers may not hold); {} before all rows.
"""

_TIMESTAMPS: Final = ("timestamp", "timestamptz")
_NUMBERS: Final = ("int2", "int4", "int8", "numeric")


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column of a database's, its type in Spark, whether it is read as text, and the name of its
    own type ("" for one that PostgreSQL does not bring).
    """

    name: str
    kind: DataType
    as_text: bool = False
    type_name: str = ""


@dataclass(frozen=True, slots=True)
class Ordering:
    """The columns that tell which rows are new: a timestamp, an incrementing number, or both."""

    timestamp: str | None = None
    incrementing: str | None = None
    delay_ms: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Their keys in a Position, in the order in which they count."""
        given = {"timestamp": self.timestamp, "incrementing": self.incrementing}
        return tuple(name for name, column in given.items() if column is not None)

    @property
    def columns(self) -> tuple[str, ...]:
        """Their columns, in that order."""
        return tuple(column for column in (self.timestamp, self.incrementing) if column is not None)


def column_of(name: str, type_name: str, precision: int | None, scale: int | None) -> SourceColumn:
    """A column of PostgreSQL's; what Spark has no type for is read as the text of it."""
    kind = _TYPES.get(type_name)
    if type_name == "numeric":
        if precision is None:  # Any number of digits: Spark's own JDBC takes these.
            kind = DecimalType(_MOST_DIGITS, 18)
        elif precision <= _MOST_DIGITS and 0 <= (scale or 0) <= precision:
            kind = DecimalType(precision, scale or 0)
    return SourceColumn(name, kind or StringType(), as_text=kind is None, type_name=type_name)


def ordering_types(ordering: Ordering, columns: Sequence[SourceColumn], where: str) -> list[str]:
    """PostgreSQL's types of the ordering's columns, in their order.

    Raises OptionError for a column that is not there, and for one whose type has no order that a
    position could keep; ``where`` says whose options they are.
    """
    types = {column.name: column.type_name for column in columns}
    wanted = {
        "timestampColumn": (ordering.timestamp, _TIMESTAMPS),
        "incrementingColumn": (ordering.incrementing, _NUMBERS),
    }
    found = []
    for option, (name, good) in wanted.items():
        if name is None:
            continue
        if name not in types:
            raise OptionError(
                f"{where}: {option}={name}: there is no column {name}, but {', '.join(types)}"
            )
        if types[name] not in good:
            raise OptionError(
                f"{where}: {option}={name} is {types[name] or 'of a type of its own'}, and not one "
                f"of {', '.join(good)}; next: cast it in option query, or name another column"
            )
        found.append(types[name])
    return found


def relation(table: str | None, query: str | None) -> sql.Composable:
    """What stands after FROM: a table, ``schema.table``, or a query."""
    if query is not None:
        # The user's own SQL, as they wrote it.
        return sql.SQL("({}) AS penstock_query").format(sql.SQL(query))
    assert table is not None
    return identifier(table)


def identifier(name: str) -> sql.Composable:
    """A table's name, quoted: ``orders`` or ``shop.orders``. Raises OptionError for others."""
    parts = name.split(".")
    if len(parts) > 2 or not all(parts):
        raise OptionError(f"'{name}' is no name of a table; next: write table or schema.table")
    return sql.Identifier(*parts)


def select_rows(
    source: sql.Composable,
    columns: Sequence[SourceColumn],
    ordering: Ordering | None,
    start: Position,
    end: Position,
) -> sql.Composed:
    """The rows after ``start`` up to and with ``end``; all of them without an ordering.

    With one, those that have NULL in a column of it are left out: a comparison of rows is true or
    unknown for them by what the other column says, so by where batches happen to end.
    """
    chosen = sql.SQL(", ").join(
        sql.SQL("{0}::text AS {0}" if each.as_text else "{0}").format(sql.Identifier(each.name))
        for each in columns
    )
    found = sql.SQL("SELECT {} FROM {}").format(chosen, source)
    if ordering is None:
        return found
    bounds = [
        *_not_null(ordering),
        _compared(ordering, ">", start),
        _compared(ordering, "<=", end),
    ]
    return found + sql.SQL(" WHERE ") + sql.SQL(" AND ").join(filter(None, bounds))


def select_end(
    source: sql.Composable, ordering: Ordering, start: Position, most: int | None
) -> sql.Composed:
    """The position of the last of the next ``most`` rows after ``start``; no row where none is.

    Rows whose timestamp is younger than the delay, by the database's clock, are not there yet.
    """
    names = sql.SQL(", ").join(map(sql.Identifier, ordering.columns))
    conditions = _not_null(ordering)
    if (after := _compared(ordering, ">", start)) is not None:
        conditions.append(after)
    if ordering.timestamp is not None:
        conditions.append(
            sql.SQL("{} <= now() - {} * interval '1 millisecond'").format(
                sql.Identifier(ordering.timestamp), sql.Literal(ordering.delay_ms)
            )
        )
    found = sql.SQL("SELECT {} FROM {} WHERE {}").format(
        names, source, sql.SQL(" AND ").join(conditions)
    )
    downwards = sql.SQL(", ").join(
        sql.SQL("{} DESC").format(sql.Identifier(column)) for column in ordering.columns
    )
    if most is not None:
        found = sql.SQL("SELECT {0} FROM ({1} ORDER BY {0} LIMIT {2}) AS next_rows").format(
            names, found, sql.Literal(most)
        )
    return found + sql.SQL(" ORDER BY {} LIMIT 1").format(downwards)


def position_of(ordering: Ordering, row: Sequence[Any]) -> Position:
    """The position that ``select_end`` found, as JSON has it. Raises ConnectorError for a NUMERIC
    that is no number, behind which PostgreSQL sorts no other.
    """
    columns = zip(ordering.columns, row, strict=True)
    values = [_plain(column, value) for column, value in columns]
    return dict(zip(ordering.names, values, strict=True))


def _plain(column: str, value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if not isinstance(value, decimal.Decimal):
        return value
    if not value.is_finite():
        raise ConnectorError(
            f"column {column} has {value}, and rows after it would never be read; next: mend that "
            "row, or leave it out by option query"
        )
    return str(value)


def _not_null(ordering: Ordering) -> list[sql.Composed]:
    return [sql.SQL("{} IS NOT NULL").format(sql.Identifier(name)) for name in ordering.columns]


def _compared(ordering: Ordering, operator: str, position: Position) -> sql.Composed | None:
    if not position:
        return None
    return sql.SQL("({}) {} ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, ordering.columns)),
        sql.SQL(operator),
        sql.SQL(", ").join(sql.Literal(position[name]) for name in ordering.names),
    )


# --- the sink -------------------------------------------------------------------------------

BATCHES_TABLE: Final = "penstock_batches"
CREATE_BATCHES: Final = sql.SQL(
    "CREATE TABLE IF NOT EXISTS {} (sink_id text, table_name text, batch_id bigint NOT NULL, "
    "execution text, content text, committed_at timestamptz NOT NULL DEFAULT now(), "
    "PRIMARY KEY (sink_id, table_name))"
).format(sql.Identifier(BATCHES_TABLE))
LOCK_BATCH: Final = sql.SQL(
    "SELECT batch_id, execution, content FROM {} WHERE sink_id = %s AND table_name = %s FOR UPDATE"
).format(sql.Identifier(BATCHES_TABLE))
FIRST_BATCH: Final = sql.SQL(
    "INSERT INTO {} (sink_id, table_name, batch_id, content) VALUES (%s, %s, -1, '') "
    "ON CONFLICT DO NOTHING"
).format(sql.Identifier(BATCHES_TABLE))
KEEP_BATCH: Final = sql.SQL(
    "UPDATE {} SET batch_id = %s, execution = %s, content = %s, committed_at = now() "
    "WHERE sink_id = %s AND table_name = %s"
).format(sql.Identifier(BATCHES_TABLE))

TASK: Final = "penstock_task"
ORDER: Final = "penstock_order"
DELETED: Final = "penstock_deleted"


@dataclass(frozen=True, slots=True)
class Merge:
    """How staged rows go into a table: its columns, its keys, and what is known besides."""

    table: str
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    ordered: bool
    deletes: bool

    def create_staging(self, staging: str) -> sql.Composed:
        """A table of the target's types that no crash keeps, for what tasks write."""
        return sql.SQL(
            "CREATE UNLOGGED TABLE {} AS SELECT {}, 0::bigint AS {}, 0::bigint AS {}, "
            "false AS {} FROM {} LIMIT 0"
        ).format(
            sql.Identifier(staging),
            _names(self.columns),
            sql.Identifier(TASK),
            sql.Identifier(ORDER),
            sql.Identifier(DELETED),
            identifier(self.table),
        )

    def copy_into(self, staging: str) -> sql.Composed:
        """COPY of the columns, then the task, the order, and whether the row is a deletion."""
        return sql.SQL("COPY {} ({}) FROM STDIN").format(
            sql.Identifier(staging), _names((*self.columns, TASK, ORDER, DELETED))
        )

    def apply(self, staging: str) -> list[sql.Composed]:
        """The statements; each takes the list of the tasks that count as its one parameter."""
        last = self._last_rows(staging)
        if not self.keys:
            return [
                sql.SQL("INSERT INTO {} ({}) SELECT {} FROM ({}) AS s").format(
                    identifier(self.table), _names(self.columns), _names(self.columns), last
                )
            ]
        found = [self._upsert(last)]
        if self.deletes:
            on_keys = sql.SQL(" AND ").join(
                sql.SQL("t.{0} = s.{0}").format(sql.Identifier(key)) for key in self.keys
            )
            found.append(
                sql.SQL("DELETE FROM {} AS t USING ({}) AS s WHERE {} AND s.{}").format(
                    identifier(self.table), last, on_keys, sql.Identifier(DELETED)
                )
            )
        return found

    def _last_rows(self, staging: str) -> sql.Composed:
        """Of each key the last row, where an order is known; rows of tasks that do not count
        are left out.
        """
        found = sql.SQL("SELECT {} * FROM {} WHERE {} = ANY(%s)").format(
            sql.SQL("DISTINCT ON ({})").format(_names(self.keys)) if self.ordered else sql.SQL(""),
            sql.Identifier(staging),
            sql.Identifier(TASK),
        )
        if self.ordered:
            found += sql.SQL(" ORDER BY {}, {} DESC").format(
                _names(self.keys), sql.Identifier(ORDER)
            )
        return found

    def _upsert(self, last: sql.Composed) -> sql.Composed:
        others = [name for name in self.columns if name not in self.keys]
        action = (
            sql.SQL("DO UPDATE SET {}").format(
                sql.SQL(", ").join(
                    sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(name)) for name in others
                )
            )
            if others
            else sql.SQL("DO NOTHING")
        )
        return sql.SQL(
            "INSERT INTO {} ({}) SELECT {} FROM ({}) AS s WHERE NOT {} ON CONFLICT ({}) {}"
        ).format(
            identifier(self.table),
            _names(self.columns),
            _names(self.columns),
            last,
            sql.Identifier(DELETED),
            _names(self.keys),
            action,
        )


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))
