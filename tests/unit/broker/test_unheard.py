"""What is said of heartbeats that fail: seldom, and in words."""

from __future__ import annotations

import grpc
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.controller_log import Unheard, Untold, in_words
from penstock.wire.errors import NotControllerError


def test_it_is_said_as_it_begins_and_then_now_and_then():
    unheard = Unheard()
    said = {at_ms: told for at_ms in range(0, 150_000, 100) if (told := unheard.failed(at_ms))}
    assert list(said) == [0, 60_000, 120_000]
    assert said[0] == {"failures": 1, "for_ms": 0}
    assert said[60_000] == {"failures": 600, "for_ms": 60_000}


def test_a_controller_that_comes_and_goes_is_no_reason_for_a_flood():
    unheard = Unheard()
    said = []
    for at_ms in range(0, 40_000, 1000):
        unheard.heard()
        if (told := unheard.failed(at_ms)) is not None:
            said.append((at_ms, told["failures"]))
    assert said == [(0, 1), (10_000, 10), (20_000, 10), (30_000, 10)]


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=200))
def test_every_failure_is_counted_once(steps):
    unheard, now_ms, failures, told = Unheard(), 0, 0, 0
    for wait_ms, is_heard in steps:
        now_ms += wait_ms
        if is_heard:
            unheard.heard()
            continue
        failures += 1
        told += (unheard.failed(now_ms) or {"failures": 0})["failures"]
    last = unheard.failed(now_ms + 60_000)
    assert last is not None
    assert told + last["failures"] == failures + 1


def test_reasons_are_in_words():
    nothing = aio.Metadata()
    broken = aio.AioRpcError(  # type: ignore[call-arg]  # The stubs want more.
        grpc.StatusCode.UNAVAILABLE, nothing, nothing, "connection refused: 127.0.0.1:9093"
    )
    assert in_words(broken) == "UNAVAILABLE: connection refused: 127.0.0.1:9093"
    silent = aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing)  # type: ignore[call-arg]
    assert in_words(silent) == "CANCELLED: no details"
    assert in_words(NotControllerError("ask node 3")) == "ask node 3"
    assert in_words(TimeoutError()) == "no answer in half of broker.session.timeout.ms"
    assert in_words(ValueError("odd")) == "ValueError: odd"


def test_one_cause_is_said_once_however_grpc_words_it(capsys):
    untold = Untold()
    for details in ("Deadline Exceeded", "Stream removed (Deadline Exceeded)"):
        for _ in range(2):
            untold.failed(
                1,
                aio.AioRpcError(  # type: ignore[call-arg]  # The stubs want more.
                    grpc.StatusCode.DEADLINE_EXCEEDED, aio.Metadata(), aio.Metadata(), details
                ),
            )
    untold.failed(1, NotControllerError("another is"))
    said = capsys.readouterr()
    assert (said.out + said.err).count("not told of external.advertised yet") == 2
    untold.told()
    untold.failed(1, NotControllerError("another is"))
    said = capsys.readouterr()
    assert (said.out + said.err).count("not told of external.advertised yet") == 1
