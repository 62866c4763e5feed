"""`penstock transactions`: what it shows, what it ends, and what it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import transactions
from penstock.cli.app import app
from penstock.cli.settings import Settings
from penstock.client.descriptions import (
    HangingSearch,
    HangingTransaction,
    TransactionDescription,
    TransactionListing,
)
from penstock.wire.errors import TransactionalIdNotFoundError
from penstock.wire.ids import TopicPartition

HANGING = HangingTransaction(TopicPartition("a", 1), 7, 3, 40, 1_000)
DESCRIBED = TransactionDescription(
    "billing", "ongoing", 7, 3, 60_000, 1_769_860_800_000, (TopicPartition("a", 1),),
    False, "timeout_or_person",
)  # fmt: skip


class Admin:
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.hanging = HangingSearch((HANGING,))

    def list_transactions(
        self, states: Any = (), *, min_duration_ms: int = 0
    ) -> list[TransactionListing]:
        self.asked.append((list(states), min_duration_ms))
        return [TransactionListing("billing", 7, "ongoing", 2, 1_769_860_800_000)]

    def describe_transactions(self, names: list[str]) -> list[TransactionDescription]:
        if names != ["billing"]:
            raise TransactionalIdNotFoundError("no such id")
        return [DESCRIBED]

    def abort_transaction(self, name: str) -> None:
        self.describe_transactions([name])
        self.asked.append(name)

    def abort_hanging(
        self, where: Any, producer_id: int, start_offset: int | None, *, force: bool
    ) -> int:
        self.asked.append((where, producer_id, start_offset, force))
        return 40

    def find_hanging(self, partitions: Any, *, older_than_ms: int) -> HangingSearch:
        self.asked.append((partitions, older_than_ms))
        return self.hanging

    def describe_node_configs(self) -> list[Any]:
        return [SimpleNamespace(key="transaction.max.timeout.ms", value="900000")]

    def list_topics(self, *, include_internal: bool = False) -> list[Any]:
        assert include_internal
        return [self._topic("a", 2), self._topic("__consumer_offsets", 1)]

    def describe_topics(self, names: list[str]) -> list[Any]:
        return [self._topic(name, 1) for name in names]

    @staticmethod
    def _topic(name: str, count: int) -> Any:
        partitions = [SimpleNamespace(partition=number) for number in range(count)]
        return SimpleNamespace(name=name, partitions=partitions)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    made = Admin()

    @contextmanager
    def connect(settings: Settings) -> Iterator[Admin]:
        yield made

    monkeypatch.setattr(transactions, "admin_client", connect)
    return made


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["transactions", *arguments])


def test_ids_are_listed(admin: Admin) -> None:
    done = run("list", "--state", "ongoing", "--longer-than", "1.5")
    assert done.exit_code == 0
    assert done.output.split() == [
        "TransactionalId", "State", "Since", "ProducerId", "Coordinator",
        "─" * len(done.output.splitlines()[2].strip()),
        "billing", "ongoing", "2026-01-31T12:00:00.000+00:00", "7", "2",
    ]  # fmt: skip
    assert admin.asked == [(["ongoing"], 1_500)]
    assert json.loads(run("list", "--output", "json").output) == [
        {
            "transactional_id": "billing", "producer_id": 7, "state": "ongoing", "coordinator": 2,
            "since_ms": 1_769_860_800_000,
        }
    ]  # fmt: skip


def test_a_state_that_is_none_is_refused_with_the_near_one(admin: Admin) -> None:
    done = run("list", "--state", "ongoin")
    assert done.exit_code == 2
    assert "did you mean 'ongoing'?" in done.output
    assert not admin.asked


def test_an_id_is_described(admin: Admin) -> None:
    done = run("describe", "billing")
    assert done.exit_code == 0
    assert "2026-01-31T12:00:00.000+00:00" in done.output
    assert "a-1" in done.output
    [shown] = json.loads(run("describe", "billing", "--output", "json").output)
    assert shown["partitions"] == [{"topic": "a", "partition": 1}]
    assert (shown["producer_epoch"], shown["transaction_timeout_ms"]) == (3, 60_000)
    assert (shown["last_committed"], shown["last_ended_by"]) == (False, "timeout_or_person")


@pytest.mark.parametrize(
    ("committed", "by", "shown"),
    [
        (False, "nobody", None),
        (True, "producer", "committed by producer"),
        (False, "timeout_or_person", "aborted by timeout_or_person"),
    ],
)
def test_how_the_last_one_ended_is_told(committed: bool, by: str, shown: str | None) -> None:
    described = replace(DESCRIBED, last_committed=committed, last_ended_by=by)
    assert transactions._last_end(described) == shown


@pytest.mark.parametrize("command", ["describe", "abort"])
def test_an_id_that_there_is_not_is_told_the_near_one(admin: Admin, command: str) -> None:
    done = run(command, "biling")
    assert done.exit_code == 1
    assert "did you mean 'billing'?" in done.output
    far = run(command, "xyzzy")
    assert (far.exit_code, "did you mean" in far.output) == (1, False)
    assert "penstock transactions list" in far.output


def test_what_hangs_is_shown_with_how_to_end_it(admin: Admin) -> None:
    admin.hanging = HangingSearch(
        (replace(HANGING, last_timestamp_ms=int(time.time() * 1000) - 90_000),)
    )
    done = run("hanging")
    assert done.exit_code == 1
    assert (
        "penstock transactions abort --topic a --partition 1 --producer-id 7 --start-offset 40"
        in done.output
    )
    assert " 90 " in done.output
    every = [("a", 0), ("a", 1), ("__consumer_offsets", 0)]
    assert admin.asked == [(every, 900_000)]
    shown = json.loads(run("hanging", "b", "--longer-than", "2", "--output", "json").output)
    assert not shown["in_doubt"]
    [shown] = shown["hanging"]
    assert (shown["topic"], shown["partition"], shown["start_offset"]) == ("a", 1, 40)
    assert admin.asked[1] == ([("b", 0)], 2_000)


def test_nothing_that_hangs_is_success(admin: Admin) -> None:
    admin.hanging = HangingSearch()
    done = run("hanging")
    assert (done.exit_code, done.output) == (0, "no transaction hangs\n")
    shown = json.loads(run("hanging", "--output", "json").output)
    assert shown == {"hanging": [], "in_doubt": [], "not_searched": []}


def test_what_is_in_doubt_is_no_success_and_has_no_command(admin: Admin) -> None:
    reason = "__transaction_state-4 did not answer"
    admin.hanging = HangingSearch(in_doubt=((HANGING, reason),))
    done = run("hanging")
    assert done.exit_code == 1
    assert "of 1 open transaction it can't be told" in done.output
    assert f"a-1, producer id 7, from offset 40: {reason}" in done.output
    assert "penstock transactions abort" not in done.output
    assert "no transaction hangs" not in done.output
    done = run("hanging", "--output", "json")
    assert done.exit_code == 1
    shown = json.loads(done.output)
    assert shown["hanging"] == []
    assert [(one["start_offset"], one["reason"]) for one in shown["in_doubt"]] == [(40, reason)]


def test_where_it_was_not_looked_is_told_and_is_no_success(admin: Admin) -> None:
    reason = "partition a-0 has no leader"
    admin.hanging = HangingSearch(not_searched=((TopicPartition("a", 0), reason),))
    done = run("hanging")
    assert done.exit_code == 1
    assert "no transaction hangs in the others" in done.output
    assert "1 partition was not looked in" in done.output
    assert f"a-0: {reason}" in done.output
    done = run("hanging", "--output", "json")
    assert done.exit_code == 1
    assert json.loads(done.output)["not_searched"] == [
        {"topic": "a", "partition": 0, "reason": reason}
    ]
    admin.hanging = HangingSearch((HANGING,), (), admin.hanging.not_searched)
    both = run("hanging").output
    assert "penstock transactions abort --topic a --partition 1" in both
    assert "no transaction hangs" not in both
    assert f"a-0: {reason}" in both


def test_whoever_forces_an_abort_is_told_what_it_may_cost(admin: Admin) -> None:
    place = ("--topic", "a", "--partition", "1", "--producer-id", "7", "--force")
    done = run("abort", *place)
    assert done.exit_code == 0
    assert "no coordinator is asked" in done.stderr
    assert admin.asked == [(("a", 1), 7, None, True)]


def test_one_is_aborted_by_its_id_or_by_its_place(admin: Admin) -> None:
    assert run("abort", "billing").output == "aborted the open transaction of billing\n"
    place = ("--topic", "a", "--partition", "1", "--producer-id", "7")
    done = run("abort", *place)
    assert done.output == "aborted what producer id 7 had open in a-1 from offset 40\n"
    shown = json.loads(run("abort", *place, "--start-offset", "9", "--output", "json").output)
    assert shown == {
        "topic": "a", "partition": 1, "producer_id": 7, "start_offset": 40, "aborted": True
    }  # fmt: skip
    assert admin.asked == ["billing", (("a", 1), 7, None, False), (("a", 1), 7, 9, False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name one, or the place of a hanging one"),
        (("billing", "--topic", "a"), "the id says which transaction"),
        (("billing", "--start-offset", "4"), "the id says which transaction"),
        (("--topic", "a"), "--partition, --producer-id"),
        (("--partition", "0", "--producer-id", "1"), "--topic"),
        (("--start-offset", "4"), "name one"),
        (("billing", "--force"), "only a place can be forced"),
    ],
)
def test_half_a_place_is_none(admin: Admin, arguments: tuple[str, ...], message: str) -> None:
    done = run("abort", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not admin.asked
