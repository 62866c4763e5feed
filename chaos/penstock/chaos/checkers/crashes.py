"""Whether nodes' logs tell of crashes and broken assertions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from penstock.chaos.checkers import Evidence
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


def tells_of_a_crash(line: str) -> bool:
    """Whether a line of a node's log is to be gathered for the checker."""
    return CRASHES.search(line) is not None


class Crashes:
    """A crash is a line of a node's log that tells of an exception that nobody handled, a broken
    assertion, or the end of the process by its own doing (the patterns of ``CRASHES``). That the
    harness has killed a node leaves no such line. ``expected`` are parts of lines that do not
    count. An anomaly is a line.
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
            for line in lines:
                if tells_of_a_crash(line) and not any(part in line for part in self._expected):
                    findings.add(f"node {node}: {line.strip()[:300]}", {"node": node, "line": line})
        return findings.verdict("no node's log was gathered", nodes=len(evidence.logs))
