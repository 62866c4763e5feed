"""Connect's routers, which set the topic that the sink writes to; its predicates, and Filter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from penstock.pipeline.errors import TransformError
from penstock.pipeline.functions.columns import (
    column_type,
    field,
    quoted,
    resolve,
    struct_type,
)
from penstock.pipeline.functions.times import format_utc

_PREDICATE = "__penstock_predicate"
_BEFORE = "__penstock_before"


def regex_router(records: DataFrame, regex: str, replacement: str) -> DataFrame:
    r"""Connect's RegexRouter: topics whose whole name matches are renamed.

    The expression is Java's, and so is ``replacement``: ``$1`` is its first group.
    """
    column_type(records, "topic")
    whole = rf"\A(?:{regex})\z"
    topic = sf.col("topic")
    routed = sf.when(topic.rlike(whole), sf.regexp_replace(topic, whole, replacement))
    return records.withColumn("topic", routed.otherwise(topic))


def timestamp_router(
    records: DataFrame,
    *,
    topic_format: str = "${topic}-${timestamp}",
    timestamp_format: str = "yyyyMMdd",
) -> DataFrame:
    """Connect's TimestampRouter: the topic's name with the record's time, in UTC.

    ``timestamp_format`` is a pattern of Java's, of the letters y M d H m s S X.
    """
    column_type(records, "topic")
    column_type(records, "timestamp")
    stamp = format_utc(sf.col("timestamp"), timestamp_format)
    topic = sf.replace(sf.lit(topic_format), sf.lit("${topic}"), sf.col("topic"))
    return records.withColumn("topic", sf.replace(topic, sf.lit("${timestamp}"), stamp))


def extract_topic(records: DataFrame, column: str, name: str) -> DataFrame:
    """Confluent's ExtractTopic: the topic is that field of the key or value.

    Where it is NULL or empty the topic stays.
    """
    path, _ = resolve(struct_type(records, column), name, column)
    found = sf.nullif(field(column, path).cast("string"), sf.lit(""))
    return records.withColumn("topic", sf.coalesce(found, sf.col("topic")))


def filter_out(records: DataFrame, predicate: Column) -> DataFrame:
    """Connect's Filter: without the records that the predicate is true of (``~`` negates it).

    Where it is NULL the record stays: to lose one takes a clear answer.
    """
    return records.filter(~sf.coalesce(predicate, sf.lit(False)))


def only_where(
    records: DataFrame,
    predicate: Column,
    transform: Callable[..., DataFrame],
    *arguments: Any,
    **named: Any,
) -> DataFrame:
    """A transform with a predicate, as ``transforms.NAME.predicate`` of Connect.

    Other records keep their columns as they were; so the transform must keep the columns and
    their types, and may not drop records. Raises TransformError where it does not.
    """
    columns = records.columns
    marked = records.select(
        "*",
        sf.coalesce(predicate, sf.lit(False)).alias(_PREDICATE),
        sf.struct(*[sf.col(quoted(name)) for name in columns]).alias(_BEFORE),
    )
    changed = transform(marked, *arguments, **named)
    before = {each.name: each.dataType.simpleString() for each in records.schema.fields}
    after = {each.name: each.dataType.simpleString() for each in changed.schema.fields}
    after = {name: kind for name, kind in after.items() if name not in (_PREDICATE, _BEFORE)}
    if before != after:
        names = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        raise TransformError(
            f"the transform gives {', '.join(names)} another type, which records that it is not "
            "for would not have; next: apply it to all records, or keep the types"
        )
    return changed.select(
        *[
            sf.when(sf.col(_PREDICATE), sf.col(quoted(name)))
            .otherwise(sf.col(quoted(_BEFORE, name)))
            .alias(name)
            for name in columns
        ]
    )


def record_is_tombstone() -> Column:
    """Connect's predicate RecordIsTombstone: whether the value is NULL."""
    return sf.col("value").isNull()


def topic_name_matches(regex: str) -> Column:
    """Connect's predicate TopicNameMatches: whether an expression of Java's matches the name."""
    return sf.col("topic").rlike(rf"\A(?:{regex})\z")
