"""`penstock quorum`: what it asks for, what it says, and how it ends."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.broker.datadir import format_directory, open_directories
from penstock.cli import quorum
from penstock.cli.app import app
from penstock.cli.settings import Settings
from penstock.client.descriptions import QuorumDescription, QuorumVoter
from penstock.raft_meta.directory_lock import locked
from penstock.raft_meta.journal import COMMAND, NO_OP, LmdbJournal
from penstock.raft_meta.voters import VoterSet
from penstock.wire.errors import (
    BootstrapError,
    DuplicateVoterError,
    LastVoterError,
    PenstockError,
    VoterNotCaughtUpError,
)


def voters(*nodes: int) -> QuorumDescription:
    members = tuple(QuorumVoter(node, "127.0.0.1", 9000 + node, 7) for node in nodes)
    return QuorumDescription(1, 3, 7, 7, members, 1, 5, confirmed=True, role="leader", last_index=7)


class FakeAdmin:
    def __init__(self, after: QuorumDescription | PenstockError) -> None:
        self.answer = after
        self.asked: list[tuple[object, ...]] = []

    @contextmanager
    def connect(self, _settings: Settings) -> Iterator[FakeAdmin]:
        yield self

    def remove_voter(self, node: int) -> QuorumDescription:
        return self._answer("remove", node)

    def add_voter(self, node: int, address: str) -> QuorumDescription:
        return self._answer("add", node, address)

    def describe_quorum(self) -> QuorumDescription:
        return self._answer("status")

    def _answer(self, *asked: object) -> QuorumDescription:
        self.asked.append(asked)
        if isinstance(self.answer, PenstockError):
            raise self.answer
        return self.answer


def invoke(monkeypatch: pytest.MonkeyPatch, admin: FakeAdmin, *arguments: str) -> Result:
    monkeypatch.setattr(quorum, "admin_client", admin.connect)
    return CliRunner().invoke(app, ["quorum", *arguments])


def run(
    monkeypatch: pytest.MonkeyPatch, after: QuorumDescription, *arguments: str, ends_with: int = 0
) -> Result:
    result = invoke(monkeypatch, FakeAdmin(after), *arguments)
    assert result.exit_code == ends_with, result.output
    return result


@pytest.mark.parametrize(
    "change", [("remove", "3"), ("add", "2@127.0.0.1:9002")], ids=lambda words: words[0]
)
def test_two_voters_that_a_change_leaves_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, change: tuple[str, ...]
) -> None:
    result = run(monkeypatch, voters(1, 2), *change)
    assert "Tolerates: 0" in result.stdout
    assert result.stderr == (
        "warning: 2 voters tolerate no loss: the cluster stands still while either is down\n"
        "next: add a third with `penstock quorum add NODE@HOST:PORT`\n"
    )


def test_one_voter_is_warned_of_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "warning: 1 voter tolerates no loss" in run(monkeypatch, voters(1), "remove", "2").stderr


@pytest.mark.parametrize(("count", "tolerated"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_how_many_may_be_lost_is_shown(
    monkeypatch: pytest.MonkeyPatch, count: int, tolerated: int
) -> None:
    after = voters(*range(1, count + 1))
    result = run(monkeypatch, after, "status", "--output", "json")
    assert json.loads(result.stdout)["tolerated_losses"] == tolerated == after.tolerated_losses
    assert result.stderr == ""


def test_three_voters_are_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, voters(1, 2, 3), "remove", "4").stderr == ""


# What is asked for.


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("add", "4@h.example:9094"), ("add", 4, "h.example:9094")),
        (("add", "4@[::1]:9094"), ("add", 4, "[::1]:9094")),
        (("remove", "0"), ("remove", 0)),
        (("status",), ("status",)),
    ],
)
def test_what_is_named_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], asked: tuple[object, ...]
) -> None:
    admin = FakeAdmin(voters(1, 2, 3))
    assert invoke(monkeypatch, admin, *arguments).exit_code == 0
    assert admin.asked == [asked]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("add",), "Missing argument"),
        (("add", "4"), "'4' is not a controller; write NODE@HOST:PORT"),
        (("add", "four@h:1"), "'four@h:1' is not a controller"),
        (("add", "@h:1"), "'@h:1' is not a controller"),
        (("add", "4@h"), "NODE@HOST:PORT"),
        (("add", "4@h:99999"), "NODE@HOST:PORT"),
        (("remove",), "Missing argument"),
        (("remove", "--", "-1"), "Invalid value for 'node'"),
        (("remove", "three"), "Invalid value for 'node'"),
        (("recover",), "Missing option '--config'"),
        (("status", "--output", "xml"), "'--output'"),
    ],
)
def test_a_mistake_asks_for_nothing(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], wanted: str
) -> None:
    admin = FakeAdmin(voters(1, 2, 3))
    result = invoke(monkeypatch, admin, *arguments)
    assert (result.exit_code, result.stdout, admin.asked) == (2, "", [])
    assert result.stderr.startswith("error: ")
    assert wanted in result.stderr


# What it says.


def troubled() -> QuorumDescription:
    """Node 2 leads, 1 is behind, 3 lost its disk, 4 does not answer, and 5 is to be added."""
    members = (
        QuorumVoter(1, "10.0.0.1", 10092, 1300, "5f" * 16, silent_ms=12),
        QuorumVoter(2, "10.0.0.2", 10092, 1312, "91" * 16),
        QuorumVoter(3, "10.0.0.3", 10092, 0, "c7" * 16, True, 8_000, is_unreachable=True),
        QuorumVoter(4, "::1", 10092, -1, "", silent_ms=9_000, is_unreachable=True),
    )
    newcomer = QuorumVoter(5, "10.0.0.5", 10092, 600, silent_ms=3)
    return QuorumDescription(
        2,
        4,
        1310,
        1309,
        members,
        2,
        3,
        True,
        "leader",
        1312,
        catching_up=newcomer,
        metadata_index=1308,
    )


def rows(lines: list[str]) -> list[list[str]]:
    """The cells of a table, without its rules."""
    texts = [line.strip() for line in lines]
    return [re.split(r"  +", text) for text in texts if text.strip("─")]


def test_the_voters_are_shown_with_who_leads_and_who_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    title, *lines = run(monkeypatch, troubled(), "status").stdout.splitlines()
    assert title == (
        "Leader: 2  Term: 4  Committed: 1310  VotersSince: 3  Tolerates: 1  AnsweredBy: 2  "
        "Confirmed: yes"
    )
    assert rows(lines) == [
        ["Voter", "Address", "State", "LogEnd", "Behind", "SilentMs", "Directory"],
        ["1", "10.0.0.1:10092", "follower", "1300", "10", "12", "5f" * 16],
        ["2", "10.0.0.2:10092", "leader", "1312", "0", "-", "91" * 16],
        ["3", "10.0.0.3:10092", "wiped: remove and add it", "0", "1310", "8000", "c7" * 16],
        ["4", "[::1]:10092", "unreachable", "-", "-", "9000", "-"],
        ["5", "10.0.0.5:10092", "catching up", "600", "710", "3", "-"],
    ]


def test_a_newcomer_that_never_answered_is_no_less_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newcomer = QuorumVoter(5, "10.0.0.5", 10092, -1, silent_ms=700, is_unreachable=True)
    quorum = replace(troubled(), catching_up=newcomer)
    last = rows(run(monkeypatch, quorum, "status").stdout.splitlines())[-1]
    assert last == ["5", "10.0.0.5:10092", "to be added, not heard", "-", "-", "700", "-"]


def unled(leader_id: int = -1, *, role: str = "candidate") -> QuorumDescription:
    """What controller 2 of three says, which does not lead."""
    members = tuple(QuorumVoter(node, "10.0.0.1", 9000 + node, -1) for node in (1, 2, 3))
    return QuorumDescription(leader_id, 4, 6, 6, members, 2, role=role, last_index=9)


def test_without_a_leader_it_is_said_and_only_who_answered_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(monkeypatch, unled(), "status", ends_with=1)
    title, *lines = result.stdout.splitlines()
    assert title.startswith("Leader: none  Term: 4  ")
    assert title.endswith("AnsweredBy: 2  Confirmed: no")
    assert [row[2:6] for row in rows(lines)[1:]] == [
        ["unknown", "-", "-", "-"],
        ["candidate", "9", "-", "-"],
        ["unknown", "-", "-", "-"],
    ]
    assert result.stderr == (
        "warning: no controller leads, as far as controller 2 knows: nothing can be changed until "
        "a majority of 1, 2, 3 runs and reaches each other\n"
        "next: start those that are down, and look into the logs of the others\n"
    )


def test_whom_a_follower_takes_for_the_leader_is_not_shown_as_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(monkeypatch, unled(3, role="follower"), "status", ends_with=1)
    assert [row[2:4] for row in rows(result.stdout.splitlines()[1:])[1:]] == [
        ["unknown", "-"],
        ["follower", "9"],
        ["said to lead", "-"],
    ]
    assert "only controller 2 answered, which takes 3 for the leader" in result.stderr


def test_a_leader_that_no_majority_confirms_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, replace(troubled(), confirmed=False), "status", ends_with=1)
    assert "Confirmed: no" in result.stdout
    assert "no majority of 1, 2, 3, 4 confirms it" in result.stderr


def test_a_leader_of_older_software_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    older = replace(troubled(), confirmed=False, role="", last_index=-1)
    assert run(monkeypatch, older, "status").stderr == ""


@pytest.mark.parametrize("change", [("status",), ("remove", "9"), ("add", "9@h:1")])
def test_programs_are_told_everything(
    monkeypatch: pytest.MonkeyPatch, change: tuple[str, ...]
) -> None:
    result = run(monkeypatch, troubled(), *change, "--output", "json")
    told = json.loads(result.stdout)
    assert told.pop("voters")[2] == {
        "node_id": 3, "host": "10.0.0.3", "port": 10092, "match_index": 0,
        "directory_id": "c7" * 16, "is_wiped": True, "silent_ms": 8_000, "is_unreachable": True,
    }  # fmt: skip
    assert told.pop("catching_up")["match_index"] == 600
    assert told.pop("states") == {
        "1": "follower", "2": "leader", "3": "wiped: remove and add it", "4": "unreachable",
        "5": "catching up",
    }  # fmt: skip
    assert told == {
        "confirmed": True, "role": "leader", "last_index": 1312,
        "leader_id": 2, "term": 4, "commit_index": 1310, "applied_index": 1309, "answered_by": 2,
        "voters_index": 3, "metadata_index": 1308, "tolerated_losses": 1,
    }  # fmt: skip


def test_a_warning_does_not_spoil_what_programs_read(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, voters(1, 2), "remove", "3", "--output", "json")
    assert json.loads(result.stdout)["tolerated_losses"] == 0
    assert result.stderr.startswith("warning: ")


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize("change", [("status",), ("remove", "3"), ("add", "3@h:1")])
@pytest.mark.parametrize(
    ("error", "step"),
    [
        (DuplicateVoterError("it is one; next: penstock quorum remove 3"), "penstock quorum rem"),
        (LastVoterError("the only one; next: penstock quorum add another"), "penstock quorum add"),
        (VoterNotCaughtUpError("9 behind; next: see that it runs"), "see that it runs"),
        (BootstrapError("nobody answers"), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_says_what_to_do_and_fails(
    monkeypatch: pytest.MonkeyPatch,
    change: tuple[str, ...],
    error: PenstockError,
    step: str,
    output: str,
) -> None:
    result = invoke(monkeypatch, FakeAdmin(error), *change, "--output", output)
    assert (result.exit_code, result.stdout) == (1, "")
    first, second = result.stderr.splitlines()
    assert first == f"error: {error.message.partition('; next: ')[0]}"
    assert second.startswith(f"next: {step}")


# Recovering.


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The settings of controller 2 of three, which is stopped."""
    data = tmp_path / "data"
    format_directory(data, "cluster-of-three", 2)
    open_directories(data, 2, [data / "raft"])
    journal = LmdbJournal(data / "raft" / "journal", cluster_id="cluster-of-three", node_id=2)
    journal.found(VoterSet.of([1, 2, 3], {2: ("old.example", 1)}))
    journal.add(NO_OP, 1, 0)
    journal.add(NO_OP, 2, 4)
    journal.add(COMMAND + b"kept", 3, 4)
    journal.setCurrentTerm(6, None)
    journal.close()
    path = tmp_path / "node.toml"
    path.write_text(
        f'node.id = 2\ndata.dir = "{data}"\nnode.roles = "controller"\n'
        'controller.listen = "127.0.0.1:9093"\n'
        'controller.quorum.voters = "1@127.0.0.1:9092,2@127.0.0.1:9093,3@127.0.0.1:9094"\n'
    )
    return path


def recover(stopped: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["quorum", "recover", "--config", str(stopped), *arguments])


def voters_of(stopped: Path) -> VoterSet | None:
    path = stopped.parent / "data" / "raft" / "journal"
    journal = LmdbJournal(path, cluster_id="cluster-of-three", node_id=2)
    try:
        return journal.voters
    finally:
        journal.abandon()


def test_recovering_shows_and_changes_nothing_until_the_loss_is_accepted(stopped: Path) -> None:
    for _ in range(2):
        shown = recover(stopped)
        assert shown.exit_code == 0, shown.output
        header, row, [last] = rows(shown.stdout.splitlines())
        assert header == ["Node", "LastTerm", "LastIndex", "VotersBefore"]
        assert row == ["2", "4", "3", "1,2,3"]
        assert last.startswith("Nothing was changed.")
    found = voters_of(stopped)
    assert found is not None
    assert (found.node_ids, found.recovered) == ({1, 2, 3}, False)


def test_recovering_makes_the_survivor_the_only_voter(stopped: Path) -> None:
    done = recover(stopped, "--accept-loss")
    assert done.exit_code == 0, done.output
    assert "Controller 2 is the only voter now." in done.stdout
    assert "penstock quorum add NODE@HOST:PORT" in done.stdout
    found = voters_of(stopped)
    assert found is not None
    assert found.recovered
    assert [member.address for member in found] == [("old.example", 1)]


@pytest.mark.parametrize("accepted", [False, True])
def test_programs_are_told_what_is_recovered(stopped: Path, accepted: bool) -> None:
    result = recover(stopped, "--output", "json", *(["--accept-loss"] if accepted else []))
    assert json.loads(result.stdout) == {
        "node_id": 2, "voters_before": [1, 2, 3], "last_index": 3, "last_term": 4,
        "recovered": accepted,
    }  # fmt: skip


def test_a_node_that_runs_is_not_recovered(stopped: Path) -> None:
    with locked(stopped.parent / "data" / "raft"):
        result = recover(stopped, "--accept-loss")
    assert result.exit_code == 1
    assert "another process" in result.stderr
    assert "\nnext: " in result.stderr
    found = voters_of(stopped)
    assert found is not None
    assert not found.recovered


def test_without_settings_or_directory_nothing_is_recovered(stopped: Path) -> None:
    missing = recover(stopped.with_name("missing.toml"), "--accept-loss")
    assert missing.exit_code == 1
    assert missing.stderr.startswith("error: ")
    stopped.write_text(stopped.read_text().replace("/data", "/elsewhere"))
    elsewhere = recover(stopped, "--accept-loss")
    assert elsewhere.exit_code == 1
    assert "elsewhere" in elsewhere.stderr


def test_an_empty_directory_is_refused_with_one_step(stopped: Path) -> None:
    data = stopped.parent / "data"
    shutil.rmtree(data)
    format_directory(data, "cluster-of-three", 2)
    open_directories(data, 2, [data / "raft"])
    LmdbJournal(data / "raft" / "journal", cluster_id="cluster-of-three", node_id=2).close()
    result = recover(stopped)
    assert result.exit_code == 1
    what, step = result.stderr.splitlines()
    assert "empty" in what
    assert step == "next: run this on a controller that still has its directory"


def test_a_node_that_is_no_controller_has_nothing_to_recover(stopped: Path) -> None:
    stopped.write_text(stopped.read_text().replace('"controller"', '"broker"'))
    result = recover(stopped)
    assert result.exit_code == 1
    what, step = result.stderr.splitlines()
    assert what.startswith("error: node 2 is no controller by the node.roles of its settings")
    assert step == "next: run this on a controller that still has its directory"
