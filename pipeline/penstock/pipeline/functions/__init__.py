"""Connect's single-message transforms, predicates and converters, for Spark's columns.

::

    orders = (
        records.withColumn("value", from_json("value", "id bigint, card string, total double"))
        .transform(mask_field, "value", "card")
        .transform(insert_field, "value", "offset", sf.col("offset"))
        .transform(regex_router, "(.*)-raw", "$1")
        .withColumn("value", to_json("value"))
    )
"""

from penstock.pipeline.functions.avro import from_avro, to_avro
from penstock.pipeline.functions.fields import (
    cast,
    extract_field,
    flatten,
    hoist_field,
    insert_field,
    mask_field,
    replace_field,
    timestamp_converter,
    value_to_key,
)
from penstock.pipeline.functions.headers import (
    drop_headers,
    has_header_key,
    header,
    header_from,
    insert_header,
)
from penstock.pipeline.functions.protobuf import from_protobuf, to_protobuf
from penstock.pipeline.functions.routing import (
    extract_topic,
    filter_out,
    only_where,
    record_is_tombstone,
    regex_router,
    timestamp_router,
    topic_name_matches,
)
from penstock.pipeline.functions.text import from_csv, from_json, to_csv, to_json

__all__ = [
    "cast",
    "drop_headers",
    "extract_field",
    "extract_topic",
    "filter_out",
    "flatten",
    "from_avro",
    "from_csv",
    "from_json",
    "from_protobuf",
    "has_header_key",
    "header",
    "header_from",
    "hoist_field",
    "insert_field",
    "insert_header",
    "mask_field",
    "only_where",
    "record_is_tombstone",
    "regex_router",
    "replace_field",
    "timestamp_converter",
    "timestamp_router",
    "to_avro",
    "to_csv",
    "to_json",
    "to_protobuf",
    "topic_name_matches",
    "value_to_key",
]
