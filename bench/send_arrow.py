"""What it costs to put the rows of an Arrow table into batches: `send_arrow`, without the network.

Tables as Spark's sink has them, 10,000 rows of 100 bytes: values alone; with keys of 8 bytes; with
keys, times and partitions; with two headers. Each row is looked at twice, as `send_arrow` does:
once whether all can be sent, and once to send them. CPU microseconds a row, the best of several
rounds in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pyarrow as pa

from penstock.cli.output import print_json, print_table
from penstock.client.arrow_sending import ArrowRecords
from penstock.wire.codec import IS_COMPILED, Claim, Intake, Places, Receipt, Stuck
from penstock.wire.records import BatchBuilder

ROWS: Final = 10_000
PARTITIONS: Final = 6
_NOW_MS: Final = 1_700_000_000_000
_LARGE: Final = 2**30


class _Place(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp_ms: int


def _tables() -> dict[str, pa.Table]:
    values = pa.array([b"%0100d" % number for number in range(ROWS)])
    keys = pa.array([b"%08d" % number for number in range(ROWS)])
    times = pa.array(range(_NOW_MS, _NOW_MS + ROWS), pa.int64())
    partitions = pa.array([number % PARTITIONS for number in range(ROWS)], pa.int32())
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    headers = pa.array([[("trace", b"12345678"), ("kind", b"order")]] * ROWS, pa.list_(header))
    return {
        "values": pa.table({"value": values}),
        "keys and values": pa.table({"key": keys, "value": values}),
        "keys, values, times, partitions": pa.table(
            {"key": keys, "value": values, "timestamp": times, "partition": partitions}
        ),
        "values, headers": pa.table({"value": values, "headers": headers}),
    }


def _send(table: pa.Table) -> None:
    """The table into open batches that have room for all of it."""
    intake: Intake[Receipt, Any] = Intake(
        Claim, buffer_memory_bytes=_LARGE, max_record_bytes=_LARGE, hashes_keys=True
    )
    for number in range(PARTITIONS):
        intake.open(
            "t",
            number,
            partition_count=PARTITIONS,
            body=BatchBuilder(),
            receipt=Receipt("t", number, _Place),
            limit_bytes=_LARGE,
        )
    intake.stick("t", Stuck(0, _LARGE))
    records = ArrowRecords(table)
    for _ in records.chunks(_NOW_MS):
        pass
    places: Places[Receipt] = Places()
    for plain in records.chunks(_NOW_MS):
        before = len(places)
        taken = intake.take_many(
            "t",
            *plain[:3],
            partition=None,
            before=before,
            places=places,
            partitions=plain.partitions,
            headers=plain.joined_headers,
        )
        assert taken == len(plain.values)


def _rounds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best CPU microseconds a row of each, all in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            times, began = 0, time.process_time()
            while (spent := time.process_time() - began) < 0.1:
                call()
                times += 1
            best[name] = min(best[name], spent / times / ROWS * 1e6)
    return best


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if not IS_COMPILED:
        print("The compiled codec was not built: a C compiler is needed.", file=sys.stderr)
        return 2
    calls = {name: lambda table=table: _send(table) for name, table in _tables().items()}
    best = _rounds(calls, options.rounds)
    if options.json:
        print_json({"cpu_us_per_row": best})
    else:
        print_table(
            ["columns", "CPU us a row"],
            [[name, f"{us:.3f}"] for name, us in best.items()],
            right=["CPU us a row"],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
