"""`penstock cluster describe`: what it shows where the controllers may not stand as they did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from penstock.cli import cluster
from penstock.cli.app import app
from penstock.cli.settings import Settings
from penstock.client.descriptions import (
    BrokerDescription,
    ClusterDescription,
    QuorumDescription,
    QuorumVoter,
)
from penstock.wire.errors import ClusterNotFoundedError, NetworkError, PenstockError

VOTERS = tuple(QuorumVoter(node, "h", 9000 + node, 7) for node in (1, 2, 3))
CONFIRMED = QuorumDescription(2, 3, 7, 7, VOTERS, 2, 5, confirmed=True, role="leader", last_index=7)
UNLED = replace(CONFIRMED, leader_id=-1, answered_by=1, confirmed=False, role="follower")


class FakeAdmin:
    def __init__(
        self, quorum: QuorumDescription | PenstockError, external: tuple[str, int] = ("", 0)
    ) -> None:
        self._quorum = quorum
        self._external = external

    @contextmanager
    def connect(self, _settings: Settings) -> Iterator[FakeAdmin]:
        yield self

    def describe_cluster(self) -> ClusterDescription:
        broker = BrokerDescription(1, "h", 9001, "", False, False, 4)
        host, port = self._external
        other = replace(broker, node_id=2, external_host=host, external_port=port)
        return ClusterDescription("c", 2, 3, 7, (broker, other), 1)

    def describe_quorum(self) -> QuorumDescription:
        if isinstance(self._quorum, PenstockError):
            raise self._quorum
        return self._quorum


def described(
    monkeypatch: pytest.MonkeyPatch, quorum: QuorumDescription | PenstockError, *options: str
) -> Result:
    monkeypatch.setattr(cluster, "admin_client", FakeAdmin(quorum).connect)
    return CliRunner().invoke(app, ["cluster", "describe", *options])


def test_a_confirmed_quorum_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    result = described(monkeypatch, CONFIRMED)
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("options", [(), ("--output", "json")], ids=["table", "json"])
def test_what_no_majority_confirms_is_shown_with_a_warning_and_a_failure(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    result = described(monkeypatch, UNLED, *options)
    assert result.exit_code == 1
    assert result.stdout
    what, step = result.stderr.splitlines()
    assert what.startswith("warning: no controller leads, as far as controller 1 knows")
    assert what.endswith("; the brokers are shown as broker 1 heard of them last")
    assert step.startswith("next: start those that are down")


def test_a_quorum_that_is_not_known_at_all_is_a_failure_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = described(monkeypatch, NetworkError("nobody answers; next: start the controllers"))
    assert result.exit_code == 1
    assert "live" in result.stdout
    assert "Quorum: not known: nobody answers\n" in result.stdout
    assert result.stderr == (
        "warning: it is not known how the controllers stand; the brokers are shown as broker 1 "
        "heard of them last\nnext: start the controllers\n"
    )


def test_a_cluster_that_nobody_founded_is_refused_as_by_other_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = ClusterNotFoundedError("the cluster is not founded yet; next: start node 1")
    result = described(monkeypatch, error)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: the cluster is not founded yet\nnext: start node 1\n"


def test_programs_are_told_of_the_quorum_what_quorum_status_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = json.loads(described(monkeypatch, CONFIRMED, "--output", "json").stdout)["quorum"]
    assert told["tolerated_losses"] == 1
    assert told["states"] == {"1": "follower", "2": "leader", "3": "follower"}
    assert told["voters"][0]["node_id"] == 1


def test_where_clients_from_outside_reach_brokers_is_shown_where_there_is_such_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown(external: tuple[str, int], *options: str) -> str:
        admin = FakeAdmin(CONFIRMED, external)
        monkeypatch.setattr(cluster, "admin_client", admin.connect)
        return CliRunner().invoke(app, ["cluster", "describe", *options]).stdout

    assert "External" not in shown(("", 0))
    table = shown(("b2.example.com", 9094))
    assert re.search(r"Address\s+External\s+Rack", table)
    assert re.search(r"^\s*1\s+h:9001\s+-\s", table, re.MULTILINE)
    assert re.search(r"^\s*2\s+h:9001\s+b2.example.com:9094\s", table, re.MULTILINE)
    told = json.loads(shown(("b2.example.com", 9094), "--output", "json"))["brokers"]
    assert [one["external_host"] for one in told] == ["", "b2.example.com"]
