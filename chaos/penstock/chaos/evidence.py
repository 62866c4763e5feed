"""What a run gathers beside the history: processes, logs, watermarks and replicas.

Processes are measured by /proc: where there is none (or nodes are elsewhere) there are no samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from penstock.chaos.checkers import Evidence, HeldFault, ReplicaRecords, Sample
from penstock.chaos.checkers.crashes import tells_of_a_crash
from penstock.chaos.cluster import Cluster
from penstock.chaos.errors import EvidenceError, reason_of
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import iter_batches

SAMPLE_S: Final = 1.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_MOST_LINES: Final = 200
_TRACEBACK: Final = "Traceback (most recent call last)"


class Watcher(ABC):
    """Calls ``look`` every so often in a thread of its own, until it is stopped."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._interval_s: Final = interval_s
        self._stop: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Look no more. Idempotent."""
        self._stop.set()
        self._thread.join(timeout_s)

    @abstractmethod
    def look(self) -> None:
        """What is done each time."""

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()


class ProcessSampler(Watcher):
    """Memory, descriptors and threads of every node's process, as time goes by."""

    def __init__(self, cluster: Cluster, epoch_ns: int) -> None:
        super().__init__("samples", SAMPLE_S)
        self._cluster: Final = cluster
        self._epoch_ns: Final = epoch_ns
        self.samples: Final[list[Sample]] = []

    def look(self) -> None:
        """Measure each."""
        for node in self._cluster.nodes:
            pid = self._cluster.pid(node)
            used = None if pid is None else measure(pid)
            if used is not None:
                t = time.monotonic_ns() - self._epoch_ns
                assert pid is not None
                self.samples.append(Sample(t, node, pid, *used))


def measure(pid: int) -> tuple[int, int, int] | None:
    """Resident bytes, descriptors and threads of a process; None where that cannot be known."""
    process = Path("/proc") / str(pid)
    try:
        pages = int((process / "statm").read_text(encoding="ascii").split()[1])
        descriptors = sum(1 for _ in (process / "fd").iterdir())
        threads = sum(1 for _ in (process / "task").iterdir())
    except (OSError, ValueError, IndexError):
        return None
    return pages * _PAGE_BYTES, descriptors, threads


def crash_lines(path: Path) -> list[str]:
    """The lines of a node's log that tell of a crash or a broken assertion, the first ones.

    A traceback is one entry: what was logged before it, and what it ends with.
    """
    found: list[str] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for entry in _crashes(file):
                found.append(entry)
                if len(found) >= _MOST_LINES:
                    break
    except FileNotFoundError:
        pass
    return found


def _crashes(lines: Iterable[str]) -> Iterator[str]:
    before = ""
    traceback: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\n")
        if traceback:
            traceback.append(text)
            if not text or text[0].isspace():
                continue
            yield f"{traceback[0]} ... {text}"
            traceback = []
        elif _TRACEBACK in text:
            traceback = [f"line {number}: {before} {_TRACEBACK}"]
        elif tells_of_a_crash(text):
            yield f"line {number}: {text}"
        before = text
    if traceback:
        yield traceback[0]


def read_replica(
    directory: Path, topic: str, partition: int, node: int, high_watermark: int
) -> ReplicaRecords:
    """What a node's files hold of a partition below the high watermark.

    The node may run: what is below the high watermark is not written any more (of a topic that is
    not compacted), and what is not whole yet is above it.
    """
    batches: list[tuple[int, int, bytes]] = []
    for segment in sorted((directory / "logs" / f"{topic}-{partition}").glob("*.log")):
        try:
            for header, batch in iter_batches(segment.read_bytes(), allow_torn_tail=True):
                if header.last_offset >= high_watermark:
                    break
                digest = hashlib.sha256(batch).digest()
                batches.append((header.base_offset, header.last_offset, digest))
        except (CorruptRecordError, FileNotFoundError):
            break  # Deleted meanwhile, or damaged: then the rest is missing, which tells.
    start = batches[0][0] if batches else high_watermark
    return ReplicaRecords(topic, partition, node, start, high_watermark, batches)


# --- kept with a run, to be judged again


def write_evidence(evidence: Evidence, directory: Path) -> None:
    """Keep everything but the faults, which ``faults.jsonl`` has."""
    directory.mkdir(exist_ok=True)
    _write_lines(directory / "samples.jsonl", map(asdict, evidence.samples))
    _write_lines(directory / "watermarks.jsonl", evidence.watermarks)
    _write_lines(
        directory / "replicas.jsonl",
        (
            {**asdict(one), "batches": [[low, high, d.hex()] for low, high, d in one.batches]}
            for one in evidence.replicas
        ),
    )
    logs = {str(node): list(lines) for node, lines in evidence.logs.items()}
    (directory / "crashes.json").write_text(json.dumps(logs, indent=1) + "\n", encoding="utf-8")


def read_evidence(directory: Path, faults: Sequence[HeldFault]) -> Evidence:
    """What ``write_evidence`` wrote, as far as it is there. Raises EvidenceError."""
    with readable(directory / "crashes.json") as path:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        logs = {int(node): list(lines) for node, lines in found.items()}
    with readable(directory / "samples.jsonl") as path:
        samples = [Sample(**one) for one in _read_lines(path)]
    with readable(directory / "replicas.jsonl") as path:
        replicas = [_replica(one) for one in _read_lines(path)]
    with readable(directory / "watermarks.jsonl") as path:
        watermarks = list(_read_lines(path))
    return Evidence(faults, samples, replicas, logs, watermarks)


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """Raises EvidenceError where what is done with the file inside finds it to be none of ours."""
    try:
        yield path
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"{path} is no evidence of a run ({reason_of(error)}); next: take the file out of its "
            "directory, and what it tells is not judged"
        ) from error


def _replica(fields: Mapping[str, Any]) -> ReplicaRecords:
    batches = [(low, high, bytes.fromhex(digest)) for low, high, digest in fields["batches"]]
    return ReplicaRecords(**{**fields, "batches": batches})


def _write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
