"""Whether nodes refuse directories that are not theirs."""

from __future__ import annotations

from penstock.chaos.checkers import Evidence
from penstock.chaos.history import History
from penstock.chaos.verdict import Findings, Verdict

REFUSED = "refused"
"""What a held fault calls the nodes that refused the directory that it had given them."""


def is_about_directories(evidence: Evidence) -> bool:
    """Whether any node was started on a directory that it must refuse."""
    return any(REFUSED in fault.details for fault in evidence.faults)


class DirectoryRefused:
    """A wrong directory is one that is empty, or that is another node's. An anomaly is a node that
    was started on one and had not ended when the fault held: it would forget what it had voted
    for and stored, or take another node's place.
    """

    name = "directory-refused"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del history
        findings = Findings(self.name)
        for fault in evidence.faults:
            if REFUSED not in fault.details:
                continue
            for node in fault.struck:
                findings.looked_at += 1
                if node not in fault.details[REFUSED]:
                    findings.add(
                        f"node {node} runs in a directory that it should refuse: {fault.kind}",
                        {"node": node, "held_t": fault.held_t},
                    )
        return findings.verdict("no node was started on a wrong directory")
