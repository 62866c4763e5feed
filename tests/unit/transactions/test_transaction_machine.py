"""A shard of transactions under any order of requests, writes that fail, crashes and late marks.

What was ever told must stay true: an identity is one instance's, a transaction is decided once, its
marks cover every partition that was let in, and what the log says is what the coordinator says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_codec import ReplayedId
from penstock.broker.core.transaction_events import Change, Mark, TransactionSettings
from penstock.broker.core.transaction_shard import TransactionShard
from penstock.broker.core.transaction_values import (
    LAST_EPOCH,
    NOBODY,
    Identity,
    Participant,
    State,
    Transaction,
    Winner,
)
from penstock.wire.errors import ErrorCode
from penstock.wire.transactional_ids import Attempt, parse_attempt
from tests.unit.transactions.transaction_harness import (
    A,
    B,
    Driver,
    attempt_id,
    participant,
)

NAMES = ("young", "old")  # "old" is near the end of its epochs.
PARTITIONS = ("orders-0", "orders-1", "sales-0", "stock-0")
STEPS = int(os.environ.get("PENSTOCK_MACHINE_STEPS", "60"))
EXAMPLES = int(os.environ.get("PENSTOCK_MACHINE_EXAMPLES", "60"))

names = st.sampled_from(NAMES)
INSTANCES = tuple(bytes([letter]) * 16 for letter in b"abcdef")
instances = st.sampled_from(INSTANCES)  # As many as are remembered of one id.
numbers = st.integers(0, 3)
small = st.integers(0, 1)
kept_partitions = st.lists(st.sampled_from(PARTITIONS), max_size=3, unique=True)
some_partitions = st.lists(st.sampled_from(PARTITIONS), min_size=1, max_size=3, unique=True)


@dataclass(frozen=True)
class Asked:
    """A request whose answer is to be judged."""

    kind: str
    name: str
    instance: bytes = b""
    identity: Identity = NOBODY
    partitions: frozenset[Participant] = frozenset()
    commit: bool = False
    number: int = -1
    winners: frozenset[Winner] = frozenset()


class Transactions(RuleBasedStateMachine):
    """Producers, engines, people, time, and a log that loses what was not committed."""

    def __init__(self) -> None:
        super().__init__()
        self.d = Driver(TransactionSettings(id_expiration_ms=400_000, settled_at_once=1))
        self.d.commits_at_once = False
        self.asked: dict[int, Asked] = {}
        self.sent: list[Mark] = []
        self.sent_to: dict[Identity, set[Participant]] = {}  # By what marks are under.
        # What was told.
        self.owners: dict[Identity, tuple[str, bytes]] = {}
        self.newest: dict[int, int] = {}  # By producer id the highest epoch that was given.
        self.instances: dict[tuple[str, int], list[bytes]] = {}  # Who was given a name, in order.
        self.outcomes: dict[Identity, bool] = {}
        self.let_in: dict[Identity, set[Participant]] = {}
        self.commits: dict[int, frozenset[Winner]] = {}
        self.attempts: dict[str, list[Identity]] = {}
        # Who may have reason to think that another instance, or a later transaction, is there.
        self.initialised: dict[str, set[bytes]] = {}
        self.used: dict[str, set[Identity]] = {}
        self.expected: dict[Identity, bool] = {}  # What commits of the group say of attempts.

    @initialize(epoch=st.integers(LAST_EPOCH - 6, LAST_EPOCH - 1))
    def one_is_old(self, epoch: int) -> None:
        value = Transaction(State.EMPTY, 7, epoch, 60_000, self.d.wall_ms, A)
        change = Change(
            "old", transaction_codec.id_key("old"), transaction_codec.id_value(value),
            "old", False, None,
        )  # fmt: skip
        self.d.log.append(change)
        self.d.load()
        self._is_given(Identity(7, epoch), "old", A)

    def teardown(self) -> None:
        """In the end everything ends."""
        self.d.commits_at_once = self.d.gives_ids = True
        while self.d.ids_asked:
            self.d.give_id()
        self.d.commit()
        for _ in range(3):
            self.d.pass_ms(100_000)
            self._judge()
            self._write_all()
        assert set(self.d.list().values()) <= {State.EMPTY}
        self._judge()
        for identity, partitions in self.let_in.items():
            exist = {one for one in partitions if self.d.topics.knows(one.topic_id)}
            under = Identity(identity.producer_id, identity.epoch + 1)
            assert {(under, one) for one in exist} <= self.d.written, "a mark was forgotten"
            if exist:
                assert identity in self.outcomes, "a transaction that never ended"
                expected = self.expected.get(identity, self.outcomes[identity])
                assert self.outcomes[identity] == expected, "not as its group's commit said"

    def _write_all(self) -> None:
        while self.d.marks:
            self.d.write_marks()
            self._judge()

    # ------------------------------------------------------------------ requests

    def _ask(self, asked: Asked) -> None:
        self.asked[self.d.last_request] = asked
        self._judge()

    def _identity(self, name: str, index: int) -> Identity:
        """One that was given for the name, or near one; the newest first."""
        known = [one for one, (owner, _) in self.owners.items() if owner == name][::-1]
        if not known:
            return Identity(999_999, 0)
        return known[index % len(known)]

    def _use(self, name: str, index: int) -> Identity:
        identity = self._identity(name, index)
        self.used.setdefault(name, set()).add(identity)
        return identity

    @rule(name=names, instance=instances)
    def init(self, name: str, instance: bytes) -> None:
        self.initialised.setdefault(name, set()).add(instance)
        self.d.init(instance, name=name)
        self._ask(Asked("init", name, instance))

    @rule(name=names, index=numbers, partitions=some_partitions)
    def add(self, name: str, index: int, partitions: list[str]) -> None:
        identity = self._use(name, index)
        self.d.add(identity, *partitions, name=name)
        added = frozenset(map(participant, partitions))
        self._ask(Asked("add", name, identity=identity, partitions=added))

    @rule(name=names, index=numbers, commit=st.booleans(), keep=kept_partitions)
    def end(self, name: str, index: int, commit: bool, keep: list[str]) -> None:
        identity = self._use(name, index)
        self.d.end(identity, commit=commit, name=name, keep=keep)
        self._ask(Asked("end", name, identity=identity, commit=commit))

    @rule(name=names, partitions=some_partitions, commit=st.booleans(), marked=st.booleans())
    def goes_from_one_to_the_next(
        self, name: str, partitions: list[str], commit: bool, marked: bool
    ) -> None:
        """As a producer does that all goes well for, up to where its next transaction is kept."""
        if self._identity(name, 0) not in self.owners:
            self.init(name, A)
            self.commit_all()
        self.add(name, 0, partitions)
        self.commit_all()
        self.end(name, 0, commit, partitions)
        self.commit_all()
        if marked:
            self._write_all()

    @rule(name=names)
    def abort(self, name: str) -> None:
        self.d.abort(name)

    @rule(number=numbers, task=small, attempt=small, instance=st.sampled_from([A, B]))
    def begin(self, number: int, task: int, attempt: int, instance: bytes) -> None:
        self.d.begin(number, task, attempt, instance)
        self._ask(Asked("begin", attempt_id(number, task, attempt), instance, number=number))

    @rule(number=numbers, task=small, attempt=small, index=small, partitions=some_partitions)
    def add_to_attempt(
        self, number: int, task: int, attempt: int, index: int, partitions: list[str]
    ) -> None:
        self.add(attempt_id(number, task, attempt), index, partitions)

    @rule(number=numbers, task=small, attempt=small, index=small)
    def end_attempt(self, number: int, task: int, attempt: int, index: int) -> None:
        self.end(attempt_id(number, task, attempt), index, False, ["orders-0"])

    @rule(number=numbers, winners=st.lists(small, max_size=2))
    def commit_group(self, number: int, winners: list[int]) -> None:
        won = [attempt_id(number, task, attempt) for task, attempt in enumerate(winners)]
        self._commit(number, [self._winner(one) for one in won])

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3), count=st.integers(0, 2), older=st.booleans())
    def commit_what_began(self, index: int, count: int, older: bool) -> None:
        """With ``older`` by what began first, where others did so again under the same numbers."""
        began = list(self.attempts)[::-1]
        number = _attempt(began[index % len(began)]).epoch_number
        by_task = {_attempt(one).task: one for one in began if _attempt(one).epoch_number == number}
        names = sorted(by_task.values())[:count]
        if older:
            self._commit(number, [self._winner(one, 0) for one in names])
        self._commit(number, [self._winner(one) for one in names])
        if older:
            self._commit(number, [self._winner(one, 0) for one in names])

    def _winner(self, name: str, place: int = -1) -> Winner:
        identities = self.attempts.get(name, [NOBODY._replace(producer_id=0)])
        return Winner(_attempt(name).task, _attempt(name).attempt, identities[place].producer_id)

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3))
    def what_began_begins_again(self, index: int) -> None:
        """By another writer, as of a stage that an engine runs anew."""
        began = list(self.attempts)[::-1]
        name = began[index % len(began)]
        named = _attempt(name)
        _, instance = self.owners[self.attempts[name][-1]]
        other = B if instance == A else A
        self.begin(named.epoch_number, named.task, named.attempt, other)

    @rule(index=st.integers(0, 3), partitions=some_partitions)
    def what_began_writes(self, index: int, partitions: list[str]) -> None:
        began = list(self.attempts)[::-1]
        if began:
            self.add(began[index % len(began)], 0, partitions)

    def _commit(self, number: int, winners: list[Winner]) -> None:
        self.d.commit_group(number, *winners)
        self._ask(Asked("commit", "", number=number, winners=frozenset(winners)))

    # ------------------------------------------------------------------ the world

    @precondition(lambda self: len(self.d.log) > self.d.committed)
    @rule(share=st.floats(0, 1))
    def commit_records(self, share: float) -> None:
        pending = len(self.d.log) - self.d.committed
        self.d.commit(self.d.committed + max(1, int(share * pending)))
        self._judge()

    @rule()
    def commit_all(self) -> None:
        self.d.commit()
        self._judge()

    @precondition(lambda self: len(self.d.log) > self.d.committed)
    @rule()
    def writes_fail(self) -> None:
        self.d.fail_writes()

    @precondition(lambda self: len(self.d.log) > self.d.committed)
    @rule(index=st.integers(0, 20))
    def one_record_is_too_large(self, index: int) -> None:
        waiting = self.d.log[self.d.committed :]
        self.d.fail_writes(waiting[index % len(waiting)].subject)

    @rule(share=st.floats(0, 1))
    def crash(self, share: float) -> None:
        pending = len(self.d.log) - self.d.committed
        self.d.ids_asked = 0
        self.d.marks.clear()  # What was under way is lost, or answered for as a late one.
        self.d.crash(self.d.committed + int(share * pending))
        self._judge()

    @rule(gives=st.booleans())
    def producer_ids_come_at_once(self, gives: bool) -> None:
        self.d.gives_ids = gives

    @precondition(lambda self: self.d.ids_asked)
    @rule(gives=st.booleans())
    def producer_id(self, gives: bool) -> None:
        if gives:
            self.d.give_id()
        else:
            self.d.refuse_id()
        self._judge()

    @rule(ms=st.sampled_from([100, 1_000, 5_000, 20_000, 60_500, 70_000]))
    def time_passes(self, ms: int) -> None:
        self.d.pass_ms(ms)
        self._judge()

    @precondition(lambda self: self.d.marks)
    @rule()
    def marks_are_written(self) -> None:
        self.d.write_marks()
        self._judge()

    @precondition(lambda self: self.sent)
    @rule(index=st.integers(0, 50), share=st.floats(0, 1))
    def a_mark_is_answered_for(self, index: int, share: float) -> None:
        """Any that was sent, by whatever coordinator, in some of its partitions."""
        mark = self.sent[-1 - index % len(self.sent)]
        some = sorted(mark.partitions)[: max(1, int(share * len(mark.partitions)))]
        self.d.mark_there(mark, *(f"{one.topic}-{one.partition}" for one in some))
        self._judge()

    @rule()
    def a_topic_is_deleted(self) -> None:
        if len(self.d.topics.ids) > 2:
            self.d.remove_topic("stock")
            self._judge()

    # ------------------------------------------------------------------ judging

    def _judge(self) -> None:
        """Judge what was told since the last time, in its order."""
        told, self.d.told = self.d.told, []
        for one in told:
            if isinstance(one, Mark):
                self._sees(one)
            elif one in self.asked:
                self._judge_answer(self.asked[one], self.d.answers[one])
        for one in told:
            if isinstance(one, Mark):
                self._is_whole(one)

    def _judge_answer(self, asked: Asked, answer: Any) -> None:
        refused = ErrorCode(answer.error.code) if answer.HasField("error") else None
        if refused is None:
            getattr(self, f"_{asked.kind}_succeeded")(asked, answer)
        elif refused is ErrorCode.PRODUCER_FENCED and asked.kind == "end" and asked.name in NAMES:
            self._was_fenced(asked)
        elif refused is ErrorCode.GROUP_COMMIT_CONFLICT:
            assert self.commits.get(asked.number) != asked.winners
        else:
            assert refused is not ErrorCode.UNKNOWN_SERVER_ERROR

    def _was_fenced(self, asked: Asked) -> None:
        """Whoever has asked for nothing later is told the outcome, however long ago it was."""
        if asked.identity not in self.owners:
            return
        others = self.initialised.get(asked.name, set()) - {self.owners[asked.identity][1]}
        order = list(self.owners)
        later = order[order.index(asked.identity) + 1 :]
        assert others or not self.used[asked.name].isdisjoint(later), "fenced by nobody"

    def _sees(self, mark: Mark) -> None:
        following = Identity(mark.producer_id, mark.producer_epoch)
        if mark.kept:
            # From now on leaders may let batches in, and ask nobody.
            assert following not in self.outcomes, "kept for a transaction that has ended"
            assert mark.kept <= mark.partitions
            self.let_in.setdefault(following, set()).update(mark.kept)
        if mark in self.sent:
            return
        self.sent.append(mark)
        ended = Identity(mark.producer_id, mark.producer_epoch - 1)
        self._is_decided(ended, mark.commit)
        before = {one for one in self.sent_to.get(ended, ()) if self.d.topics.knows(one.topic_id)}
        behind = {one for one in before if (ended, one) not in self.d.written}
        assert not behind & mark.partitions, "a mark overtakes the one before it"
        self.sent_to.setdefault(following, set()).update(mark.partitions)

    def _is_whole(self, mark: Mark) -> None:
        following = Identity(mark.producer_id, mark.producer_epoch)
        ended = Identity(mark.producer_id, mark.producer_epoch - 1)
        exist = {one for one in self.let_in.get(ended, ()) if self.d.topics.knows(one.topic_id)}
        # Where the mark before was not known to be there it goes first; "forgotten" tells the rest.
        behind = {
            one
            for value in self.d.shard.ledger.ids.values()
            if (value.producer_id, value.epoch) == following
            for one in value.carried
        }
        assert exist - behind <= self.sent_to[following], "a torn transaction"

    def _is_decided(self, identity: Identity, committed: bool) -> None:
        assert self.outcomes.setdefault(identity, committed) == committed, "decided twice"

    def _is_given(self, identity: Identity, name: str, instance: bytes) -> None:
        owner = self.owners.setdefault(identity, (name, instance))
        assert owner == (name, instance), "an identity of two instances"
        assert identity.epoch < LAST_EPOCH
        newest = self.newest.get(identity.producer_id, -1)
        assert identity.epoch >= newest, "an epoch went back"
        self.newest[identity.producer_id] = identity.epoch

    def _has_the_name(self, asked: Asked, producer_id: int) -> None:
        """The asking instance was given the name: for the first time, or nobody was since."""
        lives = 0
        for change in self.d.log:
            replayed = transaction_codec.decode(change.key, change.value)
            if isinstance(replayed, ReplayedId) and replayed.transactional_id == asked.name:
                if replayed.value is not None and replayed.value.producer_id == producer_id:
                    break
                lives += replayed.value is None  # Forgotten, with whoever had it.
        order = self.instances.setdefault((asked.name, lives), [])
        if asked.instance not in order:
            order.append(asked.instance)
        assert order[-1] == asked.instance, "an instance took back what another one had since"

    def _init_succeeded(self, asked: Asked, answer: Any) -> None:
        identity = Identity(answer.producer_id, answer.producer_epoch)
        assert identity not in self.outcomes, "given for a transaction that has ended"
        self._has_the_name(asked, identity.producer_id)
        self._is_given(identity, asked.name, asked.instance)

    def _begin_succeeded(self, asked: Asked, answer: Any) -> None:
        identity = Identity(answer.producer_id, answer.producer_epoch)
        assert identity not in self.outcomes, "given for a transaction that has ended"
        assert asked.number > max(self.commits, default=-1), "begun after its group's commit"
        self._has_the_name(asked, identity.producer_id)
        self._is_given(identity, asked.name, asked.instance)
        began = self.attempts.setdefault(asked.name, [])
        if identity not in began:
            began.append(identity)

    def _add_succeeded(self, asked: Asked, answer: Any) -> None:
        assert asked.identity not in self.outcomes, "let in after the end"
        self.let_in.setdefault(asked.identity, set()).update(asked.partitions)

    def _end_succeeded(self, asked: Asked, answer: Any) -> None:
        self._is_decided(asked.identity, asked.commit)
        if parse_attempt(asked.name) is not None:
            assert not self.expected.get(asked.identity, False), "a winner is said to be aborted"
            return
        after = Identity(answer.producer_id, answer.producer_epoch)
        assert after not in self.outcomes, "the next transaction has ended before it began"
        assert after > asked.identity or after.producer_id != asked.identity.producer_id
        name, instance = self.owners.get(asked.identity, (asked.name, A))
        self._is_given(after, name, instance)

    def _commit_succeeded(self, asked: Asked, answer: Any) -> None:
        assert self.commits.setdefault(asked.number, asked.winners) == asked.winners
        assert asked.number == max(self.commits), "a lower number was decided, or replayed"
        if answer.is_replay:
            return
        for winner in asked.winners:
            name = attempt_id(asked.number, winner.task, winner.attempt)
            identity = Identity(winner.producer_id, 0)
            began = self.attempts.get(name, [])
            assert identity in began, "a winner that never began"
            assert identity == began[-1], "a winner that was aborted when another one began"
            assert self.outcomes.get(identity, True), "a winner that was aborted"
            self.expected[identity] = True
        for name, identities in self.attempts.items():
            if _attempt(name).epoch_number <= asked.number:
                for identity in identities:
                    self.expected.setdefault(identity, False)

    # ------------------------------------------------------------------ always

    @invariant()
    def the_log_is_the_state(self) -> None:
        replayed = TransactionShard(self.d.topics, self.d.settings)
        for change in self.d.log:
            assert replayed.replay(change.key, change.value)
        assert replayed.ledger.durable() == self.d.shard.ledger.durable()

    @invariant()
    def what_was_told_is_in_what_is_committed(self) -> None:
        committed = TransactionShard(self.d.topics, self.d.settings)
        for change in self.d.log[: self.d.committed]:
            committed.replay(change.key, change.value)
        ids, commits = committed.ledger.durable()
        for (name, _), identity in ((owner, one) for one, owner in self.owners.items()):
            value = ids.get(name)
            if value is not None and value.identity.producer_id == identity.producer_id:
                assert value.identity.epoch >= identity.epoch
        for number in self.commits:
            assert any(commit.epoch_number >= number for commit in commits.values())


def _attempt(transactional_id: str) -> Attempt:
    attempt = parse_attempt(transactional_id)
    assert attempt is not None
    return attempt


def test_transactions_under_any_order_of_events() -> None:
    run_state_machine_as_test(
        Transactions,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
