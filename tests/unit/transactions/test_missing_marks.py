"""What is kept (ADR 13) while a mark of the transaction before does not get to its partition."""

from __future__ import annotations

import pytest

from penstock.broker.core.transaction_events import TransactionSettings
from penstock.broker.core.transaction_values import Identity
from penstock.wire.errors import ErrorCode
from tests.unit.transactions.test_kept_partitions import (
    DEADLINE_MS,
    EMPTY,
    PREPARE_ABORT,
    names,
    up,
)
from tests.unit.transactions.transaction_harness import Driver, code, identity_of


@pytest.fixture(params=["sales-1 is kept", "sales-1 is not"])
def stuck(request: pytest.FixtureRequest) -> tuple[Driver, Identity]:
    """What is kept, with the mark of the transaction before in all partitions but sales-1."""
    d = Driver()
    identity = d.open("orders-0", "sales-1")
    keep = ("orders-0", "sales-1")[: 2 if request.param.endswith("kept") else 1]
    answer = d.end(identity, commit=True, keep=keep)
    (mark,) = d.marks
    d.mark_there(mark, "orders-0")
    d.marks.clear()
    return d, identity_of(answer)


def said(d: Driver) -> list[tuple[int, bool, set[str]]]:
    """Epoch, outcome and partitions of the marks that were sent."""
    return [(one.producer_epoch, one.commit, names(one.partitions)) for one in d.marks]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("reloads", [False, True])
def test_it_does_not_hold_up_where_the_mark_is(
    stuck: tuple[Driver, Identity], by_hand: bool, reloads: bool
) -> None:
    """What leaders have let in by its word is open: no reader gets beyond it until it ends."""
    d, identity = stuck
    if by_hand:
        assert code(d.abort()) is None
    else:
        d.pass_ms(DEADLINE_MS - 1)
        assert d.marks == []
        d.pass_ms(1)
    if reloads:
        d.marks.clear()
        d.crash()
    epoch = identity.epoch
    assert said(d) == [(epoch, True, {"sales-1"}), (epoch + 1, False, {"orders-0"})]
    assert all(not one.kept for one in d.marks)
    committed, aborted = d.marks
    d.marks.clear()
    d.mark_there(aborted)
    assert d.describe().state == PREPARE_ABORT
    assert d.marks == []
    d.mark_there(committed)
    assert said(d) == [(epoch + 1, False, {"sales-1"})]
    d.write_marks()
    assert d.describe().state == EMPTY
    assert code(d.add(up(identity), "orders-0", "sales-1")) is None
    assert identity_of(d.end(up(identity), commit=True)) == up(identity, 2)
    assert said(d) == [(epoch + 2, True, {"orders-0", "sales-1"})]


def test_its_producer_is_told_of_both(stuck: tuple[Driver, Identity]) -> None:
    d, identity = stuck
    d.pass_ms(DEADLINE_MS)
    before = up(identity, -1)
    assert identity_of(d.end(before, commit=True)) == up(identity)
    assert code(d.end(before, commit=False)) is ErrorCode.INVALID_TXN_STATE
    assert code(d.end(identity, commit=True)) is ErrorCode.TRANSACTION_ABORTABLE
    assert code(d.add(identity, "orders-0")) is ErrorCode.TRANSACTION_ABORTABLE
    assert identity_of(d.end(identity, commit=False)) == up(identity)
    assert d.add(up(identity), "orders-0") is None, "a mark is missing"


def test_its_topic_is_deleted(stuck: tuple[Driver, Identity]) -> None:
    d, identity = stuck
    d.pass_ms(DEADLINE_MS)
    d.remove_topic("sales")
    aborted = d.marks[-1]
    assert (aborted.producer_epoch, names(aborted.partitions)) == (up(identity).epoch, {"orders-0"})
    d.mark_there(aborted)
    assert d.describe().state == EMPTY


def test_what_could_not_be_written_of_that_leaves_it_kept(stuck: tuple[Driver, Identity]) -> None:
    d, identity = stuck
    d.commits_at_once = False
    d.pass_ms(DEADLINE_MS)
    assert d.marks == []
    d.fail_writes()
    d.commits_at_once = True
    d.pass_ms(TransactionSettings().retry_ms)
    epoch = identity.epoch
    # Nobody knows any more which of the marks before are there.
    assert said(d) == 2 * [(epoch, True, {"orders-0", "sales-1"})]
    d.write_marks(1)
    assert (epoch + 1, False, {"orders-0", "sales-1"}) in said(d)
    d.write_marks()
    assert d.describe().state == EMPTY
