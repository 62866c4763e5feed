"""What the simulated network brings late, and that none of it is lost on the way there."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from penstock.chaos.simulator.inbox import Inbox
from penstock.chaos.simulator.network import End, Network
from penstock.chaos.simulator.scheduler import Scheduler


class Peer:
    """A process that notes what it is asked and told."""

    def __init__(self, world: World, address: int) -> None:
        self.address = address
        self.alive = True
        self.told: list[tuple[int, Any]] = []
        self.ended: list[int] = []
        self._world = world
        self._streams = 0
        world.network.processes[address] = self

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        self.told.append((0, request))
        reply(f"to {request}")

    def accept(self, service: str, end: End) -> None:
        self._streams += 1
        stream = self._streams
        end.on_message = lambda message: self.told.append((stream, message))
        end.on_broken = lambda: self.ended.append(stream)


class World:
    def __init__(self, seed: int = 0) -> None:
        self.scheduler = Scheduler(Random(seed))
        self.network = Network(self.scheduler, Random(seed), late=0, left_over=0)
        weather = self.network.weather
        weather.lost = weather.doubled = weather.late_openings = 0

    def run_ms(self, duration_ms: int) -> None:
        self.scheduler.run_until(self.scheduler.now_ms + duration_ms, lambda: False)


def test_what_changes_something_comes_again_when_its_call_was_given_up_long_ago() -> None:
    world = World()
    client, broker, controller = Peer(world, 100), Peer(world, 1), Peer(world, -2)
    world.network.weather.left_over = 1
    answers: list[Any] = []
    for target, method in ((-2, "command"), (1, "produce"), (1, "fetch")):
        world.network.call(client, target, method, method, answers.append, timeout_ms=1000)
    world.run_ms(1000)
    assert controller.told == [(0, "command")]
    assert sorted(broker.told) == [(0, "fetch"), (0, "produce")]
    world.run_ms(5000)
    assert controller.told == [(0, "command")] * 2
    assert sorted(broker.told) == [(0, "fetch"), (0, "produce"), (0, "produce")]
    assert len(answers) == 3, "nobody waits for what is said to that"


def test_what_a_producer_asked_for_may_come_long_after_it_ended() -> None:
    world = World()
    producer, broker = Peer(world, 100), Peer(world, 1)
    world.network.weather.left_over = 1
    world.network.call(producer, 1, "produce", "batch", print, timeout_ms=1000)
    producer.alive = False
    world.network.ended(producer, silently=False)
    Peer(world, 101)
    world.run_ms(1000)
    assert broker.told == [(0, "batch")]
    world.run_ms(5000)
    assert broker.told == [(0, "batch")] * 2


def test_a_stream_that_was_given_up_is_read_after_the_one_in_its_place() -> None:
    world = World()
    follower, leader = Peer(world, 1), Peer(world, 2)
    world.network.weather.late_openings = 1
    given_up: list[int] = []
    first = world.network.connect(follower, 2, "replication")
    first.on_broken = lambda: given_up.append(1)
    first.send("old")
    world.network.weather.late_openings = 0
    while not given_up:
        world.run_ms(1)
    assert leader.told == []
    second = world.network.connect(follower, 2, "replication")
    second.send("new")
    world.run_ms(1000)
    assert leader.told == [(1, "new"), (2, "old")]
    assert leader.ended == [2]
    assert second.is_open


def test_what_a_process_sent_before_it_ended_may_come_after_its_successor_has_spoken() -> None:
    overtaken = 0
    for seed in range(50):
        world = World(seed)
        before, leader = Peer(world, 1), Peer(world, 2)
        stream = world.network.connect(before, 2, "replication")
        world.run_ms(10)
        stream.send("a")
        stream.send("b")
        before.alive = False
        world.network.ended(before, silently=False)
        after = Peer(world, 1)
        world.network.connect(after, 2, "replication").send("c")
        world.run_ms(2000)
        first = [message for number, message in leader.told if number == 1]
        assert first == ["a", "b"][: len(first)], "a stream keeps its order"
        assert (2, "c") in leader.told
        assert leader.ended == [1]
        overtaken += leader.told.index((2, "c")) < len(leader.told) - 1
    assert overtaken > 5


class Busy:
    """A process that acts on what it is told, one thing after the other."""

    def __init__(self, world: World) -> None:
        self.acted: list[tuple[int, str]] = []
        self.after = world.scheduler.after
        self.inbox: Inbox[str] = Inbox(self, self._act)
        self._scheduler = world.scheduler

    def _act(self, message: str) -> None:
        self.acted.append((self._scheduler.steps, message))


def test_what_waited_is_acted_on_a_message_a_step() -> None:
    world = World()
    process = Busy(world)
    process.inbox.be_busy(10)
    for message in "abc":
        process.inbox.take(message)
    assert process.acted == []
    world.run_ms(20)
    assert "".join(message for _, message in process.acted) == "abc"
    assert len({step for step, _ in process.acted}) == 3
    process.inbox.take("d")
    assert process.acted[-1][1] == "d"
