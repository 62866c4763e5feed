"""What must hold, after every step of every voter and every command applied.

The oracle keeps the one log that was decided, the state at each index (a ClusterState of its own:
what it makes of a command is judged by rules written apart), and what was promised to whom.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import crc32c

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.journal import COMMAND, FIRST_INDEX, VOTERS
from penstock.raft_meta.quorum import QuorumStatus, Role
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.raft_meta.voter import Voter
    from tests.simulation.quorum.node import Process


class Violation(Exception):  # noqa: N818 - it is a finding.
    """A promise is broken."""


def require(condition: object, what: str) -> None:
    """Raise Violation unless the condition holds."""
    if not condition:
        raise Violation(what)


def authority_refusal(
    state: ClusterState,
    leader: cluster_pb2.BrokerRecord | None,
    entry: cluster_pb2.AlterPartitionEntry,
) -> str:
    """Why a change of an in-sync set must be refused in this state; nothing if it may be made.

    Written apart from the production code's own checks, on purpose (KIP-497, KIP-903, KIP-966).
    """
    partition = state.partition(entry.topic_id, entry.partition)
    if partition is None:
        return "there is no such partition"
    members = [member.node_id for member in entry.new_isr]
    if partition.leader_epoch != entry.leader_epoch:
        return f"leader epoch {entry.leader_epoch}, and {partition.leader_epoch} is in force"
    if leader is None or partition.leader != leader.node_id:
        return f"{partition.leader} leads"
    if partition.partition_epoch != entry.partition_epoch:
        return f"partition epoch {entry.partition_epoch}, and it is {partition.partition_epoch}"
    if not set(members) <= set(partition.replicas) or len(set(members)) != len(members):
        return f"members {members} of {partition.replicas}"
    if leader.node_id not in members:
        return "the leader is not in it"
    for member in entry.new_isr:
        broker = state.brokers.get(member.node_id)
        if broker is None or broker.broker_epoch != member.broker_epoch or broker.fenced:
            return f"member {member.node_id} is not who caught up, or is fenced"
        if broker.in_controlled_shutdown and broker.node_id != leader.node_id:
            return f"member {member.node_id} shuts down"
    return ""


class Checkers:
    """All that is known of one world."""

    def __init__(self) -> None:
        self.leaders: dict[int, int] = {}  # By term.
        self.decided: dict[int, tuple[int, bytes]] = {}  # Term and payload by index.
        self.decided_in: dict[int, int] = {}  # The term of the leader that committed it, by index.
        self.state_crc: dict[int, int] = {}  # By index.
        self.view_crc: dict[int, int] = {}  # Of what brokers are told, by index of the change.
        self.active: dict[int, int] = {}  # Node by controller epoch.
        self.highest = 0  # The last index that any process applied.
        self.told_index = 0  # The last index that anybody outside was told of.
        self.counts: Counter[str] = Counter()
        self.producer_blocks: set[int] = set()
        self.metadata_index_of: dict[tuple[int, int], int] = {}  # By broker and broker epoch.
        self.lives: list[bytes] = []  # Of brokers, by incarnation id, as they began.
        self.let_in_epoch: dict[int, int] = {}  # By broker: the last epoch that it was let in with.
        self.fenced_at: dict[int, int] = {}  # By broker: when it was fenced or registered last.
        self.leader_changes = 0
        self.voters: frozenset[int] | None = None  # The last set that was decided.
        self.recovered_from = 0  # The index of the set that an operator put in force.
        self._results: dict[int, tuple[bytes, bytes]] = {}  # Command and result, by index.
        self._commit_seen: dict[Any, int] = {}
        self._voters_seen: dict[Any, VoterSet | None] = {}  # In force after its last step.
        self._reference = ClusterState()

    # The voters.

    def after_step(self, process: Process, voter: Voter, status: QuorumStatus) -> None:
        """One leader a term, who has all that is decided; one committed prefix."""
        journal = voter._journal
        require(
            not process.disk.is_behind(str(journal._path)),
            f"node {process.node_id} ended a step, and not all that it may say now is on its disk",
        )
        require(
            journal.first_index <= FIRST_INDEX or process.disk.keeps("metadata/snapshot"),
            f"node {process.node_id} cut its log to a snapshot that is not on its disk",
        )
        if status.role is Role.LEADER:
            require(
                journal.voters_index >= self.recovered_from,
                f"node {process.node_id} leads by a voter set that was given up",
            )
            known = self.leaders.get(status.term)
            if known is None:
                self.leaders[status.term] = process.node_id
                self.leader_changes += 1
                self._leader_is_complete(process, journal, status.term)
            require(
                known in (None, process.node_id),
                f"nodes {known} and {process.node_id} both lead term {status.term}",
            )
        commit, seen = journal.commit_index, self._commit_seen.get(process, 1)
        for index in range(max(seen + 1, journal.first_index + 1), commit + 1):
            term = journal.term_at(index)
            require(term is not None, f"node {process.node_id} committed {index} and lacks it")
            entry = journal.entries(index, index)[0]
            self._decide(process, index, term or 0, entry.command, status.term)
        if commit > seen and status.role is Role.LEADER:
            self._majority_has_it(process, journal, commit)
        self._commit_seen[process] = commit
        self._voters_seen[process] = journal.voters

    def _majority_has_it(self, process: Process, journal: Any, index: int) -> None:
        """What a leader counts as committed, a majority of the voters in force has.

        A step commits first and may append another set then, so that either of the two counts.
        """
        sets = {journal.voters, self._voters_seen.get(process)} - {None}
        lacking = [self._lack(process, journal, index, voters) for voters in sets if voters]
        require(not sets or not all(lacking), "; ".join(lacking))

    def _lack(self, process: Process, journal: Any, index: int, voters: VoterSet) -> str:
        """How many of the voters have an entry if they are no majority, else nothing.

        Who is down is given the benefit of the doubt.
        """
        term, having = journal.term_at(index), 0
        processes = process.world.processes
        for member in voters:
            other = processes.get(member.node_id)
            theirs = None if other is None or other.voter is None else other.voter._journal
            having += theirs is None or (
                member.is_kept_in(theirs.directory_id)
                and (theirs.term_at(index) == term or theirs.first_index > index)
                and (theirs._dirty_from is None or index < theirs._dirty_from)  # It waits for room.
            )
        if having >= len(voters) // 2 + 1:
            return ""
        return (
            f"node {process.node_id} commits {index}, and {having} of {len(voters)} voters have it"
        )

    def _leader_is_complete(self, process: Process, journal: Any, term: int) -> None:
        """Raft 5.4.3: who is elected has everything that was committed in an earlier term.

        Who counts the votes of its term late, when leaders of later ones have committed already,
        need not have what only those committed.
        """
        for index in range(max(journal.first_index, 2), max(self.decided, default=0) + 1):
            decided = self.decided.get(index)
            if decided is not None and self.decided_in[index] < term:
                require(
                    journal.term_at(index) == decided[0],
                    f"node {process.node_id} leads without entry {index} of term {decided[0]}",
                )

    def _decide(
        self, process: Process, index: int, term: int, command: bytes, in_term: int
    ) -> None:
        if index not in self.decided and command[:1] == VOTERS:
            self._follows(VoterSet.decode(command[1:]).node_ids)
        self.decided_in.setdefault(index, in_term)  # Its leader is the first to know.
        known = self.decided.setdefault(index, (term, command))
        require(
            known == (term, command),
            f"entry {index} is of term {known[0]}, but node {process.node_id} committed another "
            f"one of term {term}",
        )

    def _follows(self, node_ids: frozenset[int]) -> None:
        """Two voter sets that follow each other have majorities that meet (thesis 4.1)."""
        before, self.voters = self.voters, node_ids
        self.counts["voter sets committed"] += 1
        require(
            before is None or len(before ^ node_ids) <= 1,
            f"the voters {sorted(node_ids)} follow {sorted(before or ())}",
        )

    # The state machine.

    def before_apply(self, process: Process, index: int, term: int, payload: bytes) -> None:
        """In order, once, and what was decided."""
        require(
            index > process.applied_index,
            f"node {process.node_id} applies {index} after {process.applied_index}",
        )
        process.applied_index = index
        known = self.decided.get(index)
        require(
            known == (term, b"\x42" + payload),
            f"node {process.node_id} applies at {index} what was not decided",
        )

    def applied(
        self, process: Process, index: int, payload: bytes, raw: bytes, state: ClusterState
    ) -> None:
        """The same index, the same state; and a change that was allowed, the first time."""
        if index > self.highest:
            self.highest = index
            self._results[index] = payload, raw
            self._judge(index, payload, cluster_pb2.CommandResult.FromString(raw))
            reference = self._reference.snapshot()
            self.state_crc[index] = crc32c.crc32c(reference)
        self._same_state(process, index, state)
        if process.shell._core.is_active:
            epoch = process.shell._epoch
            known = self.active.setdefault(epoch, process.node_id)
            require(
                known == process.node_id,
                f"{known} and {process.node_id} are both active in controller epoch {epoch}",
            )

    def installed(self, process: Process, index: int, state: ClusterState) -> None:
        """A snapshot is the state at its index."""
        require(
            index >= process.applied_index,
            f"node {process.node_id} goes back from {process.applied_index} to {index}",
        )
        process.applied_index = index
        self.counts["snapshots installed"] += 1
        self._same_state(process, state.applied_index, state)

    def encoded(self, process: Process, index: int, snapshot: bytes) -> None:
        """A snapshot, encoded after its index while the state went on, is of its index."""
        self.counts["snapshots encoded"] += 1
        require(
            self.state_crc[index] == crc32c.crc32c(snapshot),
            f"node {process.node_id}'s snapshot up to {index} is of another state",
        )

    def _same_state(self, process: Process, index: int, state: ClusterState) -> None:
        known = self.state_crc.get(index)
        require(
            known is None or known == crc32c.crc32c(state.snapshot()),
            f"node {process.node_id} has another state than others at {index}",
        )

    def _judge(self, index: int, payload: bytes, result: cluster_pb2.CommandResult) -> None:
        """Apply it to the oracle's own state too, and look at what changed."""
        command = cluster_pb2.Command.FromString(payload)
        before = self._reference
        kind = command.WhichOneof("body") or "none"
        self._authority(before, command, result)
        partitions = dict(before.all_partitions())
        brokers = dict(before.brokers)
        epoch, sequence = before.controller_epoch, before.last_sequence
        applied = before.apply(index, payload)
        state = self._reference
        require(
            applied.result.SerializeToString() == result.SerializeToString(),
            f"command {index} has another result the second time",
        )
        ok = not result.HasField("error")
        self.counts["commands applied" if ok else "commands refused"] += 1
        if ok:
            self.counts[kind] += 1
        require(state.controller_epoch >= epoch, "the controller epoch fell")
        if ok and kind != "become_controller":
            require(
                command.controller_epoch == epoch,
                f"command {index} of epoch {command.controller_epoch} took effect in {epoch}",
            )
            require(
                command.sequence > sequence,
                f"command {index}, sequence {command.sequence}, took effect after {sequence}",
            )
        if ok and kind == "become_controller":
            require(command.controller_epoch > epoch, f"controller epoch {epoch} was claimed twice")
        self._check_brokers(index, command, result, brokers, state)
        if applied.delta is not None:
            self._check_partitions(index, kind, partitions, applied.delta, state)
            self.view_crc[index] = view_crc(state.metadata())
        try:
            state.validate()
        except AssertionError as error:
            raise Violation(f"at {index}: {error}") from error
        if ok and kind == "allocate_producer_ids":
            first = result.allocate_producer_ids.first_producer_id
            require(first not in self.producer_blocks, f"producer ids {first} are given out twice")
            self.producer_blocks.add(first)

    def _authority(
        self, state: ClusterState, command: cluster_pb2.Command, result: cluster_pb2.CommandResult
    ) -> None:
        """What acts on an authority that is over has no effect."""
        if result.HasField("error"):
            return
        kind = command.WhichOneof("body") or ""
        body = getattr(command, kind) if kind else None
        if kind in (
            "fence_broker", "unfence_broker", "controlled_shutdown", "alter_partition",
            "allocate_producer_ids",
        ):  # fmt: skip
            broker = state.brokers.get(body.node_id)
            require(
                broker is not None and broker.broker_epoch == body.broker_epoch,
                f"{kind} of broker {body.node_id}, epoch {body.broker_epoch}, took effect",
            )
        if kind == "alter_partition":
            leader = state.brokers.get(body.node_id)
            for entry, answer in zip(
                body.partitions, result.alter_partition.partitions, strict=True
            ):
                took_effect = not answer.HasField("error") or (
                    answer.error.code == ErrorCode.NEW_LEADER_ELECTED  # It did, and with that.
                )
                refusal = authority_refusal(state, leader, entry)  # type: ignore[arg-type]
                require(
                    not took_effect or not refusal,
                    f"an in-sync set was changed by broker {body.node_id}, though {refusal}",
                )
                require(
                    answer.error.code != ErrorCode.INELIGIBLE_REPLICA
                    or answer.partition.partition_epoch > entry.partition_epoch,
                    f"broker {body.node_id} may ask again in partition epoch "
                    f"{entry.partition_epoch} for what it was refused: {answer.error.message}",
                )

    def _check_brokers(
        self,
        index: int,
        command: cluster_pb2.Command,
        result: cluster_pb2.CommandResult,
        before: dict[int, Any],
        state: ClusterState,
    ) -> None:
        for node_id, broker in state.brokers.items():
            old = before.get(node_id)
            if old is not None:
                require(broker.broker_epoch >= old.broker_epoch, f"broker {node_id}'s epoch fell")
            anew = old is None or old.broker_epoch != broker.broker_epoch
            if anew:
                require(broker.fenced, f"broker {node_id} registers unfenced")
            if anew or (broker.fenced and not old.fenced):
                self.fenced_at[node_id] = index
            if not broker.fenced:
                self.let_in_epoch[node_id] = broker.broker_epoch
            if old is not None and old.fenced and not broker.fenced:
                seen = self.metadata_index_of.get((node_id, broker.broker_epoch), 0)
                require(
                    seen >= self.fenced_at[node_id],
                    f"broker {node_id} is let in at {index}: it has seen {seen}, and was fenced "
                    f"at {self.fenced_at[node_id]}",
                )
        registration = command.register_broker
        node_id = registration.node_id
        if command.WhichOneof("body") != "register_broker" or result.HasField("error"):
            return
        broker, old = state.brokers[node_id], before.get(node_id)
        if old is not None and old.broker_epoch == broker.broker_epoch:
            return  # It is told again what it was told.
        require(
            old is None
            or self.lives.index(old.incarnation_id) < self.lives.index(broker.incarnation_id),
            f"broker {node_id} is set back by the late registration of an earlier process",
        )
        needed = None if old is None else self.let_in_epoch.get(node_id, old.broker_epoch)
        if needed is None or registration.previous_broker_epoch < needed:
            for key, partition in state.all_partitions():
                require(
                    node_id not in partition.elr, f"{node_id} lost its cache, and may lead {key}"
                )

    def _check_partitions(
        self,
        index: int,
        kind: str,
        before: dict[Any, Any],
        delta: cluster_pb2.MetadataDelta,
        state: ClusterState,
    ) -> None:
        for record in delta.partitions:
            where = f"partition {record.topic_id.hex()[:6]}-{record.partition} at {index}"
            replicas, isr = set(record.replicas), set(record.isr)
            require(isr and isr <= replicas, f"{where}: in sync {isr} of {replicas}")
            require(set(record.elr) <= replicas - isr, f"{where}: eligible {list(record.elr)}")
            require(record.leader == -1 or record.leader in isr, f"{where}: {record.leader} leads")
            if record.leader != -1:
                broker = state.brokers.get(record.leader)
                require(broker is not None and not broker.fenced, f"{where}: its leader is fenced")
            for member in isr if record.leader != -1 else ():
                broker = state.brokers.get(member)
                require(broker is not None and not broker.fenced, f"{where}: {member} is fenced")
            old = before.get((record.topic_id, record.partition))
            if old is None:
                continue
            require(record.partition_epoch > old.partition_epoch, f"{where}: its epoch stands")
            self._check_move(where, kind, old, record)
            changed = record.leader != old.leader
            require(
                record.leader_epoch >= old.leader_epoch + changed,
                f"{where}: led by {record.leader} after {old.leader} in the same epoch",
            )
            if changed and record.leader != -1:
                self.counts["partition leaders elected"] += 1
                # A leader that shuts down may name its successor in sync with the same breath.
                named = isr if kind == "alter_partition" else set()
                require(
                    record.leader in {*old.isr, *old.elr, *named},
                    f"{where}: {record.leader} leads, and {old.isr} and {old.elr} could: "
                    f"{kind} {old} -> {record}",
                )

    def _check_move(self, where: str, kind: str, old: Any, record: Any) -> None:
        """A reassignment (KIP-455) takes nobody away before those who come are in sync."""
        adding, removing = set(record.adding_replicas), set(record.removing_replicas)
        replicas = set(record.replicas)
        require(adding | removing <= replicas, f"{where}: {adding} and {removing} of {replicas}")
        require(not adding & removing, f"{where}: {adding & removing} come and go")
        left, come = set(old.replicas) - replicas, replicas - set(old.replicas)
        if not left and not come:
            return
        self.counts["moves begun or changed" if come else "moves ended"] += 1
        require(not come or kind == "alter_reassignments", f"{where}: {come} come by {kind}")
        require(
            not left or record.leader_epoch > old.leader_epoch,
            f"{where}: {left} left in leader epoch {record.leader_epoch}",
        )
        cancelled = left <= set(old.adding)
        require(
            cancelled or not left or set(old.adding) & replicas <= set(record.isr),
            f"{where}: {left} left before {old.adding} were in sync: {list(record.isr)}",
        )

    # What an operator gives up.

    def survives(
        self,
        number: int,
        log: dict[int, tuple[int, bytes]],
        other_logs: list[dict[int, tuple[int, bytes]]],
    ) -> None:
        """The survivor that goes on has every decision that any survivor has.

        It has all that was committed before its last term (Raft 5.4.3), and of that term what a
        survivor with less has. What only later terms committed none of the survivors has of those
        terms: that another has such an entry of an older term shows nobody that it is decided.
        """
        last_term = log[max(log)][0]
        for index, entry in self.decided.items():
            if index <= min(log) or log.get(index) == entry:
                continue
            in_term = self.decided_in[index]
            held = any(index <= min(other) or other.get(index) == entry for other in other_logs)
            require(
                in_term > last_term or (in_term == last_term and not held),
                f"survivor {number} goes on without entry {index}, which was decided in term "
                f"{in_term}{' and which another survivor has' if held else ''}",
            )

    def recovered(self, log: dict[int, tuple[int, bytes]], term: int, voters_index: int) -> None:
        """A survivor's log, as far as it was before it became the only voter, is what there is.

        All of it is decided by that; what others decided beyond it is lost, and with it whatever
        followed from that. ``term`` was the survivor's last one, and no later one ever was.
        """
        unlike = [i for i, entry in log.items() if self.decided.get(i, entry) != entry]
        end = min([voters_index, *unlike]) - 1  # Up to here everything is as it was.
        self.counts["decisions lost with a majority"] += sum(i > end for i in self.decided)
        self.counts["entries decided by an operator"] += sum(i > self._last_decided() for i in log)
        for known in (self.decided, self.decided_in, self.state_crc, self.view_crc, self._results):
            for index in [index for index in known if index > end]:
                del known[index]
        for index, entry in log.items():
            self.decided.setdefault(index, entry)
            self.decided_in.setdefault(index, term)
        self.leaders = {t: node for t, node in self.leaders.items() if t <= term}
        self.active = {t: node for t, node in self.active.items() if t <= term}
        self.told_index = min(self.told_index, end)
        self.voters, self.recovered_from = None, voters_index
        # What a broker has seen beyond it is nothing any more; what is before it, it has seen too.
        self.metadata_index_of = {
            (node, epoch): min(index, end)
            for (node, epoch), index in self.metadata_index_of.items()
            if epoch <= end
        }
        self._replay()

    def _last_decided(self) -> int:
        return max(self.decided, default=0)

    def _replay(self) -> None:
        """Bring the oracle's own state to the last result that is left."""
        self.highest = max(self._results, default=0)
        self._reference = ClusterState()
        self.producer_blocks.clear()
        self.fenced_at.clear()
        self.let_in_epoch.clear()
        counts = Counter(self.counts)
        seen, self.metadata_index_of = self.metadata_index_of, _Unknown()
        for index, (payload, raw) in sorted(self._results.items()):
            self._judge(index, payload, cluster_pb2.CommandResult.FromString(raw))
        self.metadata_index_of = seen
        self.counts = counts

    def topics(self) -> set[bytes]:
        """The topics that there are when everything that is decided is applied."""
        state = ClusterState.restore(self._reference.snapshot())
        for index, (_term, command) in sorted(self.decided.items()):
            if index > self.highest and command[:1] == COMMAND:
                state.apply(index, command[1:])
        return set(state.topics)

    # What is told outside.

    def acknowledged(self, index: int) -> None:
        """Somebody outside knows that what happened at this index happened."""
        self.counts["acknowledged"] += 1
        require(index in self.decided, f"{index} was acknowledged, and is not decided")
        self.told_index = max(self.told_index, index)

    def read(self, asked_index: int, answered_index: int, applied_index: int, node: int) -> None:
        """A linearizable read, asked when ``asked_index`` was known outside."""
        self.counts["reads"] += 1
        require(
            min(answered_index, applied_index) >= asked_index,
            f"node {node} reads at {answered_index} (applied {applied_index}) what was at "
            f"{asked_index} before it was asked",
        )

    def broker_view(self, node_id: int, broker_epoch: int, index: int, crc: int) -> None:
        """A broker has the metadata as they are at the index."""
        known = self.view_crc.get(index)
        require(
            known is None or known == crc, f"broker {node_id} has other metadata than at {index}"
        )
        key = (node_id, broker_epoch)
        self.metadata_index_of[key] = max(index, self.metadata_index_of.get(key, 0))


class _Unknown(dict[tuple[int, int], int]):
    """In the place of what brokers had seen when something was judged for the first time."""

    def get(self, _key: object, _default: object = None) -> int:  # type: ignore[override]  # Enough.
        return 1 << 62


def view_crc(metadata: cluster_pb2.MetadataDelta) -> int:
    """A checksum of what brokers know."""
    parts = (
        *sorted(record.SerializeToString(deterministic=True) for record in metadata.brokers),
        *sorted(record.SerializeToString(deterministic=True) for record in metadata.topics),
        *sorted(record.SerializeToString(deterministic=True) for record in metadata.partitions),
    )
    return crc32c.crc32c(b"\0".join(parts))
