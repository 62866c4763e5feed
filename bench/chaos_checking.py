"""How long the chaos harness takes to judge millions of records, and in how much memory.

Writes the history of a correct run: producers whose appends of 1 to ``--run`` records lie between
each other, readers, and final reads. The shorter the runs, the more there is to judge. Then it is
read from the file and judged in a process of its own, whose peak memory is told.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import orjson

from penstock.chaos.checkers import Evidence, HeldFault
from penstock.chaos.checkers.registry import applicable
from penstock.chaos.history import read_history

_PARTITIONS: Final = 12
_PRODUCERS: Final = 24
_GIVEN: Final = 500
"""So many records a poll gives, or a few more."""
_MS: Final = 1_000_000


def events(records: int, longest: int, random: Random) -> Iterator[dict[str, Any]]:
    """Of a correct run, by time."""
    t = 0
    logs: list[list[tuple[int, str, int, int]]] = [[] for _ in range(_PARTITIONS)]
    ends, numbers = [0] * _PARTITIONS, [[0] * _PARTITIONS for _ in range(_PRODUCERS)]
    read, unread = [0] * _PARTITIONS, [0] * _PARTITIONS
    written = 0
    while written < records:
        t += 50_000
        who, where = random.randrange(_PRODUCERS), random.randrange(_PARTITIONS)
        name, first, count = f"producer-{who}", numbers[who][where], random.randint(1, longest)
        asked = {
            "topic": "orders",
            "partition": where,
            "producer": name,
            "acks": "all",
            "first": first,
            "count": count,
        }
        offset = ends[where]
        yield {"t": t, "p": name, "type": "invoke", "f": "append", "value": asked}
        answer = {**asked, "runs": [[first, count, offset]]}
        yield {"t": t + 40_000, "p": name, "type": "ok", "f": "append", "value": answer}
        logs[where].append((offset, name, first, count))
        ends[where] += count
        numbers[who][where] += count
        written += count
        unread[where] += count
        if unread[where] >= _GIVEN:
            unread[where] = 0
            t += 50_000
            yield from _poll(f"reader-{where}", where, logs[where], read[where], t=t, phase="")
            read[where] = len(logs[where])
    for where, log in enumerate(logs):
        reader = f"final-{where}"
        seek = {"topic": "orders", "partition": where, "where": "earliest"}
        for kind, value in (("invoke", seek), ("ok", {"offset": 0})):
            t += _MS
            shared = {"t": t, "p": reader, "type": kind, "f": "seek", "phase": "final"}
            yield {**shared, "value": value}
        for at in range(0, len(log), _GIVEN):
            t += _MS
            yield from _poll(reader, where, log[: at + _GIVEN], at, t=t, phase="final")


def _poll(
    reader: str,
    where: int,
    log: Sequence[tuple[int, str, int, int]],
    at: int,
    *,
    t: int,
    phase: str,
) -> Iterator[dict[str, Any]]:
    partition = f"orders-{where}"
    before, after = log[at][0], log[-1][0] + log[-1][3]
    asked = {"topic": "orders", "positions": {partition: before}, "isolation": "read_uncommitted"}
    runs = [[partition, *run] for run in log[at:]]
    answer = {"runs": runs, "positions": {partition: after}, "ends": {partition: after}}
    for shift, kind, value in ((0, "invoke", asked), (10_000, "ok", answer)):
        event = {"t": t + shift, "p": reader, "type": kind, "f": "poll", "value": value}
        yield {**event, "phase": phase} if phase else event


def write(path: Path, records: int, longest: int) -> None:
    """The whole history of a run."""
    with path.open("wb") as file:
        for event in events(records, longest, Random(0)):
            file.write(orjson.dumps(event) + b"\n")


def judge(path: Path) -> None:
    """Read and judge it, and print what it took."""
    began = time.perf_counter()
    history = read_history(path)
    print(f"  {'read and paired':24} {time.perf_counter() - began:6.1f} s")
    fault = HeldFault("kill", "kill", 0, _MS, 2 * _MS, [1])
    evidence = Evidence(faults=[fault])
    for checker in applicable(history, evidence):
        start = time.perf_counter()
        verdict = checker.check(history, evidence)
        took = time.perf_counter() - start
        print(f"  {verdict.checker:24} {took:6.1f} s  {verdict.valid} of {verdict.looked_at:,}")
    used = resource.getrusage(resource.RUSAGE_SELF)
    wall, cpu = time.perf_counter() - began, used.ru_utime + used.ru_stime
    memory = used.ru_maxrss / 1024
    print(f"  {'in all':24} {wall:6.1f} s, {cpu:.1f} s of CPU, peak memory {memory:,.0f} MiB")


def main() -> None:
    """Write, and judge in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--run", type=int, default=10, help="the most records of one append")
    parser.add_argument("--judge", type=Path, help="judge this history alone")
    arguments = parser.parse_args()
    if arguments.judge is not None:
        judge(arguments.judge)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "history.jsonl")
        write(path, arguments.records, arguments.run)
        size = path.stat().st_size / 2**20
        print(
            f"{arguments.records:,} records in appends of 1 to {arguments.run}: {size:,.0f} MiB",
            flush=True,
        )
        subprocess.run([sys.executable, __file__, "--judge", str(path)], check=True)


if __name__ == "__main__":
    main()
