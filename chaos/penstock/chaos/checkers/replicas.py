"""Whether replicas hold the same bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final

from penstock.chaos.checkers import Evidence, ReplicaRecords
from penstock.chaos.history import History
from penstock.chaos.verdict import Findings, Verdict

_Batch = tuple[int, int, bytes]


def _is_internal(topic: str) -> bool:
    """Coordinators' topics are compacted."""
    return topic.startswith("__")


class ReplicasIdentical:
    """Replicas differ where, of one partition after healing, one of them has another batch (offsets
    or bytes) than most at an offset that lies wholly above the log starts and below the high
    watermarks of all of them. Partitions of compacted topics are left out: each replica compacts
    for itself. An anomaly is a partition and a replica, told with its first batch that differs.
    """

    name = "replicas-identical"

    def __init__(self, *, is_compacted: Callable[[str], bool] = _is_internal) -> None:
        self._is_compacted: Final = is_compacted

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del history
        findings = Findings(self.name)
        partitions: dict[tuple[str, int], list[ReplicaRecords]] = defaultdict(list)
        for replica in evidence.replicas:
            if not self._is_compacted(replica.topic):
                partitions[replica.topic, replica.partition].append(replica)
        for (topic, number), replicas in sorted(partitions.items()):
            if len(replicas) > 1:
                _compare(findings, f"{topic}-{number}", replicas)
        return findings.verdict("of no partition two replicas' records were gathered")


def _compare(findings: Findings, name: str, replicas: list[ReplicaRecords]) -> None:
    start = max(replica.log_start_offset for replica in replicas)
    end = min(replica.high_watermark for replica in replicas)
    held: list[dict[int, _Batch]] = [
        {base: (base, last, digest) for base, last, digest in replica.batches}
        for replica in replicas
    ]
    # A batch may straddle where one log begins, or the high watermark: those are left out.
    bases = sorted({base for its in held for base in its if start <= base < end})
    differs: dict[int, tuple[int, _Batch | None, _Batch | None]] = {}
    for base in bases:
        batches = [its.get(base) for its in held]
        if any(batch is not None and batch[1] >= end for batch in batches):
            continue
        findings.looked_at += 1
        usual, _ = Counter(batches).most_common(1)[0]
        for replica, batch in zip(replicas, batches, strict=True):
            if batch != usual:
                differs.setdefault(replica.node, (base, batch, usual))
    for node, (base, batch, usual) in sorted(differs.items()):
        findings.add(
            f"{name}: the replica of node {node} differs from the others at offset {base}",
            {"node": node, "batch": _shown(batch)},
            {"others": _shown(usual)},
        )


def _shown(batch: _Batch | None) -> object:
    if batch is None:
        return "no batch begins there"
    return {"base_offset": batch[0], "last_offset": batch[1], "sha256": batch[2].hex()}
