"""What a client knows of the topics that it makes and deletes, and what its history says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from penstock.chaos.history import Event, HistoryWriter
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads.claims import NUMBER, Claim
from penstock.chaos.workloads.outcomes import is_refused
from penstock.client import (
    AsyncAdminClient,
    InvalidPartitionsError,
    NetworkError,
    NotEnoughVotersError,
    RequestTimedOutError,
    TopicAlreadyExistsError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.client.descriptions import CreatedTopic, TopicDescription

LOST = NetworkError("the connection broke")
TAKEN = TopicAlreadyExistsError("topic 't' exists already")
UNKNOWN = UnknownTopicOrPartitionError("there is no topic 't'")


def unheard(error: Exception) -> Exception:
    """As the client raises it after an attempt that was not answered."""
    error.add_note(
        "the request was sent 2 times, because an earlier answer did not come; it may have taken "
        "effect then"
    )
    return error


class Events:
    """A history's writer that keeps what was written."""

    def __init__(self) -> None:
        self.added: list[Event] = []

    def add(self, event: Event) -> None:
        self.added.append(event)

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(one.f, one.type.value) for one in self.added if one.type.value != "invoke"]


class FakeAdmin:
    """One topic's name. ``trouble`` is raised once, before or after what was asked is done."""

    def __init__(self) -> None:
        self.topic: TopicDescription | None = None
        self.made = 0
        self.trouble: Callable[[bool], None] = lambda done: None

    def fail(self, error: Exception, *, done: bool) -> None:
        def raise_it(now: bool) -> None:
            if now is done:
                self.trouble = lambda _: None
                raise error

        self.trouble = raise_it

    async def create_topic(self, name: str, configs: dict[str, Any], **how: Any) -> CreatedTopic:
        self.trouble(False)
        if self.topic is not None:
            raise TopicAlreadyExistsError(f"topic {name!r} exists already")
        self.made += 1
        texts = {key: str(value) for key, value in configs.items()}
        self.topic = TopicDescription(name, f"id-{self.made}", False, texts, ())
        made = CreatedTopic(name, self.topic.topic_id, created=True)
        self.trouble(True)
        return made

    async def delete_topic(self, name: str, *, topic_id: str) -> None:
        self.trouble(False)
        if self.topic is None or self.topic.topic_id != topic_id:
            raise UnknownTopicOrPartitionError(f"there is no topic {name!r}")
        self.topic = None
        self.trouble(True)

    async def describe_topics(self, names: list[str]) -> list[TopicDescription]:
        self.trouble(False)
        if self.topic is None:
            raise UnknownTopicOrPartitionError(f"there is no topic {names[0]!r}")
        return [self.topic]


@pytest.fixture
def admin() -> FakeAdmin:
    return FakeAdmin()


@pytest.fixture
def events() -> Events:
    return Events()


def claim(admin: FakeAdmin, events: Events, first: int = 0) -> Claim:
    recorder = Recorder(cast(HistoryWriter, events), "client", 0)
    return Claim(cast(AsyncAdminClient, admin), recorder, "t", first)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (TAKEN, True),
        (UNKNOWN, True),
        (UnknownTopicIdError("no topic has the id"), True),
        (InvalidPartitionsError("topic 't' has 2 partitions; 1 is not more"), True),
        (NotEnoughVotersError("the command create_topic was not carried out: nobody"), True),
        (NotEnoughVotersError("a majority would be down"), False),
        (LOST, False),
        (RequestTimedOutError("no answer"), False),
        (ValueError("no error of ours"), False),
        (unheard(TopicAlreadyExistsError("topic 't' exists already")), False),
        (unheard(UnknownTopicOrPartitionError("there is no topic 't'")), False),
    ],
)
def test_a_request_has_failed_only_where_nothing_can_have_come_of_it(
    error: Exception, refused: bool
) -> None:
    assert is_refused(error) is refused


async def test_what_is_answered_is_told_with_its_id(admin: FakeAdmin, events: Events) -> None:
    its = claim(admin, events)
    assert await its.create("create", {"topic": "t"})
    assert its.topic_id == "id-1"
    assert not await claim(admin, events, 7).create("create", {"topic": "t"})
    assert await its.delete("delete", {"topic": "t"})
    assert its.topic_id is None
    assert events.outcomes == [("create", "ok"), ("create", "fail"), ("delete", "ok")]
    told = [one.value["topic_id"] for one in events.added if one.type.value == "ok"]
    assert told == ["id-1", "id-1"]


@pytest.mark.parametrize("done", [True, False])
async def test_a_creation_that_was_not_answered_is_found_out(
    admin: FakeAdmin, events: Events, done: bool
) -> None:
    its = claim(admin, events)
    admin.fail(LOST, done=done)
    assert not await its.create("cas", {"register": "t"})
    assert await its.settle()
    assert its.topic_id == ("id-1" if done else None)
    assert events.outcomes == [("cas", "info")]
    # If it was not done it may be done later: it is looked for until it is found.
    if not done:
        await admin.create_topic("t", {NUMBER: 86_400_001})
        assert await its.settle()
        assert its.topic_id == "id-1"


async def test_the_topic_of_another_is_not_taken_for_its_own(
    admin: FakeAdmin, events: Events
) -> None:
    its, other = claim(admin, events), claim(admin, events, Claim.MOST_CREATIONS)
    admin.fail(LOST, done=False)
    assert not await its.create("cas", {"register": "t"})
    assert await other.create("cas", {"register": "t"})
    assert await its.settle()
    assert its.topic_id is None


@pytest.mark.parametrize("done", [True, False])
async def test_a_deletion_that_was_not_answered_is_done_in_the_end_and_is_no_second_operation(
    admin: FakeAdmin, events: Events, done: bool
) -> None:
    its = claim(admin, events)
    assert await its.create("create", {"topic": "t"})
    admin.fail(LOST, done=done)
    assert not await its.delete("delete", {"topic": "t"})
    admin.fail(RequestTimedOutError("no answer"), done=False)
    assert not await its.settle()
    if done:
        await admin.create_topic("t", {})
    assert await its.settle()
    assert (admin.topic is None) is not done, "what came after it is left alone"
    assert events.outcomes == [("create", "ok"), ("delete", "info")]
