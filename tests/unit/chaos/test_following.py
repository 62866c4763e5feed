from __future__ import annotations

from collections.abc import Iterator
from random import Random

import hpack
import pytest

from penstock.chaos.backends.following import (
    DATA,
    HEADERS,
    PREFACE,
    Calls,
    Follower,
    Holder,
    is_named,
)
from tests.unit.chaos.http2_bytes import Sender, data, frame, frames_in, reset

PRODUCE = "/penstock.v1.Log/Produce"
FETCH = "/penstock.v1.Log/Fetch"
SETTINGS = 4


def pieces(whole: bytes, random: Random) -> Iterator[bytes]:
    at = 0
    while at < len(whole):
        size = random.choice([1, 2, 5, 9, 40, 300])
        yield whole[at : at + size]
        at += size


@pytest.mark.parametrize("name", ["Produce", "Log/Produce"])
def test_a_call_is_named_by_its_method_or_with_its_service(name: str) -> None:
    assert is_named(PRODUCE, [name])
    assert not is_named("/penstock.v1.Log/ProduceOnce", [name])
    assert not is_named("", [name])


@pytest.mark.parametrize("seed", range(20))
def test_calls_are_known_however_the_bytes_come(seed: int) -> None:
    random = Random(seed)
    sender = Sender()
    wanted: Calls = {}
    whole = PREFACE + frame(SETTINGS, 0)
    for stream in range(1, 101, 2):
        path = random.choice([PRODUCE, FETCH, f"/penstock.v1.Log/Other{stream}"])
        wanted[stream] = path
        if random.random() < 0.3:
            whole += sender.split_request(stream, path)
        else:  # Some of these change how the next block is to be read, some do not.
            whole += sender.request(stream, path, ("timeout", random.choice(["1", "2", str(seed)])))
        whole += data(stream, random.randbytes(random.randrange(40)))
    calls: Calls = {}
    follower = Follower(calls, requests=True)
    marks = [mark for piece in pieces(whole, random) for mark in follower.feed(piece)]
    assert calls == wanted
    assert [mark.stream for mark in marks if mark.kind == DATA] == list(wanted)
    assert [mark.path for mark in marks if mark.kind == DATA] == list(wanted.values())
    assert not follower.is_lost


def test_a_call_is_forgotten_when_it_is_over() -> None:
    sender, answers = Sender(), Sender()
    calls: Calls = {}
    there = Follower(calls, requests=True)
    back = Follower(calls, requests=False)
    there.feed(PREFACE + sender.request(1, PRODUCE) + sender.request(3, FETCH))
    there.feed(sender.request(5, FETCH) + data(5, b"question", end=True))
    assert set(calls) == {1, 3, 5}, "that of 5 has not been answered"
    back.feed(answers.headers(3, (":status", "200")) + data(3, b"answer"))
    back.feed(answers.headers(3, ("grpc-status", "0"), end=True))
    there.feed(reset(1))
    assert set(calls) == {5}


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n", PREFACE + frame(HEADERS, 1, b"\xff\xff\xff", 0x4)],
)
def test_what_is_no_http2_is_given_up(said: bytes) -> None:
    follower = Follower({}, requests=True)
    assert follower.feed(said) == []
    assert follower.is_lost
    assert follower.feed(data(1, b"more")) == []


class Answers:
    """The direction of a node's answers to three calls: 1 and 5 produce, 3 fetches."""

    def __init__(self) -> None:
        self.calls: Calls = {1: PRODUCE, 3: FETCH, 5: PRODUCE}
        self.holder = Holder(Follower(self.calls, requests=False))
        self.sender = Sender()

    def feed(self, said: bytes, now: float, hold_s: float = 10.0) -> bytes:
        return b"".join(self.holder.feed(said, ["Produce"], now, hold_s))


def test_the_named_wait_their_time_and_others_do_not() -> None:
    answers = Answers()
    ping = frame(6, 0, bytes(8))
    said = data(1, b"late") + data(3, b"soon") + ping + data(1, b"later")
    assert answers.feed(said, now=100.0) == data(3, b"soon") + ping
    assert answers.feed(data(5, b"last"), now=101.0) == b""
    assert answers.holder.next_due == 110.0
    assert answers.holder.take_due(109.9) == []
    assert answers.holder.take_due(110.0) == [data(1, b"late"), data(1, b"later")]
    assert answers.holder.take_due(111.0) == [data(5, b"last")]
    assert answers.holder.is_idle


def test_nothing_of_a_call_overtakes_what_waits_of_it() -> None:
    answers = Answers()
    end = answers.sender.headers(1, ("grpc-status", "0"), end=True)
    assert answers.feed(data(1, b"late") + end, now=0.0) == b""
    # How this block is to be read depends on the one that waits.
    other = answers.sender.headers(3, ("grpc-status", "0"), end=True)
    assert answers.feed(data(3, b"soon") + other, now=1.0) == data(3, b"soon")
    assert answers.feed(reset(5), now=2.0) == reset(5), "nothing of that one waits"
    assert b"".join(answers.holder.take_due(10.0)) == data(1, b"late") + end + other
    decoder = hpack.Decoder()
    for block in (end, other):
        assert decoder.decode(block[9:]) == [("grpc-status", "0")]


def test_healing_lets_all_go_at_once_and_in_order() -> None:
    answers = Answers()
    begun = data(1, b"torn in the middle")
    answers.feed(data(1, b"first") + begun[:12], now=0.0)
    assert b"".join(answers.holder.flush()) == data(1, b"first") + begun[:12]
    # The rest of the frame is not the beginning of one.
    assert answers.feed(begun[12:] + data(1, b"next"), now=1.0) == begun[12:]
    assert answers.holder.take_due(11.0) == [data(1, b"next")]


def test_holding_may_begin_within_a_frame() -> None:
    answers = Answers()
    whole = data(1, b"x" * 100)
    answers.holder.watch(data(3, b"went by") + whole[:50])
    assert answers.feed(whole[50:80], now=0.0) == whole[50:80]
    assert answers.feed(whole[80:] + data(1, b"late"), now=0.0) == whole[80:]
    assert not answers.holder.is_idle


@pytest.mark.parametrize("seed", range(30))
def test_what_each_call_says_comes_whole_and_in_order_whatever_is_held(seed: int) -> None:
    random = Random(seed)
    answers = Answers()
    said = b""
    for _ in range(60):
        stream = random.choice([1, 3, 5])
        if random.random() < 0.2:
            said += answers.sender.headers(stream, ("n", str(random.randrange(5))))
        else:
            said += data(stream, random.randbytes(random.randrange(60)))
    came, now, is_held = b"", 0.0, False
    for piece in pieces(said, random):
        now += random.random()
        came += b"".join(answers.holder.take_due(now))
        if random.random() < 0.1:
            is_held = not is_held
            if not is_held:
                came += b"".join(answers.holder.flush())
        if is_held or not answers.holder.is_idle:
            names = ["Produce"] if is_held else []
            came += b"".join(answers.holder.feed(piece, names, now, random.uniform(0, 5)))
        else:
            answers.holder.watch(piece)
            came += piece
    came += b"".join(answers.holder.flush())
    for stream in (1, 3, 5):
        of_it = [one for one in frames_in(said) if one[1] == stream]
        assert [one for one in frames_in(came) if one[1] == stream] == of_it
    blocks = [one for one in frames_in(said) if one[0] == HEADERS]
    assert [one for one in frames_in(came) if one[0] == HEADERS] == blocks
