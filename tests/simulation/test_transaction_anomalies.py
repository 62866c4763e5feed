"""Each anomaly of transactions is seen where it is: in histories and logs made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from penstock.chaos.simulator.checkers import Violation
from penstock.chaos.simulator.transactions import anomalies
from penstock.chaos.simulator.transactions.anomalies import Anomaly
from penstock.chaos.simulator.transactions.history import (
    Acknowledged,
    Attempt,
    Began,
    Consumed,
    Decided,
    Deleted,
    EndAsked,
    Ended,
    Event,
    Given,
    GroupDecided,
    GroupTold,
    History,
    Identity,
    Kind,
    LoggedBatch,
    Seen,
    Sent,
    Taken,
)
from penstock.wire.ids import TopicId, TopicIdPartition

ONE, TWO = (TopicIdPartition(TopicId(b"t" * 16), number) for number in range(2))
A, B, C = (Identity(7, epoch) for epoch in range(3))
OTHER = Identity(8, 0)


@dataclass
class Case:
    """Events and logs, to be put together step by step."""

    events: list[Event] = field(default_factory=list)
    logs: dict[TopicIdPartition, list[LoggedBatch]] = field(
        default_factory=lambda: {ONE: [], TWO: []}
    )

    def happened(self, *events: Event) -> Case:
        self.events += events
        return self

    def logged(self, key: TopicIdPartition, identity: Identity, kind: Kind, *values: bytes) -> Case:
        log = self.logs[key]
        base = log[-1].next_offset if log else 0
        log.append(LoggedBatch(base, base + max(len(values), 1), identity, kind, values))
        return self

    def wrote(
        self,
        txn: int,
        identity: Identity,
        *places: tuple[TopicIdPartition, bytes],
        attempt: Attempt | None = None,
        name: str = "t",
    ) -> Case:
        """A transaction whose batches are in the logs, and acknowledged."""
        self.happened(Began(txn, name, identity, attempt))
        for key, value in places:
            self.happened(Sent(txn, key, (value,)), Acknowledged(txn, (value,)))
            self.logged(key, identity, Kind.DATA, value)
        return self

    def marked(self, identity: Identity, *keys: TopicIdPartition, commit: bool = True) -> Case:
        mark = identity._replace(producer_epoch=identity.producer_epoch + 1)
        for key in keys:
            self.logged(key, mark, Kind.COMMIT if commit else Kind.ABORT)
        return self

    def judge(self, anomaly: Anomaly) -> None:
        anomaly(History(self.events), self.logs)


def committed() -> Case:
    """A transaction of two partitions, committed, told, and read."""
    return (
        Case([Given("t", b"i", A)])
        .wrote(1, A, (ONE, b"x"), (TWO, b"y"))
        .happened(EndAsked(1, True), Decided(A, True), Ended(1, True), Given("t", b"i", B))
        .marked(A, ONE, TWO)
        .happened(Seen(9, ONE, (b"x",)), Seen(9, TWO, (b"y",)))
    )


def aborted() -> Case:
    """As above, and then one that is aborted, of which nothing is read."""
    return (
        committed()
        .wrote(2, B, (ONE, b"u"), (TWO, b"v"))
        .happened(EndAsked(2, False), Decided(B, False), Ended(2, False), Given("t", b"i", C))
        .marked(B, ONE, TWO, commit=False)
    )


def attempt(number: int, task: int = 0, group: str = "g") -> Attempt:
    return Attempt(f"{group}/{number}/{task}", group, number, task)


def grouped() -> Case:
    """Two attempts at a task, one of which wins."""
    return (
        Case([Given("g/1/0", b"i", A), Given("g/1/1", b"j", OTHER)])
        .wrote(1, A, (ONE, b"x"), attempt=attempt(1, 0), name="g/1/0")
        .wrote(2, OTHER, (ONE, b"y"), attempt=attempt(1, 1), name="g/1/1")
        .happened(GroupDecided("g", 1, ("g/1/0",)), GroupTold("g", 1, ("g/1/0",), False))
        .marked(A, ONE)
        .marked(OTHER, ONE, commit=False)
        .happened(Decided(A, True), Decided(OTHER, False), Seen(9, ONE, (b"x",)))
    )


@pytest.mark.parametrize("case", [Case, committed, aborted, grouped])
@pytest.mark.parametrize("anomaly", [*anomalies.AT_ALL_TIMES, *anomalies.AT_REST])
def test_what_is_in_order_has_no_anomaly(case: type[Case], anomaly: Anomaly) -> None:
    case().judge(anomaly)


def found(case: Case, anomaly: Anomaly, match: str) -> None:
    with pytest.raises(Violation, match=match):
        case.judge(anomaly)


def test_an_aborted_record_is_read() -> None:
    case = aborted().happened(Seen(9, TWO, (b"v",)))
    found(case, anomalies.aborted_read, r"G1a: reader 9 was given b'v' of transaction 2")


def test_a_record_is_read_that_is_aborted_later() -> None:
    case = Case().wrote(1, A, (ONE, b"x")).happened(Seen(9, ONE, (b"x",)), Decided(A, False))
    found(case, anomalies.aborted_read, "which is aborted")
    found(case, anomalies.precommitted_read, "not decided yet")


def test_a_record_is_read_before_it_is_decided() -> None:
    case = Case().wrote(1, A, (ONE, b"x")).happened(Seen(9, ONE, (b"x",)), Decided(A, True))
    found(case, anomalies.precommitted_read, "precommitted read: reader 9")
    case.judge(anomalies.aborted_read)
    undecided = Case().wrote(1, A, (ONE, b"x")).happened(Seen(9, ONE, (b"x",)))
    found(undecided, anomalies.precommitted_read, "not decided yet")


def test_information_goes_in_a_circle() -> None:
    def case(*more: Event) -> Case:
        return (
            Case()
            .wrote(1, A, (ONE, b"x"))
            .wrote(2, OTHER, (TWO, b"y"), name="o")
            .happened(Consumed(2, (b"x",)), *more, Decided(A, True), Decided(OTHER, True))
        )

    case().judge(anomalies.circular_information)
    found(case(Consumed(1, (b"y",))), anomalies.circular_information, "transaction 1 .*tion 2")
    found(case(Consumed(2, (b"y",))), anomalies.circular_information, "G1c")


def test_a_circle_with_one_that_is_aborted_is_none() -> None:
    case = (
        Case()
        .wrote(1, A, (ONE, b"x"))
        .wrote(2, OTHER, (TWO, b"y"), name="o")
        .happened(Consumed(1, (b"y",)), Consumed(2, (b"x",)), Decided(A, True))
        .happened(Decided(OTHER, False))
    )
    case.judge(anomalies.circular_information)


def test_marks_that_disagree() -> None:
    case = Case().wrote(1, A, (ONE, b"x"), (TWO, b"y")).happened(Decided(A, True))
    case.marked(A, ONE).marked(A, TWO, commit=False)
    found(case, anomalies.torn_marks, "commit mark in partition 0 and a abort mark in partition 1")


def test_marks_against_the_decision_or_without_one() -> None:
    against = Case().wrote(1, A, (ONE, b"x")).happened(Decided(A, False)).marked(A, ONE)
    found(against, anomalies.torn_marks, "its decision is aborted")
    without = Case().wrote(1, A, (ONE, b"x")).marked(A, ONE)
    found(without, anomalies.torn_marks, "its decision is undecided")


def test_a_reader_that_sees_a_part_for_ever() -> None:
    case = committed()
    case.events.pop()
    found(case, anomalies.torn_reads, r"given 1 records .*, and never \[b'y'\]")


def test_a_reader_that_has_seen_nothing_of_a_transaction_has_seen_no_part() -> None:
    case = committed()
    del case.events[-2:]
    case.judge(anomalies.torn_reads)


def test_an_acknowledged_commit_is_lost() -> None:
    case = committed()
    case.logs[TWO].pop()
    found(case, anomalies.lost_or_partial, r"told committed, but \[b'y'\] are not visible")


def test_an_aborted_transaction_is_visible() -> None:
    case = committed().wrote(2, B, (ONE, b"u")).happened(EndAsked(2, False), Ended(2, False))
    found(case.marked(B, ONE), anomalies.lost_or_partial, "never committed for its producer")


def test_a_transaction_whose_commit_nobody_asked_for_is_visible() -> None:
    case = committed().wrote(2, B, (ONE, b"u")).marked(B, ONE)
    found(case, anomalies.lost_or_partial, "never committed for its producer")


def test_an_unknown_outcome_is_all_or_nothing() -> None:
    def case() -> Case:
        return Case().wrote(1, A, (ONE, b"x"), (TWO, b"y")).happened(EndAsked(1, True))

    case().judge(anomalies.lost_or_partial)
    case().marked(A, ONE, TWO).judge(anomalies.lost_or_partial)
    case().marked(A, ONE, TWO, commit=False).judge(anomalies.lost_or_partial)
    torn = case().marked(A, ONE).marked(A, TWO, commit=False)
    found(torn, anomalies.lost_or_partial, "visible in part")


def test_nothing_is_missing_that_was_in_a_partition_which_is_deleted() -> None:
    for anomaly in (anomalies.lost_or_partial, anomalies.torn_reads):
        case = committed()
        del case.logs[TWO]
        case.events.pop()
        found(case, anomaly, "b'y'")
        case.happened(Deleted(TWO)).judge(anomaly)


def test_a_loser_is_read() -> None:
    case = grouped().happened(Seen(9, ONE, (b"y",)))
    found(case, anomalies.read_of_a_loser, r"transaction 2 of g/1/1 .* did not win")
    marked = grouped()
    marked.logs[ONE][-1] = LoggedBatch(3, 4, Identity(8, 1), Kind.COMMIT)
    found(marked, anomalies.read_of_a_loser, "did not win")


def test_an_attempt_of_a_later_epoch_number_is_undecided() -> None:
    case = grouped().wrote(3, C, (TWO, b"z"), attempt=attempt(2), name="g/2/0")
    assert 3 not in History(case.events).decisions()
    case.marked(C, TWO)
    found(case, anomalies.read_of_a_loser, "transaction 3")


def test_a_decision_that_changes() -> None:
    found(committed().happened(Decided(A, False)), anomalies.changed_decision, "was committed and")
    unknown = Case([Decided(C, True), Decided(C, False)])
    found(unknown, anomalies.changed_decision, "was committed and is aborted")
    against = grouped().happened(Decided(OTHER, True))
    found(against, anomalies.changed_decision, "was aborted and is committed")


def test_a_producer_that_is_told_otherwise_or_too_early() -> None:
    wrong = Case().wrote(1, A, (ONE, b"x")).happened(Decided(A, True), Ended(1, False))
    found(wrong, anomalies.changed_decision, "told aborted, but is committed")
    early = Case().wrote(1, A, (ONE, b"x")).happened(Ended(1, True), Decided(A, True))
    found(early, anomalies.changed_decision, "told committed")
    never = Case().wrote(1, A, (ONE, b"x")).happened(Ended(1, True))
    found(never, anomalies.changed_decision, "but is undecided")


def test_group_commits_out_of_order() -> None:
    judge = anomalies.group_commits_out_of_order
    grouped().happened(GroupDecided("g", 1, ("g/1/0",)), GroupDecided("g", 3, ())).judge(judge)
    found(grouped().happened(GroupDecided("g", 0, ())), judge, "number 0 with nobody is decided")
    found(grouped().happened(GroupDecided("g", 1, ("g/1/1",))), judge, "decided after")


def test_drivers_that_are_told_what_is_not_so() -> None:
    judge = anomalies.group_commits_out_of_order
    grouped().happened(GroupTold("g", 1, ("g/1/0",), True)).judge(judge)
    other = grouped().happened(GroupTold("g", 1, ("g/1/1",), True))
    found(other, judge, "a driver was told that epoch number 1")
    found(grouped().happened(GroupTold("g", 2, (), True)), judge, "but none is")
    again = grouped().happened(GroupTold("g", 1, ("g/1/0",), False))
    found(again, judge, "each told to be the first")


def test_a_group_commit_in_part() -> None:
    case = (
        Case()
        .wrote(1, A, (ONE, b"x"), attempt=attempt(1, 0), name="g/1/0")
        .wrote(2, OTHER, (TWO, b"y"), attempt=attempt(1, 1), name="g/1/1")
        .happened(GroupDecided("g", 1, ("g/1/0", "g/1/1")))
        .marked(A, ONE)
    )
    found(
        case, anomalies.group_commit_in_part, r"transaction 2 .* won epoch number 1, but \[b'y'\]"
    )
    case.marked(OTHER, TWO).judge(anomalies.group_commit_in_part)


def test_an_identity_given_twice() -> None:
    judge = anomalies.identity_given_twice
    committed().happened(Given("t", b"i", A)).judge(judge)
    found(committed().happened(Given("t", b"j", A)), judge, "given to two instances")
    found(committed().happened(Given("s", b"i", C)), judge, "of t and s")
    case = committed().wrote(2, A, (ONE, b"z"))
    found(case, judge, "transaction 1 .* and transaction 2 .* under one identity")


def test_an_id_is_taken_back() -> None:
    judge = anomalies.id_taken_back
    others = [Taken("t", bytes([number])) for number in range(6)]
    case = Case().happened(*others, Taken("s", b"\0"), Taken("t", b"\6"), Taken("t", b"\0"))
    case.judge(judge)
    found(case.happened(Taken("t", b"\3")), judge, "t was taken back by 03")


def test_money_is_made() -> None:
    case = Case().happened(Began(1, "t", A), Sent(1, ONE, (b"x",), (-5,)))
    case.happened(Sent(1, TWO, (b"y",), (5,)))
    case.logged(ONE, A, Kind.DATA, b"x").logged(TWO, A, Kind.DATA, b"y").marked(A, ONE)
    found(case, anomalies.money_made, "add up to -5")
    case.marked(A, TWO).judge(anomalies.money_made)


def test_a_record_is_processed_twice_or_never() -> None:
    def case(*consumed: Consumed) -> Case:
        made = Case()
        for value in (b"a", b"b", b"c"):
            made.logged(ONE, Identity(-1, -1), Kind.PLAIN, value)
        made.wrote(1, A, (TWO, b"x")).wrote(2, B, (TWO, b"y"))
        return made.happened(*consumed, Decided(A, True), Decided(B, True))

    judge = anomalies.processed_twice_or_never
    case(Consumed(1, (b"a",)), Consumed(2, (b"b",))).judge(judge)
    twice = case(Consumed(1, (b"a",)), Consumed(2, (b"a", b"b")))
    found(twice, judge, r"b'a' was processed by transaction 1 .* and by transaction 2")
    never = case(Consumed(1, (b"a",)), Consumed(2, (b"c",)))
    found(never, judge, "t processed 2 records of partition 0 up to number 3")


def test_what_an_aborted_transaction_processed_is_processed_again() -> None:
    case = Case().logged(ONE, Identity(-1, -1), Kind.PLAIN, b"a")
    case.wrote(1, A, (TWO, b"x")).wrote(2, B, (TWO, b"y"))
    case.happened(Consumed(1, (b"a",)), Consumed(2, (b"a",)), Decided(A, False), Decided(B, True))
    case.judge(anomalies.processed_twice_or_never)


def test_a_transaction_that_is_open_for_ever() -> None:
    case = committed().wrote(2, B, (TWO, b"z"))
    found(
        case, anomalies.open_at_rest, "partition 1: the transaction of producer 7 that began at 2"
    )


def test_the_last_stable_offset_is_that_of_the_high_watermark() -> None:
    log = committed().wrote(2, OTHER, (ONE, b"z")).logs[ONE]  # data, mark, data
    assert [anomalies.last_stable_offset(log, at) for at in range(4)] == [0, 0, 2, 2]
    assert anomalies.last_stable_offset(log[:2], 2) == 2
    assert anomalies.last_stable_offset([], 0) == 0
