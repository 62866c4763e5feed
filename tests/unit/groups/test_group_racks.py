"""Groups that look at racks, and replicas that move between them (KIP-881)."""

from __future__ import annotations

import pytest

from penstock.broker.core.group_events import TopicsChanged
from penstock.wire.ids import TopicIdPartition
from tests.unit.groups.group_harness import Driver, FakeTopics


@pytest.fixture
def driver() -> Driver:
    return Driver(FakeTopics(orders=4))


def join(driver: Driver, member_id: str, assignor: str, rack: str) -> None:
    response = driver.heartbeat(
        member_id, 0, topics=["orders"], server_assignor=assignor, rack_id=rack
    )
    assert not response.HasField("error"), response.error.message


def test_a_rack_aware_group_reads_in_its_racks(driver: Driver) -> None:
    rack_aware_pair(driver, {0, 3})
    assert driver.describe().assignor == "rackaware"
    assert driver.assigned("a") == {("orders", 0), ("orders", 3)}
    assert driver.assigned("b") == {("orders", 1), ("orders", 2)}


def rack_aware_pair(driver: Driver, near_a: set[int]) -> None:
    """Members a, in the east with ``near_a``, and b, in the west with the rest, both served."""
    place(driver, near_a)
    join(driver, "a", "rackaware", "east")
    join(driver, "b", "rackaware", "west")
    give_back(driver)


def place(driver: Driver, in_the_east: set[int]) -> None:
    topic_id = driver.topics.find("orders").topic_id
    for number in range(4):
        rack = frozenset({"east" if number in in_the_east else "west"})
        driver.topics.racks_of[TopicIdPartition(topic_id, number)] = rack


def give_back(driver: Driver) -> None:
    """Both members say that they hold no more than they may."""
    for _ in range(2):
        for name in "ab":
            epoch = driver.describe().assignment_epoch
            driver.heartbeat(name, epoch, owned=driver.assigned(name))


def test_replicas_that_move_to_other_racks_make_a_new_assignment(driver: Driver) -> None:
    rack_aware_pair(driver, {0, 3})
    assert driver.assigned("a") == {("orders", 0), ("orders", 3)}
    place(driver, {1, 3})
    driver.do(TopicsChanged(frozenset(), moved=frozenset({"payments"})))
    assert driver.describe().group_epoch == 2, "none of its topics"
    driver.do(TopicsChanged(frozenset(), moved=frozenset({"orders"})))
    give_back(driver)
    assert driver.describe().group_epoch == 3
    assert driver.assigned("a") == {("orders", 1), ("orders", 3)}
    assert driver.assigned("b") == {("orders", 0), ("orders", 2)}


def test_replicas_that_moved_before_the_group_was_loaded_make_a_new_assignment(
    driver: Driver,
) -> None:
    rack_aware_pair(driver, {0, 3})
    driver.reload()
    assert driver.describe().group_epoch == 2, "nothing moved"
    place(driver, {1, 3})
    driver.reload()
    give_back(driver)
    assert driver.describe().group_epoch == 3
    assert driver.assigned("a") == {("orders", 1), ("orders", 3)}


@pytest.mark.parametrize(("assignor", "rack"), [("uniform", "east"), ("rackaware", "")])
def test_a_group_that_does_not_look_at_racks_is_left_alone(
    driver: Driver, assignor: str, rack: str
) -> None:
    place(driver, {0, 3})
    join(driver, "a", assignor, rack)
    place(driver, {1, 3})
    driver.do(TopicsChanged(frozenset(), moved=frozenset({"orders"})))
    driver.reload()
    assert driver.describe().group_epoch == 1
