"""What no run may show of transactions, each as a pure function over history and committed logs.

Each raises Violation where its anomaly is there. They know nothing of how the cluster works.

What was written to partitions that are deleted counts for nothing.

A transaction is *committed* or *aborted* when the coordinators' log says so, committed; one that
is neither is *undecided*. A record is *visible* in a log when a reader of committed records is to
be given it: it belongs to no transaction, or to one that a commit mark ended there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from penstock.chaos.simulator.history import check
from penstock.chaos.simulator.transactions.history import (
    Consumed,
    Decided,
    Ended,
    Given,
    GroupDecided,
    GroupTold,
    History,
    Identity,
    Kind,
    LoggedBatch,
    Logs,
    Seen,
    Taken,
)
from penstock.chaos.simulator.transactions.position_anomalies import OF_POSITIONS
from penstock.wire.ids import TopicIdPartition

_REMEMBERED: Final = 5
"""So many instances that had a transactional id before the last one do not get it again."""


def aborted_read(history: History, logs: Logs) -> None:
    """G1a. A reader of committed records was given a record of a transaction that is aborted,
    whether that was decided before or after.
    """
    decisions = history.decisions()
    for _, seen in history.of_kind(Seen):
        for value in seen.values:
            txn = history.writers.get(value)
            decision = decisions.get(txn.number) if txn else None
            check(
                decision is None or decision.commit,
                f"G1a: reader {seen.reader} was given {value!r} of {txn}, which is aborted",
            )


def precommitted_read(history: History, logs: Logs) -> None:
    """A reader of committed records was given a record of a transaction at a time at which it was
    undecided: it may still have been aborted.
    """
    decisions = history.decisions()
    for at, seen in history.of_kind(Seen):
        for value in seen.values:
            txn = history.writers.get(value)
            decision = decisions.get(txn.number) if txn else None
            check(
                txn is None or (decision is not None and decision.at < at),
                f"precommitted read: reader {seen.reader} was given {value!r} of {txn}, which "
                "was not decided yet",
            )


def circular_information(history: History, logs: Logs) -> None:
    """G1c. Committed transactions depend on each other in a circle: each was made out of records
    that the one before wrote. Only reads count: two open transactions may write to two partitions
    in opposite orders, which is no harm to who reads whole transactions.
    """
    decisions = history.decisions()
    reads: dict[int, set[int]] = {}
    for _, consumed in history.of_kind(Consumed):
        for value in consumed.values:
            txn = history.writers.get(value)
            if txn is not None:
                reads.setdefault(consumed.txn, set()).add(txn.number)
    committed = {number for number in reads if number in decisions and decisions[number].commit}
    left = {number: reads[number] & committed for number in committed}
    while left:
        # Who depends on nobody that is left is in no circle.
        free = [number for number, others in left.items() if not others & left.keys()]
        circle = ", ".join(str(history.transactions[number]) for number in sorted(left))
        check(bool(free), f"G1c: information goes in a circle among {circle}")
        for number in free:
            del left[number]


def torn_marks(history: History, logs: Logs) -> None:
    """A transaction is committed in the log of one partition and aborted in that of another, or
    its marks say otherwise than its decision.
    """
    kinds: dict[Identity, tuple[Kind, TopicIdPartition]] = {}
    for key, log in logs.items():
        for batch in log:
            if batch.kind in (Kind.COMMIT, Kind.ABORT):
                # A mark has the epoch after that of the transaction that it ends.
                ended = batch.identity._replace(producer_epoch=batch.identity.producer_epoch - 1)
                kind, where = kinds.setdefault(ended, (batch.kind, key))
                check(
                    kind is batch.kind,
                    f"torn: producer {ended.producer_id}, epoch {ended.producer_epoch}, has a "
                    f"{kind.value} in partition {where.partition} and a {batch.kind.value} in "
                    f"partition {key.partition}",
                )
    decisions = history.decisions()
    for txn in history.transactions.values():
        decision, known = decisions.get(txn.number), kinds.get(txn.identity)
        if known is not None:
            kind, where = known
            check(
                decision is not None and decision.commit == (kind is Kind.COMMIT),
                f"torn: {txn} has a {kind.value} in partition {where.partition}, and its decision "
                f"is {_told(None if decision is None else decision.commit)}",
            )


def torn_reads(history: History, logs: Logs) -> None:
    """A reader that was given records up to the end of every partition has seen a part of a
    transaction and not all of what was acknowledged to its producer.
    """
    seen: dict[int, set[bytes]] = {}
    for _, event in history.of_kind(Seen):
        seen.setdefault(event.reader, set()).update(event.values)
    decisions = history.decisions()
    promised = history.promised()
    for txn in history.transactions.values():
        decision = decisions.get(txn.number)
        if decision is None or not decision.commit:
            continue
        for reader, values in seen.items():
            found = values & txn.sent.keys()
            missing = promised[txn.number] - values
            check(
                not found or not missing,
                f"torn: reader {reader} was given {len(found)} records of {txn}, and never "
                f"{sorted(missing)}",
            )


def lost_or_partial(history: History, logs: Logs) -> None:
    """A transaction whose producer was told that it is committed is not visible whole; one of
    which it was told that it is aborted is visible in part; or one whose outcome it never learned
    is neither visible whole nor invisible.
    """
    visible = visible_values(logs)
    promised = history.promised()
    for txn in history.transactions.values():
        found, missing = txn.sent.keys() & visible, promised[txn.number] - visible
        told = _told(txn.told)
        if txn.told is True:
            check(not missing, f"{txn} was told committed, but {sorted(missing)} are not visible")
        if txn.told is False or not txn.asked - {False}:
            by_group = txn.attempt is not None
            check(
                not found or by_group,
                f"{txn} never committed for its producer ({told}), but {sorted(found)} are visible",
            )
        check(
            not found or not missing,
            f"{txn} ({told}) is visible in part: {sorted(found)}, and not {sorted(missing)}",
        )


def read_of_a_loser(history: History, logs: Logs) -> None:
    """A record of an attempt that did not win its group's epoch number is visible, or was given
    to a reader of committed records.
    """
    won = {
        (event.group, event.epoch_number, winner)
        for _, event in history.of_kind(GroupDecided)
        for winner in event.winners
    }
    seen = {value for _, event in history.of_kind(Seen) for value in event.values}
    visible = visible_values(logs)
    for txn in history.transactions.values():
        attempt = txn.attempt
        if attempt is None:
            continue
        if (attempt.group, attempt.epoch_number, attempt.handle) not in won:
            found = txn.sent.keys() & (visible | seen)
            check(not found, f"{txn} did not win, but {sorted(found)} are read")


def changed_decision(history: History, logs: Logs) -> None:
    """The coordinators' log decides about one transaction first so and then otherwise; or a
    producer was told an outcome that is not the one decided, or that was not decided yet.
    """
    decisions = history.decisions()
    first: dict[Identity, bool] = {}
    for txn in history.transactions.values():
        if txn.number in decisions:
            first[txn.identity] = decisions[txn.number].commit
    for _, decided in history.of_kind(Decided):
        before = first.setdefault(decided.identity, decided.commit)
        check(
            before == decided.commit,
            f"the transaction of producer {decided.identity.producer_id}, epoch "
            f"{decided.identity.producer_epoch}, was {_told(before)} and is {_told(not before)}",
        )
    for at, ended in history.of_kind(Ended):
        decision = decisions.get(ended.txn)
        check(
            decision is not None and decision.commit == ended.commit and decision.at < at,
            f"{history.transactions[ended.txn]} was told {_told(ended.commit)}, but is "
            f"{_told(None if decision is None else decision.commit)}",
        )


def group_commits_out_of_order(history: History, logs: Logs) -> None:
    """A group's epoch number is decided twice with different winners, or after a higher one; or a
    driver was told of a commit that is not the one decided; or two were told that they did it.
    """
    decided: dict[str, GroupDecided] = {}
    all_of_them: dict[tuple[str, int], GroupDecided] = {}
    for _, event in history.of_kind(GroupDecided):
        last = decided.get(event.group)
        check(
            last is None or last.epoch_number < event.epoch_number or last == event,
            f"group {event.group}: {_commit(event)} is decided after {_commit(last)}",
        )
        decided[event.group] = event
        all_of_them[event.group, event.epoch_number] = event
    firsts: set[tuple[str, int]] = set()
    for _, told in history.of_kind(GroupTold):
        place = told.group, told.epoch_number
        known = all_of_them.get(place)
        check(
            known is not None and set(known.winners) == set(told.winners),
            f"group {told.group}: a driver was told that epoch number {told.epoch_number} is "
            f"committed with {told.winners}, but {_commit(known)} is",
        )
        check(
            told.is_replay or place not in firsts,
            f"group {told.group}: two commits of epoch number {told.epoch_number} were each told "
            "to be the first",
        )
        if not told.is_replay:
            firsts.add(place)


def group_commit_in_part(history: History, logs: Logs) -> None:
    """A group's commit was told to its driver, or decided, and a winner's records are not all
    visible.
    """
    visible = visible_values(logs)
    promised = history.promised()
    decisions = history.decisions()
    by_attempt = {txn.attempt.handle: txn for txn in history.transactions.values()
                  if txn.attempt is not None}  # fmt: skip
    events: list[GroupDecided | GroupTold] = [
        *(decided for _, decided in history.of_kind(GroupDecided)),
        *(told for _, told in history.of_kind(GroupTold)),
    ]
    for event in events:
        for winner in event.winners:
            txn = by_attempt.get(winner)
            if txn is not None:
                missing = promised[txn.number] - visible
                decision = decisions.get(txn.number)
                check(
                    not missing and decision is not None and decision.commit,
                    f"group {event.group}: {txn} won epoch number {event.epoch_number}, but "
                    f"{sorted(missing)} are not visible",
                )


def identity_given_twice(history: History, logs: Logs) -> None:
    """Two producers were told that they have the same identity for their next transaction, or one
    producer has written two transactions under the same.
    """
    owners: dict[Identity, Given] = {}
    ids: dict[int, str] = {}
    for _, given in history.of_kind(Given):
        owner = owners.setdefault(given.identity, given)
        name = ids.setdefault(given.identity.producer_id, given.transactional_id)
        check(
            owner.instance == given.instance and name == given.transactional_id,
            f"producer {given.identity.producer_id}, epoch {given.identity.producer_epoch}, was "
            f"given to two instances, of {name} and {given.transactional_id}",
        )
    written: dict[Identity, int] = {}
    for txn in history.transactions.values():
        number = written.setdefault(txn.identity, txn.number)
        check(
            number == txn.number,
            f"{history.transactions[number]} and {txn} were written under one identity",
        )


def id_taken_back(history: History, logs: Logs) -> None:
    """A copy of a request that came late has taken a transactional id from the instance that took
    it since: that one is fenced, and nobody is there to go on.
    """
    had: dict[str, list[bytes]] = {}
    for _, taken in history.of_kind(Taken):
        before = had.setdefault(taken.transactional_id, [])
        check(
            taken.instance not in before[-_REMEMBERED - 1 :],
            f"{taken.transactional_id} was taken back by {taken.instance.hex()}, which another "
            f"instance had taken it from",
        )
        before.append(taken.instance)


def money_made(history: History, logs: Logs) -> None:
    """What transfers moved does not add up to nothing: of some only one side is visible, or one
    is visible twice.
    """
    amounts: dict[bytes, int] = {}
    for txn in history.transactions.values():
        amounts.update(txn.amounts)
    visible = [value for log in logs.values() for value in _visible(log)]
    total = sum(amounts.get(value, 0) for value in visible)
    check(total == 0, f"transfers that are visible add up to {total:+}")


def processed_twice_or_never(history: History, logs: Logs) -> None:
    """A record was processed in two committed transactions of the same transactional id, or of the
    same group, or one was processed and one before it, of the same partition, never was.

    A process that reads, processes and writes keeps its positions in the transactions by which it
    writes: whatever takes its place goes on where the last committed one was.
    """
    decisions = history.decisions()
    consumed: dict[tuple[str, bytes], int] = {}
    for _, event in history.of_kind(Consumed):
        decision = decisions.get(event.txn)
        if decision is None or not decision.commit:
            continue
        txn = history.transactions[event.txn]
        for value in event.values:
            name = event.group or txn.transactional_id
            other = consumed.setdefault((name, value), txn.number)
            check(
                other == txn.number,
                f"{value!r} was processed by {history.transactions[other]} and by {txn}",
            )
    readable = {key: list(_visible(log)) for key, log in logs.items()}
    for name in sorted({name for name, _ in consumed}):
        for key, values in readable.items():
            places = [at for at, value in enumerate(values) if (name, value) in consumed]
            check(
                not places or places == list(range(places[-1] + 1)),
                f"{name} processed {len(places)} records of partition {key.partition} up to "
                f"number {places[-1] + 1 if places else 0}",
            )


def open_at_rest(history: History, logs: Logs) -> None:
    """After all faults are over and everybody is done, a log has a transaction that nobody ended:
    its last stable offset stands still for ever.
    """
    for key, log in logs.items():
        for producer_id, offset in sorted(open_transactions(log).items()):
            check(
                False,
                f"partition {key.partition}: the transaction of producer {producer_id} that began "
                f"at {offset} is open for ever",
            )


# What a log says.


def open_transactions(log: Iterable[LoggedBatch]) -> dict[int, int]:
    """By producer id where its transaction began that is open at the end of the log."""
    found: dict[int, int] = {}
    for batch in log:
        if batch.kind is Kind.DATA:
            found.setdefault(batch.identity.producer_id, batch.base_offset)
        elif batch.kind is not Kind.PLAIN:
            found.pop(batch.identity.producer_id, None)
    return found


def last_stable_offset(log: Sequence[LoggedBatch], high_watermark: int) -> int:
    """Below it every transaction is ended, by marks below the high watermark."""
    below = (batch for batch in log if batch.next_offset <= high_watermark)
    return min(open_transactions(below).values(), default=high_watermark)


def _visible(log: Sequence[LoggedBatch]) -> Iterable[bytes]:
    """The values of a log that a reader of committed records is to be given, in order."""
    shown: dict[int, bool] = {}
    of_producer: dict[int, list[int]] = {}
    for batch in log:
        if batch.kind is Kind.DATA:
            of_producer.setdefault(batch.identity.producer_id, []).append(batch.base_offset)
        elif batch.kind is not Kind.PLAIN:
            for offset in of_producer.pop(batch.identity.producer_id, ()):
                shown[offset] = batch.kind is Kind.COMMIT
    for batch in log:
        if batch.kind is Kind.PLAIN or shown.get(batch.base_offset, False):
            yield from batch.values


def visible_values(logs: Logs) -> set[bytes]:
    """All values that a reader of committed records is to be given."""
    return {value for log in logs.values() for value in _visible(log)}


def _told(commit: bool | None) -> str:
    return {True: "committed", False: "aborted", None: "undecided"}[commit]


def _commit(decided: GroupDecided | None) -> str:
    if decided is None:
        return "none"
    return f"epoch number {decided.epoch_number} with {', '.join(decided.winners) or 'nobody'}"


Anomaly = Callable[[History, Logs], None]

AT_ALL_TIMES: Final[tuple[Anomaly, ...]] = (
    identity_given_twice,
    id_taken_back,
    changed_decision,
    group_commits_out_of_order,
    aborted_read,
    precommitted_read,
    circular_information,
    torn_marks,
    *OF_POSITIONS,
)
"""What must not be there at any time."""

AT_REST: Final[tuple[Anomaly, ...]] = (
    open_at_rest,
    lost_or_partial,
    torn_reads,
    read_of_a_loser,
    group_commit_in_part,
    money_made,
    processed_twice_or_never,
)
"""What must not be there when everybody is done and all readers are at the end."""
