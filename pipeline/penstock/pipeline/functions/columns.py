"""How transforms find fields within a column, and change them there."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import DataType, StructType

from penstock.pipeline.errors import TransformError


def quoted(*names: str) -> str:
    """A path of these names, each as it is, whatever characters it has."""
    return ".".join(f"`{name.replace('`', '``')}`" for name in names)


def column_type(records: DataFrame, column: str) -> DataType:
    """The type of a column. Raises TransformError without it, and names those there are."""
    schema = records.schema
    if column not in schema.fieldNames():
        raise TransformError(
            f"there is no column '{column}'; next: name one of {', '.join(schema.fieldNames())}"
        )
    return schema[column].dataType


def struct_type(records: DataFrame, column: str) -> StructType:
    """The fields of a column. Raises TransformError where it has none, as before a converter."""
    found = column_type(records, column)
    if not isinstance(found, StructType):
        raise TransformError(
            f"column '{column}' is {found.simpleString()} and has no fields; next: parse it first, "
            "as with from_json, or name another column"
        )
    return found


def resolve(of: StructType, path: str, column: str) -> tuple[tuple[str, ...], DataType]:
    """The names on the way to a field within a column's fields, and its type.

    A field whose name is the whole ``path`` comes before one that lies deeper. Raises
    TransformError where there is none.
    """
    if path in of.fieldNames():
        return (path,), of[path].dataType
    names = path.split(".")
    at: DataType = of
    for name in names:
        if not isinstance(at, StructType) or name not in at.fieldNames():
            raise TransformError(
                f"column '{column}' has no field '{path}'; next: name one of "
                f"{', '.join(of.fieldNames())}"
            )
        at = at[name].dataType
    return tuple(names), at


def field(column: str, names: Sequence[str]) -> Column:
    """The field at the end of this way."""
    return sf.col(quoted(column, *names))


def with_fields(
    records: DataFrame, column: str, changed: Sequence[tuple[Sequence[str], Column]]
) -> DataFrame:
    """The records with these fields of a column set. Where the column is NULL it stays NULL."""
    value = sf.col(quoted(column))
    for names, new in changed:
        value = value.withField(quoted(*names), new)
    return records.withColumn(column, value)
