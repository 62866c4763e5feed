"""What an append and a read cost in a partition's log, beside the bare system calls.

Prints microseconds of wall and CPU time per call, and their ratio to os.writev and os.pread of as
many bytes. Run: python bench/storage_append.py [DIRECTORY]  (default: a temporary directory).
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import open_log
from penstock.broker.storage.settings import LogSettings, TopicLogConfig
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from penstock.wire.records import RecordData, encode_batch

_SEGMENT = {"segment.bytes": str(2**31 - 1), "max.message.bytes": str(2**25)}
_BELOW = 2**62


def _open(root: Path, partition: int) -> PartitionLog:
    directory = root / f"bench-{partition}"
    directory.mkdir()
    home = DataDirectory(root, LogSettings(), lambda: int(time.time() * 1000))
    return open_log(
        home,
        directory,
        partition=TopicPartition("bench", partition),
        key=TopicIdPartition(TopicId(bytes(16)), partition),
        config=TopicLogConfig.of(_SEGMENT),
    )


def _batch(size: int, record_bytes: int = 1000) -> bytes:
    record = RecordData(1_700_000_000_000, None, os.urandom(record_bytes))
    return encode_batch([record] * max(1, size // record_bytes))


def _measure(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Wall and CPU microseconds of one call, the best of three rounds."""
    rounds = []
    for _ in range(3):
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            call()
        rounds.append(
            (
                (time.perf_counter() - wall) / times * 1e6,
                (time.process_time() - cpu) / times * 1e6,
            )
        )
    return min(rounds)


def _bare_append(path: Path, data: bytes) -> Callable[[], object]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    parts = [data[:16], memoryview(data)[16:]]
    position = 0

    def append() -> None:
        nonlocal position
        position += os.pwritev(fd, parts, position)

    return append


def _reader(log: PartitionLog, size: int) -> Callable[[], object]:
    at = 0

    def read() -> None:
        nonlocal at
        data = log.read(at, size, below=_BELOW)
        at += 64
        if not data or at >= log.log_end_offset - 64:
            at = 0

    return read


def _row(what: str, measured: tuple[float, float], bare: tuple[float, float]) -> None:
    print(
        f"{what:38} {measured[0]:9.1f} {measured[1]:9.1f} {bare[0]:9.1f} "
        f"{measured[0] / bare[0]:6.2f} {measured[1] / max(bare[1], 0.1):6.2f}"
    )


def main() -> None:
    """Run everything and print a table."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        root = Path(name)
        print(f"{'':38} {'wall us':>9} {'cpu us':>9} {'bare us':>9} {'wall x':>6} {'cpu x':>6}")
        for number, (label, size, times) in enumerate(
            [("1 KB", 1_000, 4000), ("64 KB", 64_000, 1500), ("1 MB", 1_000_000, 150)]
        ):
            data = _batch(size)
            bare = _measure(_bare_append(root / f"bare-{number}", data), times)
            log = _open(root, number)
            leader = _measure(lambda: log.append_as_leader(data, 1, now_ms=1), times)  # noqa: B023 - called at once.
            _row(f"append as leader, {label}", leader, bare)
            piece = log.read(0, len(data), below=_BELOW)
            fd = os.open(log.directory / "00000000000000000000.log", os.O_RDONLY)
            bare = _measure(lambda: os.pread(fd, len(data), 0), times)  # noqa: B023 - as above.
            _row(f"read, {label}", _measure(_reader(log, len(piece)), times), bare)
            os.close(fd)
            log.close(save=False)
        many = _batch(1000) * 64
        bare = _measure(_bare_append(root / "bare-many", many), 1000)
        log = _open(root, 10)
        append = _measure(lambda: log.append_as_leader(many, 1, now_ms=1), 1000)
        _row("append as leader, 64 batches of 1 KB", append, bare)
        log.close(save=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        logs = [_open(root, partition) for partition in range(100, 600)]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"memory of an empty log: {grown / len(logs):.1f} KB (500 logs)")


if __name__ == "__main__":
    main()
