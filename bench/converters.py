"""What it costs to read a column of Avro: ``from_avro`` as a task of Spark's calls it, without
Spark, and fastavro's own reader in a loop beside it.

Records of five fields (BIGINT, two texts of which one may be NULL, DOUBLE, INT), in a batch of
10,000 rows. CPU microseconds a row, the best of several rounds in turns. By the schema that wrote
it; framed, by an equal schema that is looked up; and framed, by one that has a field less, which
fastavro resolves field by field. There is no goal: exit status 0.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import fastavro
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type

from penstock.cli.output import print_json, print_table
from penstock.pipeline.functions.avro import AvroDecoder
from penstock.pipeline.functions.avro_types import parse, spark_type
from penstock.pipeline.functions.binary import decode_batch
from penstock.pipeline.functions.framing import frame

_ROWS: Final = 10_000
_FIELDS: Final[list[dict[str, Any]]] = [
    {"name": "id", "type": "long"},
    {"name": "name", "type": "string"},
    {"name": "price", "type": "double"},
    {"name": "note", "type": ["null", "string"]},
    {"name": "count", "type": "int"},
]
_SCHEMA: Final = {"type": "record", "name": "Order", "fields": _FIELDS}
_OLDER: Final = {"type": "record", "name": "Order", "fields": _FIELDS[:4]}
_NEWER: Final = {**_SCHEMA, "fields": [*_FIELDS[:4], {**_FIELDS[4], "default": 0}]}


def _orders() -> list[dict[str, Any]]:
    return [
        {
            "id": number, "name": f"name-{number}", "price": number / 3,
            "note": "hello" if number % 2 else None, "count": number % 100,
        }
        for number in range(_ROWS)
    ]  # fmt: skip


def _written(schema: dict[str, Any], header: bytes = b"") -> list[bytes]:
    parsed, found = parse(schema), []
    for order in _orders():
        target = io.BytesIO()
        target.write(header)
        fastavro.schemaless_writer(target, parsed, order)
        found.append(target.getvalue())
    return found


def _decoding(
    decoder: AvroDecoder, schema: dict[str, Any], data: list[bytes]
) -> Callable[[], object]:
    kind = to_arrow_type(spark_type(parse(schema)), timezone="UTC")
    return partial(decode_batch, decoder.reader(), pa.array(data), kind, lenient=False)


def _fastavro() -> Callable[[], object]:
    data, schema = _written(_SCHEMA), parse(_SCHEMA)
    return lambda: [fastavro.schemaless_reader(io.BytesIO(each), schema, None) for each in data]


def _ways() -> dict[str, Callable[[], object]]:
    own, newer = json.dumps(_SCHEMA), json.dumps(_NEWER)
    framed, older = _written(_SCHEMA, frame(7)), _written(_OLDER, frame(7))
    return {
        "fastavro's reader alone": _fastavro(),
        "from_avro": _decoding(AvroDecoder(own, None, False, None), _SCHEMA, _written(_SCHEMA)),
        "from_avro, equal schema by id": _decoding(
            AvroDecoder(own, None, True, lambda _: json.loads(own)), _SCHEMA, framed
        ),
        "from_avro, other schema by id": _decoding(
            AvroDecoder(newer, None, True, lambda _: _OLDER), _NEWER, older
        ),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    ways = _ways()
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, run in ways.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], (time.process_time() - start) / _ROWS * 1e6)
    if options.json:
        print_json({"us_per_row": best})
    else:
        print_table(
            ["way", "us a row"],
            [[name, f"{value:.2f}"] for name, value in best.items()],
            right=["us a row"],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
