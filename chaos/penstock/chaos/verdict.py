"""What a checker concludes: true, false, or that it cannot tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

SHOWN_ANOMALIES: Final = 20
"""So many anomalies a verdict keeps; all are counted."""


class Valid(StrEnum):
    """Jepsen's three values."""

    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One promise that was broken.

    ``what`` is a sentence for a person, with the place (partition, offset, group ...). ``records``
    are the events or records that prove it, as they are in the history, to be shown one by one.
    """

    what: str
    records: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one checker.

    ``looked_at`` counts what it judged, in its own unit (records, polls, transactions ...): where
    that is 0 nothing is proven, and ``valid`` is never TRUE. ``found`` counts all anomalies, of
    which ``anomalies`` has the first ones. ``reason`` says why it is UNKNOWN.
    """

    checker: str
    valid: Valid
    looked_at: int
    found: int = 0
    anomalies: Sequence[Anomaly] = ()
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What else it measured, for the report."""

    def __post_init__(self) -> None:
        assert (self.valid is Valid.FALSE) == (self.found > 0)
        assert (self.valid is Valid.UNKNOWN) == bool(self.reason)
        assert self.looked_at > 0 or self.valid is not Valid.TRUE
        assert len(self.anomalies) <= SHOWN_ANOMALIES


class Findings:
    """Gathers what a checker finds, and concludes from it."""

    def __init__(self, checker: str) -> None:
        self._checker: Final = checker
        self._anomalies: Final[list[Anomaly]] = []
        self._found = 0
        self._doubts: Final[list[str]] = []
        self.looked_at = 0

    def add(self, what: str, *records: Mapping[str, Any]) -> None:
        """An anomaly; beyond the first ones it is counted alone. Each record proves it once."""
        self._found += 1
        if len(self._anomalies) < SHOWN_ANOMALIES:
            once = tuple(one for at, one in enumerate(records) if one not in records[:at])
            self._anomalies.append(Anomaly(what, once))

    def doubt(self, reason: str) -> None:
        """A reason for which, without an anomaly, nothing can be said for certain."""
        if reason not in self._doubts:
            self._doubts.append(reason)

    def verdict(self, nothing: str, **figures: Any) -> Verdict:
        """What follows; ``nothing`` is the reason where nothing was there to look at."""
        if not self.looked_at and not self._found:
            self.doubt(nothing)
        if self._found:
            valid, reason = Valid.FALSE, ""
        else:
            reason = "; ".join(self._doubts)
            valid = Valid.UNKNOWN if reason else Valid.TRUE
        return Verdict(
            self._checker, valid, self.looked_at, self._found, self._anomalies, reason, figures
        )


def compose(verdicts: Iterable[Verdict]) -> Valid:
    """Of a whole run: false where one is, else unknown where one is or there is none, else true."""
    values = {verdict.valid for verdict in verdicts}
    if Valid.FALSE in values:
        return Valid.FALSE
    return Valid.TRUE if values == {Valid.TRUE} else Valid.UNKNOWN
