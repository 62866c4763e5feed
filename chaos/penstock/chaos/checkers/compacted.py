"""Whether compaction keeps what it must, and brings nothing back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.records import is_final, partition_name
from penstock.chaos.checkers.showing import Shown, show
from penstock.chaos.history import Event, History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict

_NOTHING: Final = "no scan was answered"


@dataclass(slots=True)
class _Partition:
    puts: list[Operation] = field(default_factory=list)
    scans: list[Operation] = field(default_factory=list)


def _partitions(history: History) -> Mapping[str, _Partition]:
    found: dict[str, _Partition] = defaultdict(_Partition)
    for one in history.of("put", "scan"):
        asked = one.invoked.value
        its = found[partition_name(asked["topic"], asked["partition"])]
        if one.invoked.f == "put":
            its.puts.append(one)
        elif one.type is Type.OK:
            its.scans.append(one)
    return found


def _offset(put: Operation) -> int | None:
    """Where it was put, as far as it was told."""
    if put.completed is None or put.type is not Type.OK:
        return None
    offset: int | None = (put.completed.value or {}).get("offset")
    return offset


def _at(put: Operation) -> int:
    """Where it was put, of one that was acknowledged."""
    offset = _offset(put)
    assert offset is not None
    return offset


def _completed(one: Operation) -> Event:
    assert one.completed is not None
    return one.completed


def _entries(scan: Operation) -> Sequence[tuple[int, str, int]]:
    entries: Sequence[tuple[int, str, int]] = _completed(scan).value.get("entries") or ()
    return entries


def _end(scan: Operation) -> int:
    return int(_completed(scan).value["end"])


def _doubt_the_end(findings: Findings, partitions: Mapping[str, _Partition]) -> None:
    """Say nothing for certain of a partition that was not scanned whole after everything was
    healed: a key may be gone that nobody looked for.
    """
    for name, its in partitions.items():
        ends = [_end(scan) for scan in its.scans if is_final(scan)]
        last = max((offset for put in its.puts if (offset := _offset(put)) is not None), default=-1)
        if not ends:
            findings.doubt(f"there is no final scan of {name}")
        elif max(ends) <= last:
            findings.doubt(f"the final scans of {name} end at {max(ends)}, and {last} was put")


def _show(scan: Operation, key: str) -> Iterator[Shown]:
    """A scan with the entries of one key alone."""
    for shown in show(scan):
        value = shown.get("value") or {}
        its = value.get("entries")
        if its is None:
            yield shown
        else:
            about = [entry for entry in its if entry[1] == key]
            yield {**shown, "value": {**value, "entries": about, "entries_in_all": len(its)}}


class CompactedLast:
    """Compaction has not kept the last value of a key where a scan of its partition was told, as
    the key's last entry, one at a lower offset than that of a put of the key that was acknowledged
    before the scan was invoked, below the scan's end; or told of no entry of the key, though the
    last such put was no tombstone (and no later tombstone was on its way). After a tombstone the
    key may be absent, but no older value may be its last. An anomaly is a scan and a key. Nothing
    is said for certain of a partition without a final scan of all that was acknowledged.
    """

    name = "compacted-last"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        partitions = _partitions(history)
        _doubt_the_end(findings, partitions)
        for name, its in partitions.items():
            by_answer = sorted(
                (put for put in its.puts if _offset(put) is not None),
                key=lambda put: _completed(put).t,
            )
            tombstones = [put for put in its.puts if put.invoked.value.get("tombstone")]
            known: dict[str, list[Operation]] = defaultdict(list)
            at = 0
            for scan in its.scans:
                while at < len(by_answer) and _completed(by_answer[at]).t < scan.invoked.t:
                    known[by_answer[at].invoked.value["key"]].append(by_answer[at])
                    at += 1
                self._judge(findings, name, scan, known, tombstones)
        return findings.verdict(_NOTHING)

    @staticmethod
    def _judge(
        findings: Findings,
        name: str,
        scan: Operation,
        known: Mapping[str, list[Operation]],
        tombstones: Sequence[Operation],
    ) -> None:
        last: dict[str, int] = {}
        for offset, key, _ in _entries(scan):
            last[key] = max(offset, last.get(key, offset))
        for key, puts in known.items():
            below = [put for put in puts if _at(put) < _end(scan)]
            if not below:
                continue
            findings.looked_at += 1
            put = max(below, key=_at)
            offset = _at(put)
            found = last.get(key)
            if found is not None and found < offset:
                what = f"the last of key {key} is at {found}, but {offset} was put after it"
            elif found is None and not _may_be_deleted(put, scan, tombstones):
                what = f"key {key} is gone, which was put at {offset}"
            else:
                continue
            findings.add(f"{name}: {what}", *show(put), *_show(scan, key))


def _may_be_deleted(put: Operation, scan: Operation, tombstones: Sequence[Operation]) -> bool:
    """Whether it is a tombstone, or one of its key may have come after it."""
    asked, offset = put.invoked.value, _at(put)
    return bool(asked.get("tombstone")) or any(
        one.invoked.value["key"] == asked["key"]
        and one.type is not Type.FAIL
        and one.invoked.t < _completed(scan).t
        and (_offset(one) is None or _at(one) > offset)
        for one in tombstones
    )


class CompactedPast:
    """A key goes back where a scan's last entry of it is at a lower offset than that of an earlier
    scan of the partition (answered before this one was invoked), or, below the end of the earlier
    scan, is a value where that one had found none. (Older entries before a key's last one may come
    back with another leader: each replica compacts for itself.) An entry is a phantom where nobody
    had put its key with its number before the scan was answered, or the put failed, or was
    acknowledged at another offset. Entries are told in the order of their offsets, each once. An
    anomaly is a scan and an entry. Without a final scan of all nothing is said for certain.
    """

    name = "compacted-past"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        partitions = _partitions(history)
        _doubt_the_end(findings, partitions)
        for name, its in partitions.items():
            puts: dict[tuple[str, int], list[Operation]] = defaultdict(list)
            for put in its.puts:
                puts[put.invoked.value["key"], put.invoked.value["number"]].append(put)
            by_answer = sorted(its.scans, key=lambda scan: _completed(scan).t)
            at, earlier = 0, None
            for scan in its.scans:
                while at < len(by_answer) and _completed(by_answer[at]).t < scan.invoked.t:
                    earlier = by_answer[at]
                    at += 1
                findings.looked_at += max(1, len(_entries(scan)))
                for key, what, shown in _wrong_entries(scan, puts):
                    findings.add(f"{name}: {what}", *show(*shown), *_show(scan, key))
                if earlier is not None:
                    for key, what in _gone_back(scan, earlier, puts):
                        findings.add(f"{name}: {what}", *_show(earlier, key), *_show(scan, key))
        return findings.verdict(_NOTHING)


_Puts = Mapping[tuple[str, int], Sequence[Operation]]


def _wrong_entries(scan: Operation, puts: _Puts) -> Iterator[tuple[str, str, list[Operation]]]:
    """Keys, what is wrong with an entry of theirs, and the puts that show it."""
    before = -1
    for offset, key, number in _entries(scan):
        entry = f"number {number} of key {key} at {offset}"
        its = puts.get((key, number), ())
        may = [
            put for put in its if put.type is not Type.FAIL and put.invoked.t < _completed(scan).t
        ]
        if offset <= before:
            yield key, f"{entry} was told after {before}", []
        elif not may:
            yield key, f"{entry} was never put", list(its)
        elif all(_offset(put) not in {None, offset} for put in may):
            yield key, f"{entry} was put at {_offset(may[0])}", may[:1]
        before = max(before, offset)


def _gone_back(scan: Operation, earlier: Operation, puts: _Puts) -> Iterator[tuple[str, str]]:
    """Keys whose last entry is older than an earlier scan found."""
    last = {key: (offset, number) for offset, key, number in _entries(scan)}
    known = {key: offset for offset, key, _ in _entries(earlier)}
    for key, (offset, number) in last.items():
        is_value = not any(
            put.invoked.value.get("tombstone") for put in puts.get((key, number), ())
        )
        if offset < known.get(key, -1):
            yield key, f"the last of key {key} is at {offset} again, after {known[key]} was found"
        elif key not in known and offset < _end(earlier) and is_value:
            yield key, f"key {key} is back at {offset}, where an earlier scan found none"
