from __future__ import annotations

from typing import Any

import pytest

from penstock.raft_meta.core.active_controller import ActiveController
from penstock.raft_meta.core.controller_events import (
    BecameActive,
    CommandApplied,
    Effect,
    EndStream,
    Event,
    Heartbeat,
    LostLeadership,
    ProposalFailed,
    Propose,
    Reply,
    StreamClosed,
    StreamOpened,
    Tick,
)
from penstock.raft_meta.core.sessions import LivenessSettings
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.raft_meta_core.metadata_driver import Driver, incarnation

TIMES = LivenessSettings(
    session_timeout_ms=6000,
    disconnect_grace_ms=200,
    takeover_grace_ms=600,
    shutdown_wait_ms=2000,
    balance_interval_ms=5000,
    retry_ms=100,
)


class Shell:
    """An active controller on a state: carries out its proposals at once, unless held."""

    def __init__(self, brokers: int = 3, metadata_version: int = METADATA_VERSION) -> None:
        self.driver = Driver(brokers=brokers, metadata_version=metadata_version)
        self.controller = ActiveController(TIMES)
        self.now_ms = 1_000
        self.hold = False
        self.held: list[Propose] = []
        self.proposed: list[str] = []
        self.replies: dict[int, list[controller_pb2.BrokerHeartbeatResponse]] = {}
        self.ended: dict[int, ErrorCode] = {}
        self.streams = 0

    def become_active(
        self, *unconnected: int, voters: tuple[int, ...] = (), former_ended: bool = False
    ) -> None:
        self.driver.claim(self.driver.epoch + 1)
        self.tell(
            BecameActive(
                self.driver.epoch,
                self.driver.state,
                frozenset(unconnected),
                voters=frozenset(voters),
                former_ended=former_ended,
            )
        )

    def tell(self, event: Event) -> list[Effect]:
        effects = self.controller.handle(event, self.now_ms)
        for effect in effects:
            match effect:
                case Propose(_, command):
                    self.proposed.append(str(command.WhichOneof("body")))
                    self.held.append(effect)
                case Reply(stream_id, response):
                    self.replies.setdefault(stream_id, []).append(response)
                case EndStream(stream_id, error):
                    self.ended[stream_id] = error.code
        if not self.hold:
            self.carry_out()
        return effects

    def carry_out(self) -> None:
        while self.held:
            proposal = self.held.pop(0)
            body = str(proposal.command.WhichOneof("body"))
            self.apply(proposal.proposal_id, **{body: getattr(proposal.command, body)})

    def apply(self, proposal_id: int | None, **body: Any) -> cluster_pb2.CommandResult:
        driver = self.driver
        driver.sequence += 1
        command = cluster_pb2.Command(
            controller_epoch=driver.epoch, sequence=driver.sequence, **body
        )
        applied = driver.apply_bytes(command.SerializeToString())
        self.tell(CommandApplied(applied.result, applied.delta, proposal_id))
        return applied.result

    def open(self) -> int:
        self.streams += 1
        self.tell(StreamOpened(self.streams))
        return self.streams

    def beat(self, stream: int, node: int, **fields: Any) -> None:
        broker = self.driver.state.brokers.get(node)
        epoch = broker.broker_epoch if broker else 0
        request = controller_pb2.BrokerHeartbeatRequest(
            **{
                "node_id": node,
                "broker_epoch": epoch,
                "metadata_index": self.driver.index,
                **fields,
            }
        )
        self.tell(Heartbeat(stream, request))

    def registration(
        self, node: int, life: int = 1, previous: int = -1
    ) -> cluster_pb2.RegisterBrokerCommand:
        return cluster_pb2.RegisterBrokerCommand(
            node_id=node,
            incarnation_id=incarnation(node * 1000 + life),
            cluster_id=self.driver.state.cluster_id,
            host="h",
            port=1,
            previous_broker_epoch=previous,
        )

    def register(self, node: int, life: int = 1, previous: int = -1) -> None:
        body = self.registration(node, life, previous)
        assert not self.apply(None, register_broker=body).HasField("error")

    def run_until(self, end_ms: int, beating: dict[int, int] | None = None) -> None:
        """Let time pass, sleeping from deadline to deadline; ``beating`` streams beat by 1 s."""
        while self.now_ms < end_ms:
            due = self.controller.next_deadline_ms()
            next_beat = self.now_ms - self.now_ms % 1000 + 1000
            step = min(end_ms, next_beat, end_ms if due is None else max(due, self.now_ms))
            self.now_ms = step
            if step == next_beat:
                for stream, node in (beating or {}).items():
                    self.beat(stream, node)
            if due is not None and due <= step:
                self.tell(Tick())

    def fenced(self, node: int) -> bool:
        return self.driver.state.brokers[node].fenced


@pytest.fixture
def shell() -> Shell:
    """An active controller that brokers 1 to 3, all unfenced, have found: on streams 1 to 3."""
    made = Shell()
    made.become_active()
    for node in (1, 2, 3):
        made.beat(made.open(), node)
    assert made.proposed == []
    return made


def test_nothing_is_to_be_done_while_another_is_active() -> None:
    shell = Shell()
    assert shell.controller.next_deadline_ms() is None
    stream = shell.open()
    assert shell.ended[stream] == ErrorCode.NOT_CONTROLLER
    shell.beat(stream, 1)
    assert shell.replies == {}
    assert shell.tell(Tick()) == []
    assert shell.tell(CommandApplied(cluster_pb2.CommandResult(), None)) == []


def test_a_registered_broker_is_unfenced_once_it_knows_its_registration() -> None:
    shell = Shell(brokers=0)
    shell.become_active()
    shell.register(1)
    epoch = shell.driver.state.brokers[1].broker_epoch
    stream = shell.open()
    shell.beat(stream, 1, metadata_index=epoch - 1, sequence=5)
    assert shell.fenced(1)
    assert shell.replies[stream][-1].fenced
    assert shell.replies[stream][-1].sequence == 5
    shell.beat(stream, 1, metadata_index=epoch, want_fence=True)
    assert shell.fenced(1)
    shell.beat(stream, 1, metadata_index=epoch, sequence=7)
    assert not shell.fenced(1)
    answer = shell.replies[stream][-1]
    assert not answer.fenced, "the change is told at once, not at the next heartbeat"
    assert answer.sequence == 7
    assert answer.controller_epoch == shell.driver.epoch


def test_every_heartbeat_is_answered(shell: Shell) -> None:
    for sequence in range(1, 4):
        shell.beat(1, 1, sequence=sequence)
    assert [reply.sequence for reply in shell.replies[1]] == [0, 1, 2, 3]


def test_a_broken_stream_fences_after_the_grace(shell: Shell) -> None:
    start = shell.now_ms
    shell.tell(StreamClosed(2))
    assert shell.controller.next_deadline_ms() == start + 200
    shell.run_until(start + 199)
    assert not shell.fenced(2)
    shell.run_until(start + 200)
    assert shell.fenced(2)
    assert shell.proposed == ["fence_broker"]
    assert shell.controller.next_deadline_ms() == start + 6000, "nothing more depends on broker 2"


def test_a_stream_opened_again_within_the_grace_fences_nobody(shell: Shell) -> None:
    shell.tell(StreamClosed(2))
    shell.now_ms += 150
    shell.beat(shell.open(), 2)
    shell.now_ms += 100
    shell.tell(Tick())
    assert shell.proposed == []


def test_silence_fences_after_the_session_timeout_and_speech_unfences(shell: Shell) -> None:
    start = shell.now_ms
    shell.run_until(start + 5999, beating={1: 1, 2: 2})
    assert not shell.fenced(3)
    shell.run_until(start + 6000, beating={1: 1, 2: 2})
    assert shell.fenced(3)
    shell.run_until(start + 9000, beating={1: 1, 2: 2})
    assert shell.proposed == ["fence_broker"]
    shell.beat(3, 3)
    assert not shell.fenced(3)
    assert shell.proposed == ["fence_broker", "unfence_broker"]


def test_a_newer_stream_of_a_broker_replaces_the_older(shell: Shell) -> None:
    newer = shell.open()
    shell.beat(newer, 2)
    assert shell.ended == {2: ErrorCode.NETWORK_EXCEPTION}
    shell.tell(StreamClosed(2))
    shell.run_until(shell.now_ms + 1000, beating={1: 1, newer: 2, 3: 3})
    assert shell.proposed == []
    shell.beat(2, 2)
    assert len(shell.replies[2]) == 1, "what comes late on the old stream does not count"


def test_a_stream_speaks_for_one_broker(shell: Shell) -> None:
    shell.beat(1, 2)
    assert shell.ended == {1: ErrorCode.INVALID_REQUEST}
    shell.run_until(shell.now_ms + 200)
    assert shell.fenced(1)
    assert not shell.fenced(2)


@pytest.mark.parametrize(
    ("node", "fields", "code"),
    [
        (9, {}, ErrorCode.BROKER_ID_NOT_REGISTERED),
        (1, {"broker_epoch": 1}, ErrorCode.STALE_BROKER_EPOCH),
        (1, {"broker_epoch": 10**6}, ErrorCode.STALE_BROKER_EPOCH),
    ],
)
def test_strangers_are_turned_away(
    shell: Shell, node: int, fields: dict[str, int], code: ErrorCode
) -> None:
    stream = shell.open()
    shell.beat(stream, node, **fields)
    assert shell.ended == {stream: code}
    shell.run_until(shell.now_ms + 700)
    assert shell.proposed == []


def test_registering_anew_ends_the_old_process_stream(shell: Shell) -> None:
    shell.register(2, life=2)
    assert shell.ended == {2: ErrorCode.STALE_BROKER_EPOCH}
    assert shell.fenced(2)
    shell.tell(StreamClosed(2))
    shell.beat(shell.open(), 2)
    assert not shell.fenced(2)
    shell.run_until(shell.now_ms + 700)
    assert shell.proposed == ["unfence_broker"]


def test_unregistering_ends_the_stream(shell: Shell) -> None:
    shell.tell(StreamClosed(2))
    shell.run_until(shell.now_ms + 200)
    stream = shell.open()
    shell.beat(stream, 2, want_fence=True)
    shell.apply(None, unregister_broker=cluster_pb2.UnregisterBrokerCommand(node_id=2))
    assert shell.ended == {stream: ErrorCode.BROKER_ID_NOT_REGISTERED}
    assert shell.controller.next_deadline_ms() is not None
    shell.run_until(shell.now_ms + 2000, beating={1: 1, 3: 3})


def test_one_proposal_about_a_registration_is_in_flight_at_a_time(shell: Shell) -> None:
    shell.hold = True
    shell.tell(StreamClosed(2))
    shell.run_until(shell.now_ms + 5000, beating={1: 1, 3: 3})
    assert shell.proposed == ["fence_broker"]
    stream = shell.open()
    shell.beat(stream, 2)
    assert shell.proposed == ["fence_broker"]
    shell.hold = False
    shell.carry_out()
    shell.beat(stream, 2)
    assert shell.proposed == ["fence_broker", "unfence_broker"]
    assert not shell.fenced(2)


def test_a_fence_in_flight_does_not_hit_the_next_registration(shell: Shell) -> None:
    shell.hold = True
    shell.tell(StreamClosed(2))
    shell.run_until(shell.now_ms + 200)
    [stale_fence] = shell.held
    shell.held = []
    shell.register(2, life=2)
    shell.beat(shell.open(), 2)
    assert shell.proposed == ["fence_broker", "unfence_broker"]
    shell.held.reverse()
    shell.held.append(stale_fence)
    shell.hold = False
    shell.carry_out()
    assert not shell.fenced(2)
    shell.run_until(shell.now_ms + 1000, beating={1: 1, 3: 3})
    assert shell.proposed == ["fence_broker", "unfence_broker"]


def test_a_proposal_that_came_to_nothing_is_made_again_later(shell: Shell) -> None:
    shell.hold = True
    shell.tell(StreamClosed(2))
    shell.run_until(shell.now_ms + 200)
    shell.tell(ProposalFailed(shell.held.pop().proposal_id))
    assert shell.controller.next_deadline_ms() == shell.now_ms + 100
    assert shell.proposed == ["fence_broker"]
    shell.hold = False
    shell.run_until(shell.now_ms + 100)
    assert shell.proposed == ["fence_broker", "fence_broker"]
    assert shell.fenced(2)


def test_answers_to_proposals_of_an_earlier_leadership_mean_nothing(shell: Shell) -> None:
    shell.hold = True
    shell.tell(StreamClosed(2))
    shell.run_until(shell.now_ms + 200)
    old = shell.held.pop()
    shell.tell(LostLeadership())
    shell.become_active(1, 2, 3)
    assert shell.tell(ProposalFailed(old.proposal_id)) == []
    shell.run_until(shell.now_ms + 600)
    assert shell.proposed.count("fence_broker") == 1 + 3
    assert old.proposal_id not in {proposal.proposal_id for proposal in shell.held}


def test_a_broker_that_wants_to_be_fenced_is(shell: Shell) -> None:
    shell.beat(1, 1, want_fence=True)
    assert shell.fenced(1)
    shell.beat(1, 1, want_fence=True)
    assert shell.proposed == ["fence_broker"]


def test_a_shutdown_moves_leaderships_then_lets_the_broker_stop_then_fences(shell: Shell) -> None:
    shell.driver.create(assignments=[[1, 2, 3]])
    shell.beat(1, 1, want_shutdown=True, sequence=9)
    assert shell.driver.partition().leader == 2
    answer = shell.replies[1][-1]
    assert answer.may_shut_down
    assert answer.sequence == 9
    shell.beat(1, 1, want_shutdown=True)
    shell.tell(StreamClosed(1))
    assert shell.fenced(1), "it stopped, as it was told it may: nothing to wait for"
    assert shell.proposed == ["controlled_shutdown", "fence_broker"]


def test_a_shutdown_of_a_fenced_broker_waits_for_nothing(shell: Shell) -> None:
    shell.beat(1, 1, want_fence=True)
    shell.beat(1, 1, want_shutdown=True)
    assert shell.replies[1][-1].may_shut_down
    assert shell.proposed == ["fence_broker"]
    assert shell.fenced(1)


def test_a_shutdown_waits_for_a_follower_that_catches_up(shell: Shell) -> None:
    shell.driver.create(assignments=[[1, 2]])
    shell.driver.alter([1])
    shell.beat(1, 1, want_shutdown=True)
    assert not shell.replies[1][-1].may_shut_down
    entry = cluster_pb2.AlterPartitionEntry(
        topic_id=bytes(15) + b"\1",
        leader_epoch=0,
        partition_epoch=1,
        new_isr=[cluster_pb2.IsrMember(**shell.driver.about(node)) for node in (1, 2)],
    )
    about = shell.driver.about(1)
    alter = cluster_pb2.AlterPartitionCommand(**about, partitions=[entry])
    shell.apply(None, alter_partition=alter)
    assert shell.driver.partition().leader == 2
    assert shell.replies[1][-1].may_shut_down


def test_a_shutdown_waits_only_so_long(shell: Shell) -> None:
    shell.driver.create(assignments=[[1, 2]])
    shell.driver.alter([1])
    start = shell.now_ms
    shell.beat(1, 1, want_shutdown=True)
    shell.run_until(start + 1999, beating={2: 2, 3: 3})
    assert not shell.replies[1][-1].may_shut_down
    shell.run_until(start + 2000, beating={2: 2, 3: 3})
    assert shell.replies[1][-1].may_shut_down


def test_a_shutdown_does_not_wait_where_nobody_can_take_over(shell: Shell) -> None:
    shell.driver.create(assignments=[[1]])
    shell.beat(1, 1, want_shutdown=True)
    assert shell.replies[1][-1].may_shut_down


def test_all_brokers_can_shut_down_together(shell: Shell) -> None:
    shell.driver.create(partitions=6, replication_factor=3)
    for node in (1, 2, 3):
        shell.beat(node, node, want_shutdown=True)
    assert all(shell.replies[node][-1].may_shut_down for node in (1, 2, 3))
    for node in (1, 2, 3):
        shell.tell(StreamClosed(node))
    assert all(shell.fenced(node) for node in (1, 2, 3))
    assert all(part.leader == -1 for _, part in shell.driver.state.all_partitions())


def test_leaderships_go_back_to_the_preferred_brokers_in_rounds(shell: Shell) -> None:
    shell.driver.create(partitions=6, replication_factor=3)
    shell.tell(StreamClosed(1))
    shell.run_until(shell.now_ms + 200)
    stream = shell.open()
    shell.beat(stream, 1)
    beating = {2: 2, 3: 3, stream: 1}
    shell.run_until(shell.now_ms + 20_000, beating=beating)
    assert "elect_leaders" not in shell.proposed, "it is not in sync yet"
    assert shell.driver.state.leader_count(1) == 0
    for number in range(6):
        shell.driver.alter([1, 2, 3], number=number)
    start = shell.now_ms
    shell.tell(CommandApplied(cluster_pb2.CommandResult(), shell.driver.state.metadata()))
    shell.run_until(start + 5000, beating=beating)
    assert shell.driver.state.leader_count(1) == 2
    assert shell.driver.state.not_preferred_count == 0
    assert shell.proposed.count("elect_leaders") == 1
    shell.run_until(shell.now_ms + 20_000, beating=beating)
    assert shell.proposed.count("elect_leaders") == 1


def test_balancing_takes_a_broker_that_is_unregistered_for_one_that_is_not_there() -> None:
    """At metadata.version 1 the last in-sync replica may be that of a broker unregistered since."""
    shell = Shell(brokers=2, metadata_version=1)
    shell.driver.create(assignments=[[1], [2]])
    shell.driver.fence(1)
    body = cluster_pb2.UnregisterBrokerCommand(node_id=1)
    shell.driver.ok(unregister_broker=body)
    assert shell.driver.partition().isr == (1,)
    shell.become_active()
    stream = shell.open()
    shell.beat(stream, 2)
    shell.run_until(shell.now_ms + 20_000, beating={stream: 2})
    assert "elect_leaders" not in shell.proposed


def configure(shell: Shell, **configs: str) -> None:
    body = cluster_pb2.AlterClusterConfigsCommand(
        set={key.replace("_", "."): text for key, text in configs.items()}
    )
    assert not shell.apply(None, alter_cluster_configs=body).HasField("error")


def in_sync_but_not_leading(shell: Shell, partitions: int = 6) -> dict[int, int]:
    """Broker 1 leads nothing of what it should; the streams that beat."""
    shell.driver.create(partitions=partitions, replication_factor=3)
    shell.driver.fence(1)
    shell.driver.unfence(1)
    for number in range(partitions):
        shell.driver.alter([1, 2, 3], number=number)
    shell.become_active()
    beating = {shell.open(): node for node in (1, 2, 3)}
    for stream, node in beating.items():
        shell.beat(stream, node)
    return beating


def test_balancing_can_be_switched_off_and_on_again_while_it_runs(shell: Shell) -> None:
    beating = in_sync_but_not_leading(shell)
    configure(shell, leader_imbalance_enable="false")
    shell.run_until(shell.now_ms + 60_000, beating=beating)
    assert "elect_leaders" not in shell.proposed
    configure(shell, leader_imbalance_enable="true", leader_imbalance_check_interval_ms="1000")
    shell.run_until(shell.now_ms + 1_000, beating=beating)
    assert shell.driver.state.not_preferred_count == 0


def test_a_shorter_interval_counts_for_the_round_that_is_planned(shell: Shell) -> None:
    beating = in_sync_but_not_leading(shell)
    configure(shell, leader_imbalance_check_interval_ms="500")
    shell.run_until(shell.now_ms + 500, beating=beating)
    assert shell.driver.state.not_preferred_count == 0


def test_below_the_threshold_leaderships_stay(shell: Shell) -> None:
    """Of the two that are broker 1's by preference it lacks two, then one."""
    beating = in_sync_but_not_leading(shell)
    configure(shell, leader_imbalance_threshold_percent="100")
    shell.run_until(shell.now_ms + 20_000, beating=beating)
    assert shell.driver.state.leader_count(1) == 0
    configure(shell, leader_imbalance_threshold_percent="99")
    shell.run_until(shell.now_ms + 20_000, beating=beating)
    assert shell.driver.state.leader_count(1) == 2


def test_what_a_drained_broker_prefers_stays_away_until_it_may_lead_again(shell: Shell) -> None:
    beating = in_sync_but_not_leading(shell)
    drain = cluster_pb2.DrainBrokerCommand(node_id=1, since_ms=1)
    assert not shell.apply(None, drain_broker=drain).HasField("error")
    shell.run_until(shell.now_ms + 60_000, beating=beating)
    assert "elect_leaders" not in shell.proposed
    undo = cluster_pb2.DrainBrokerCommand(node_id=1)
    assert not shell.apply(None, drain_broker=undo).HasField("error")
    shell.run_until(shell.now_ms + 5_000, beating=beating)
    assert shell.driver.state.leader_count(1) == 2


def test_a_new_active_controller_goes_by_what_the_cluster_shares(shell: Shell) -> None:
    beating = in_sync_but_not_leading(shell)
    configure(shell, leader_imbalance_enable="false")
    shell.become_active()
    beating = {shell.open(): node for node in (1, 2, 3)}
    for stream, node in beating.items():
        shell.beat(stream, node)
    shell.run_until(shell.now_ms + 20_000, beating=beating)
    assert "elect_leaders" not in shell.proposed


def test_shared_times_count_for_what_begins_from_now_on(shell: Shell) -> None:
    configure(shell, broker_disconnect_grace_ms="3000")
    shell.tell(StreamClosed(1))
    shell.run_until(shell.now_ms + 2_900, beating={2: 2, 3: 3})
    assert not shell.fenced(1)
    shell.run_until(shell.now_ms + 200, beating={2: 2, 3: 3})
    assert shell.fenced(1)


def test_a_balancing_round_is_bounded_and_repeated(shell: Shell) -> None:
    shell.controller = ActiveController(LivenessSettings(balance_batch=4))
    shell.driver.create(partitions=30, replication_factor=3)
    shell.driver.fence(1)
    shell.driver.unfence(1)
    for number in range(30):
        shell.driver.alter([1, 2, 3], number=number)
    shell.become_active()
    beating = {shell.open(): node for node in (1, 2, 3)}
    for stream, node in beating.items():
        shell.beat(stream, node)
    start = shell.now_ms
    counts = []
    for seconds in (5, 10, 15):
        shell.run_until(start + seconds * 1000, beating=beating)
        counts.append(shell.driver.state.leader_count(1))
    assert counts == [4, 8, 10]


def test_a_failed_balancing_round_is_tried_again(shell: Shell) -> None:
    shell.driver.create(partitions=3, replication_factor=3)
    shell.driver.fence(1)
    shell.driver.unfence(1)
    for number in range(3):
        shell.driver.alter([1, 2, 3], number=number)
    delta = shell.driver.state.metadata()
    shell.tell(CommandApplied(cluster_pb2.CommandResult(), delta))
    shell.hold = True
    beating = {1: 1, 2: 2, 3: 3}
    shell.run_until(shell.now_ms + 5500, beating=beating)
    [proposal] = shell.held
    shell.held = []
    shell.tell(ProposalFailed(proposal.proposal_id))
    shell.hold = False
    shell.run_until(shell.now_ms + 100, beating=beating)
    assert shell.driver.state.leader_count(1) == 1


def test_a_tick_before_its_time_does_nothing(shell: Shell) -> None:
    assert shell.tell(Tick()) == []


def test_two_processes_with_one_node_id_are_told_apart(shell: Shell) -> None:
    body = cluster_pb2.RegisterBrokerCommand(node_id=1, incarnation_id=incarnation(77))
    conflict = shell.controller.registration_conflict(body, shell.now_ms)
    assert conflict is not None
    assert "127.0.0.1:9001" in conflict.message
    same = cluster_pb2.RegisterBrokerCommand(node_id=1, incarnation_id=incarnation(1001))
    assert shell.controller.registration_conflict(same, shell.now_ms) is None
    stranger = cluster_pb2.RegisterBrokerCommand(node_id=7, incarnation_id=incarnation(1))
    assert shell.controller.registration_conflict(stranger, shell.now_ms) is None
    assert shell.controller.registration_conflict(body, shell.now_ms + 3000) is None
    shell.tell(StreamClosed(1))
    assert shell.controller.registration_conflict(body, shell.now_ms) is None
