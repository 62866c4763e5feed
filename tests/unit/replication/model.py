"""A cluster of replica state machines with a controller, for one partition, in one thread.

Every message waits in a queue of its own until the test lets it through, so that a schedule is a
list of choices. Logs hold (leader epoch, value) records; what is not flushed is lost in a crash.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.partition_events import (
    AdvanceLogStart,
    AppendRecords,
    AssignEpoch,
    BrokersChanged,
    BrokerStatus,
    Diverge,
    Effect,
    Event,
    FollowerAcked,
    FollowerPositioned,
    HighWatermarkChanged,
    IsrChanged,
    IsrProposal,
    LeaderLostRecords,
    LogAdvanced,
    OutOfSync,
    PartitionChanged,
    PartitionState,
    ProposalAnswered,
    ProposeIsr,
    Pushed,
    RefuseFollower,
    Role,
    RoleChanged,
    StartPush,
    StatePosition,
    Tick,
    TruncateFullyAndStartAt,
    TruncateTo,
)
from penstock.broker.core.ports import EpochEnd
from penstock.broker.core.replica import Replica
from penstock.wire.errors import ErrorCode

LAG_MS = 1000


def isr_changed(
    *isr: int, left: dict[int, OutOfSync] | None = None, joined: tuple[int, ...] = ()
) -> IsrChanged:
    """Of a partition with enough in sync."""
    return IsrChanged(frozenset(isr), False, left or {}, frozenset(joined))


class ModelLog:
    """A log of single-record batches. ``durable_offset`` moves by ``flush`` alone."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int]] = []
        self.epochs = EpochHistory()
        self.base = 0
        self.log_start_offset = 0
        self.durable_offset = 0
        self.cuts = 0  # Of what was there.

    @property
    def log_end_offset(self) -> int:
        return self.base + len(self.records)

    @property
    def last_epoch(self) -> int:
        return self.epochs.last_epoch

    def end_of_epoch(self, leader_epoch: int) -> EpochEnd:
        return self.epochs.end_of_epoch(leader_epoch, self.log_end_offset)

    def append(self, records: list[tuple[int, int]]) -> None:
        for record in records:
            self.epochs.assign(record[0], self.log_end_offset)
            self.records.append(record)

    def read(self, offset: int, count: int) -> list[tuple[int, int]]:
        assert offset >= self.log_start_offset
        return self.records[offset - self.base : offset - self.base + count]

    def flush(self) -> None:
        self.durable_offset = self.log_end_offset

    def truncate_to(self, offset: int) -> None:
        self.cuts += offset < self.log_end_offset
        del self.records[offset - self.base :]
        self.epochs.truncate_from_end(offset)
        self.durable_offset = min(self.durable_offset, offset)

    def restart_at(self, offset: int) -> None:
        self.records, self.base = [], offset
        self.epochs = EpochHistory()
        self.log_start_offset = self.durable_offset = offset

    def advance_start(self, offset: int) -> None:
        self.log_start_offset = max(self.log_start_offset, offset)
        self.epochs.truncate_from_start(offset)

    def crash(self) -> None:
        self.truncate_to(self.durable_offset)


@dataclass
class Message:
    """What travels between two nodes; ``session`` is the stream that it travels on."""

    session: int
    body: FollowerPositioned | FollowerAcked | Pushed | ErrorCode


@dataclass
class Node:
    node_id: int
    log: ModelLog
    broker_epoch: int
    replica: Replica
    alive: bool = True
    metadata: deque[Event] = field(default_factory=deque)
    cursors: dict[int, tuple[int, int]] = field(default_factory=dict)  # node -> session, offset
    session: int = -1
    following: int = -1
    unsent: IsrProposal | None = None
    lost_records: bool = False


class Cluster:
    """Nodes 1..n, a controller, and the queues between them."""

    def __init__(
        self, nodes: int, *, min_isr: int, told: bool = True, used_up: bool = True
    ) -> None:
        """``told``: states carry the min ISR, as all but older controllers have it. ``used_up``: a
        proposal refused for a member uses up the partition epoch, as since metadata.version 4.
        """
        self.used_up = used_up
        self.min_isr = min_isr
        self.now_ms = 0
        self.sessions = 0
        self.broker_epochs = 0
        self.value = 0
        self.isr_changes = 0
        self.refusals = 0
        replicas = tuple(range(1, nodes + 1))
        self.state = PartitionState(
            1, 0, 0, replicas, frozenset(replicas), min_isr=min_isr if told else 0
        )
        self.brokers: dict[int, BrokerStatus] = {}
        self.queues: dict[tuple[int, int], deque[Message]] = {
            (a, b): deque() for a in replicas for b in replicas if a != b
        }
        self.proposals: deque[tuple[int, IsrProposal]] = deque()
        self.given_up: deque[tuple[int, IsrProposal]] = deque()
        self.answers: dict[int, deque[ProposalAnswered]] = {n: deque() for n in replicas}
        self.committed: list[tuple[int, int]] = []
        self.nodes: dict[int, Node] = {}
        for node_id in replicas:
            self.broker_epochs += 1
            self.brokers[node_id] = BrokerStatus(self.broker_epochs, eligible=True)
        for node_id in replicas:
            log = ModelLog()
            replica = Replica(node_id, log, high_watermark=0, lag_max_ms=LAG_MS)
            self.nodes[node_id] = Node(node_id, log, self.brokers[node_id].broker_epoch, replica)
            self.tell(node_id)

    # --- The controller --------------------------------------------------------------------------

    def tell(self, node_id: int) -> None:
        node = self.nodes[node_id]
        node.metadata.append(BrokersChanged(dict(self.brokers), self.now_ms))
        node.metadata.append(PartitionChanged(self.state, self.min_isr, self.now_ms))

    def commit(self, leader: int, isr: frozenset[int]) -> None:
        assert isr
        assert leader == -1 or leader in isr
        if (leader, isr) != (self.state.leader, self.state.isr):
            self.raise_epoch(leader, isr)

    def raise_epoch(self, leader: int, isr: frozenset[int]) -> None:
        state = self.state
        self.state = PartitionState(
            leader,
            state.leader_epoch + (leader != state.leader),
            state.partition_epoch + 1,
            state.replicas,
            isr,
            min_isr=state.min_isr,
        )
        for node in self.nodes.values():
            if node.alive:
                node.metadata.append(PartitionChanged(self.state, self.min_isr, self.now_ms))

    def brokers_changed(self) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.metadata.append(BrokersChanged(dict(self.brokers), self.now_ms))

    def elect(self, leader: int) -> None:
        """Move the leadership to a live in-sync replica, if it is one."""
        if leader in self.state.isr and self.brokers[leader].eligible:
            self.commit(leader, self.state.isr)

    def sends_twice(self) -> None:
        """Another sending of the next proposal is on its way, and comes much later."""
        if self.proposals:
            self.given_up.append(self.proposals[0])

    def late_sending(self) -> None:
        """The last that was given up arrives. Nobody waits for the answer."""
        if self.given_up:
            self.proposals.appendleft(self.given_up.pop())
            node_id, _ = self.proposals[0]
            self.decide()
            self.answers[node_id].pop()

    def decide(self) -> None:
        """Take one proposal, as the controllers do when they apply it."""
        node_id, proposal = self.proposals.popleft()
        state = self.state
        error: ErrorCode | None = None
        if node_id != state.leader or proposal.leader_epoch != state.leader_epoch:
            error = ErrorCode.FENCED_LEADER_EPOCH
        elif proposal.partition_epoch != state.partition_epoch:
            error = ErrorCode.INVALID_UPDATE_VERSION
        elif any(
            not self.brokers[member].eligible or self.brokers[member].broker_epoch != epoch
            for member, epoch in proposal.members
        ):
            error = ErrorCode.INELIGIBLE_REPLICA
            self.refusals += 1
            if self.used_up:
                self.raise_epoch(state.leader, state.isr)
        else:
            self.isr_changes += 1
            self.commit(state.leader, proposal.isr)
            for member in self.state.isr:
                durable = self.nodes[member].log.durable_offset
                assert durable >= len(self.committed), f"node {member} is in sync with {durable}"
        self.answers[node_id].append(ProposalAnswered(proposal, error, self.state, self.now_ms))

    def fence(self, node_id: int) -> None:
        """The controllers hear nothing of a process that lives, unless it is the last in sync."""
        if not self.nodes[node_id].alive or self.state.isr == {node_id}:
            return
        self.brokers[node_id] = BrokerStatus(self.nodes[node_id].broker_epoch, eligible=False)
        self.brokers_changed()
        self.withdraw(node_id)

    def unfence(self, node_id: int) -> None:
        """They hear of it again."""
        if self.nodes[node_id].alive and not self.brokers[node_id].eligible:
            self.brokers[node_id] = BrokerStatus(self.nodes[node_id].broker_epoch, eligible=True)
            self.brokers_changed()
            self.lead_again(node_id)

    def withdraw(self, node_id: int) -> None:
        rest = self.state.isr - {node_id}
        live = sorted(n for n in rest if self.brokers[n].eligible)
        leader = self.state.leader
        if leader == node_id:
            leader = live[0] if live else -1
        self.commit(leader, rest or self.state.isr)

    def lead_again(self, node_id: int) -> None:
        if self.state.leader == -1 and node_id in self.state.isr:
            self.commit(node_id, self.state.isr)

    def crash(self, node_id: int, *, wipe: bool) -> None:
        """The process dies, and perhaps its disk, unless that is the last one in sync."""
        node = self.nodes[node_id]
        if not node.alive:
            return
        node.alive = False
        node.log.crash()
        for (_, target), queue in self.queues.items():
            if target == node_id:
                queue.clear()  # What it sent itself is on its way and may yet arrive.
        self.brokers[node_id] = BrokerStatus(node.broker_epoch, eligible=False)
        others_in_sync = self.state.isr != {node_id}
        self.brokers_changed()
        self.withdraw(node_id)
        if wipe and others_in_sync:
            node.log = ModelLog()

    def restart(self, node_id: int) -> None:
        node = self.nodes[node_id]
        if node.alive:
            return
        self.broker_epochs += 1
        self.brokers[node_id] = BrokerStatus(self.broker_epochs, eligible=True)
        kept = node.replica.high_watermark // 2  # An old checkpoint.
        self.nodes[node_id] = Node(
            node_id,
            node.log,
            self.broker_epochs,
            Replica(node_id, node.log, high_watermark=kept, lag_max_ms=LAG_MS),
        )
        self.answers[node_id].clear()
        self.tell(node_id)
        self.brokers_changed()
        self.lead_again(node_id)

    # --- Nodes -----------------------------------------------------------------------------------

    def handle(self, node: Node, event: Event) -> None:
        effects = node.replica.handle(event)
        node.replica.validate()
        changed = False
        for effect in effects:
            changed |= self.carry_out(node, effect)
        if changed:
            self.handle(node, LogAdvanced(self.now_ms))

    def carry_out(self, node: Node, effect: Effect) -> bool:
        match effect:
            case AssignEpoch(leader_epoch):
                node.log.epochs.assign(leader_epoch, node.log.log_end_offset)
            case AppendRecords(records):
                node.log.append(records)  # type: ignore[arg-type]
            case TruncateTo(offset):
                node.log.truncate_to(offset)
            case TruncateFullyAndStartAt(offset):
                node.log.restart_at(offset)
            case AdvanceLogStart(offset):
                node.log.advance_start(offset)
            case _:
                self.act(node, effect)
                return False
        return True

    def act(self, node: Node, effect: Effect) -> None:
        match effect:
            case RoleChanged():
                node.cursors.clear()
                node.unsent = None
            case StatePosition():
                self.state_position(node)
            case StartPush(node_id, session, offset):
                node.cursors[node_id] = (session, offset)
                self.push(node, node_id, 0)
            case Diverge(node_id, session, end):
                node.cursors.pop(node_id, None)
                push = Pushed(node.replica.leader_epoch, -1, -1, -1, b"", end)
                self.queues[node.node_id, node_id].append(Message(session, push))
            case RefuseFollower(node_id, session, error):
                if node.cursors.get(node_id, (session, 0))[0] == session:
                    node.cursors.pop(node_id, None)
                self.queues[node.node_id, node_id].append(Message(session, error))
            case ProposeIsr(proposal):
                node.unsent = proposal
            case HighWatermarkChanged():
                self.check_committed(node)
            case LeaderLostRecords():
                node.lost_records = True

    def check_committed(self, node: Node) -> None:
        """What one leader has shown as committed, every other shows too."""
        if node.replica.role is not Role.LEADER:
            return
        high_watermark = node.replica.high_watermark
        for offset in range(node.log.base, high_watermark):
            record = node.log.records[offset - node.log.base]
            if offset < len(self.committed):
                assert self.committed[offset] == record, f"offset {offset} was committed otherwise"
            else:
                assert offset == len(self.committed)
                self.committed.append(record)

    def append(self, node_id: int) -> bool:
        node = self.nodes[node_id]
        if not node.alive or node.replica.role is not Role.LEADER:
            return False
        self.value += 1
        node.log.append([(node.replica.leader_epoch, self.value)])
        self.handle(node, LogAdvanced(self.now_ms))
        return True

    def flush(self, node_id: int) -> None:
        node = self.nodes[node_id]
        if not node.alive:
            return
        node.log.flush()
        self.handle(node, LogAdvanced(self.now_ms))
        replica = node.replica
        if replica.role is Role.FOLLOWER and node.session >= 0:
            ack = FollowerAcked(
                node_id,
                node.session,
                replica.leader_epoch,
                node.log.durable_offset,
                node.log.log_start_offset,
                self.now_ms,
            )
            self.queues[node_id, replica.leader].append(Message(node.session, ack))

    def state_position(self, node: Node) -> None:
        replica, leader = node.replica, node.replica.leader
        if leader not in self.nodes or not self.nodes[leader].alive:
            return
        if node.following != leader or node.session < 0:
            self.reconnect(node)
        node.log.flush()
        position = FollowerPositioned(
            node.node_id,
            node.session,
            node.broker_epoch,
            replica.leader_epoch,
            node.log.log_end_offset,
            node.log.last_epoch,
            node.log.log_start_offset,
            self.now_ms,
        )
        self.queues[node.node_id, leader].append(Message(node.session, position))

    def reconnect(self, node: Node) -> None:
        self.sessions += 1
        node.session, node.following = self.sessions, node.replica.leader

    def push(self, node: Node, node_id: int, count: int) -> None:
        """Push up to ``count`` records and the high watermark to a follower."""
        if node_id not in node.cursors:
            return
        session, offset = node.cursors[node_id]
        records = node.log.read(offset, count)
        push = Pushed(
            node.replica.leader_epoch,
            node.replica.high_watermark,
            node.log.log_start_offset,
            offset,
            records,  # type: ignore[arg-type]
        )
        node.cursors[node_id] = (session, offset + len(records))
        self.queues[node.node_id, node_id].append(Message(session, push))

    # --- Letting things happen -------------------------------------------------------------------

    def deliver(self, source: int, target: int) -> None:
        queue = self.queues[source, target]
        node = self.nodes[target]
        if not queue or not node.alive:
            return
        message = queue.popleft()
        match message.body:
            case FollowerPositioned() | FollowerAcked():
                self.handle(node, message.body)
            case Pushed() if message.session == node.session:
                self.handle(node, message.body)
            case _:
                pass  # A refusal: the follower asks again with ``retry``.

    def metadata_step(self, node_id: int) -> None:
        node = self.nodes[node_id]
        if node.alive and node.metadata:
            self.handle(node, node.metadata.popleft())

    def send_proposal(self, node_id: int) -> None:
        node = self.nodes[node_id]
        pending = node.replica.pending
        if node.alive and pending is not None and pending is node.unsent:
            self.proposals.append((node_id, pending))  # Sent again as long as it is pending.

    def answer(self, node_id: int) -> None:
        node = self.nodes[node_id]
        if self.answers[node_id] and node.alive:
            self.handle(node, self.answers[node_id].popleft())

    def retry(self, node_id: int, *, new_session: bool) -> None:
        """A follower states its position again, as after a refusal or a broken stream."""
        node = self.nodes[node_id]
        if not node.alive or node.replica.role is not Role.FOLLOWER:
            return
        if new_session:
            self.reconnect(node)
        self.state_position(node)

    def tick(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        for node in self.nodes.values():
            deadline = node.replica.next_deadline_ms()
            if node.alive and deadline is not None and deadline <= self.now_ms:
                self.handle(node, Tick(self.now_ms))

    def settle(self) -> None:
        """Restart everybody and let everything happen until nothing does."""
        for node_id in self.nodes:
            self.restart(node_id)
            self.unfence(node_id)
        for _ in range(60):
            self.settle_metadata()
            for node in self.nodes.values():
                for other in self.nodes:
                    self.push(node, other, 10)
            for source, target in self.queues:
                while self.queues[source, target]:
                    self.deliver(source, target)
            for node_id in self.nodes:
                self.flush(node_id)
            self.tick(LAG_MS // 2)
            self.reposition()

    def settle_metadata(self) -> None:
        for node_id, node in self.nodes.items():
            while node.metadata:
                self.metadata_step(node_id)
            self.send_proposal(node_id)
        while self.proposals:
            self.decide()
        for node_id in self.nodes:
            while self.answers[node_id]:
                self.answer(node_id)

    def reposition(self) -> None:
        for node_id, node in self.nodes.items():
            if node.replica.role is Role.FOLLOWER:
                leader = self.nodes[node.replica.leader]
                if node_id not in leader.cursors:
                    self.retry(node_id, new_session=False)
