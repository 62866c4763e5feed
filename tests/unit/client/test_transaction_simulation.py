"""A transactional producer's cores against brokers, a network and a clock that do their worst.

What is checked holds for every schedule: of a transaction whose commit returned all records are in
the log, once, in their order, and committed; of one whose commit was refused, or that was aborted,
none is. What nobody was told of is committed whole or not at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.client.core.send_events import (
    Dropped,
    Event,
    Fail,
    PartitionAnswer,
    SendRequest,
    Spoil,
    StreamBroken,
    TransactionEnded,
    Woken,
)
from penstock.client.core.sequencer import Identity, Sequencer
from penstock.client.core.transaction import Phase, Transactions
from penstock.client.core.transaction_events import (
    AskEnd,
    AskIdentity,
    AwaitVerdicts,
    BeginWanted,
    Done,
    DropRecords,
    EndAnswered,
    EndRefused,
    EndUnanswered,
    EndWanted,
    Failed,
    Flushed,
    IdentityGiven,
    InitWanted,
    Interrupted,
    KeptUntil,
    Renew,
    RenewalRefused,
    Renewed,
    Sent,
    SwapIdentity,
    TakeIdentity,
    Wish,
)
from penstock.wire.compression import Compression
from penstock.wire.errors import (
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTxnStateError,
    NetworkError,
    PenstockError,
    ProducerFencedError,
    RequestTimedOutError,
    TransactionAbortableError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import decode_batch, parse_header
from tests.unit.client.test_sender_simulation import NODES, PARTITIONS, World

PRODUCER = 7
KEPT_MS = 15
NONE: frozenset[TopicPartition] = frozenset()


class Coordinator:
    """Decides as docs/adr/0012-transactions.md says, and keeps partitions as 0013 does; its markers
    are in the logs at once.
    """

    def __init__(self, world: TransactionWorld) -> None:
        self.world = world
        self.epoch = 0
        self.partitions: set[int] = set()
        self.kept: set[int] = set()  # While nothing else was asked for.
        self.lapsed: int | None = None  # The epoch after the last one's, where it was only kept.
        self.last: tuple[int, bool, str] | None = None  # An epoch, its outcome, who decided.
        self.outcomes: dict[int, bool] = {}

    def decide(self, commit: bool, who: str, keep: frozenset[TopicPartition] = NONE) -> None:
        assert self.epoch not in self.outcomes, "decided twice"
        self.outcomes[self.epoch] = commit
        for partition in self.partitions:
            self.world.logs[partition].producers[PRODUCER] = (self.epoch + 1, [])
        if self.kept and who == "timeout":
            self.lapsed = self.epoch
        else:
            self.last = (self.epoch, commit, who)
            self.lapsed = None
        self.kept = self.partitions & {name.partition for name in keep}
        self.partitions = set(self.kept)
        self.epoch += 1

    def add(self, partition: int) -> None:
        """The leader asks, unless the partition was kept."""
        if partition not in self.partitions:
            self.partitions.add(partition)
            self.kept = set()

    def end(self, ask: AskEnd) -> Identity | PenstockError:
        identity, commit = ask.identity, ask.commit
        if identity.epoch == self.epoch:
            self.decide(commit, "producer", ask.keep)
        elif identity.epoch == self.lapsed:
            if commit:
                return TransactionAbortableError("it lapsed")
        elif self.last is None or identity.epoch != self.last[0] or self.last[2] == "other":
            return ProducerFencedError(f"epoch {identity.epoch}, and it is {self.epoch}")
        elif self.last[1] != commit:
            if self.last[2] == "timeout":
                return TransactionAbortableError("it timed out")
            return InvalidTxnStateError("it was ended the other way")
        return Identity(PRODUCER, self.epoch)


class TransactionWorld(World):
    def __init__(self, seed: int, *, timeout_ms: float = 3_000) -> None:
        super().__init__(seed, timeout_ms=timeout_ms)
        self.sender.sequencer = Sequencer(
            idempotent=True, max_in_flight=5, compression=Compression.NONE, transactional=True
        )
        self.machine = Transactions("producer 'p'")
        self.coordinator = Coordinator(self)
        self.number = 0
        self.named: dict[int, list[int]] = defaultdict(list)  # Records of each transaction.
        self.told: dict[int, Wish] = {}
        self.wish: tuple[Wish, int] | None = None  # What the application waits for.
        self.asked: AskEnd | None = None
        self.late: list[AskEnd] = []
        self.renewing: AskEnd | None = None
        self.renewed = self.kept = 0
        self.flushing = False
        self.wished = Wish.COMMIT
        self.seen: set[Phase] = set()
        self.carry(self.machine.handle(InitWanted()))

    # --- as the engine does it --------------------------------------------------------------

    def feed(self, event: Event) -> None:
        failure: PenstockError | None = None
        for effect in self.sender.handle(event, self.now):
            if isinstance(effect, SendRequest):
                names = frozenset(entry.batch.partition for entry in effect.entries)
                self.machine.handle(Sent(names))
                for entry in effect.entries:
                    header = parse_header(entry.batch.encoded)
                    assert header.producer_epoch == self.machine.identity.epoch
            if isinstance(effect, Spoil):
                failure = failure or effect.error
                continue
            self.carry_out(effect)
            if isinstance(effect, Fail):
                failure = failure or effect.error
        if failure is not None:
            self.carry(self.machine.handle(Failed(failure)))
        self.sender.validate()
        self.machine.validate()

    def carry(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case DropRecords(error):
                    self.feed(Dropped(error))
                case TakeIdentity(identity):
                    self.feed(TransactionEnded(identity))
                case SwapIdentity(identity):
                    self.feed(TransactionEnded(identity))
                case Renew(identity):
                    assert self.renewing is None
                    self.renewing = AskEnd(identity, commit=False)
                case AwaitVerdicts():
                    self.flushing = True
                case AskEnd():
                    self.asked = effect
                case AskIdentity():
                    self.carry(self.machine.handle(IdentityGiven(Identity(PRODUCER, 0))))
                case Done(error):
                    self.done(error)

    def done(self, error: PenstockError | None) -> None:
        if self.wish is None:
            assert error is None
            return
        (wish, number), self.wish = self.wish, None
        if error is None:
            assert self.told.setdefault(number, wish) is wish
        elif isinstance(error, TransactionAbortableError):
            assert self.told.setdefault(number, Wish.ABORT) is Wish.ABORT
        elif isinstance(error, InvalidTxnStateError):
            assert self.machine.phase is Phase.READY  # It is committed, as a lost answer said.
            assert wish is Wish.ABORT
            assert self.told.setdefault(number, Wish.COMMIT) is Wish.COMMIT
        elif not isinstance(error, ProducerFencedError):
            assert isinstance(error, RequestTimedOutError), error
            assert self.machine.phase is Phase.UNSURE

    # --- the application --------------------------------------------------------------------

    def begin(self) -> None:
        self.number += 1
        self.carry(self.machine.handle(BeginWanted(self.now)))

    def add(self, partition: int) -> None:
        self.machine.check_sending()
        self.send(partition)
        self.named[self.number].append(self.next_value)

    def end(self, wish: Wish) -> None:
        self.wished = wish
        self.wish = (wish, self.number)
        try:
            self.carry(self.machine.handle(EndWanted(wish)))
        except (TransactionAbortableError, ProducerFencedError):
            self.wish = None
        self.look()

    def interrupt(self) -> None:
        if self.asked is not None:
            self.late.append(self.asked)
        self.wish = self.asked = None
        self.flushing = False
        self.carry(self.machine.handle(Interrupted()))

    def look(self) -> None:
        self.sender.hurry = int(self.flushing)
        self.feed(Woken())
        if self.flushing and not self.sender.open_batches():
            self.flushing = False
            self.carry(self.machine.handle(Flushed()))

    # --- the world --------------------------------------------------------------------------

    def append(self, node: int, entry: Any, data: bytes) -> Any:
        header = parse_header(data)
        assert header.is_transactional
        log = self.logs[entry.batch.partition.partition]
        if log.leader == node and header.producer_epoch == self.coordinator.epoch:
            self.coordinator.add(entry.batch.partition.partition)
        elif log.leader == node:
            return PartitionAnswer(InvalidProducerEpochError("the coordinator has another"))
        if self.chance.random() < 0.01:
            return PartitionAnswer(InvalidRecordError("the topic refuses it"))
        return super().append(node, entry, data)

    def answer_end(self) -> None:
        ask, self.asked = self.asked, None
        assert ask is not None
        fate = self.chance.random()
        answer = self.coordinator.end(ask) if fate < 0.8 else None
        if fate < 0.2:
            assert answer is not None  # It is decided, and the answer lost.
            answer = None
        if answer is None:
            self.late.append(ask)
            self.carry(self.machine.handle(EndUnanswered(NetworkError("broke"))))
        elif isinstance(answer, Identity):
            kept_ms = KEPT_MS if self.coordinator.kept else 0
            self.kept += kept_ms > 0
            self.carry(self.machine.handle(EndAnswered(answer, self.now, kept_ms)))
        else:
            self.carry(self.machine.handle(EndRefused(answer)))

    def answer_renewal(self) -> None:
        ask = self.renewing
        assert ask is not None
        answer = self.coordinator.end(ask)
        if self.chance.random() < 0.3:
            self.late.append(ask)  # The answer is lost, and it is asked again.
            return
        self.renewing = None
        if isinstance(answer, Identity):
            self.renewed += 1
            self.carry(self.machine.handle(Renewed(answer)))
        else:
            assert isinstance(answer, ProducerFencedError), answer
            self.carry(self.machine.handle(RenewalRefused(answer)))

    def live(self, *, can_be_fenced: bool) -> None:
        self.seen.add(self.machine.phase)
        choice = self.chance.random()
        if self.chance.random() < 0.2:
            self.carry(self.machine.handle(KeptUntil(self.now)))
        if self.renewing is not None and self.chance.random() < 0.1:
            self.answer_renewal()
        if self.wish is None and choice < 0.4:
            self.go_on(choice)
        elif choice < 0.5 and self.asked is not None:
            self.answer_end()
        elif 0.5 < choice < 0.503 and self.wish is not None:
            self.interrupt()
        elif 0.5 < choice < 0.52 and self.late:
            self.coordinator.end(self.chance.choice(self.late))
        elif 0.5 < choice < 0.523 and self.coordinator.partitions:
            self.coordinator.decide(commit=False, who="timeout")
        elif 0.5 < choice < 0.525 and can_be_fenced:
            self.coordinator.decide(commit=False, who="other")
            self.coordinator.epoch += 1
        else:
            self.world_step()
        self.look()

    def go_on(self, choice: float) -> None:
        """What the application does next."""
        phase = self.machine.phase
        if phase is Phase.READY:
            self.begin()
        elif phase is Phase.UNSURE:
            self.end(self.wished if choice < 0.2 else Wish.ABORT)
        elif phase is Phase.SPOILED or (phase is Phase.OPEN and choice > 0.3):
            self.end(Wish.ABORT if choice < 0.1 or choice > 0.37 else Wish.COMMIT)
        elif phase is Phase.OPEN:
            for _ in range(self.chance.randint(1, 6)):
                self.add(self.chance.randrange(PARTITIONS))

    def world_step(self) -> None:
        self.now += 5
        node = self.chance.choice(NODES)
        choice = self.chance.random()
        if choice < 0.45 and self.requests[node]:
            self.answers[node].append(self.arrive(node, self.requests[node].popleft()))
        elif choice < 0.9 and self.answers[node]:
            self.feed(self.answers[node].popleft())
        elif choice < 0.91:
            self.lose_stream(node)
            self.feed(StreamBroken(node, NetworkError("broke")))
        elif choice < 0.93 and self.zombies:
            self.arrive(*self.zombies.pop(self.chance.randrange(len(self.zombies))))
        elif choice < 0.935:
            log = self.chance.choice(self.logs)
            log.leader = self.chance.choice(NODES)
            log.leader_epoch += 1
        elif choice < 0.97 and self.refresh_due:
            self.refresh()
        else:
            self.now += self.chance.choice((1, 10, 100))

    def finish(self) -> None:
        """All that is late comes, and what is open times out."""
        for ask in self.late:
            self.coordinator.end(ask)
        for node in NODES:
            for request in self.requests[node]:
                self.arrive(node, request)
        for zombie in self.zombies:
            self.arrive(*zombie)
        if self.coordinator.partitions:
            self.coordinator.decide(commit=False, who="timeout")

    def check_outcomes(self) -> None:
        committed: list[int] = []
        for log in self.logs:
            values: list[int] = []
            for _, _, data in log.batches:
                if self.coordinator.outcomes[parse_header(data).producer_epoch]:
                    values += [int(record.value or b"") for record in decode_batch(data)]
            assert values == sorted(set(values)), "duplicated or reordered"
            committed += values
        for number, names in self.named.items():
            there = set(names) & set(committed)
            assert there in (set(), set(names)), "committed in part"
            told = self.told.get(number)
            if told is not None:
                assert there == (set(names) if told is Wish.COMMIT else set()), told


def run(seed: int, steps: int, **settings: Any) -> TransactionWorld:
    world = TransactionWorld(seed, **settings)
    for _ in range(steps):
        world.live(can_be_fenced=seed % 4 == 0)
    world.finish()
    world.check_outcomes()
    return world


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(50, 500))
def test_a_transaction_is_there_whole_or_not_at_all(seed: int, steps: int) -> None:
    run(seed, steps)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_the_same_while_many_batches_time_out(seed: int) -> None:
    run(seed, 400, timeout_ms=150)


def test_the_worlds_come_to_every_end() -> None:
    """Else the above would check little."""
    seen: set[Phase] = set()
    told: Counter[Wish] = Counter()
    kept = renewed = 0
    for seed in range(60):
        world = run(seed, 400)
        told.update(wish for number, wish in world.told.items() if world.named[number])
        seen |= world.seen
        kept += world.kept
        renewed += world.renewed
        assert world.machine.phase is not Phase.FAILED
    assert seen == set(Phase) - {Phase.NO_IDENTITY, Phase.PREPARED, Phase.FAILED}
    assert min(told[Wish.COMMIT], told[Wish.ABORT], kept) > 100
    assert renewed > 10


def test_what_is_sent_between_two_transactions_is_refused() -> None:
    world = TransactionWorld(1)
    with pytest.raises(InvalidTxnStateError, match=r"begin_transaction\(\)"):
        world.add(0)


def test_an_empty_transaction_asks_nobody() -> None:
    for wish in (Wish.COMMIT, Wish.ABORT):
        world = TransactionWorld(1)
        world.begin()
        world.end(wish)
        assert world.asked is None
        assert (world.told, world.machine.phase) == ({1: wish}, Phase.READY)
        assert world.coordinator.outcomes == {}


def test_a_refusal_raises_no_epoch() -> None:
    """It is the transaction's name; a batch under the next one could get into the next one."""
    world = TransactionWorld(1)
    world.begin()
    world.add(0)
    world.sender.hurry = 1
    world.feed(Woken())
    sequencer = world.sender.sequencer
    [batch] = sequencer.outstanding()
    sequencer.refuse(batch, InvalidRecordError("the topic refuses it"))
    assert sequencer.identity == sequencer.lane(batch.partition).identity == Identity(PRODUCER, 0)


@pytest.mark.parametrize(("now_ms", "is_late"), [(KEPT_MS - 1, False), (KEPT_MS, True)])
def test_who_begins_too_late_goes_on_under_another_identity(now_ms: float, is_late: bool) -> None:
    machine = Transactions("producer 'p'")
    first, second, third = (Identity(PRODUCER, epoch) for epoch in range(3))
    machine.handle(IdentityGiven(first))
    for event in (BeginWanted(), Sent(), EndWanted(Wish.COMMIT), Flushed()):
        effects = machine.handle(event)
    assert effects == [AskEnd(first, commit=True)]
    assert machine.handle(EndAnswered(second, 0, KEPT_MS)) == [TakeIdentity(second), Done()]
    effects = machine.handle(BeginWanted(now_ms))
    if is_late:
        assert effects == [SwapIdentity(Identity()), Renew(second), Done()]
        assert machine.handle(Renewed(third)) == [SwapIdentity(third)]
    else:
        assert effects == [Done()]
    assert machine.phase is Phase.OPEN
