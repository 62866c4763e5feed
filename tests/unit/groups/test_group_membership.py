from __future__ import annotations

import pytest

from penstock.broker.core.group_events import GroupSettings
from penstock.v1 import groups_pb2
from penstock.wire.errors import ErrorCode, error_from_proto
from tests.unit.groups.group_harness import GROUP, Driver, FakeTopics, durable, held, replayed

ALL_FOUR = {("orders", n) for n in range(4)}


@pytest.fixture
def driver() -> Driver:
    return Driver(FakeTopics(orders=4))


def code(response: object) -> ErrorCode:
    return error_from_proto(response.error).code  # type: ignore[attr-defined]


def join(driver: Driver, member_id: str, **fields: object) -> groups_pb2.GroupHeartbeatResponse:
    response = driver.heartbeat(member_id, 0, topics=["orders"], **fields)  # type: ignore[arg-type]
    assert not response.HasField("error"), response.error.message
    return response


def rebalance_to_two(driver: Driver) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Members a and b with two partitions each, both in the epoch returned by describe."""
    join(driver, "a")
    join(driver, "b")
    (push,) = driver.pushes("a")
    kept = held(push.assignment.partitions)
    driver.heartbeat("a", push.member_epoch, owned=kept)
    (gain,) = driver.pushes("b")
    return kept, held(gain.assignment.partitions)


def test_the_first_member_gets_everything_at_once(driver: Driver) -> None:
    response = join(driver, "a")
    assert response.member_epoch == 1
    assert response.heartbeat_interval_ms == 3000
    assert held(response.assignment.partitions) == ALL_FOUR
    assert driver.state() == "stable"


def test_a_partition_moves_only_after_its_holder_gave_it_back(driver: Driver) -> None:
    join(driver, "a")
    response = join(driver, "b")
    assert held(response.assignment.partitions) == set()
    assert driver.state() == "reconciling"
    (push,) = driver.pushes("a")
    kept = held(push.assignment.partitions)
    assert len(kept) == 2
    assert push.member_epoch == 2
    # A keepalive, and an acknowledgement that still owns all, free nothing.
    driver.heartbeat("a", 2)
    driver.heartbeat("a", 2, owned=ALL_FOUR)
    assert driver.pushes("b") == []
    # Half given back: half moves on at once.
    (last, other) = sorted(ALL_FOUR - kept)
    driver.heartbeat("a", 2, owned=kept | {last})
    (gain,) = driver.pushes("b")
    assert held(gain.assignment.partitions) == {other}
    driver.heartbeat("a", 2, owned=kept)
    (gain,) = driver.pushes("b")
    assert held(gain.assignment.partitions) == ALL_FOUR - kept
    assert driver.state() == "stable"


def test_only_moved_partitions_are_taken(driver: Driver) -> None:
    kept, gained = rebalance_to_two(driver)
    join(driver, "c")
    for member_id, before in (("a", kept), ("b", gained)):
        assert driver.assigned(member_id) <= before
    taken = [m for m, b in (("a", kept), ("b", gained)) if driver.assigned(m) != b]
    assert len(taken) == 1  # Four over three: one member gives one partition, the other nothing.


def test_an_acknowledgement_in_an_older_epoch_frees_nothing(driver: Driver) -> None:
    # The member said what it owned before it saw that it had been given more, and less again.
    join(driver, "a")
    join(driver, "b")
    driver.heartbeat("b", -1)
    pushes = driver.pushes("a")
    assert [p.member_epoch for p in pushes] == [2, 3]
    assert held(pushes[-1].assignment.partitions) == ALL_FOUR
    join(driver, "c")
    crossing = driver.heartbeat("a", 3, owned=set())
    assert crossing.member_epoch == 4
    assert driver.pushes("c") == []
    driver.heartbeat("a", 4, owned=set())
    (gain,) = driver.pushes("c")
    assert len(held(gain.assignment.partitions)) == 2


def test_what_was_to_be_given_back_and_is_wanted_again_stays(driver: Driver) -> None:
    join(driver, "a")
    join(driver, "b")
    driver.heartbeat("b", -1)
    assert driver.assigned("a") == ALL_FOUR
    assert driver.state() == "stable"


def test_leaving_frees_at_once(driver: Driver) -> None:
    rebalance_to_two(driver)
    response = driver.heartbeat("a", -1)
    assert response.member_epoch == -1
    (push,) = driver.pushes("b")
    assert held(push.assignment.partitions) == ALL_FOUR


def test_a_silent_member_is_removed_and_told_so(driver: Driver) -> None:
    join(driver, "a", session_timeout_ms=10_000)
    join(driver, "b", session_timeout_ms=60_000)
    driver.pushes("a")
    driver.tick(9_999)
    assert len(driver.describe().members) == 2
    driver.tick(1)
    (farewell,) = driver.pushes("a")
    assert code(farewell) is ErrorCode.UNKNOWN_MEMBER_ID
    assert "10000 ms" in farewell.error.message
    assert driver.assigned("b") == ALL_FOUR
    assert code(driver.heartbeat("a", 2)) is ErrorCode.UNKNOWN_MEMBER_ID


def test_heartbeats_keep_the_session(driver: Driver) -> None:
    epoch = join(driver, "a", session_timeout_ms=10_000).member_epoch
    for _ in range(5):
        driver.tick(9_000)
        assert not driver.heartbeat("a", epoch).HasField("error")
    driver.tick(10_000)
    assert code(driver.describe()) is ErrorCode.GROUP_ID_NOT_FOUND


def test_a_member_that_gives_nothing_back_is_removed_after_its_rebalance_timeout(
    driver: Driver,
) -> None:
    join(driver, "a", rebalance_timeout_ms=5_000, session_timeout_ms=10_000)
    join(driver, "b", session_timeout_ms=60_000)
    driver.tick(3_000)
    driver.heartbeat("a", 2)  # Alive, but busy.
    join(driver, "c", session_timeout_ms=60_000)  # Does not give it more time.
    driver.tick(1_999)
    assert len(driver.describe().members) == 3
    driver.pushes("a")
    driver.tick(1)
    assert {m.member_id for m in driver.describe().members} == {"b", "c"}
    (farewell,) = driver.pushes("a")
    assert "give back" in farewell.error.message
    assert driver.assigned("b") | driver.assigned("c") == ALL_FOUR


def test_epochs_fence(driver: Driver) -> None:
    rebalance_to_two(driver)
    epoch = driver.describe().assignment_epoch
    driver.heartbeat("a", epoch)
    assert code(driver.heartbeat("a", epoch + 1)) is ErrorCode.FENCED_MEMBER_EPOCH
    assert code(driver.heartbeat("a", epoch - 1)) is ErrorCode.FENCED_MEMBER_EPOCH
    assert code(driver.heartbeat("nobody", epoch)) is ErrorCode.UNKNOWN_MEMBER_ID
    assert code(driver.heartbeat("nobody", -1)) is ErrorCode.UNKNOWN_MEMBER_ID
    assert not driver.heartbeat("a", epoch).HasField("error")


def test_an_older_stream_of_a_member_is_fenced(driver: Driver) -> None:
    epoch = join(driver, "a", stream=10).member_epoch
    again = driver.heartbeat("a", epoch, stream=11, topics=["orders"], owned=ALL_FOUR)
    assert held(again.assignment.partitions) == ALL_FOUR  # Told anew on a new stream.
    assert not driver.heartbeat("a", epoch, stream=11).HasField("assignment")
    assert code(driver.heartbeat("a", epoch, stream=10)) is ErrorCode.FENCED_MEMBER_EPOCH
    assert driver.describe().group_epoch == 1  # The same subscription again changed nothing.


def test_a_member_may_join_again_with_nothing(driver: Driver) -> None:
    join(driver, "a", stream=1)
    join(driver, "b")
    response = join(driver, "a", stream=2)  # It lost the answers and holds nothing.
    assert len(held(response.assignment.partitions)) == 2
    assert driver.state() == "stable"
    assert len(driver.assigned("b")) == 2


def test_a_changed_subscription_is_followed(driver: Driver) -> None:
    driver.topics.make("returns", 2)
    epoch = join(driver, "a").member_epoch
    response = driver.heartbeat("a", epoch, topics=["orders", "returns"])
    assert response.member_epoch == 2
    assert held(response.assignment.partitions) == ALL_FOUR | {("returns", 0), ("returns", 1)}
    response = driver.heartbeat("a", 2, topics=["returns"])
    assert held(response.assignment.partitions) == {("returns", 0), ("returns", 1)}
    assert driver.state() == "reconciling"
    driver.heartbeat("a", 3, owned={("returns", 0), ("returns", 1)})
    assert driver.state() == "stable"


def test_a_member_that_claims_what_is_not_its_own_is_told_again_what_is(driver: Driver) -> None:
    kept, gained = rebalance_to_two(driver)
    epoch = driver.describe().assignment_epoch
    assert not driver.heartbeat("a", epoch, owned=kept).HasField("assignment")
    response = driver.heartbeat("a", epoch, owned=kept | gained)
    assert held(response.assignment.partitions) == kept


# ---------------------------------------------------------------------- static members


def test_a_static_member_that_comes_back_takes_over_without_a_rebalance(driver: Driver) -> None:
    join(driver, "a1", group_instance_id="A")
    join(driver, "b", group_instance_id="B")
    (push,) = driver.pushes("a1")
    kept = held(push.assignment.partitions)
    driver.heartbeat("a1", push.member_epoch, owned=kept)
    driver.pushes("b")
    before = driver.describe()
    assert driver.heartbeat("a1", -2, group_instance_id="A").member_epoch == -2
    response = join(driver, "a2", group_instance_id="A")
    assert held(response.assignment.partitions) == kept
    after = driver.describe()
    assert (after.group_epoch, after.state) == (before.group_epoch, "stable")
    assert driver.pushes("b") == []
    assert code(driver.heartbeat("a1", 2, group_instance_id="A")) is ErrorCode.FENCED_INSTANCE_ID


def test_a_static_member_away_gives_up_what_moves(driver: Driver) -> None:
    join(driver, "a1", group_instance_id="A")
    driver.heartbeat("a1", -2, group_instance_id="A")
    response = join(driver, "b")
    assert len(held(response.assignment.partitions)) == 2  # Nobody had to be asked.
    response = join(driver, "a2", group_instance_id="A")
    assert len(held(response.assignment.partitions)) == 2


def test_going_away_frees_what_was_being_given_back(driver: Driver) -> None:
    join(driver, "a1", group_instance_id="A")
    join(driver, "b")
    driver.heartbeat("a1", -2, group_instance_id="A")
    (gain,) = driver.pushes("b")
    assert len(held(gain.assignment.partitions)) == 2


def test_a_static_member_that_stays_away_is_removed(driver: Driver) -> None:
    join(driver, "a1", group_instance_id="A", session_timeout_ms=10_000)
    join(driver, "b", session_timeout_ms=60_000)
    driver.heartbeat("a1", -2, group_instance_id="A")
    driver.tick(10_000)
    assert driver.assigned("b") == ALL_FOUR


def test_an_instance_id_in_use_is_not_taken(driver: Driver) -> None:
    join(driver, "a1", group_instance_id="A", session_timeout_ms=10_000)
    refused = driver.heartbeat("a2", 0, topics=["orders"], group_instance_id="A")
    assert code(refused) is ErrorCode.UNRELEASED_INSTANCE_ID
    assert "a1" in refused.error.message
    driver.tick(10_000)
    join(driver, "a2", group_instance_id="A")


def test_a_static_member_may_leave_for_good(driver: Driver) -> None:
    join(driver, "a1", group_instance_id="A")
    join(driver, "b")
    driver.heartbeat("a1", -1, group_instance_id="A")
    assert [m.member_id for m in driver.describe().members] == ["b"]
    join(driver, "a2", group_instance_id="A")


def test_only_a_static_member_may_go_away(driver: Driver) -> None:
    epoch = join(driver, "a").member_epoch
    assert code(driver.heartbeat("a", -2)) is ErrorCode.INVALID_REQUEST
    refused = driver.heartbeat("a", epoch, group_instance_id="A")
    assert code(refused) is ErrorCode.INVALID_REQUEST


# ---------------------------------------------------------------------- topics


def test_topics_that_appear_grow_and_go_are_followed(driver: Driver) -> None:
    epoch = driver.heartbeat("a", 0, topics=["orders", "later"]).member_epoch
    driver.topics.make("unrelated", 3)
    driver.topics_changed("unrelated")
    assert driver.pushes("a") == []
    driver.topics.make("later", 1)
    driver.topics_changed("later")
    (push,) = driver.pushes("a")
    assert push.member_epoch == epoch + 1
    assert held(push.assignment.partitions) == ALL_FOUR | {("later", 0)}
    driver.topics.grow("later", 3)
    driver.topics_changed("later")
    (push,) = driver.pushes("a")
    assert len(held(push.assignment.partitions)) == 7
    gone = driver.topics.delete("orders")
    driver.topics_changed("orders", removed=gone)
    (push,) = driver.pushes("a")
    assert {topic for topic, _ in held(push.assignment.partitions)} == {"later"}
    driver.heartbeat("a", push.member_epoch, owned={("later", n) for n in range(3)})
    assert driver.state() == "stable"


def test_a_topic_made_anew_is_another_topic(driver: Driver) -> None:
    join(driver, "a")
    gone = driver.topics.delete("orders")
    driver.topics.make("orders", 4)
    driver.topics_changed("orders", removed=gone)
    (push,) = driver.pushes("a")
    assert not push.assignment.partitions  # First the old ones are given back.
    driver.heartbeat("a", push.member_epoch, owned=set())
    assert driver.assigned("a") == ALL_FOUR


def test_patterns_follow_topics_but_not_internal_ones(driver: Driver) -> None:
    driver.topics.make("__internal-orders", 1)
    response = driver.heartbeat("a", 0, pattern=".*orders.*")
    assert held(response.assignment.partitions) == ALL_FOUR
    driver.topics.make("orders-eu", 1)
    driver.topics_changed("orders-eu")
    (push,) = driver.pushes("a")
    assert ("orders-eu", 0) in held(push.assignment.partitions)


def test_members_with_different_subscriptions_get_what_they_want(driver: Driver) -> None:
    driver.topics.make("returns", 2)
    driver.heartbeat("a", 0, topics=["orders"])
    driver.heartbeat("b", 0, topics=["returns"])
    assert driver.assigned("a") == ALL_FOUR
    assert driver.assigned("b") == {("returns", 0), ("returns", 1)}


# ---------------------------------------------------------------------- assignors, timing


def test_the_assignor_is_the_one_that_most_ask_for(driver: Driver) -> None:
    epoch = join(driver, "a", server_assignor="range").member_epoch
    assert driver.describe().assignor == "range"
    join(driver, "b", server_assignor="roundrobin")
    join(driver, "c", server_assignor="roundrobin")
    description = driver.describe()
    assert description.assignor == "roundrobin"
    epoch = description.assignment_epoch
    driver.heartbeat("c", epoch, server_assignor="range")
    assert driver.describe().assignor == "range"
    assert driver.describe().group_epoch == epoch + 1


def test_joins_close_together_are_assigned_together() -> None:
    driver = Driver(FakeTopics(orders=4), GroupSettings(assignment_interval_ms=50))
    assert join(driver, "a").member_epoch == 1
    responses = [join(driver, name) for name in ("b", "c", "d")]
    assert [r.member_epoch for r in responses] == [1, 1, 1]
    assert driver.state() == "assigning"
    driver.tick(49)
    assert driver.describe().assignment_epoch == 1
    driver.tick(1)
    description = driver.describe()
    assert (description.group_epoch, description.assignment_epoch) == (4, 4)
    (push,) = driver.pushes("a")
    assert len(held(push.assignment.partitions)) == 1


def test_members_beyond_the_partitions_stand_by(driver: Driver) -> None:
    for name in "abcdef":
        join(driver, name)
    epoch = driver.describe().assignment_epoch
    driver.heartbeat("a", epoch, owned=driver.assigned("a"))
    assert sorted(len(driver.assigned(name)) for name in "abcdef") == [0, 0, 1, 1, 1, 1]
    assert driver.state() == "stable"
    driver.heartbeat("a", -1)
    assert sorted(len(driver.assigned(name)) for name in "bcdef") == [0, 1, 1, 1, 1]


def states(driver: Driver) -> dict[str, str]:
    return {member.member_id: member.state for member in driver.describe().members}


def test_members_are_told_with_what_they_are_doing(driver: Driver) -> None:
    join(driver, "a", group_instance_id="static")
    assert states(driver) == {"a": "stable"}
    join(driver, "b")
    assert states(driver) == {"a": "revoking", "b": "waiting"}
    driver.heartbeat("a", 2, owned=driver.assigned("a"))
    for name in "cde":
        join(driver, name)
    epoch = driver.describe().assignment_epoch
    for name in "ab":
        driver.heartbeat(name, epoch, owned=driver.assigned(name))
    assert sorted(states(driver).values()) == ["stable"] * 4 + ["standby"]
    driver.heartbeat("a", -2, group_instance_id="static")
    assert states(driver)["a"] == "away"


@pytest.mark.parametrize(
    ("fields", "words", "expected"),
    [
        ({"topics": None}, "subscribes to", ErrorCode.INVALID_REQUEST),
        ({"owned": {("orders", 0)}}, "owns nothing", ErrorCode.INVALID_REQUEST),
        ({"session_timeout_ms": 10}, "1000 to 1800000", ErrorCode.INVALID_REQUEST),
        ({"session_timeout_ms": -1}, "1000 to 1800000", ErrorCode.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, "below 0", ErrorCode.INVALID_REQUEST),
        ({"server_assignor": "unifrom"}, "'uniform'?", ErrorCode.UNSUPPORTED_ASSIGNOR),
        ({"pattern": "(a"}, "not closed", ErrorCode.INVALID_REQUEST),
        ({"topics": ["t"] * 10_001}, "10000 are allowed", ErrorCode.INVALID_REQUEST),
        ({"client_id": "x" * 256}, "client_id", ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_bad_join_is_refused_in_words_and_changes_nothing(
    driver: Driver, fields: dict, words: str, expected: ErrorCode
) -> None:
    response = driver.heartbeat("a", 0, **({"topics": ["orders"]} | fields))
    assert code(response) is expected
    assert words in response.error.message
    assert driver.changes == []
    assert driver.shard.groups == {}


def test_other_nonsense_is_refused(driver: Driver) -> None:
    assert code(driver.heartbeat("", 0, topics=["orders"], stream=1)) is ErrorCode.INVALID_REQUEST
    assert code(driver.heartbeat("a", -3, topics=["orders"])) is ErrorCode.INVALID_REQUEST


# ---------------------------------------------------------------------- durability


def test_replaying_the_records_gives_the_same_state(driver: Driver) -> None:
    rebalance_to_two(driver)
    driver.commit({("orders", 0): 7}, "a", driver.describe().assignment_epoch)
    join(driver, "s", group_instance_id="S", rack_id="r", client_id="c")
    driver.heartbeat("s", -2, group_instance_id="S")
    assert durable(replayed(driver.topics, driver.settings, driver.changes)) == durable(
        driver.shard
    )


def test_a_new_coordinator_gives_everybody_time_and_remembers_the_rest(driver: Driver) -> None:
    kept, gained = rebalance_to_two(driver)
    epoch = driver.describe().assignment_epoch
    driver.tick(44_000)
    driver.reload()
    driver.tick(44_000)
    assert driver.state() == "stable"
    response = driver.heartbeat("a", epoch, stream=900, topics=["orders"], owned=kept)
    assert held(response.assignment.partitions) == kept
    assert response.member_epoch == epoch
    driver.tick(1_000)
    # b never came to the new coordinator, and was removed.
    assert driver.assigned("a") == kept | gained
    assert {m.member_id for m in driver.describe().members} == {"a"}


def test_a_new_coordinator_sees_what_became_of_topics_meanwhile(driver: Driver) -> None:
    join(driver, "a")
    driver.topics.grow("orders", 6)
    driver.reload()
    assert driver.describe().group_epoch == 2
    assert len(driver.assigned("a")) == 6


def test_reverting_brings_back_what_was(driver: Driver) -> None:
    kept, _ = rebalance_to_two(driver)
    before = durable(driver.shard)
    written = len(driver.changes)
    epoch = driver.describe().assignment_epoch
    join(driver, "c")
    driver.heartbeat("b", -1)
    driver.commit({("orders", 0): 7}, "a", epoch)
    driver.shard.revert(driver.changes[written:], driver.now_ms)
    driver.shard.validate()
    assert durable(driver.shard) == before
    assert driver.assigned("a") == kept
    assert not driver.heartbeat("a", epoch).HasField("error")


def test_what_was_given_back_and_taken_in_vain_is_given_and_taken_again(driver: Driver) -> None:
    join(driver, "a")
    join(driver, "b")
    (push,) = driver.pushes("a")
    kept = held(push.assignment.partitions)
    written = len(driver.changes)
    driver.heartbeat("a", push.member_epoch, owned=kept)
    driver.shard.revert(driver.changes[written:], driver.now_ms)
    driver.shard.validate()
    driver.pushes("b")
    driver.heartbeat("a", push.member_epoch, owned=kept)
    (gain,) = driver.pushes("b")
    assert held(gain.assignment.partitions) == ALL_FOUR - kept
    assert driver.state() == "stable"


def test_what_a_topic_change_asked_for_is_tried_again_after_a_revert(driver: Driver) -> None:
    join(driver, "a")
    written = len(driver.changes)
    driver.topics.grow("orders", 6)
    driver.topics_changed("orders")
    driver.shard.revert(driver.changes[written:], driver.now_ms)
    driver.shard.groups[GROUP].state.validate()
    assert len(driver.assigned("a")) == 4
    driver.now_ms += 500
    driver.tick(0)
    assert len(driver.assigned("a")) == 6


def test_what_is_given_back_in_an_epoch_gone_by_is_asked_for_again(driver: Driver) -> None:
    join(driver, "a")
    driver.topics_changed("orders", removed=driver.topics.delete("orders"))
    (first,) = driver.pushes("a")
    # The topic is made anew before the member's answer to its deletion comes.
    driver.topics.make("orders", 4)
    driver.topics_changed("orders")
    (second,) = driver.pushes("a")
    assert second.member_epoch > first.member_epoch
    driver.heartbeat("a", first.member_epoch, owned=set())
    assert second.HasField("assignment"), "a member answers to assignments alone"
    driver.heartbeat("a", second.member_epoch, owned=set())
    assert driver.assigned("a") == ALL_FOUR


def test_a_gift_of_a_new_coordinator_that_could_not_be_written_is_tried_again(
    driver: Driver,
) -> None:
    join(driver, "a")
    # The crash cut off the record that gave the member what it shall hold.
    found = driver.changes[:-1]
    driver.changes = list(found)
    driver.reload(found)
    assert driver.assigned("a") == ALL_FOUR
    driver.shard.revert(driver.changes[len(found) :], driver.now_ms)
    driver.shard.validate()
    assert driver.assigned("a") == set()
    driver.now_ms += 500
    driver.tick(0)
    assert driver.assigned("a") == ALL_FOUR


def test_a_removal_that_could_not_be_written_is_tried_again(driver: Driver) -> None:
    join(driver, "a", session_timeout_ms=10_000)
    written = len(driver.changes)
    driver.tick(10_000)
    assert driver.shard.groups == {}
    driver.shard.revert(driver.changes[written:], driver.now_ms)
    driver.shard.validate()
    assert [m.member_id for m in driver.describe().members] == ["a"]
    driver.tick(10_000)
    assert driver.shard.groups == {}


def test_when_nothing_is_left_the_group_is_gone(driver: Driver) -> None:
    join(driver, "a")
    driver.heartbeat("a", -1)
    assert driver.shard.groups == {}
    assert replayed(driver.topics, driver.settings, driver.changes).groups == {}
    latest = {change.key: change.value for change in driver.changes}
    assert set(latest.values()) == {None}
