"""Whether transactions read from each other in a circle, and how they lie between each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.fates import Fate, transactions, with_fate
from penstock.chaos.checkers.records import NONE, Records, partition_name
from penstock.chaos.checkers.showing import show
from penstock.chaos.checkers.spans import point
from penstock.chaos.history import History, Operation
from penstock.chaos.verdict import Findings, Verdict

_Node = TypeVar("_Node")


def components(edges: Mapping[_Node, set[_Node]]) -> Iterator[list[_Node]]:
    """The strongly connected components that have several nodes (Tarjan's, without recursion)."""
    index: dict[_Node, int] = {}
    low: dict[_Node, int] = {}
    stack: list[_Node] = []
    on_stack: set[_Node] = set()
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(edges.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, targets = work[-1]
            target = next((one for one in targets if one not in index or one in on_stack), None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    found: list[_Node] = []
                    while not found or found[-1] != node:
                        found.append(stack.pop())
                        on_stack.discard(found[-1])
                    if len(found) > 1:
                        yield found
            elif target in index:
                low[node] = min(low[node], index[target])
            else:
                index[target] = low[target] = len(index)
                stack.append(target)
                on_stack.add(target)
                work.append((target, iter(edges.get(target, ()))))


def _circle(edges: Mapping[_Node, set[_Node]], nodes: list[_Node]) -> list[_Node]:
    """A shortest way from one of them back to itself."""
    within, start = set(nodes), nodes[0]
    came: dict[_Node, _Node] = {}
    queue = [start]
    for node in queue:
        for target in edges.get(node, set()) & within:
            if target == start:
                way = [node]
                while way[-1] != start:
                    way.append(came[way[-1]])
                return way[::-1]
            if target not in came:
                came[target] = node
                queue.append(target)
    return nodes


class CircularRead:
    """A circle of reads (Adya's G1c) is a row of transactions, committed or possibly so, of which
    each has read from a record that the one before has written, and the first from the last: none
    of them can have been the first. Write-write edges are not looked at: a log has its
    transactions' records between each other, so that circles of writes (G0) are no anomaly of it;
    how many transactions lie in one is a figure. An anomaly is a set of transactions each of which
    can be reached from each.
    """

    name = "circular-read"

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del evidence
        findings = Findings(self.name)
        edges = self._edges(history, findings)
        known = history.derived(transactions)
        for nodes in components(edges):
            circle = _circle(edges, nodes)
            shown = (one for name in circle for one in known[name].of("read-from", "append"))
            findings.add(
                f"transactions {', '.join(circle)} have each read from the one before, and the "
                "first from the last",
                *show(*shown),
            )
        return findings.verdict(
            "no transaction that may be committed has read a record",
            g0_transactions=sum(map(len, components(_writes(history)))),
        )

    @staticmethod
    def _edges(history: History, findings: Findings) -> Mapping[str, set[str]]:
        """By transaction those that have read from it."""
        records, known = history.derived(Records.of), history.derived(transactions)
        fates = with_fate(history, Fate.COMMITTED, Fate.UNKNOWN)
        writers = records.attempted.where(fates[records.transaction[records.attempted.operation]])
        begins = records.numbers(writers)
        order = np.argsort(begins, kind="stable")
        begins, number = begins[order], records.transaction[writers.operation][order]
        edges: dict[str, set[str]] = defaultdict(set)
        for one in history.of("read-from"):
            reader = one.invoked.value["txn"]
            if known[reader].fate is Fate.ABORTED:
                continue
            findings.looked_at += 1
            for start, end in _spans_of(records, one):
                first = max(0, int(np.searchsorted(begins, start, "right")) - 1)
                for at in range(first, int(np.searchsorted(begins, end, "left"))):
                    run = int(order[at])
                    if begins[at] + writers.count[run] <= start:
                        continue
                    writer = records.transactions.names[int(number[at])]
                    if writer != reader:
                        edges[writer].add(reader)
        return edges


def _spans_of(records: Records, read_from: Operation) -> Iterator[tuple[int, int]]:
    """What was read, in the numbers of its producers."""
    asked = read_from.invoked.value
    width = len(records.producers.names)
    for entry, _, producer, first, count in asked.get("runs") or ():
        name = partition_name(asked.get("topic", ""), entry)
        partition, who = records.partitions.find(name), records.producers.find(producer)
        pair = partition * width + who
        lane = int(np.searchsorted(records.lanes, pair))
        if NONE in {partition, who} or lane == len(records.lanes) or records.lanes[lane] != pair:
            continue
        start = point(lane, first)
        yield start, start + count


def _writes(history: History) -> Mapping[int, set[int]]:
    """By transaction those whose records follow on its own in a partition."""
    records = history.derived(Records.of)
    done = records.acknowledged
    mine = done.where(records.transaction[done.operation] != NONE)
    mine = mine.where(np.argsort(mine.start, kind="stable"))
    number = records.transaction[mine.operation]
    follows = (mine.partition[1:] == mine.partition[:-1]) & (number[1:] != number[:-1])
    edges: dict[int, set[int]] = defaultdict(set)
    for one, other in zip(number[:-1][follows].tolist(), number[1:][follows].tolist(), strict=True):
        edges[one].add(other)
    return edges
