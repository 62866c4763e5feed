"""Whether partitions' leaders are one at a time, and what they say of a partition only goes up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.chaos.checkers import Evidence
from penstock.chaos.history import History
from penstock.chaos.verdict import Findings, Verdict

_NOTHING: Final = "no broker was asked for its high watermarks"
_Said = Mapping[str, Any]


def _by_partition(evidence: Evidence) -> Iterator[tuple[str, Sequence[_Said]]]:
    """What brokers said of each partition, by time; of each topic that had the name by itself."""
    found: dict[tuple[str, int, str], list[_Said]] = defaultdict(list)
    for said in sorted(evidence.watermarks, key=lambda said: int(said["t"])):
        found[said["topic"], said["partition"], said.get("topic_id", "")].append(said)
    for (topic, number, _), its in sorted(found.items()):
        yield f"{topic}-{number}", its


class WatermarksForward:
    """A high watermark, or a log start offset, goes back where a leader says less of its partition
    than it has said before in the same leader epoch. (A new leader may say less at first: it learns
    its predecessor's only from what it was told.) A high watermark is lost where, after the last
    fault was healed, the leader of the newest epoch says less than any leader has said before.
    With ``unclean`` elections of leaders that were not in sync the latter is to be expected, and a
    figure. An anomaly is what a broker said.
    """

    name = "watermarks-forward"

    def __init__(self, *, unclean: bool = False) -> None:
        self._unclean: Final = unclean

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del history
        findings = Findings(self.name)
        healed = max((fault.healed_t for fault in evidence.faults), default=-1)
        lost = 0
        for name, said in _by_partition(evidence):
            before: dict[tuple[int, int], _Said] = {}
            leaders = [one for one in said if one["is_leader"]]
            for one in leaders:
                findings.looked_at += 1
                key = (one["node"], one["leader_epoch"])
                for what in ("high_watermark", "log_start_offset"):
                    if key in before and one[what] < before[key][what]:
                        findings.add(
                            f"{name}: the {what.replace('_', ' ')} of node {key[0]} in leader "
                            f"epoch {key[1]} went back from {before[key][what]} to {one[what]}",
                            before[key],
                            one,
                        )
                before[key] = one
            if not leaders:
                continue
            highest = max(leaders, key=lambda one: int(one["high_watermark"]))
            newest = max(leaders, key=lambda one: (int(one["leader_epoch"]), int(one["t"])))
            if newest["t"] > healed and newest["high_watermark"] < highest["high_watermark"]:
                lost += 1
                if not self._unclean and newest["leader_epoch"] != highest["leader_epoch"]:
                    findings.add(
                        f"{name}: after healing the high watermark is {newest['high_watermark']}; "
                        f"it has been {highest['high_watermark']}",
                        highest,
                        newest,
                    )
        return findings.verdict(_NOTHING, lost_high_watermarks=lost)


class OneLeader:
    """A leader epoch of a partition has two leaders where two nodes say that they lead the
    partition in it. An anomaly is a partition, an epoch and a second node.
    """

    name = "one-leader"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del history
        findings = Findings(self.name)
        for name, said in _by_partition(evidence):
            first: dict[int, _Said] = {}
            told: set[tuple[int, int]] = set()
            for one in said:
                if not one["is_leader"]:
                    continue
                findings.looked_at += 1
                epoch, node = one["leader_epoch"], one["node"]
                other = first.setdefault(epoch, one)
                if other["node"] != node and (epoch, node) not in told:
                    told.add((epoch, node))
                    findings.add(
                        f"{name}: both node {other['node']} and node {node} lead it in leader "
                        f"epoch {epoch}",
                        other,
                        one,
                    )
        return findings.verdict(_NOTHING)


class StaleEpoch:
    """A stale epoch is accepted where a node says that it leads a partition in a leader epoch that
    is older than one in which it has said before that it leads it, or follows in it: it knew
    better. An anomaly is what the node said.
    """

    name = "stale-epoch"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del history
        findings = Findings(self.name)
        for name, said in _by_partition(evidence):
            newest: dict[int, _Said] = {}
            for one in said:
                findings.looked_at += 1
                known = newest.get(one["node"])
                if known is None or known["leader_epoch"] <= one["leader_epoch"]:
                    newest[one["node"]] = one
                elif one["is_leader"]:
                    findings.add(
                        f"{name}: node {one['node']} leads it in leader epoch "
                        f"{one['leader_epoch']}, though it knew of {known['leader_epoch']}",
                        known,
                        one,
                    )
        return findings.verdict(_NOTHING)
