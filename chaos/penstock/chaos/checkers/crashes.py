"""Whether nodes' logs tell of crashes and broken assertions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.chaos.checkers import Evidence, HeldFault
from penstock.chaos.history import History
from penstock.chaos.verdict import Findings, Verdict

CRASHES: Final = re.compile(
    r"Traceback \(most recent call last\)"
    r"|\bAssertionError\b|\bAssertion .* failed"
    r"|Fatal Python error|Segmentation fault|\bcore dumped\b|\bdouble free\b|terminate called"
    r"|\bMemoryError\b|\bRecursionError\b"
    r"|exception was never retrieved|Unhandled exception"
    r'|"level": ?"critical"'
    # What a backend writes there of a node that nobody has asked to end.
    r"|penstock\.chaos: node \d+ .*ended by itself",
)
"""What the lines of a log look like that tell of one. A process that was killed writes nothing."""


MAY_END: Final = "may_end"
"""What a held fault calls the reason for which the nodes that it struck may end by themselves."""
_ENDED: Final = re.compile(r"penstock\.chaos: node \d+ .*ended by itself: (.+)")
_ENDINGS: Final[Mapping[str, str]] = {
    "disk": r"exit status 1",  # Without a data directory that works a node ends, and says why.
    "directory": r"exit status 2",  # One that is not its own it refuses.
    "memory": r".*",
}
"""By reason how such a node may end, once a fault, as docs/operating/failures.md says."""
_WITHOUT_MEMORY: Final = re.compile(
    r"\bMemoryError\b|\bbad_alloc\b|terminate called|can't start new thread|allocate memory"
)
"""What a node without memory may say as often as it likes."""


def tells_of_a_crash(line: str) -> bool:
    """Whether a line of a node's log is to be gathered for the checker."""
    return CRASHES.search(line) is not None


class Crashes:
    """A crash is a line of a node's log that tells of an exception that nobody handled, a broken
    assertion, or the end of the process by its own doing (the patterns of ``CRASHES``). That the
    harness has killed a node leaves no such line. ``expected`` are parts of lines that do not
    count. Nor does, once for each fault that struck the node, an end that is documented for the
    fault: with status 1 where its disk fails, with status 2 where its directory is not its own, any
    where it has no memory, and there all that it says about memory. An anomaly is a line.
    """

    name = "crashes"

    def __init__(self, *, expected: Sequence[str] = ()) -> None:
        self._expected: Final = expected

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del history
        findings = Findings(self.name)
        for node, lines in sorted(evidence.logs.items()):
            findings.looked_at += 1
            documented = _Documented([one for one in evidence.faults if node in one.struck])
            for line in lines:
                if not tells_of_a_crash(line) or any(part in line for part in self._expected):
                    continue
                if not documented.takes(line):
                    findings.add(f"node {node}: {line.strip()[:300]}", {"node": node, "line": line})
        return findings.verdict("no node's log was gathered", nodes=len(evidence.logs))


class _Documented:
    """The ends that faults of one node may bring about, each taken once."""

    def __init__(self, faults: Sequence[HeldFault]) -> None:
        reasons = [fault.details[MAY_END] for fault in faults if MAY_END in fault.details]
        self._left: Final = Counter(reasons)
        self._lacks_memory: Final = "memory" in reasons

    def takes(self, line: str) -> bool:
        if (ended := _ENDED.search(line)) is None:
            return self._lacks_memory and _WITHOUT_MEMORY.search(line) is not None
        for reason, count in self._left.items():
            if count and re.fullmatch(_ENDINGS.get(reason, r"(?!)"), ended[1].strip()):
                self._left[reason] -= 1
                return True
        return False
