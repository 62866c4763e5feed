"""Whether a register behaves as if it did one operation at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.linearizing import NEVER, Step, search, without_idle
from penstock.chaos.checkers.records import is_final
from penstock.chaos.checkers.showing import show
from penstock.chaos.history import History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict

_SHOWN_BESIDE: Final = 6


class LinearizableRegister:
    """A register is not linearizable where there is no order of its operations in which each lies
    between its invocation and its completion and each read tells what the write before it has
    written (the first ones: ``initial``). A write (or ``cas``, which writes where the value is the
    ``expected`` one) that nobody knows of may have been done at any time after its invocation, or
    never; one that failed was not done. Where all answers tell versions, the order is theirs: then
    a version with two values or two writes, a version that goes back in time, and a value that
    nobody could have written yet are the anomalies. Otherwise an order is searched for; an anomaly
    is a register without one, and nothing is said where the search takes more than ``budget``
    steps, or a register was not read in the end, after everything was healed.
    """

    name = "linearizable"

    def __init__(self, *, initial: Any = None, budget: int = 1_000_000) -> None:
        self._initial: Final = initial
        self._budget: Final = budget

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        registers: dict[str, list[Operation]] = defaultdict(list)
        for one in history.of("read", "write", "cas"):
            if one.type is not Type.FAIL:
                registers[str(one.invoked.value["register"])].append(one)
        steps = 0
        for name, operations in sorted(registers.items()):
            findings.looked_at += sum(one.type is Type.OK for one in operations)
            if not any(_is_final_read(one) for one in operations):
                findings.doubt(f"there is no final read of register {name}")
            if _tell_versions(operations):
                for what, shown in _wrong_versions(operations, self._initial):
                    findings.add(f"register {name}: {what}", *show(*shown))
            else:
                steps += self._search(findings, name, operations)
        return findings.verdict("no operation on a register succeeded", steps_of_search=steps)

    def _search(self, findings: Findings, name: str, operations: Sequence[Operation]) -> int:
        steps = [_step(one) for one in operations]
        places = without_idle(steps)
        outcome = search([steps[place] for place in places], _key(self._initial), self._budget)
        if outcome.linearizable is None:
            findings.doubt(
                f"register {name}: no order was found, nor that there is none, in "
                f"{self._budget:,} steps"
            )
        elif not outcome.linearizable:
            assert outcome.stuck is not None
            stuck = operations[places[outcome.stuck]]
            beside = [
                one
                for one in operations
                if one is not stuck and _begun(one) < _ended(stuck) and _ended(one) > _begun(stuck)
            ]
            before = [one for one in operations if _ended(one) < _begun(stuck)][-2:]
            findings.add(
                f"register {name}: there is no order of its operations; the longest that was found "
                f"leaves {outcome.value} and cannot have {stuck.invoked.f} "
                f"{_key(_value_of(stuck))} by {stuck.invoked.p} next",
                *show(*before, stuck, *beside[:_SHOWN_BESIDE]),
            )
        return outcome.steps


def _is_final_read(one: Operation) -> bool:
    return one.invoked.f == "read" and one.type is Type.OK and is_final(one)


def _key(value: Any) -> str:
    """A value as something that can be compared and remembered."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _begun(one: Operation) -> int:
    return one.invoked.t


def _ended(one: Operation) -> int:
    return one.completed.t if one.completed is not None and one.type is Type.OK else NEVER


def _answer(one: Operation) -> Mapping[str, Any]:
    answer = one.completed.value if one.completed is not None else None
    return answer if isinstance(answer, dict) else {}


def _value_of(one: Operation) -> Any:
    """What it wrote, or was told."""
    return (_answer(one) if one.invoked.f == "read" else one.invoked.value).get("value")


def _step(one: Operation) -> Step:
    f, value = one.invoked.f, _key(_value_of(one))
    if f == "read":
        return Step(_begun(one), _ended(one), False, True, expected=value)
    if f == "write":
        return Step(_begun(one), _ended(one), True, False, written=value)
    expected = _key(one.invoked.value.get("expected"))
    return Step(_begun(one), _ended(one), True, True, value, expected)


def _tell_versions(operations: Sequence[Operation]) -> bool:
    """Whether the order of all that is known is told."""
    return all(
        one.invoked.f != "cas" and isinstance(_answer(one).get("version"), int)
        for one in operations
        if one.type is Type.OK
    )


_Wrong = Iterator[tuple[str, tuple[Operation, ...]]]


def _wrong_versions(operations: Sequence[Operation], initial: Any) -> _Wrong:
    done = [one for one in operations if one.type is Type.OK]
    values: dict[int, Operation] = {}
    writes: dict[int, Operation] = {}
    for one in done:
        version = _answer(one)["version"]
        first = values.setdefault(version, one)
        if _value_of(first) != _value_of(one):
            what = f"{_key(_value_of(first))} and also {_key(_value_of(one))}"
            yield f"version {version} is {what}", (first, one)
        if one.invoked.f == "write" and writes.setdefault(version, one) is not one:
            yield f"two writes have version {version}", (writes[version], one)
    yield from _back_in_time(done)
    yield from _unwritten(operations, values, writes, initial)


def _back_in_time(done: Sequence[Operation]) -> _Wrong:
    """Operations with a version below that of one that had ended before they began."""
    by_end = sorted(done, key=_ended)
    at, newest = 0, None
    for one in sorted(done, key=_begun):
        while at < len(by_end) and _ended(by_end[at]) < _begun(one):
            version = _answer(by_end[at])["version"]
            if newest is None or version > _answer(newest)["version"]:
                newest = by_end[at]
            at += 1
        if newest is None:
            continue
        version, before = _answer(one)["version"], _answer(newest)["version"]
        if version < before or (version == before and one.invoked.f == "write"):
            yield f"{one.invoked.f} has version {version} after {before} was seen", (newest, one)


def _unwritten(
    operations: Sequence[Operation],
    values: Mapping[int, Operation],
    writes: Mapping[int, Operation],
    initial: Any,
) -> _Wrong:
    """Values that no write can have written: of each version the first that was told of it."""
    unknown: dict[str, list[Operation]] = defaultdict(list)
    for one in operations:
        if one.invoked.f == "write" and one.type is not Type.OK:
            unknown[_key(_value_of(one))].append(one)
    lowest = min(values, default=0)
    for version, one in sorted(values.items()):
        write = writes.get(version)
        if write is not None:
            told = min(
                (other for other in (one, write) if other.invoked.f == "read"),
                key=_ended,
                default=None,
            )
            if told is not None and _ended(told) < _begun(write):
                yield f"version {version} was read before its write was invoked", (told, write)
            continue
        if version == lowest and _value_of(one) == initial:
            continue
        may = [write for write in unknown[_key(_value_of(one))] if _begun(write) < _ended(one)]
        if not may:
            what = f"{_key(_value_of(one))} of version {version} was read, and nobody wrote it"
            yield what, (one,)
