"""Times between their forms (numbers, text, dates, timestamps), by UTC wherever the session is."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
)

from penstock.pipeline.errors import TransformError
from penstock.pipeline.functions.patterns import has_zone, parse_pattern

_DAY_US: Final = 86_400_000_000
UNITS: Final = ("seconds", "milliseconds", "microseconds", "nanoseconds")


def to_instant(
    given: Column, kind: DataType, pattern: str | None, unit: str, *, lenient: bool
) -> Column:
    """A TIMESTAMP of a number, text, date or timestamp. ``lenient`` makes NULL of other text."""
    if isinstance(kind, TimestampType):
        return given
    if isinstance(kind, DateType):
        return sf.timestamp_micros(sf.unix_date(given).cast("bigint") * sf.lit(_DAY_US))
    if isinstance(kind, (IntegerType, LongType)):
        number = given.cast("bigint")
        if unit == "seconds":
            return sf.timestamp_seconds(number)
        if unit == "milliseconds":
            return sf.timestamp_millis(number)
        return sf.timestamp_micros(number if unit == "microseconds" else _floor(number, 1_000))
    if isinstance(kind, StringType):
        if pattern is None:
            raise TransformError("text has no time without its pattern; next: pass pattern=")
        return _parsed(given, pattern, lenient)
    raise TransformError(
        f"{kind.simpleString()} is no time; next: name a field that is a number, text, a date or "
        "a timestamp"
    )


def from_instant(instant: Column, target: str, pattern: str | None, unit: str) -> Column:
    """A TIMESTAMP as "unix" (BIGINT of ``unit``), "string", "date" or "timestamp"."""
    if target == "timestamp":
        return instant
    if target == "date":
        return sf.date_from_unix_date(_floor(sf.unix_micros(instant), _DAY_US).cast("int"))
    if target == "string":
        if pattern is None:
            raise TransformError("text needs a pattern; next: pass pattern=")
        return format_utc(instant, pattern)
    if target != "unix":
        raise TransformError(f"'{target}' is none of unix, string, date, timestamp")
    if unit == "seconds":
        return sf.unix_seconds(instant)
    if unit == "milliseconds":
        return sf.unix_millis(instant)
    micros = sf.unix_micros(instant)
    return micros if unit == "microseconds" else micros * sf.lit(1_000)


def format_utc(instant: Column, pattern: str) -> Column:
    """A TIMESTAMP as text by a pattern of Java's, in UTC."""
    micros = sf.unix_micros(instant)
    date = sf.date_from_unix_date(_floor(micros, _DAY_US).cast("int"))
    of_day = sf.pmod(micros, sf.lit(_DAY_US))
    second = sf.pmod(_floor(of_day, 1_000_000), sf.lit(60))
    numbers = {
        "y": sf.year(date), "M": sf.month(date), "d": sf.day(date),
        "H": _floor(of_day, 3_600_000_000), "m": sf.pmod(_floor(of_day, 60_000_000), sf.lit(60)),
        "s": second,
    }  # fmt: skip
    parts = []
    for part in parse_pattern(pattern):
        if isinstance(part, str):
            parts.append(sf.lit(part))
        elif part[0] == "X":
            parts.append(sf.lit("Z"))
        elif part[0] == "S":
            fraction = sf.lpad(sf.pmod(micros, sf.lit(1_000_000)).cast("string"), 6, "0")
            parts.append(sf.substring(fraction, 1, part[1]))
        else:
            letter, width = part
            number = sf.pmod(numbers[letter], sf.lit(100)) if part == ("y", 2) else numbers[letter]
            text = number.cast("string")
            padded = sf.lpad(text, width, "0")
            parts.append(sf.when(sf.length(text) < width, padded).otherwise(text))
    return sf.concat(*parts)


def _parsed(text: Column, pattern: str, lenient: bool) -> Column:
    checked = sf.try_to_timestamp(text, sf.lit(pattern)) if lenient else None
    if has_zone(pattern):
        return sf.to_timestamp(text, pattern) if checked is None else checked
    # A time without a zone is read as such, and then counted from the epoch: by the session's
    # zone one hour a year would not be there.
    local = sf.to_timestamp_ntz(text, sf.lit(pattern))
    if checked is not None:
        local = sf.when(checked.isNotNull(), local)
    seconds = (sf.hour(local) * 60 + sf.minute(local)) * 60
    micros = (sf.date_part(sf.lit("SECOND"), local) * sf.lit(1_000_000)).cast("bigint")
    days = sf.unix_date(local.cast("date")).cast("bigint")
    return sf.timestamp_micros(days * sf.lit(_DAY_US) + seconds.cast("bigint") * 1_000_000 + micros)


def _floor(number: Column, by: int) -> Column:
    """Whole parts, downwards, and exactly: ``/`` would go through a floating point number."""
    return sf.call_function("div", number - sf.pmod(number, sf.lit(by)), sf.lit(by))
