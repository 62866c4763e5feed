"""Whatever is delayed, lost, crashed or elected: nothing that was committed is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.core.partition_events import Role
from tests.unit.replication.model import Cluster

NODES = (1, 2, 3)

WEIGHTS = {
    "append": 12,
    "push": 16,
    "deliver": 50,
    "flush": 14,
    "metadata": 20,
    "propose": 4,
    "decide": 4,
    "answer": 4,
    "elect": 2,
    "retry": 2,
    "tick": 2,
    "crash": 1,
    "restart": 2,
    "fence": 2,
    "unfence": 3,
    "late": 1,
}


FENCED_AGAIN_AND_AGAIN = {
    **WEIGHTS,
    "crash": 0,
    "elect": 0,
    "push": 40,
    "deliver": 160,
    "flush": 40,
    "append": 6,
    "retry": 1,
    "propose": 10,
    "decide": 3,
    "answer": 10,
    "tick": 4,
    "fence": 6,
    "unfence": 8,
    "late": 8,
}
"""Who is refused is let in again soon, and what was sent before arrives."""


class Schedule:
    """Draws steps that can happen; which is up to the seed."""

    def __init__(
        self, seed: int, weights: Mapping[str, int] = WEIGHTS, *, used_up: bool = True
    ) -> None:
        self.random = random.Random(seed)
        told = self.random.random() < 0.8
        min_isr = self.random.randint(1, 3)
        self.cluster = Cluster(3, min_isr=min_isr, told=told, used_up=used_up)
        self.names = list(WEIGHTS)
        # Each run stresses something else.
        self.weights = [weight * self.random.choice((0.3, 1, 1, 2)) for weight in weights.values()]
        self.high_watermarks: dict[tuple[int, int, int], int] = {}

    def step(self) -> None:
        name = self.random.choices(self.names, self.weights)[0]
        getattr(self, name)()
        self.check()

    def node_id(self) -> int:
        return self.random.choice(NODES)

    def append(self) -> None:
        for node_id in NODES:
            if self.random.random() < 0.7:
                self.cluster.append(node_id)

    def push(self) -> None:
        source = self.cluster.nodes[self.node_id()]
        if source.alive and source.cursors:
            target = self.random.choice(sorted(source.cursors))
            self.cluster.push(source, target, self.random.randint(0, 4))

    def deliver(self) -> None:
        waiting = [pair for pair, queue in self.cluster.queues.items() if queue]
        if waiting:
            self.cluster.deliver(*self.random.choice(waiting))

    def flush(self) -> None:
        self.cluster.flush(self.node_id())

    def metadata(self) -> None:
        waiting = [node_id for node_id, node in self.cluster.nodes.items() if node.metadata]
        if waiting:
            self.cluster.metadata_step(self.random.choice(waiting))

    def propose(self) -> None:
        for node_id in NODES:
            self.cluster.send_proposal(node_id)

    def decide(self) -> None:
        if self.cluster.proposals:
            if self.random.random() < 0.5:
                self.cluster.sends_twice()
            self.cluster.decide()

    def answer(self) -> None:
        self.cluster.answer(self.node_id())

    def elect(self) -> None:
        self.cluster.elect(self.node_id())

    def retry(self) -> None:
        self.cluster.retry(self.node_id(), new_session=self.random.random() < 0.5)

    def tick(self) -> None:
        self.cluster.tick(self.random.randint(1, 700))

    def crash(self) -> None:
        self.cluster.crash(self.node_id(), wipe=self.random.random() < 0.3)

    def restart(self) -> None:
        self.cluster.restart(self.node_id())

    def fence(self) -> None:
        node_id = self.node_id()
        if node_id != self.cluster.state.leader or self.random.random() < 0.1:
            self.cluster.fence(node_id)

    def unfence(self) -> None:
        self.cluster.unfence(self.node_id())

    def late(self) -> None:
        self.cluster.late_sending()

    def check(self) -> None:
        for member in self.cluster.nodes.values():
            replica = member.replica
            assert not member.lost_records, "no leader of this model starts with less than it had"
            if not member.alive or replica.role is not Role.LEADER:
                continue
            # It never goes back within a leadership (of one process) ...
            leadership = (member.node_id, member.broker_epoch, replica.leader_epoch)
            before = self.high_watermarks.get(leadership)
            assert before is None or replica.high_watermark >= before
            self.high_watermarks[leadership] = replica.high_watermark
            # ... and rises only to what every in-sync replica holds, durably and identically. (Who
            # was taken out since may have lost it: the leader does not know yet.)
            if before is not None and replica.high_watermark > before:
                assert len(replica.isr) >= replica.min_isr
                isr = replica.isr & self.cluster.state.isr
                self.check_held_by(isr, replica.high_watermark, member.node_id)

    def check_held_by(self, isr: frozenset[int], offset: int, leader_id: int) -> None:
        leader = self.cluster.nodes[leader_id]
        for node_id in isr:
            log = self.cluster.nodes[node_id].log
            assert log.durable_offset >= offset, f"node {node_id} does not hold up to {offset}"
            assert log.records[:offset] == leader.log.records[:offset]


def run(
    seed: int, weights: Mapping[str, int] = WEIGHTS, *, length: int = 1000, used_up: bool = True
) -> Schedule:
    schedule = Schedule(seed, weights, used_up=used_up)
    for _ in range(length):
        schedule.step()
    cluster = schedule.cluster
    cluster.settle()
    schedule.check()
    logs = [member.log.records for member in cluster.nodes.values()]
    assert logs[0] == logs[1] == logs[2]
    assert logs[0][: len(cluster.committed)] == cluster.committed
    # Everybody is in sync again, and everything is committed.
    assert cluster.state.isr == frozenset(NODES)
    leader = cluster.nodes[cluster.state.leader]
    assert leader.replica.high_watermark == leader.log.log_end_offset
    return schedule


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_nothing_committed_is_lost_and_all_logs_agree_in_the_end(seed: int) -> None:
    run(seed)


def test_a_wish_that_was_given_up_puts_nobody_in_sync() -> None:
    refusals = sum(run(seed, FENCED_AGAIN_AND_AGAIN).cluster.refusals for seed in range(300))
    assert refusals > 20


def test_it_would_if_its_refusal_left_the_partition_epoch_where_it_was() -> None:
    """The schedules can show what metadata.version 4 is for."""

    def run_all() -> None:
        for seed in range(300):
            run(seed, FENCED_AGAIN_AND_AGAIN, used_up=False)

    with pytest.raises(AssertionError, match=r"is in sync with|committed otherwise"):
        run_all()


def test_the_schedules_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        cluster = run(seed).cluster
        seen["committed"] += len(cluster.committed)
        seen["leaderships"] += cluster.state.leader_epoch
        seen["cuts"] += sum(node.log.cuts for node in cluster.nodes.values())
        seen["isr changes"] += cluster.isr_changes
    assert seen["committed"] > 500, seen
    assert seen["leaderships"] > 200, seen
    assert seen["cuts"] > 50, seen
    assert seen["isr changes"] > 100, seen
