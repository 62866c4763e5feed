"""What is told of transactions to people: by the page, since when, and how they ended."""

from __future__ import annotations

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core import transaction_describe
from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.transaction_values import Cause, Identity
from penstock.v1 import transactions_pb2
from tests.unit.groups.coordinator_harness import PARTITIONS
from tests.unit.transactions.test_transaction_coordinator import World, served, world
from tests.unit.transactions.transaction_harness import B, Driver

EMPTY = transactions_pb2.TRANSACTION_STATE_EMPTY
ONGOING = transactions_pb2.TRANSACTION_STATE_ONGOING
PREPARE_COMMIT = transactions_pb2.TRANSACTION_STATE_PREPARE_COMMIT


def test_listing_by_state_and_duration() -> None:
    d = Driver()
    d.init(name="idle")
    d.open(name="old")
    d.pass_ms(5_000)
    d.open(name="new")
    ended = d.open("sales-0", name="ended")
    d.end(ended, commit=True, name="ended")
    assert d.list() == {
        "ended": PREPARE_COMMIT, "idle": EMPTY, "new": ONGOING, "old": ONGOING
    }  # fmt: skip
    assert d.list(ONGOING, EMPTY) == {"idle": EMPTY, "new": ONGOING, "old": ONGOING}
    assert d.list(min_duration_ms=5_000) == {"old": ONGOING}
    d.write_marks()
    assert d.list()["ended"] == EMPTY


def test_ids_are_listed_by_the_page() -> None:
    d = Driver()
    names = [f"id-{number:02}" for number in range(7)]
    for name in reversed(names):
        d.init(name=name)
    d.open(name="id-05")
    for limit in (1, 2, 6, 7, 8):
        listed: list[str] = []
        after, is_last = "", False
        while not is_last:
            page = d.list_page(transactions_pb2.ListTransactionsRequest(), after, limit)
            listed += [one.transactional_id for one in page.transactions]
            after, is_last = page.next_page_token, not page.next_page_token
        assert listed == names
    only_open = transactions_pb2.ListTransactionsRequest(states=[ONGOING])
    page = d.list_page(only_open, "", 3)
    assert (list(page.transactions), page.next_page_token) == ([], "id-02")
    page = d.list_page(only_open, "id-02", 4)
    assert [one.transactional_id for one in page.transactions] == ["id-05"]
    assert not page.next_page_token


@given(
    names=st.lists(st.integers(0, 40).map(str), unique=True),
    count=st.integers(1, 12),
    sample_size=st.integers(1, 12),
)
def test_the_first_of_many_are_found_without_sorting_all(
    names: list[str], count: int, sample_size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction_describe, "_SAMPLE_SIZE", sample_size)
        assert transaction_describe._first(names, count) == sorted(names)[:count]


def test_an_id_that_is_gone_is_a_place_to_go_on_from() -> None:
    d = Driver()
    d.init(name="b")
    d.init(name="d")
    page = d.list_page(transactions_pb2.ListTransactionsRequest(), "c", 5)
    assert [one.transactional_id for one in page.transactions] == ["d"]


def test_it_is_told_since_when_an_id_is_in_its_state() -> None:
    d = Driver()
    d.init()
    d.pass_ms(40)
    assert d.since() == (EMPTY, 40)
    identity = d.open()
    d.pass_ms(30)
    assert d.since() == (ONGOING, 30)
    d.end(identity, commit=True)
    d.pass_ms(20)
    assert d.since() == (PREPARE_COMMIT, 20)
    d.write_marks()
    assert d.since() == (EMPTY, 20)


def test_it_is_told_how_the_last_transaction_ended() -> None:
    d = Driver()
    identity = d.open()
    assert d.last_end() == (Cause.NOBODY, False)
    d.end(identity, commit=True)
    assert d.last_end() == (Cause.PRODUCER, True)
    d.write_marks()
    assert d.last_end() == (Cause.PRODUCER, True)
    d.add(Identity(identity.producer_id, identity.epoch + 1), "orders-0")
    d.abort()
    assert d.last_end() == (Cause.COORDINATOR, False)
    d.write_marks()
    d.open(name="taken")
    d.init(B, name="taken")
    assert d.last_end("taken") == (Cause.FENCED, False)
    d.write_marks()
    assert d.last_end("taken") == (Cause.NOBODY, False), "its new producer has ended none"


# ---------------------------------------------------------------------- by a coordinator


async def test_ids_are_listed_by_the_page_and_by_partition() -> None:
    async with world() as w:
        names = {f"t-{number}" for number in range(23)}
        for name in names:
            await w.init(name=name)
        for max_count in (1, 5, 23, 1_000):
            pages = await pages_of(w, max_count)
            assert all(len(page) <= max_count for page in pages)
            listed = [name for page in pages for name in page]
            assert listed == sorted(listed, key=by_partition)
            assert set(listed) == names
            assert len(listed) == len(names), "none is listed twice"


async def test_a_page_has_an_end_whatever_is_asked_for() -> None:
    async with world() as w:
        for number in range(5):
            await w.init(name=f"t-{number}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.broker.coordinator.transaction_coordinator._LISTED_AT_ONCE", 2)
            for max_count in (0, 3, 1_000_000):
                assert [len(page) for page in await pages_of(w, max_count)][:2] == [2, 2]


async def test_what_comes_goes_or_moves_between_pages_is_no_error() -> None:
    async with world() as w:
        names = sorted((f"t-{number}" for number in range(23)), key=by_partition)
        for name in names:
            await w.init(name=name)
        request = transactions_pb2.ListTransactionsRequest(max_count=1)
        page = await w.coordinator.list_transactions(request)
        number = partition_for_group(names[0], PARTITIONS)
        w.lead_again(names[0], leader_epoch=9, leader=2)
        late = next(
            f"late-{one}"
            for one in range(1_000)
            if partition_for_group(f"late-{one}", PARTITIONS) > number
        )
        await w.init(name=late)
        pages = await pages_of(w, 4, page.next_page_token)
        still_here = {name for name in names if partition_for_group(name, PARTITIONS) != number}
        assert {name for page in pages for name in page} == still_here | {late}


async def test_a_token_that_no_answer_had_is_refused() -> None:
    async with world() as w, served(w) as stub:
        for token in ("7", "x:y", ":", "-1:a"):
            with pytest.raises(aio.AioRpcError, match="next_page_token") as caught:
                await stub.ListTransactions(
                    transactions_pb2.ListTransactionsRequest(page_token=token)
                )
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def by_partition(name: str) -> tuple[int, str]:
    return partition_for_group(name, PARTITIONS), name


async def pages_of(w: World, max_count: int, token: str = "") -> list[list[str]]:
    pages: list[list[str]] = []
    while token or not pages:
        request = transactions_pb2.ListTransactionsRequest(max_count=max_count, page_token=token)
        answer = await w.coordinator.list_transactions(request)
        pages.append([one.transactional_id for one in answer.transactions])
        assert not token or answer.next_page_token != token, "it does not get on"
        token = answer.next_page_token
    return pages
