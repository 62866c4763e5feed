"""JSON and CSV by Spark's own functions, with what a topic's bytes need around them."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql.types import DataType, StringType, StructField, StructType

from penstock.pipeline.errors import ConverterError
from penstock.pipeline.functions.fields import is_lenient

_CORRUPT = "__penstock_corrupt"
_CORRUPT_OPTION = "columnNameOfCorruptRecord"
_SHOWN_CHARACTERS = 40


def from_json(
    column: Column | str,
    schema: StructType | str,
    *,
    envelope: bool = False,
    mode: str = "FAILFAST",
) -> Column:
    """Connect's JsonConverter, reading: a column of bytes or text as the struct of ``schema``.

    As Spark's own ``from_json``, but bytes may come as they are, and what is corrupt is an error
    of the query (FAILFAST) or NULL as a whole (PERMISSIVE), not a struct of what could be read.
    ``envelope`` is for ``schemas.enable``: the struct is what ``payload`` holds, and what has no
    ``payload`` is corrupt. NULL stays NULL, and with FAILFAST nothing else becomes NULL but a
    ``payload`` of null: not an empty value, and not JSON's null.
    """
    wanted = _struct(schema)
    text = _text(column)
    if not envelope:
        return _parsed_json(text, wanted, mode)
    payload = _parsed_json(text, StructType([StructField("payload", wanted)]), mode)["payload"]
    if is_lenient(mode):
        return payload
    has_payload = sf.array_contains(sf.json_object_keys(text), "payload")
    missing = "has no field payload; next: pass envelope=False for JSON without schemas"
    return sf.coalesce(payload, sf.when(~has_payload, _refusal("from_json", text, missing)))


def to_json(column: Column | str) -> Column:
    """Connect's JsonConverter, writing: a struct, array or map as bytes of JSON.

    As Spark's own ``to_json``, but fields that are NULL are written as such, as Connect does.
    """
    return sf.to_json(column, {"ignoreNullFields": "false"}).cast("binary")


def from_csv(
    column: Column | str,
    schema: StructType | str,
    *,
    separator: str = ",",
    mode: str = "FAILFAST",
) -> Column:
    """A column of bytes or text, one line of CSV each, as the struct of ``schema``.

    As Spark's own ``from_csv`` but for corrupt lines, which go as with ``from_json``; so does a
    line of fewer or more fields.
    """

    def read(text: Column, of: StructType, options: dict[str, str]) -> Column:
        return sf.from_csv(text, of.toDDL(), {**options, "sep": separator})

    return _parsed(
        _text(column), _struct(schema), mode, read, function="from_csv", wanted="line of CSV"
    )


def to_csv(column: Column | str, *, separator: str = ",") -> Column:
    """A struct as bytes of one line of CSV."""
    return sf.to_csv(column, {"sep": separator}).cast("binary")


def _text(column: Column | str) -> Column:
    return (sf.col(column) if isinstance(column, str) else column).cast("string")


def _struct(schema: StructType | str) -> StructType:
    found = DataType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(found, StructType):
        raise ConverterError(
            f"the schema is {found.simpleString()}; next: write the fields of a struct, as in "
            "'id bigint, name string'"
        )
    return found


def _parsed_json(text: Column, schema: StructType, mode: str) -> Column:
    return _parsed(text, schema, mode, sf.from_json, function="from_json", wanted="JSON object")


def _parsed(
    text: Column,
    schema: StructType,
    mode: str,
    read: Callable[[Column, StructType, dict[str, str]], Column],
    *,
    function: str,
    wanted: str,
) -> Column:
    if not is_lenient(mode):
        # Spark fails for what is corrupt, but makes NULL of what is empty or white space alone.
        found = read(text, schema, {"mode": "FAILFAST"})
        why = f"is no {wanted}; next: filter such values out before, or pass mode='PERMISSIVE'"
        return sf.coalesce(found, sf.when(text.isNotNull(), _refusal(function, text, why)))
    # Spark makes of a corrupt record a struct with whatever fields it could read, and keeps its
    # text where there is a field for it: that field tells corrupt records from others.
    marked = StructType([*schema.fields, StructField(_CORRUPT, StringType())])
    found = read(text, marked, {"mode": "PERMISSIVE", _CORRUPT_OPTION: _CORRUPT})
    return sf.when(found[_CORRUPT].isNull(), found.dropFields(_CORRUPT))


def _refusal(function: str, text: Column, why: str) -> Column:
    """An error of the query, by whatever row asks for it."""
    shown = sf.substring(text, 1, _SHOWN_CHARACTERS)
    return sf.raise_error(sf.concat(sf.lit(f"{function}: '"), shown, sf.lit(f"' {why}")))
