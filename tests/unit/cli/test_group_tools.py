"""`penstock groups verify` and `groups offsets`, and how places in a log are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import group_offsets, group_verify, offsets
from penstock.cli.app import app
from penstock.cli.group_offsets import Change, change
from penstock.cli.group_offsets_file import FileFormat, parse, render
from penstock.cli.group_verify import Look, findings, moved_by_nobody
from penstock.cli.places import format_time_ms, parse_partitions, parse_time_ms
from penstock.cli.settings import Settings
from penstock.client import OffsetAndMetadata, OffsetAndTimestamp
from penstock.client.descriptions import GroupDescription, MemberDescription
from penstock.wire.errors import (
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InvalidRequestError,
)
from penstock.wire.ids import TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
COUNTS = {"a": 2, "b": 1, "other": 5}


def member(
    name: str,
    *held: TopicPartition,
    target: tuple[TopicPartition, ...] | None = None,
    epoch: int = 4,
    topics: tuple[str, ...] = ("a",),
    pattern: str = "",
) -> MemberDescription:
    return MemberDescription(
        name, "", "client", "10.0.0.1", epoch, held, held if target is None else target, topics,
        pattern,
    )  # fmt: skip


def group(*members: MemberDescription, **offsets_by_name: int) -> GroupDescription:
    committed = {
        TopicPartition(name[0], int(name[1])): OffsetAndMetadata(offset)
        for name, offset in offsets_by_name.items()
    }
    return GroupDescription("g", "stable", 4, 4, "uniform", 1, members, committed)


def rules(*members: MemberDescription, **offsets_by_name: int) -> list[tuple[str, str]]:
    look = Look(group(*members, **offsets_by_name), COUNTS, {A0: 100, A1: 100})
    return [(one.rule, one.where) for one in findings(look)]


# --- verify ---------------------------------------------------------------------------------------


def test_a_group_that_shares_all_partitions_is_sound() -> None:
    assert rules(member("m", A0), member("n", A1), a0=100, a1=7) == []


def test_a_group_without_members_is_sound() -> None:
    assert rules(a0=3) == []


def test_a_partition_that_two_hold_is_found() -> None:
    assert rules(member("m", A0, A1), member("n", A1)) == [
        ("exclusive", "a-1"),  # Held by both.
        ("exclusive", "a-1"),  # Meant for both.
    ]


def test_a_partition_that_nobody_holds_is_found() -> None:
    [finding] = findings(Look(group(member("m", A0)), COUNTS, {}))
    assert (finding.rule, finding.where) == ("complete", "a-1")
    assert finding.what == "no member holds it; it is meant for nobody"
    waiting = group(member("m", A0, target=(A0, A1)))
    [finding] = findings(Look(waiting, COUNTS, {}))
    assert finding.what == "no member holds it; it is meant for member m at 10.0.0.1"


def test_topics_of_a_pattern_are_to_be_held_as_well() -> None:
    by_pattern = member("m", A0, A1, topics=(), pattern="a|b")
    assert rules(by_pattern) == [("complete", "b-0")]
    assert rules(member("m", A0, A1, B0, topics=(), pattern="[ab]")) == []


def test_a_pattern_means_no_internal_topic() -> None:
    look = Look(group(member("m", A0, A1, B0, topics=(), pattern=".*")), COUNTS, {})
    assert {one.where.rpartition("-")[0] for one in findings(look)} == {"other"}
    assert findings(replace(look, internal=frozenset({"other"}))) == []


def test_a_topic_that_is_not_there_has_no_partitions_to_hold() -> None:
    assert rules(member("m", A0, A1, topics=("a", "absent"))) == []


def test_a_member_of_another_epoch_is_found() -> None:
    assert rules(member("m", A0, epoch=3), member("n", A1)) == [("zombie", "member m at 10.0.0.1")]
    assert rules(member("m", A0, epoch=-2), member("n", A1)) == [], "it is away for a while"


def test_a_member_that_keeps_what_is_no_longer_its_own_is_found() -> None:
    kept = member("m", A0, A1, target=(A0,))
    look = Look(group(kept, member("n", target=(A1,))), COUNTS, {})
    assert [one.what for one in findings(look)] == ["it has not given a-1 back"]


def test_a_position_beyond_the_end_is_found() -> None:
    assert rules(member("m", A0, A1), a0=101, a1=100) == [("position", "a-0")]


def test_a_position_that_moves_though_nobody_holds_it_is_found() -> None:
    one = member("m", A0, A1)
    before = Look(group(one, a0=1, b0=5), COUNTS, {})
    after = Look(group(one, a0=2, b0=6), COUNTS, {})
    [finding] = moved_by_nobody(before, after)
    assert (finding.rule, finding.where) == ("zombie", "b-0")
    assert "from 5 to 6" in finding.what
    assert moved_by_nobody(after, after) == []
    empty = [Look(group(b0=offset), COUNTS, {}) for offset in (1, 2)]
    assert moved_by_nobody(*empty) == [], "anybody may commit for a group without members"


class StandInAdmin:
    """A group ``g`` in one state after another, and logs from 10 to 100."""

    def __init__(self, *groups: GroupDescription) -> None:
        self.groups = list(groups)
        self.committed: dict[TopicPartition, Any] = {}
        self.deleted: list[str] = []
        self.leaderless: set[TopicPartition] = set()
        self.forgotten: list[TopicPartition] = []
        self.in_use = ""  # A topic that members read.

    @contextmanager
    def connect(self, settings: Settings) -> Iterator[StandInAdmin]:
        yield self

    def _group(self) -> GroupDescription:
        return self.groups.pop(0) if len(self.groups) > 1 else self.groups[0]

    def describe_groups(self, names: list[str]) -> list[GroupDescription]:
        if names != ["g"]:
            raise GroupIdNotFoundError("no such group")
        return [self._group()]

    def list_group_offsets(self, name: str) -> dict[TopicPartition, OffsetAndMetadata]:
        [found] = self.describe_groups([name])
        return found.offsets

    def list_topics(self, *, include_internal: bool = False) -> list[Any]:
        return [
            SimpleNamespace(
                name=name,
                partition_count=n,
                internal=name == "other",
                partitions=[
                    SimpleNamespace(
                        partition=number,
                        leader=-1 if TopicPartition(name, number) in self.leaderless else 1,
                    )
                    for number in range(n)
                ],
            )
            for name, n in COUNTS.items()
        ]

    def describe_topics(self, names: list[str]) -> list[Any]:
        return [topic for topic in self.list_topics() if topic.name in names]

    def list_offsets(self, partitions: dict[TopicPartition, Any]) -> dict[TopicPartition, Any]:
        assert not self.leaderless.intersection(partitions), "it would be waited for in vain"
        places = {"earliest": 10, "latest": 100, "max_timestamp": 90, 5_000: 40, 9_000: -1}
        return {
            where: OffsetAndTimestamp(places[spec], spec if isinstance(spec, int) else -1, 0)
            for where, spec in partitions.items()
        }

    def alter_group_offsets(self, name: str, offsets: dict[TopicPartition, Any]) -> None:
        self.committed = offsets

    def delete_group_offsets(self, name: str, partitions: list[TopicPartition]) -> None:
        if any(where.topic == self.in_use for where in partitions):
            raise GroupSubscribedToTopicError(f"group {name} has members that read {self.in_use}")
        self.forgotten += partitions

    def delete_groups(self, names: list[str]) -> None:
        self.deleted += names


def run(monkeypatch: pytest.MonkeyPatch, admin: StandInAdmin, *arguments: str) -> Any:
    from penstock.cli import groups

    for module in (groups, group_offsets, group_verify, offsets):
        monkeypatch.setattr(module, "admin_client", admin.connect)
    monkeypatch.setattr(group_verify, "_LOOK_AGAIN_SECONDS", 0.01)
    return CliRunner().invoke(app, list(arguments))


def test_what_a_rebalance_explains_is_gone_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_its_way, settled = group(member("m", A0)), group(member("m", A0, A1))
    admin = StandInAdmin(on_its_way, on_its_way, on_its_way, settled)
    result = run(monkeypatch, admin, "groups", "verify", "g")
    assert result.exit_code == 0, result.output
    assert result.stdout == "group g is sound: stable, 1 member, 2 partitions held\n"


def test_what_stays_is_said_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = StandInAdmin(group(member("m", A0)))
    result = run(monkeypatch, admin, "groups", "verify", "g", "--wait", "0.05")
    assert result.exit_code == 1
    assert "1 finding" in result.stdout
    assert "complete" in result.stdout
    result = run(monkeypatch, admin, *("groups", "verify", "g", "--wait", "0", "--output", "json"))
    verdict = json.loads(result.stdout)
    assert (verdict["sound"], verdict["findings"][0]["where"]) == (False, "a-1")


def test_a_partition_without_a_leader_does_not_hide_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin = StandInAdmin(group(member("m", A0, A1), a0=90, a1=101))
    admin.leaderless = {A1}
    result = run(monkeypatch, admin, "groups", "describe", "g")
    assert result.exit_code == 0, result.output
    assert "no leader, so that the lag is not known: a-1\n" in result.stdout
    result = run(monkeypatch, admin, "groups", "describe", "g", "--output", "json")
    [shown] = json.loads(result.stdout)
    assert [(one["lag"], one["log_end_offset"]) for one in shown["partitions"]] == [
        (10, 100),
        (None, None),
    ]
    assert run(monkeypatch, admin, "groups", "verify", "g").exit_code == 0


def test_groups_are_deleted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = StandInAdmin(group())
    result = run(monkeypatch, admin, "groups", "delete", "g", "h")
    assert result.stdout == "deleted group g\ndeleted group h\n"
    assert admin.deleted == ["g", "h"]


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-01T00:00:01", 1_000),
        ("1970-01-01T01:00:01.5+01:00", 1_500),
        ("1970-01-02", 86_400_000),
        ("1970-01-01T00:00:00Z", 0),
        ("1700000000000", 1_700_000_000_000),
    ],
)
def test_times_are_iso_or_milliseconds(text: str, ms: int) -> None:
    assert parse_time_ms(text, "--at") == ms
    shown = format_time_ms(ms)
    assert shown is not None
    assert parse_time_ms(shown, "--at") == ms


def test_a_time_beyond_the_calendar_is_shown_as_it_is() -> None:
    assert format_time_ms(2**62) == str(2**62)
    assert format_time_ms(-1) is None


def test_partitions_are_named_behind_their_topic() -> None:
    assert parse_partitions("a", "X") == ("a", None)
    assert parse_partitions("a:3", "X") == ("a", (3,))
    assert parse_partitions("a:1,0,1", "X") == ("a", (1, 0))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["offsets", "get", "a:"], "is not TOPIC"),
        (["offsets", "get", ":1"], "is not TOPIC"),
        (["offsets", "get", "a:x"], "is not TOPIC"),
        (["offsets", "get", "a:99999999999"], "no topic has a partition"),
        (["offsets", "get", "a", "--at", "soon"], "'soon' is not a time"),
        (["offsets", "get", "a", "--at", "1960-01-01"], "before 1970"),
        (["offsets", "get", "a", "--at", "9" * 20], "too large for a time"),
        (["groups", "offsets", "reset", "g"], "give one of them"),
        (
            ["groups", "offsets", "reset", "g", "--to", "latest", "--shift-by", "1"],
            "give one of them",
        ),
        (["groups", "offsets", "reset", "g", "--to-offset", "-1"], "--to-offset"),
        (["groups", "offsets", "reset", "g", "--to", "newest"], "'newest' is not a time"),
        (["groups", "offsets", "export", "g", "--format", "xml"], "--format"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], wanted: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert wanted in result.stderr


# --- offsets get ----------------------------------------------------------------------------------


def test_offsets_are_found_by_place_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = StandInAdmin(group())
    result = run(monkeypatch, admin, "offsets", "get", "a", "b:0", "--output", "json")
    rows = json.loads(result.stdout)
    assert [(row["topic"], row["partition"]) for row in rows] == [("a", 0), ("a", 1), ("b", 0)]
    assert {row["offset"] for row in rows} == {100}
    result = run(monkeypatch, admin, *("offsets", "get", "a:1", "--at", "1970-01-01T00:00:05"))
    assert result.stdout.splitlines()[3].split() == [
        "a",
        "1",
        "40",
        "1970-01-01T00:00:05.000+00:00",
    ]
    result = run(monkeypatch, admin, *("offsets", "get", "a:1", "--at", "9000", "--output", "json"))
    assert json.loads(result.stdout)[0]["offset"] is None, "no record is that late"


def test_a_partition_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, StandInAdmin(group()), "offsets", "get", "a:0,2")
    assert result.exit_code == 1
    assert "topic 'a' has no partition 2; it has 2, from 0 to 1" in result.stderr


# --- groups offsets -------------------------------------------------------------------------------

COMMITTED = {A0: OffsetAndMetadata(4, 2, 'said "so", ä'), B0: OffsetAndMetadata(7)}


@pytest.mark.parametrize("how", list(FileFormat))
def test_what_is_exported_is_imported_the_same(how: FileFormat) -> None:
    assert parse(render("g", COMMITTED, how), "f") == COMMITTED


def test_files_of_kafkas_tool_are_read() -> None:
    assert parse("a,0,4\nb,0,7\n\n", "f") == {A0: OffsetAndMetadata(4), B0: OffsetAndMetadata(7)}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "f has no offsets"),
        ("{", "f is no JSON"),
        ("{}", "f has no list of offsets"),
        ('{"offsets": [4]}', "f has no list of offsets"),
        ('[{"topic": "a", "partition": 0}]', "f, entry 1: offset is None"),
        ('[{"topic": "a", "partition": true, "offset": 1}]', "f, entry 1: partition is True"),
        ('[{"partition": 0, "offset": 1}]', "f, entry 1 names no topic"),
        ("a,0,4\na,0,5\n", "f, line 2: a-0 is there twice"),
        ("topic,partition,offset\na,zero,4\n", "f, line 2: partition is 'zero'"),
        ("a,0,-4\n", "f, line 1: offset is '-4'"),
        ("a,0\n", "f, line 1: offset is None"),
    ],
)
def test_a_file_that_cannot_be_meant_says_where(text: str, wanted: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse(text, "f")
    assert wanted in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "becomes"), [(3, 10), (10, 10), (55, 55), (100, 100), (101, 100)]
)
def test_offsets_stay_within_the_log(asked: int, becomes: int) -> None:
    found = change(A0, None, OffsetAndMetadata(asked, 5, "said"), 10, 100)
    assert found.new.offset == becomes
    assert found.asked == (None if asked == becomes else asked)
    assert found.new.metadata == "said"
    assert found.new.leader_epoch == (5 if asked == becomes else -1)


@pytest.mark.parametrize(
    ("options", "new"),
    [
        (["--to", "earliest"], 10),
        (["--to", "latest"], 100),
        (["--to", "1970-01-01T00:00:05"], 40),
        (["--to", "9000"], 100),
        (["--to-offset", "60"], 60),
        (["--shift-by", "-5"], 15),
        (["--shift-by", "-50"], 10),
        (["--shift-by", "+3"], 23),
    ],
)
def test_a_reset_moves_what_was_committed(
    monkeypatch: pytest.MonkeyPatch, options: list[str], new: int
) -> None:
    admin = StandInAdmin(group(a0=20))
    reset = ("groups", "offsets", "reset", "g", *options)
    result = run(monkeypatch, admin, *reset)
    assert result.exit_code == 0, result.output
    assert "nothing was changed; add --execute" in result.stdout
    assert admin.committed == {}
    result = run(monkeypatch, admin, *reset, "--execute", "--output", "json")
    document = json.loads(result.stdout)
    assert document["executed"] is True
    assert [(one["committed_offset"], one["new_offset"]) for one in document["offsets"]] == [
        (20, new)
    ]
    assert admin.committed == {A0: OffsetAndMetadata(new)}


def test_a_reset_takes_the_partitions_named(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = StandInAdmin(group(a0=20))
    options = ("--topic", "a:1", "--topic", "b", "--to", "earliest", "--execute")
    assert run(monkeypatch, admin, "groups", "offsets", "reset", "g", *options).exit_code == 0
    assert set(admin.committed) == {A1, B0}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["new", "--to", "latest"], "group new has committed nothing yet"),
        (["g", "--topic", "a", "--shift-by", "1"], "there is nothing to shift at a-1"),
    ],
)
def test_what_cannot_be_reset_says_why(
    monkeypatch: pytest.MonkeyPatch, options: list[str], wanted: str
) -> None:
    result = run(monkeypatch, StandInAdmin(group(a0=20)), "groups", "offsets", "reset", *options)
    assert result.exit_code == 1
    assert wanted in result.stderr
    assert "next: " in result.stderr


def test_offsets_of_a_group_with_members_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = StandInAdmin(group(member("m", A0, A1), a0=20))
    reset = ("groups", "offsets", "reset", "g", "--to", "earliest")
    assert run(monkeypatch, admin, *reset).exit_code == 0, "showing harms nobody"
    result = run(monkeypatch, admin, *reset, "--execute")
    assert result.exit_code == 1
    assert "group g has 1 member (client at 10.0.0.1)" in result.stderr
    assert admin.committed == {}


DELETE = ("groups", "offsets", "delete", "g")


def test_offsets_are_deleted_only_when_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = StandInAdmin(group(a0=20, a1=21, b0=30))
    result = run(monkeypatch, admin, *DELETE, "--topic", "a")
    assert result.exit_code == 0, result.output
    assert "nothing was changed; add --execute" in result.stdout
    assert admin.forgotten == []
    result = run(monkeypatch, admin, *DELETE, "--topic", "a:1", "--topic", "b", "--execute")
    assert "deleted 2 offsets of group g" in result.stdout
    assert admin.forgotten == [A1, B0]
    result = run(monkeypatch, admin, *DELETE, "--topic", "a", "--execute", "--output", "json")
    assert json.loads(result.stdout) == {
        "group_id": "g",
        "executed": True,
        "offsets": [
            {"topic": "a", "partition": 0, "committed_offset": 20},
            {"topic": "a", "partition": 1, "committed_offset": 21},
        ],
    }


@pytest.mark.parametrize(
    ("topics", "wanted"),
    [
        (["b"], "group g has committed no offset for b"),
        (["a:1,0"], "group g has committed no offset for a-1"),
        (["a:2"], "topic 'a' has no partition 2"),
    ],
)
def test_what_cannot_be_deleted_says_why(
    monkeypatch: pytest.MonkeyPatch, topics: list[str], wanted: str
) -> None:
    admin = StandInAdmin(group(a0=20))
    options = [word for topic in topics for word in ("--topic", topic)]
    result = run(monkeypatch, admin, *DELETE, *options, "--execute")
    assert result.exit_code == 1
    assert wanted in result.stderr
    assert "next: " in result.stderr
    assert admin.forgotten == []


def test_what_was_deleted_before_a_refusal_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = StandInAdmin(group(a0=20, b0=30))
    admin.in_use = "b"
    result = run(monkeypatch, admin, *DELETE, "--topic", "b", "--topic", "a", "--execute")
    assert result.exit_code == 1
    assert "deleted 1 offset of group g" in result.stdout
    assert "has members that read" in result.stderr
    assert admin.forgotten == [A0]


def test_offsets_go_through_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    admin = StandInAdmin(group(a0=20, b0=30))
    file = tmp_path / "offsets.csv"
    export = ("groups", "offsets", "export", "g", "--format", "csv", "--file", str(file))
    assert "wrote 2 offsets" in run(monkeypatch, admin, *export).stderr
    result = run(monkeypatch, admin, "groups", "offsets", "import", "new", str(file), "--execute")
    assert result.exit_code == 0, result.output
    assert "committed 2 offsets for group new" in result.stdout
    assert admin.committed == {A0: OffsetAndMetadata(20), B0: OffsetAndMetadata(30)}
    result = run(monkeypatch, admin, "groups", "offsets", "export", "g", "--topic", "b:0")
    assert [entry["topic"] for entry in json.loads(result.stdout)["offsets"]] == ["b"]
    missing = run(monkeypatch, admin, "groups", "offsets", "import", "g", str(tmp_path / "no"))
    assert "cannot read" in missing.stderr


def test_a_change_knows_what_was_there() -> None:
    assert change(A0, OffsetAndMetadata(1), OffsetAndMetadata(50), 10, 100) == Change(
        A0, 1, OffsetAndMetadata(50), 10, 100
    )
