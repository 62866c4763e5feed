"""Transactions that are seen too early, in part, never, or although they are not committed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.chaos.checkers import Checker
from penstock.chaos.checkers.cycles import CircularRead, components
from penstock.chaos.checkers.exactly_once import ProcessedOnce, TransferTotal
from penstock.chaos.checkers.transactions import (
    AbortedRead,
    PrecommittedRead,
    TornTransaction,
    TransactionOffsets,
    TransactionsEnd,
)
from penstock.chaos.history import Type
from tests.unit.chaos.histories import FAIL, INFO, OK, Script, is_false, is_true, is_unknown

ALL = (
    AbortedRead(),
    PrecommittedRead(),
    TornTransaction(),
    TransactionsEnd(),
    TransactionOffsets(),
    CircularRead(),
    ProcessedOnce(),
    TransferTotal(),
)


class Bank(Script):
    """Transfers of a record in each of two partitions; partition 2 holds what they come from."""

    def begin(self, name: str, at: int | None, *, amount: int = 5) -> None:
        self.do(name, "begin", {"txn": name, "transactional_id": name})
        for partition in (0, 1):
            self.append(name, 0, 1, at, partition=partition, txn=name)
        self.do(name, "transfer", {"txn": name, "from": "a", "to": "b", "amount": amount})

    def end(self, name: str, type_: Type | None) -> None:
        if type_ is None:
            self.do(name, "abort", {"txn": name})
        else:
            self.do(name, "commit", {"txn": name}, type_=type_)

    def worked(self, name: str, *runs: tuple[int, int, str, int, int], up_to: int) -> None:
        named = [[f"orders-{run[0]}", *run[1:]] for run in runs]
        self.do(name, "read-from", {"txn": name, "runs": named})
        asked = {"txn": name, "group": "g", "member": "m", "generation": 1}
        self.do(name, "send-offsets", {**asked, "offsets": {"orders-2": up_to}})

    def read(self, reader: str, names: dict[int, str], end: int, *partitions: int, **more) -> None:
        """Of these partitions from the start to the end, the transactions at these offsets."""
        for partition in partitions or (0, 1):
            runs = [(partition, offset, name, 0, 1) for offset, name in names.items()]
            self.poll(
                reader, {partition: 0}, runs, {partition: end},
                isolation=more.get("isolation", "read_committed"), final=more.get("final", False),
            )  # fmt: skip

    def told(self, offset: int) -> None:
        answer = {"offsets": {"orders-2": offset}}
        self.do("admin", "committed-offsets", {"group": "g"}, answer, final=True)


def bank() -> Bank:
    """One of each fate, with their markers between them, worked off an input of four records."""
    script = Bank()
    script.append("p", 0, 4, 0, partition=2)
    for at, (name, type_) in enumerate((("t1", OK), ("t2", None), ("t3", INFO), ("t4", OK))):
        script.begin(name, 2 * at)
        done = {"t1": 0, "t2": 1, "t3": 1, "t4": 2}[name]
        script.worked(name, (2, done, "p", done, 1), up_to=done + 1)
        script.end(name, type_)
    script.read("r", {0: "t1", 4: "t3", 6: "t4"}, 8)
    script.read("f", {0: "t1", 4: "t3", 6: "t4"}, 8, final=True)
    everything = {0: "t1", 2: "t2", 4: "t3", 6: "t4"}
    script.read("u", everything, 8, final=True, isolation="read_uncommitted")
    script.begin("t5", 8)
    script.do("t5", "read-from", {"txn": "t5", "runs": [["orders-0", 6, "t4", 0, 1]]})
    script.end("t5", FAIL)
    script.do("t6", "read-from", {"txn": "t6", "runs": [["orders-0", 6, "t4", 0, 1]]})
    script.end("t6", OK)
    script.told(3)
    return script


@pytest.mark.parametrize("checker", ALL, ids=lambda one: one.name)
def test_a_clean_history_passes(checker: Checker) -> None:
    is_true(checker, bank())


@pytest.mark.parametrize(
    ("checker", "says"),
    [
        (AbortedRead(), "no read_committed reader was given a record of a transaction"),
        (PrecommittedRead(), "no read_committed reader was given a record of a transaction"),
        (TornTransaction(), "no transaction that may be committed was read"),
        (TransactionsEnd(), "no transaction wrote a record"),
        (TransactionOffsets(), "no transaction sent offsets"),
        (CircularRead(), "no transaction that may be committed has read"),
        (ProcessedOnce(), "no committed transaction has read a record and sent its offset"),
        (TransferTotal(), "no read_committed reader has passed a transfer"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_nothing_is_said_of_nothing(checker: Checker, says: str) -> None:
    is_unknown(checker, Script(), says)


@pytest.mark.parametrize(("how", "type_"), [("abort", None), ("commit", FAIL), ("nothing", OK)])
def test_what_was_aborted_is_not_read(how: str, type_: Type | None) -> None:
    script = Bank()
    script.begin("t1", 0)
    if how != "nothing":
        script.end("t1", type_)
    script.read("u", {0: "t1"}, 1, 0, isolation="read_uncommitted")
    is_unknown(AbortedRead(), script, "no read_committed reader")
    script.read("r", {0: "t1"}, 1, 0)
    says = "orders-0: t1's 0 of transaction t1, which is not committed, was given to r"
    is_false(AbortedRead(), script, says)


def test_what_is_not_committed_yet_is_not_read() -> None:
    script = Bank()
    script.begin("t1", 0)
    script.read("r", {0: "t1"}, 1, 0)
    script.end("t1", OK)
    script.read("s", {0: "t1"}, 1, 1)
    says = "orders-0: t1's 0 was given to r before the commit of its transaction t1 was invoked"
    is_false(PrecommittedRead(), script, says)
    is_true(AbortedRead(), script)


@pytest.mark.parametrize("type_", [OK, INFO])
def test_half_a_transaction_is_torn(type_: Type) -> None:
    script = Bank()
    script.begin("t1", 0)
    script.end("t1", type_)
    script.read("r", {0: "t1"}, 1, 0)
    is_unknown(TornTransaction(), script, "no final read_committed read went over all of orders-1")
    script.read("f", {}, 1, 1, final=True)
    fate = "committed" if type_ is OK else "unknown"
    says = f"transaction t1 ({fate}) was seen in part: what it wrote to orders-1 at offset 0 was"
    is_false(TornTransaction(), script, says)


def test_a_transaction_of_which_nothing_is_seen_is_not_torn() -> None:
    script = Bank()
    script.begin("t1", 0)
    script.end("t1", INFO)
    script.begin("t2", 1)
    script.end("t2", OK)
    script.read("f", {1: "t2"}, 2, final=True)
    is_true(TornTransaction(), script)


def test_a_transaction_that_never_ends_withholds_what_follows() -> None:
    script = Bank()
    script.begin("t1", 0)
    is_unknown(TransactionsEnd(), script, "no final read_committed read was told the end of orders")
    script.read("f", {}, 0, final=True)
    is_unknown(TransactionsEnd(), script, "no final read_uncommitted read was told")
    script.read("u", {0: "t1"}, 1, final=True, isolation="read_uncommitted")
    says = "in the end read_committed readers are told of 0 offsets, and read_uncommitted ones of 1"
    is_false(TransactionsEnd(), script, f"orders-0: {says}", f"orders-1: {says}")


@pytest.mark.parametrize(
    ("type_", "told", "says"),
    [
        (OK, 1, "transaction t2 is committed with 2, but 1 is read"),
        (FAIL, 2, "2 is read, which transaction t2 sent, and is not committed"),
        (INFO, 1, ""),
        (INFO, 2, ""),
        (OK, 2, ""),
        (FAIL, 1, ""),
    ],
)
def test_offsets_are_committed_with_their_transaction(type_: Type, told: int, says: str) -> None:
    script = Bank()
    for up_to, (name, fate) in enumerate((("t1", OK), ("t2", type_)), 1):
        script.worked(name, (2, up_to - 1, "p", up_to - 1, 1), up_to=up_to)
        script.end(name, fate)
    is_unknown(TransactionOffsets(), script, "no final read of what group g has committed")
    script.told(told)
    if says:
        is_false(TransactionOffsets(), script, says)
    else:
        is_true(TransactionOffsets(), script)


def circle(*fates: Type) -> Bank:
    """Transactions of which each reads from the one before, and the first from the last."""
    script = Bank()
    count = len(fates)
    for number in range(count):
        script.begin(f"t{number}", number)
    for number in range(count):
        before = (number - 1) % count
        run = [["orders-0", before, f"t{before}", 0, 1]]
        script.do(f"t{number}", "read-from", {"txn": f"t{number}", "runs": run})
    for number, type_ in enumerate(fates):
        script.end(f"t{number}", type_)
    return script


def test_transactions_do_not_read_in_a_circle() -> None:
    is_false(CircularRead(), circle(OK, INFO, OK), "have each read from the one before")
    verdict = is_true(CircularRead(), circle(OK, OK, FAIL))
    assert verdict.figures == {"g0_transactions": 0}


def test_circles_of_writes_are_a_figure() -> None:
    script = bank()
    for name, at in (("t7", (0, 1)), ("t8", (1, 0))):
        for partition in (0, 1):
            script.append(name, 0, 1, 20 + at[partition], partition=partition, txn=name)
    assert is_true(CircularRead(), script).figures == {"g0_transactions": 2}


def test_components_are_found() -> None:
    edges = {1: {2}, 2: {3, 4}, 3: {1}, 4: {5}, 5: {4, 6}, 6: {7}, 8: {1}}
    assert sorted(map(sorted, components(edges))) == [[1, 2, 3], [4, 5]]
    long = {number: {number + 1} for number in range(50_000)}
    assert list(components(long)) == []


def test_a_record_is_processed_once() -> None:
    def worked(*reads: tuple[int, int], third: Type = OK) -> Bank:
        script = Bank()
        script.append("p", 0, 10, 0, partition=2)
        for number, (offset, count) in enumerate(reads):
            name = f"t{number}"
            script.worked(name, (2, offset, "p", offset, count), up_to=offset + count)
            script.end(name, third if number == 2 else OK)
        return script

    is_true(ProcessedOnce(), worked((0, 4), (4, 4)))
    says = "group g, orders-2: offset 3 was processed twice, by transaction t0 and by t1"
    is_false(ProcessedOnce(), worked((0, 4), (3, 5)), says)
    says = "group g, orders-2: offset 4 to 5 was never processed, but transaction t1 went on behind"
    is_false(ProcessedOnce(), worked((0, 4), (6, 4)), says)
    is_true(ProcessedOnce(), worked((0, 4), (6, 4), (4, 2), third=INFO))
    is_true(ProcessedOnce(), worked((0, 4), (4, 6), (4, 2), third=INFO))
    is_false(ProcessedOnce(), worked((0, 4), (6, 4), (4, 2), third=FAIL), "never processed")


def test_half_a_transfer_changes_the_total() -> None:
    script = bank()
    script.read("half", {0: "t1", 4: "t3", 6: "t4"}, 8, 0)
    script.read("half", {0: "t1", 6: "t4"}, 8, 1)
    says = "half's total changes by -5: it was given a part of a transfer of transaction t3"
    assert is_false(TransferTotal(), script, says).figures["totals"]["half"] == -5
    script = bank()
    script.read("too", {0: "t1", 2: "t2", 4: "t3", 6: "t4"}, 8, 1)
    script.read("too", {0: "t1", 4: "t3", 6: "t4"}, 8, 0)
    is_false(TransferTotal(), script, "too's total changes by 5: it was given a part of")


def test_a_total_is_taken_where_transactions_lie_behind() -> None:
    script = bank()
    script.read("on the way", {0: "t1", 4: "t3"}, 6, 0)
    script.read("on the way", {0: "t1"}, 2, 1)
    verdict = is_true(TransferTotal(), script)
    assert verdict.figures["totals"]["on the way"] == 0


def test_a_transfer_may_have_several_legs() -> None:
    script = Bank()
    legs = {"t1": [-5, 3, 2], "t2": [-1, 1]}
    for base, (name, amounts) in zip((0, 3), legs.items(), strict=True):
        for at in range(len(amounts)):
            script.append(name, at, 1, base + at, txn=name)
        script.do(name, "transfer", {"txn": name, "amounts": amounts})
        script.end(name, OK)
    whole, half = [(0, 0, "t1", 0, 3), (0, 3, "t2", 0, 2)], [(0, 0, "t1", 0, 2)]
    more: dict[str, Any] = {"isolation": "read_committed"}
    script.poll("whole", {0: 0}, whole, {0: 5}, **more)
    assert is_true(TransferTotal(), script).looked_at == 2
    script.poll("half", {0: 0}, half, {0: 3}, **more)
    is_false(TransferTotal(), script, "half's total changes by -2: it was given a part of a")
