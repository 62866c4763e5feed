"""What a run gathers beside its history: from logs, from segment files, from processes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from penstock.chaos.checkers import Evidence, HeldFault, ReplicaRecords, Sample
from penstock.chaos.checkers.crashes import tells_of_a_crash
from penstock.chaos.evidence import (
    crash_lines,
    measure,
    read_evidence,
    read_replica,
    write_evidence,
)
from penstock.wire.records import BatchBuilder

LOG = """\
[info     ] started
[error    ] event failed                   node=2
Traceback (most recent call last):
  File "broker.py", line 1, in <module>
    raise ValueError
ValueError: of no value
[info     ] goes on
AssertionError: the epoch went back
penstock.chaos: node 2 (pid 7) ended by itself: killed by SIGSEGV
"""


def batch(base_offset: int, *values: bytes) -> bytes:
    builder = BatchBuilder()
    for value in values:
        builder.append(0, None, value)
    return builder.build(base_offset=base_offset, leader_epoch=1)


def test_a_traceback_is_one_entry_with_what_it_began_and_ended_with(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    path.write_text(LOG, encoding="utf-8")
    found = crash_lines(path)
    assert len(found) == 3
    assert "event failed" in found[0]
    assert found[0].endswith("ValueError: of no value")
    assert "the epoch went back" in found[1]
    assert "ended by itself" in found[2]
    assert all(map(tells_of_a_crash, found))


def test_a_log_that_is_not_there_tells_of_nothing(tmp_path: Path) -> None:
    assert crash_lines(tmp_path / "none.log") == []


def test_a_replica_is_read_up_to_the_high_watermark(tmp_path: Path) -> None:
    first, second, third = batch(0, b"a", b"b"), batch(2, b"c"), batch(3, b"d", b"e")
    directory = tmp_path / "logs" / "t-1"
    directory.mkdir(parents=True)
    (directory / "00000000000000000000.log").write_bytes(first + second)
    (directory / "00000000000000000003.log").write_bytes(third + b"torn")
    found = read_replica(tmp_path, "t", 1, node=2, high_watermark=5)
    assert [(low, high) for low, high, _ in found.batches] == [(0, 1), (2, 2), (3, 4)]
    assert found.batches[1][2] == hashlib.sha256(second).digest()
    assert (found.node, found.high_watermark, found.log_start_offset) == (2, 5, 0)
    # A batch that reaches beyond it may still change.
    cut = read_replica(tmp_path, "t", 1, node=2, high_watermark=4)
    assert [high for _, high, _ in cut.batches] == [1, 2]


def test_what_is_damaged_or_missing_ends_what_a_replica_has(tmp_path: Path) -> None:
    directory = tmp_path / "logs" / "t-0"
    directory.mkdir(parents=True)
    (directory / "00000000000000000000.log").write_bytes(batch(0, b"a") + b"\xff" * 100)
    assert len(read_replica(tmp_path, "t", 0, 1, 9).batches) == 1
    assert read_replica(tmp_path, "t", 7, 1, 9).batches == []


def test_a_process_is_measured_and_one_that_is_gone_is_not() -> None:
    used = measure(os.getpid())
    assert used is not None
    memory_bytes, descriptors, threads = used
    assert memory_bytes > 1_000_000
    assert descriptors >= 3
    assert threads >= 1
    assert measure(2**30) is None


def test_evidence_is_kept_with_a_run(tmp_path: Path) -> None:
    faults = [HeldFault("kill", "kill", 1, 2, 3, [2])]
    gathered = Evidence(
        faults,
        [Sample(1, 2, 3, 4, 5, 6)],
        [ReplicaRecords("t", 0, 1, 0, 5, [(0, 4, b"\x00\xff")])],
        {1: ["AssertionError"], 2: []},
        [{"t": 1, "node": 1, "topic": "t", "partition": 0, "high_watermark": 5}],
    )
    write_evidence(gathered, tmp_path / "evidence")
    assert read_evidence(tmp_path / "evidence", faults) == gathered
    assert read_evidence(tmp_path / "nothing", faults) == Evidence(faults, [], [], {}, [])
