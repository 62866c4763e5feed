"""What clients asked for and what came of it: events, and the files that hold them.

The format is in docs/internals/chaos.md. Files are JSON lines, written by each worker for itself
and merged by time; a line that was cut when its worker was killed is left out. Histories have
millions of events: what is read and kept of each one here decides how long judging takes.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from sys import intern
from typing import IO, Any, Final, TypeVar

import orjson

from penstock.chaos.errors import HistoryError, reason_of

FINAL: Final = "final"

_Derived = TypeVar("_Derived")


class Type(StrEnum):
    """What an event says of its operation."""

    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One line of a history; see docs/internals/chaos.md for its fields."""

    t: int
    p: str
    type: Type
    f: str
    value: Any = None
    error: str = ""
    phase: str = ""

    def fields(self) -> dict[str, Any]:
        """What its line holds."""
        fields: dict[str, Any] = {"t": self.t, "p": self.p, "type": self.type.value, "f": self.f}
        if self.value is not None:
            fields["value"] = self.value
        if self.error:
            fields["error"] = self.error
        if self.phase:
            fields["phase"] = self.phase
        return fields

    def may_have(self, name: str) -> bool:
        """Whether ``value`` may have a field of this name (plain letters): where it has, always.

        It costs far less than to look at the value of an event that was read.
        """
        return isinstance(self.value, dict) and name in self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash((self.t, self.p, self.type, self.f))

    def line(self) -> str:
        """As JSON, without the end of the line."""
        return orjson.dumps(self.fields()).decode()


class _Line(Event):
    """One that was read, and takes no more memory than its line: ``value`` is parsed when asked
    for.

    Raises KeyError, TypeError or ValueError where the line is no event.
    """

    __slots__ = ("_line",)
    _line: bytes

    def __init__(self, line: bytes) -> None:
        fields = orjson.loads(line)
        # Names come again in every line: one object for each. The slots are set past what freezes.
        _set_t(self, int(fields["t"]))
        _set_p(self, intern(fields["p"]))
        _set_type(self, _TYPES[fields["type"]])
        _set_f(self, intern(fields["f"]))
        _set_error(self, str(fields.get("error", "")))
        _set_phase(self, intern(fields.get("phase", "")))
        object.__setattr__(self, "_line", line)

    def may_have(self, name: str) -> bool:
        """See Event."""
        return f'"{name}"'.encode() in self._line

    @property
    def value(self) -> Any:
        """What exactly was asked for, or came."""
        return orjson.loads(self._line).get("value")


_TYPES: Final[dict[str, Type]] = {one.value: one for one in Type}
_set_t, _set_p, _set_type, _set_f, _set_error, _set_phase = (
    Event.__dict__[name].__set__ for name in ("t", "p", "type", "f", "error", "phase")
)


@dataclass(frozen=True, slots=True)
class Operation:
    """An invocation and its completion."""

    invoked: Event
    completed: Event | None
    """None where nothing was heard any more, which is as good as INFO."""

    @property
    def type(self) -> Type:
        """What came of it: never INVOKE."""
        return Type.INFO if self.completed is None else self.completed.type

    @property
    def value(self) -> Any:
        """What came of it where that is known, else what was asked for."""
        if self.completed is None or self.completed.value is None:
            return self.invoked.value
        return self.completed.value


class History:
    """All events of a run by time, and the operations that they make. Never changed."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events: Final[Sequence[Event]] = sorted(events, key=attrgetter("t"))
        self.operations: Final[Sequence[Operation]] = _pair(self.events)
        """By the time of their invocations."""
        self._by_f: Final[dict[str, list[Operation]]] = defaultdict(list)
        for one in self.operations:
            self._by_f[one.invoked.f].append(one)
        self._derived: Final[dict[Callable[[History], Any], Any]] = {}

    @property
    def kinds(self) -> frozenset[str]:
        """What was done: the ``f`` of all operations."""
        return frozenset(self._by_f)

    @property
    def end_t(self) -> int:
        """When its last event was; 0 where it has none."""
        return self.events[-1].t if self.events else 0

    def of(self, *fs: str) -> Iterator[Operation]:
        """The operations of these kinds, by the time of their invocations."""
        found = [one for f in fs for one in self._by_f.get(f, ())]
        return iter(found if len(fs) == 1 else sorted(found, key=attrgetter("invoked.t")))

    def derived(self, make: Callable[[History], _Derived]) -> _Derived:
        """What ``make`` makes of it: made once, for all checkers that look at it."""
        if make not in self._derived:
            self._derived[make] = make(self)
        made: _Derived = self._derived[make]
        return made

    def write(self, path: Path) -> None:
        """Write all events, one a line."""
        with path.open("w", encoding="utf-8") as file:
            file.writelines(event.line() + "\n" for event in self.events)


def _pair(events: Sequence[Event]) -> list[Operation]:
    """Raises HistoryError where a process has two operations under way, or answers nothing."""
    begun: dict[str, Event] = {}
    completed: dict[int, Event] = {}
    order: list[Event] = []
    for event in events:
        if event.type is Type.INVOKE:
            if event.p in begun:
                raise HistoryError(
                    f"process {event.p} begins {event.f} at {event.t} while its {begun[event.p].f} "
                    f"of {begun[event.p].t} is under way"
                )
            begun[event.p] = event
            order.append(event)
            continue
        invoked = begun.pop(event.p, None)
        if invoked is None or invoked.f != event.f:
            raise HistoryError(
                f"process {event.p} completes {event.f} at {event.t}, which it has not begun"
            )
        completed[id(invoked)] = event
    return [Operation(invoked, completed.get(id(invoked))) for invoked in order]


class HistoryWriter:
    """Appends events to a file. For one thread; what was added is in the file after ``flush``."""

    def __init__(self, path: Path) -> None:
        self._file: Final[IO[str]] = path.open("a", encoding="utf-8", buffering=1 << 16)

    def add(self, event: Event) -> None:
        """Append one."""
        self._file.write(event.line() + "\n")

    def flush(self) -> None:
        """Hand over to the system what was added: a killed worker loses none of it."""
        self._file.flush()

    def close(self) -> None:
        """Flush, and close the file. Idempotent."""
        self._file.close()


def read_history(*paths: Path) -> History:
    """The events of these files together.

    Raises HistoryError where a file cannot be read, or a line is no event, but for the last one of
    a file, which may have been cut when its writer was killed.
    """
    with _without_collecting():
        try:
            return History(event for path in paths for event in _read(path))
        except OSError as error:
            raise HistoryError(
                f"{error.filename} cannot be read ({reason_of(error)}); next: name the history of "
                "a run"
            ) from None


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Millions of objects come to stay: looking again and again for cycles takes half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read(path: Path) -> Iterator[Event]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _Line(line)
            except (KeyError, TypeError, ValueError) as error:
                raise HistoryError(
                    f"{path}, line {number} is no event of a history ({reason_of(error)}); next: "
                    "see whether this is the history.jsonl of a run, whole"
                ) from None
