"""`penstock can-roll`: what it waits for, what it does not, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from penstock.cli import can_roll
from penstock.cli.app import app
from penstock.client.descriptions import (
    ClusterDescription,
    QuorumDescription,
    QuorumVoter,
    TopicDescription,
)
from penstock.wire.errors import BrokerIdNotRegisteredError, NetworkError, PenstockError

SHORT = "without node 2 fewer replicas are in sync; next: wait until the others are"
Look = Sequence[str] | PenstockError


class Asked:
    """A cluster that answers one look after the other, and the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Look) -> None:
        self._looks = list(looks)
        self.count = 0
        self._now_s = 0.0
        monkeypatch.setattr(can_roll, "admin_client", self._client)
        monkeypatch.setattr(can_roll, "reasons_now", self._reasons)
        monkeypatch.setattr(can_roll.time, "monotonic", lambda: self._now_s)
        monkeypatch.setattr(can_roll.time, "sleep", self._pass)

    @contextmanager
    def _client(self, _settings: object) -> Iterator[None]:
        yield None

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds

    def _reasons(self, _admin: object, node: int) -> list[str]:
        assert node == 2
        look = self._looks[min(self.count, len(self._looks) - 1)]
        self.count += 1
        if isinstance(look, PenstockError):
            raise look
        return list(look)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["can-roll", "2", *arguments])
        return done.exit_code, done.stdout, done.stderr


def test_without_a_wait_it_looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, [SHORT], [])
    status, said, told = asked.run("--output", "json")
    assert (status, asked.count, told) == (1, 1, "")
    assert json.loads(said) == {"node_id": 2, "can_roll": False, "reasons": [SHORT]}


def test_it_waits_through_reasons_and_through_nodes_that_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch, [SHORT], [SHORT], NetworkError("connection lost"), [SHORT], [])
    status, said, told = asked.run("--wait", "60")
    assert (status, asked.count) == (0, 5)
    assert "node 2 can be stopped" in said
    # Each is said when it changes, without what to do: it waits for that.
    assert told.splitlines() == [
        "waiting: without node 2 fewer replicas are in sync",
        "waiting: connection lost",
        "waiting: without node 2 fewer replicas are in sync",
    ]


def test_it_ends_in_time_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, [SHORT])
    status, said, _ = asked.run("--wait", "2.5")
    assert (status, asked.count) == (1, 4), "at once, after each second, and at the end"
    assert "node 2 should not be stopped now" in said


def test_a_node_that_nobody_knows_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, BrokerIdNotRegisteredError("broker 2 is not registered"))
    status, _, told = asked.run("--wait", "60")
    assert (status, asked.count) == (1, 1)
    assert "error: broker 2 is not registered" in told


def test_an_outage_that_outlasts_the_wait_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, [SHORT], NetworkError("connection lost"))
    status, said, told = asked.run("--wait", "2")
    assert (status, said) == (1, "")
    assert "error: connection lost" in told


class Lagging:
    """What is asked first, and up to where the rest is to be known."""

    def __init__(self, epoch: int = 4) -> None:
        self.epoch = epoch
        self.asked: list[tuple[str, int]] = []

    def describe_quorum(self) -> QuorumDescription:
        self.asked.append(("quorum", 0))
        voters = tuple(QuorumVoter(node, "h", 1, 9) for node in (1, 2, 3))
        return QuorumDescription(1, 4, 9, 9, voters, 1, confirmed=True, metadata_index=8)

    def describe_cluster(self, *, since_index: int = 0) -> ClusterDescription:
        self.asked.append(("cluster", since_index))
        return ClusterDescription("c", 1, self.epoch, since_index + 1, (), 3)

    def list_topics(
        self, *, include_internal: bool = False, since_index: int = 0
    ) -> list[TopicDescription]:
        assert include_internal
        self.asked.append(("topics", since_index))
        return []


def test_it_goes_by_all_that_was_decided_before() -> None:
    admin = Lagging()
    assert can_roll.reasons_now(admin, 2) == []  # type: ignore[arg-type]  # What it asks for.
    # The partitions are no older than the brokers.
    assert admin.asked == [("quorum", 0), ("cluster", 8), ("topics", 9)]


def test_what_another_epoch_decided_is_not_believed() -> None:
    [reason] = can_roll.reasons_now(Lagging(epoch=3), 2)  # type: ignore[arg-type]
    assert "broker 3 knows of the metadata of controller epoch 3" in reason
    assert "the present one is 4; next: ask again" in reason
