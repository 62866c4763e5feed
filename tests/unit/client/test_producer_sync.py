from __future__ import annotations

import asyncio
import linecache
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from penstock.client import (
    BufferExhaustedError,
    ClientClosedError,
    DeliveryFailedError,
    InvalidRequestError,
    Producer,
    UnknownTopicOrPartitionError,
    sending,
)
from penstock.client import producer as producer_module
from penstock.client.core import accumulator
from penstock.wire.errors import AccessForbiddenError
from tests.support import wait_until
from tests.unit.client.conftest import Background
from tests.unit.client.test_producer import refusal


def test_many_threads_share_a_producer(background: Background) -> None:
    background.cluster.add_topic("t", 4)
    with Producer(background.cluster.bootstrap, linger_ms=1) as producer:

        def send(thread: int) -> None:
            for number in range(300):
                producer.send("t", b"%d-%d" % (thread, number), partition=thread)

        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        assert background.cluster.values("t", number) == [
            b"%d-%d" % (number, n) for n in range(300)
        ]


def test_the_future_has_the_place(background: Background) -> None:
    background.cluster.add_topic("t")
    with Producer(background.cluster.bootstrap) as producer:
        called = threading.Event()
        future = producer.send("t", b"v", timestamp_ms=5)
        future.add_done_callback(lambda done: called.set())
        place = future.result(10)
        assert (place.topic, place.partition, place.offset, place.timestamp_ms) == ("t", 0, 0, 5)
        assert called.wait(10)
        assert producer.partitions_for("t") == 1


def test_a_full_buffer_blocks_the_thread_and_then_raises(background: Background) -> None:
    background.cluster.add_topic("t")
    gate = threading.Event()

    async def closed(node: object, request: object) -> str | None:
        return None if gate.is_set() else "drop"

    background.cluster.on_produce = closed
    with Producer(
        background.cluster.bootstrap,
        buffer_memory=3_000,
        max_block_ms=100,
        request_timeout_ms=500,
        delivery_timeout_ms=30_000,
    ) as producer:
        producer.send("t", b"v" * 1_000)
        producer.send("t", b"v" * 1_000)
        with pytest.raises(BufferExhaustedError, match="buffer_memory=3000"):
            producer.send("t", b"v" * 1_000)
        gate.set()
    assert len(background.cluster.values("t")) == 2


def test_a_blocked_thread_goes_on_when_there_is_room(background: Background) -> None:
    background.cluster.add_topic("t")
    with Producer(background.cluster.bootstrap, buffer_memory=5_000) as producer:
        for _ in range(60):
            producer.send("t", b"v" * 1_000)
    assert len(background.cluster.values("t")) == 60


def test_a_failure_that_nobody_read_raises_at_close(background: Background) -> None:
    background.cluster.add_topic("t")

    async def refuse(node: object, request: object) -> object:
        return refusal(request, AccessForbiddenError("not for you"))  # type: ignore[arg-type]

    background.cluster.on_produce = refuse
    producer = Producer(background.cluster.bootstrap)
    producer.send("t", b"v")
    with pytest.raises(DeliveryFailedError, match=r"1 record was.*not for you"):
        producer.close()
    with pytest.raises(ClientClosedError):
        producer.send("t", b"v")


def fail_after_sending(producer: Producer) -> None:
    producer.send("t", b"v")
    raise ZeroDivisionError


def test_the_exception_of_the_block_wins_over_that_of_closing(background: Background) -> None:
    background.cluster.add_topic("t")

    async def refuse(node: object, request: object) -> object:
        return refusal(request, AccessForbiddenError("not for you"))  # type: ignore[arg-type]

    background.cluster.on_produce = refuse
    with (
        pytest.raises(ZeroDivisionError) as caught,
        Producer(background.cluster.bootstrap) as producer,
    ):
        fail_after_sending(producer)
    assert "not delivered" in caught.value.__notes__[0]


def test_unknown_topic(background: Background) -> None:
    background.cluster.add_topic("orders")
    with (
        Producer(background.cluster.bootstrap) as producer,
        pytest.raises(UnknownTopicOrPartitionError, match="did you mean 'orders'"),
    ):
        producer.send("oders", b"v")


def test_blocking_in_a_callback_is_refused_instead_of_hanging(background: Background) -> None:
    background.cluster.add_topic("t")
    caught: list[BaseException] = []
    done = threading.Event()
    with Producer(background.cluster.bootstrap) as producer:

        def flush(future: object) -> None:
            try:
                producer.flush()
            except InvalidRequestError as error:
                caught.append(error)
            done.set()

        producer.send("t", b"v").add_done_callback(flush)
        assert done.wait(10)
    assert "callback" in str(caught[0])


def test_a_new_topic_in_a_callback_is_refused_by_a_typed_error(background: Background) -> None:
    background.cluster.add_topic("t")
    background.cluster.add_topic("new")
    caught: list[BaseException] = []
    done = threading.Event()
    with Producer(background.cluster.bootstrap) as producer:

        def forward(future: object) -> None:
            try:
                producer.send("new", b"v")
            except Exception as error:
                caught.append(error)
            done.set()

        producer.send("t", b"v").add_done_callback(forward)
        assert done.wait(10)
        assert isinstance(caught[0], InvalidRequestError)
        assert "partitions_for" in caught[0].message
        done.clear()
        producer.partitions_for("new")
        producer.send("t", b"v").add_done_callback(forward)
        assert done.wait(10)
    assert len(caught) == 1
    assert background.cluster.values("new") == [b"v"]


def test_sends_from_a_callback_are_fine(background: Background) -> None:
    background.cluster.add_topic("t")
    with Producer(background.cluster.bootstrap) as producer:
        producer.send("t", b"1").add_done_callback(lambda _: producer.send("t", b"2"))
        wait_until(lambda: background.cluster.values("t") == [b"1", b"2"], "both are there")


def test_a_full_buffer_does_not_stop_the_thread_that_callbacks_run_on(
    background: Background,
) -> None:
    background.cluster.add_topic("t")
    told: queue.Queue[BaseException | None] = queue.Queue()

    with Producer(
        background.cluster.bootstrap, buffer_memory=2_000, max_block_ms=60_000, linger_ms=0
    ) as producer:

        def more(done: object) -> None:
            try:
                for _ in range(4):
                    producer.send("t", b"y" * 900)
            except BufferExhaustedError as error:
                told.put(error)
            else:
                told.put(None)

        producer.send("t", b"x").add_done_callback(more)
        error = told.get(timeout=10)
    assert isinstance(error, BufferExhaustedError)
    assert "another thread" in error.message
    assert background.cluster.values("t") == [b"x", b"y" * 900, b"y" * 900]


def test_a_close_from_a_callback_is_refused_and_the_producer_goes_on(
    background: Background,
) -> None:
    background.cluster.add_topic("t")
    refused: queue.Queue[object] = queue.Queue()
    with Producer(background.cluster.bootstrap) as producer:

        def close(_: object) -> None:
            try:
                producer.close()
            except InvalidRequestError as error:
                refused.put(error)

        producer.send("t", b"1").add_done_callback(close)
        assert "callback" in str(refused.get(timeout=10))
        producer.send("t", b"2")
    assert background.cluster.values("t", 0) == [b"1", b"2"]


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("many", [False, True])
def test_a_callback_that_wants_the_process_to_end_does_not_end_the_clients_thread(
    background: Background,
    ending: type[BaseException],
    many: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    background.cluster.add_topic("t")

    def end(_: object) -> None:
        raise ending("enough")

    heard: queue.Queue[object] = queue.Queue()
    with Producer(background.cluster.bootstrap, linger_ms=50) as producer:
        first: Future[Any] = producer.send_many("t", [b"1"]) if many else producer.send("t", b"1")
        second = producer.send("t", b"2")
        first.add_done_callback(end)
        first.add_done_callback(heard.put)
        assert second.result(10).offset == 1
        assert heard.get(timeout=10) is first
        assert producer.send("t", b"3").result(10).offset == 2
    assert ending.__name__ in caplog.text
    assert "callback" in caplog.text


def test_an_exit_from_a_callback_in_the_callers_own_thread_is_one(background: Background) -> None:
    """The verdict is there, so that it is called at once."""
    background.cluster.add_topic("t")

    def end(_: object) -> None:
        raise SystemExit(3)

    with Producer(background.cluster.bootstrap) as producer:
        future = producer.send("t", b"1")
        future.result(10)
        with pytest.raises(SystemExit):
            future.add_done_callback(end)


def test_a_partitioner_may_wait_for_the_client(background: Background) -> None:
    background.cluster.add_topic("t", 2)
    background.cluster.add_topic("rules")
    chosen = 0

    def ask(
        topic: str, key: bytes | None, value: bytes | None, count: int, available: Sequence[int]
    ) -> int:
        nonlocal chosen
        # Anything that only the client's own thread can answer, while that has work to do.
        chosen = producer.send("rules", b"?", partition=0).result(10).offset
        return producer.partitions_for(topic) - 1

    with Producer(background.cluster.bootstrap, partitioner=ask, linger_ms=0) as producer:
        futures = [producer.send("t", b"%d" % number) for number in range(20)]
        assert {future.result(10).partition for future in futures} == {1}
    assert chosen == 19


def interrupting(count: int, files: set[str | None]) -> Callable[[FrameType, str, object], Any]:
    """A trace function that raises KeyboardInterrupt at the count-th line of these files."""
    left = count

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        # The step from a block to the end of its ``with`` is none where signals are looked at.
        if event == "line" and not linecache.getline(
            frame.f_code.co_filename, frame.f_lineno
        ).lstrip().startswith("with "):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def test_a_producer_goes_on_wherever_a_send_was_interrupted(background: Background) -> None:
    background.cluster.add_topic("t")
    files = {module.__file__ for module in (producer_module, sending, accumulator)}
    for count in range(1, 1_000):
        with Producer(background.cluster.bootstrap, linger_ms=0) as producer:
            producer.send("t", b"first").result(10)
            before = sys.gettrace()
            sys.settrace(interrupting(count, files))
            try:
                # With a header, that it goes the long way; nobody reads the future.
                producer.send("t", b"second", headers=[("name", b"value")])
            except KeyboardInterrupt:
                whole = False
            else:
                whole = True
            finally:
                sys.settrace(before)
            producer.send("t", b"third", headers=[("name", b"value")]).result(10)
        if whole:
            break
    assert count > 20
    assert whole


def test_no_interrupt_can_leave_a_send_with_the_lock_held(background: Background) -> None:
    """Where the lock is taken and given back no Python code runs, and so no signal's handler."""
    background.cluster.add_topic("t")
    inside: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_name in {"__enter__", "__exit__"}:
            inside.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    with Producer(background.cluster.bootstrap) as producer:
        producer.send("t", b"first").result(10)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            producer.send("t", b"second", headers=[("name", b"value")])
        finally:
            sys.settrace(before)
    assert inside == []
