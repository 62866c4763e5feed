"""What it costs to encode a record, and to decode it as a value or in columns, by each codec.

Records of 100 bytes, without a key, in batches of 1,000 (110 KB) and of 150 (16 KB, a producer's
batch.size); checksums are made and checked. CPU microseconds a record, the best of several rounds
in turns. The compiled codec, the one in pure Python, and those of aiokafka (Cython) and
kafka-python. Exit status 1 when a goal is missed, with batches of 1,000 records: 0.12 to encode,
0.2 to decode into tuples, 0.03 into columns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

from aiokafka.record._crecords import DefaultRecordBatch as AiokafkaBatch
from aiokafka.record._crecords import DefaultRecordBatchBuilder as AiokafkaBuilder
from kafka.record.default_records import DefaultRecordBatch as KafkaPythonBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder

from penstock.cli.output import print_json, print_table
from penstock.wire import codec, reference
from penstock.wire.records import (
    BatchBuilder,
    RecordData,
    decode_batch,
    decode_columns,
    encode_batch,
)

GOALS: Final = {"encode": 0.12, "tuples": 0.2, "columns": 0.03}
COUNTS: Final = (1_000, 150)
_NOW_MS: Final = 1_700_000_000_000

Calls = dict[str, Callable[[], object]]


def _ours(records: list[RecordData]) -> Calls:
    batch = encode_batch(records)
    return {
        "encode": lambda: encode_batch(records),
        "tuples": lambda: decode_batch(batch),
        "columns": lambda: decode_columns(batch),
    }


def _pure(records: list[RecordData]) -> Calls:
    """The same with the reference in the compiled one's place."""

    class Builder(reference.RecordsBody):
        build = BatchBuilder.build
        _packed = BatchBuilder._packed
        _header = BatchBuilder._header

    def encode() -> object:
        builder: Any = Builder()
        builder.extend(records)
        return builder.build()

    def with_reference(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with mock.patch.multiple(
                codec,
                parse_records=reference.parse_records,
                parse_columns=reference.parse_columns,
            ):
                return call()

        return run

    ours = _ours(records)
    return {
        "encode": encode,
        "tuples": with_reference(ours["tuples"]),
        "columns": with_reference(ours["columns"]),
    }


def _theirs(builder_class: Any, batch_class: Any, records: list[RecordData]) -> Calls:
    batch = encode_batch(records)

    def encode() -> object:
        builder = builder_class(2, 0, 0, -1, -1, -1, 1 << 30)
        for offset, record in enumerate(records):
            builder.append(offset, record.timestamp_ms, record.key, record.value, [])
        return builder.build()

    def decode() -> object:
        reader = batch_class(batch)
        reader.validate_crc()
        return list(reader)

    return {"encode": encode, "tuples": decode}


def _rounds(calls: dict[tuple[str, str], Callable[[], object]], rounds: int, count: int) -> Any:
    """The best CPU microseconds a record of each, all in turns."""
    best: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for key, call in calls.items():
            call()
            times, began = 0, time.process_time()
            while (spent := time.process_time() - began) < 0.05:
                call()
                times += 1
            us = spent / times / count * 1e6
            best[key] = min(best.get(key, us), us)
    return best


def _figures(rounds: int) -> Iterator[dict[str, Any]]:
    for count in COUNTS:
        records = [RecordData(_NOW_MS, None, b"%0100d" % number) for number in range(count)]
        codecs = {
            "penstock, compiled": _ours(records),
            "penstock, pure Python": _pure(records),
            "aiokafka, Cython": _theirs(AiokafkaBuilder, AiokafkaBatch, records),
            "kafka-python": _theirs(KafkaPythonBuilder, KafkaPythonBatch, records),
        }
        calls = {(name, what): one for name, all_ in codecs.items() for what, one in all_.items()}
        best = _rounds(calls, rounds, count)
        for name in codecs:
            costs = {what: best.get((name, what)) for what in GOALS}
            yield {"codec": name, "records": count, **costs}


def main() -> int:
    """Measure, print, and say by the exit status whether the goals were met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if not codec.IS_COMPILED:
        print("The compiled codec was not built: a C compiler is needed.", file=sys.stderr)
        return 2
    figures = list(_figures(options.rounds))
    if options.json:
        print_json({"goals": GOALS, "figures": figures})
    else:
        print_table(
            ["codec", "records a batch", *(f"{what} us" for what in GOALS)],
            [
                [
                    one["codec"],
                    str(one["records"]),
                    *("" if one[what] is None else f"{one[what]:.3f}" for what in GOALS),
                ]
                for one in figures
            ],
            right=["records a batch", *(f"{what} us" for what in GOALS)],
        )
    return int(any(figures[0][what] > goal for what, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
