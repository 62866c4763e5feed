"""Connect's transforms of fields. Each takes records, the column whose fields it is about (mostly
"key" or "value", parsed by a converter) and gives records; ``records.transform(f, ...)`` chains.

Records whose column is NULL (tombstones) go through unchanged. A field within a field is named
``outer.inner``. What is wrong raises TransformError before a query starts.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampType,
)

from penstock.pipeline.errors import TransformError
from penstock.pipeline.functions.columns import (
    column_type,
    field,
    quoted,
    resolve,
    struct_type,
    with_fields,
)
from penstock.pipeline.functions.times import UNITS, from_instant, to_instant

MODES: Final = ("FAILFAST", "PERMISSIVE")
"""What becomes of data that cannot be converted: an error, or NULL."""


def insert_field(records: DataFrame, column: str, name: str, value: Any) -> DataFrame:
    """Connect's InsertField: set a field to a literal, or to a Column of the record.

    ``insert_field(records, "value", "offset", sf.col("offset"))`` inserts what Connect's
    ``offset.field`` does; so do the columns topic, partition and timestamp.
    """
    outer, _, _ = name.rpartition(".")
    of = struct_type(records, column)
    if name in of.fieldNames() or not outer:
        names: tuple[str, ...] = (name,)
    else:
        names = (*resolve(of, outer, column)[0], name.rpartition(".")[2])
    return with_fields(records, column, [(names, _as_column(value))])


def replace_field(
    records: DataFrame,
    column: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
) -> DataFrame:
    """Connect's ReplaceField: keep only these fields, leave these out, and rename these.

    Of the column's own fields, in their order. ``renames`` goes from old names to new ones.
    """
    of = struct_type(records, column)
    named = dict(renames or {})
    for name in (*include, *exclude, *named):
        if name not in of.fieldNames():
            resolve(of, name, column)
            raise TransformError(f"'{name}' lies within a field; next: replace the outer one")
    kept = [
        name for name in of.fieldNames() if name not in exclude and (not include or name in include)
    ]
    new = [named.get(name, name) for name in kept]
    if not kept or len(set(new)) < len(new):
        what = "no field" if not kept else f"a name twice ({', '.join(new)})"
        raise TransformError(f"column '{column}' would have {what}; next: change what is replaced")
    whole = sf.struct(
        *[field(column, [old]).alias(name) for old, name in zip(kept, new, strict=True)]
    )
    return _replaced(records, column, whole)


def mask_field(records: DataFrame, column: str, *names: str, replacement: Any = None) -> DataFrame:
    """Connect's MaskField: put ``replacement`` in place of these fields.

    Without it their type's empty value: no text, no bytes, zero, false, the epoch, no elements.
    Fields that are NULL are masked too. The field keeps its type.
    """
    of = struct_type(records, column)
    changed = []
    for name in names:
        path, kind = resolve(of, name, column)
        mask = _empty(kind, name) if replacement is None else _as_column(replacement)
        changed.append((path, mask.cast(kind)))
    return with_fields(records, column, changed)


def cast(
    records: DataFrame, column: str, types: Mapping[str, str] | str, *, mode: str = "FAILFAST"
) -> DataFrame:
    """Connect's Cast: change the types of fields, or with one type for ``types`` of the column.

    Types are Spark's ("int", "double", "decimal(10,2)"). What cannot be cast is an error of the
    query, or NULL by the mode PERMISSIVE.
    """
    lenient = is_lenient(mode)

    def converted(given: Column, kind: str) -> Column:
        return given.try_cast(kind) if lenient else given.cast(kind)

    if isinstance(types, str):
        column_type(records, column)
        return records.withColumn(column, converted(sf.col(quoted(column)), types))
    of = struct_type(records, column)
    paths = {name: resolve(of, name, column)[0] for name in types}
    return with_fields(
        records,
        column,
        [(path, converted(field(column, path), types[name])) for name, path in paths.items()],
    )


def timestamp_converter(
    records: DataFrame,
    column: str,
    name: str | None = None,
    *,
    target: str,
    pattern: str | None = None,
    unit: str = "milliseconds",
    mode: str = "FAILFAST",
) -> DataFrame:
    """Connect's TimestampConverter: a field, or the column, as another form of time.

    ``target`` is "unix" (a BIGINT of ``unit`` since the epoch), "string" (by ``pattern``), "date"
    or "timestamp"; the field is any of these forms now. All goes by UTC. Patterns are Java's, of
    the letters y M d H m s S X. Text that is no time is an error, or NULL by PERMISSIVE.
    """
    if unit not in UNITS:
        raise TransformError(f"unit='{unit}' is none of {', '.join(UNITS)}")
    lenient = is_lenient(mode)
    if name is None:
        kind = column_type(records, column)
        instant = to_instant(sf.col(quoted(column)), kind, pattern, unit, lenient=lenient)
        return records.withColumn(column, from_instant(instant, target, pattern, unit))
    path, kind = resolve(struct_type(records, column), name, column)
    instant = to_instant(field(column, path), kind, pattern, unit, lenient=lenient)
    return with_fields(records, column, [(path, from_instant(instant, target, pattern, unit))])


def flatten(records: DataFrame, column: str, *, delimiter: str = ".") -> DataFrame:
    """Connect's Flatten: one level of fields, named ``outer.inner``. Arrays and maps stay whole."""
    leaves = list(_leaves(struct_type(records, column), ()))
    names = [delimiter.join(path) for path in leaves]
    if len(set(names)) < len(names):
        raise TransformError(
            f"column '{column}' would have a field twice ({', '.join(names)}); next: pass another "
            "delimiter"
        )
    whole = sf.struct(
        *[field(column, path).alias(name) for path, name in zip(leaves, names, strict=True)]
    )
    return _replaced(records, column, whole)


def hoist_field(records: DataFrame, column: str, name: str) -> DataFrame:
    """Connect's HoistField: the whole column as the one field ``name`` of a new one.

    A column that is NULL becomes a field that is NULL, as in Connect.
    """
    column_type(records, column)
    return records.withColumn(column, sf.struct(sf.col(quoted(column)).alias(name)))


def extract_field(records: DataFrame, column: str, name: str) -> DataFrame:
    """Connect's ExtractField: the column is that field alone."""
    path, _ = resolve(struct_type(records, column), name, column)
    return records.withColumn(column, field(column, path))


def value_to_key(records: DataFrame, *names: str) -> DataFrame:
    """Connect's ValueToKey: the key is a struct of these fields of the value."""
    of = struct_type(records, "value")
    if not names:
        raise TransformError("value_to_key needs the name of a field; next: name one")
    paths = [resolve(of, name, "value")[0] for name in names]
    key = sf.struct(*[field("value", path).alias(path[-1]) for path in paths])
    return records.withColumn("key", key)


def is_lenient(mode: str) -> bool:
    """Whether what cannot be converted becomes NULL. Raises TransformError for unknown modes."""
    if mode.upper() not in MODES:
        raise TransformError(f"mode='{mode}' is none of {', '.join(MODES)}")
    return mode.upper() == "PERMISSIVE"


def _replaced(records: DataFrame, column: str, whole: Column) -> DataFrame:
    return records.withColumn(column, sf.when(sf.col(quoted(column)).isNotNull(), whole))


def _leaves(of: StructType, way: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for each in of.fields:
        if isinstance(each.dataType, StructType):
            yield from _leaves(each.dataType, (*way, each.name))
        else:
            yield (*way, each.name)


def _as_column(value: Any) -> Column:
    return value if isinstance(value, Column) else sf.lit(value)


def _empty(kind: DataType, name: str) -> Column:
    empties: list[tuple[type[DataType], Any]] = [
        (StringType, ""),
        (BinaryType, b""),
        (BooleanType, False),
        (NumericType, 0),
        (DateType, datetime.date(1970, 1, 1)),
        (TimestampType, datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)),
    ]
    for of, empty in empties:
        if isinstance(kind, of):
            return sf.lit(empty)
    if isinstance(kind, ArrayType):
        return sf.array()
    if isinstance(kind, MapType):
        return sf.create_map()
    raise TransformError(
        f"'{name}' is {kind.simpleString()} and has no empty value; next: pass replacement="
    )
