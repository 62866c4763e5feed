"""The port for frames: who is served, who is refused and how, and what is done when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import StatusCode
from structlog.testing import capture_logs

from penstock.broker.replication import connecting, frame_server, frame_stream
from penstock.broker.replication.connecting import ReplicationConnector
from penstock.broker.replication.frame_server import FrameServer, Refused
from penstock.broker.replication.frame_stream import FrameStream
from penstock.broker.replication.frames import MAX_HELLO_BYTES, PREAMBLE, Kind, encode_header
from penstock.broker.replication.leader import MAX_IN_FLIGHT, MAX_PUSH_BYTES
from penstock.broker.replication.ports import EOF, LeaderStream, StreamBrokenError
from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import common_pb2, replication_pb2
from penstock.wire.errors import AddressInUseError
from penstock.wire.transport import MAX_MESSAGE_BYTES
from tests.integration.proxy import Relay
from tests.support import eventually
from tests.unit.replication.brokers import CLUSTER_ID, TOPIC_ID, Brokers, running

HELLO = replication_pb2.FollowerHello(cluster_id=CLUSTER_ID, node_id=2, broker_epoch=99)
READ_TIMEOUT_S = 10


def framed(message: Any, kind: Kind = Kind.MESSAGE) -> bytes:
    body = message.SerializeToString()
    return encode_header(kind, len(body)) + body


def hello(**changes: Any) -> bytes:
    said = replication_pb2.FollowerHello()
    said.CopyFrom(HELLO)
    for name, value in changes.items():
        setattr(said, name, value)
    return PREAMBLE + framed(replication_pb2.ReplicationFetchRequest(hello=said))


def welcome(node_id: int, cluster_id: str = CLUSTER_ID) -> bytes:
    said = replication_pb2.LeaderWelcome(cluster_id=cluster_id, node_id=node_id)
    return PREAMBLE + framed(said, Kind.WELCOME)


async def answer_to(brokers: Brokers, data: bytes) -> bytes:
    """All that broker 1 says to somebody who writes this and waits."""
    port = brokers[1].located.frames_port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), READ_TIMEOUT_S)
    finally:
        writer.close()


def end_in(answer: bytes) -> replication_pb2.StreamEnd:
    assert answer.startswith(PREAMBLE)
    assert answer[len(PREAMBLE) + 4] == Kind.END
    return replication_pb2.StreamEnd.FromString(answer[len(PREAMBLE) + 5 :])


async def open_stream(brokers: Brokers, said: Any = HELLO) -> LeaderStream:
    connector = ReplicationConnector(NodeConnector(None))
    return await connector.open_stream(1, "127.0.0.1", brokers[1].port, said)


# --- Who is served -------------------------------------------------------------------------------


async def test_brokers_that_have_frames_use_them_and_the_others_grpc() -> None:
    async with running(2) as brokers:
        brokers.frames = False
        await brokers.start(3)
        brokers.create_topic(partitions=3)  # Each leads one, and follows the other two.
        for partition in range(3):
            await brokers[partition + 1].append(b"a", partition=partition)
        assert set(brokers[1].served) == {"frames"}
        assert set(brokers[2].served) == {"frames"}
        assert set(brokers[3].served) == {"grpc"}  # It is older: nobody has frames with it.
        assert not any(brokers[node].refusals for node in (1, 2, 3))


async def test_a_broker_that_shall_not_use_frames_does_not() -> None:
    async with running(1) as brokers:
        connector = ReplicationConnector(NodeConnector(None), frames=False)
        stream = await connector.open_stream(1, "127.0.0.1", brokers[1].port, HELLO)
        await eventually(lambda: brokers[1].served == ["grpc"])
        await stream.close()


@pytest.mark.parametrize(
    ("change", "status", "reason", "cause"),
    [
        ({"cluster_id": "other"}, StatusCode.FAILED_PRECONDITION, "is of cluster 'other'", 1),
        ({"cluster_id": ""}, StatusCode.UNAVAILABLE, "does not know its cluster yet", 0),
        ({"broker_epoch": 1}, StatusCode.FAILED_PRECONDITION, "has registered anew with 3", 1),
    ],
)
async def test_who_may_not_follow_is_told_why_and_goes_no_other_way(
    change: dict[str, Any], status: StatusCode, reason: str, cause: int
) -> None:
    async with running(2) as brokers:
        said = replication_pb2.FollowerHello()
        said.CopyFrom(HELLO)
        for name, value in change.items():
            setattr(said, name, value)
        with pytest.raises(StreamBrokenError) as caught:
            await open_stream(brokers, said)
        assert caught.value.status is status
        assert reason in caught.value.reason
        assert len(brokers[1].refusals) == cause  # Who comes again soon is nothing to tell of.
        assert brokers[1].served == []


# --- Who is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "cause", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "stranger", "not those of a broker"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "stranger", "not those of a broker"),
        (b"penstock\x00\x02", "version", "version 2"),
        (PREAMBLE + b"\xff\xff\xff\xff\x01", "oversize", "4294967295 bytes"),
        (
            PREAMBLE + (MAX_HELLO_BYTES + 1).to_bytes(4, "big") + b"\x01",
            "oversize",
            f"{MAX_HELLO_BYTES} are the most",
        ),
        (PREAMBLE + b"\x00\x00\x00\x01\x01\xff", "malformed", "no message of this stream"),
        (PREAMBLE + b"\x00\x00\x00\x00\x02", "malformed", "a welcome is out of place"),
        (PREAMBLE + b"\x00\x00\x00\x00\x01", "malformed", "must be the hello"),
        (
            PREAMBLE + framed(replication_pb2.ReplicationFetchRequest(ack={"sequence": 1})),
            "malformed",
            "must be the hello",
        ),
    ],
)
async def test_whatever_is_no_hello_is_refused_counted_and_answered(
    data: bytes, cause: str, reason: str
) -> None:
    async with running(2) as brokers:
        with capture_logs() as logged:
            end = end_in(await answer_to(brokers, data))
        assert end.status == StatusCode.INVALID_ARGUMENT.value[0]
        assert reason in end.reason
        assert brokers[1].refusals == [cause]
        [line] = [entry for entry in logged if entry["event"] == "replication connection refused"]
        assert line["cause"] == cause
        assert reason in line["reason"]
        assert brokers[1].served == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00\x00\x00\x03\x01\xff\xff\xff", "no message of this stream"),
        (b"\x00\x00\x00\x00\x02", "a welcome is out of place"),
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big") + b"\x01", "is announced"),
        (framed(replication_pb2.ReplicationFetchRequest(hello=HELLO)), "'hello' is out of place"),
    ],
)
async def test_nonsense_after_the_hello_ends_the_stream_as_well(data: bytes, reason: str) -> None:
    async with running(2) as brokers:
        port = brokers[1].located.frames_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hello())
        await reader.readexactly(len(welcome(1)))
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), READ_TIMEOUT_S)
        assert reason.encode() in answer
        assert len(brokers[1].refusals) == 1
        await eventually(lambda: not brokers[1].manager._feeds)
        writer.close()


@pytest.mark.parametrize(
    ("status", "cause", "counted"),
    [
        (StatusCode.UNAVAILABLE, "closed", []),
        (StatusCode.UNAVAILABLE, "broken", []),
        (StatusCode.INVALID_ARGUMENT, "malformed", ["malformed"]),
    ],
)
async def test_a_follower_that_goes_while_it_is_written_to_is_no_refusal(
    status: StatusCode, cause: str, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(*_: Any) -> None:
        raise StreamBrokenError(status, "as the writer finds it", cause=cause)

    async with running(2) as brokers:
        monkeypatch.setattr(frame_server.FollowerStream, "run", ended)
        stream = await open_stream(brokers)
        with contextlib.suppress(StreamBrokenError):
            assert await asyncio.wait_for(stream.read(), READ_TIMEOUT_S) is EOF
        assert brokers[1].served == ["frames"]
        assert brokers[1].refusals == counted


async def test_who_says_nothing_or_half_a_hello_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_server, "HELLO_TIMEOUT_S", 0.05)
    async with running(2) as brokers:
        for said in (b"", PREAMBLE[:4], hello()[:-1]):
            end = end_in(await answer_to(brokers, said))
            assert "no hello came" in end.reason
        assert brokers[1].refusals == ["silent"] * 3


async def test_a_crowd_of_strangers_is_bounded_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_server, "MAX_UNKNOWN", 3)
    async with running(2) as brokers:
        port = brokers[1].located.frames_port
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await answer_to(brokers, b"") == b""  # Closed without a word.
        assert brokers[1].refusals == ["crowded"]
        # Nobody is kept out by it: there is another way in.
        stream = await open_stream(brokers)
        await eventually(lambda: brokers[1].served == ["grpc"])
        await stream.close()
        for _, writer in held:
            writer.close()
        await eventually(lambda: brokers[1].frames._unknown == 0)
        stream = await open_stream(brokers)
        await eventually(lambda: brokers[1].served == ["grpc", "frames"])
        await stream.close()


def test_a_stranger_cannot_fill_the_log() -> None:
    counted: list[str] = []
    now_s = 100.0
    refused = Refused(counted.append, lambda: now_s)
    with capture_logs() as logged:
        for _ in range(1000):
            refused.add("stranger", "who are you", "peer:1")
        refused.add("oversize", "too large", "peer:1")
        now_s += 61
        refused.add("stranger", "who are you", "peer:1")
    assert len(counted) == 1002
    assert [(line["cause"], line["more_since_last_told"]) for line in logged] == [
        ("stranger", 0),
        ("oversize", 0),
        ("stranger", 999),
    ]


async def test_a_port_that_is_taken_is_said_to_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = FrameServer(
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            lambda: None,
            lambda _request, _on_end: None,
            cluster_id=CLUSTER_ID,
            node_id=1,
            count_refused=lambda _: None,
            count_served=lambda: None,
        )
        with pytest.raises(AddressInUseError, match=r"change\s+replication.frames.listen"):
            await server.start("127.0.0.1", taken.getsockname()[1])
        await server.stop()


# --- Where the port does not serve ---------------------------------------------------------------


@asynccontextmanager
async def somebody_else(answer: bytes | None) -> AsyncIterator[int]:
    """A port where this is answered; None: nothing ever is."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            writer.write(answer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "nothing was answered within"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not those of a broker"),
        (b"penstock\x00\x09", "version 9"),
        (welcome(7), "broker 7 of cluster 'cluster' is there instead"),
        (welcome(1, "other"), "broker 1 of cluster 'other' is there instead"),
        (PREAMBLE + framed(replication_pb2.ReplicationFetchResponse()), "message is out of place"),
    ],
)
async def test_a_port_that_is_somebody_elses_is_left_for_grpc(
    answer: bytes | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short only where nothing comes: an answer may be late on a busy machine.
    monkeypatch.setattr(connecting, "FRAMES_TIMEOUT_S", 0.2 if answer is None else 8.0)
    async with running(2) as brokers, somebody_else(answer) as port:
        brokers[1].located.frames_port = port
        with capture_logs() as logged:
            brokers.create_topic()
            await brokers[1].append(b"a")
        assert brokers[1].served == ["grpc"]
        [line] = [entry for entry in logged if "replication goes by gRPC" in entry["event"]]
        assert reason in line["reason"]
        assert line["leader"] == 1


async def test_a_port_that_refuses_connections_is_told_of_once_and_tried_each_time() -> None:
    async with running(2) as brokers:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed_port = gone.getsockname()[1]
        port, brokers[1].located.frames_port = brokers[1].located.frames_port, closed_port
        connector = ReplicationConnector(NodeConnector(None))
        with capture_logs() as logged:
            for _ in range(3):
                stream = await connector.open_stream(1, "127.0.0.1", brokers[1].port, HELLO)
                await stream.close()
        assert len([line for line in logged if "goes by gRPC" in line["event"]]) == 1
        brokers[1].located.frames_port = port
        stream = await connector.open_stream(1, "127.0.0.1", brokers[1].port, HELLO)
        await eventually(lambda: "frames" in brokers[1].served)
        await stream.close()


async def test_a_network_that_is_cut_in_the_middle_of_writing_loses_nothing() -> None:
    async with running(2) as brokers:
        relay = Relay(brokers[1].located.frames_port)
        brokers[1].located.frames_port = relay.port
        brokers.create_topic()
        values = [b"%d" % number for number in range(200)]
        for value in values[:100]:
            await brokers[1].append(value)
        assert brokers[1].served == ["frames"]
        writes = [asyncio.create_task(brokers[1].append(value)) for value in values[100:]]
        await asyncio.sleep(0)  # They are appended, and on their way.
        relay.cut()
        await asyncio.gather(*writes)
        assert brokers[1].served == ["frames", "grpc"]
        assert brokers[2].log().values() == values


# --- The stream ----------------------------------------------------------------------------------


async def test_who_was_let_in_may_say_more_than_a_hello() -> None:
    async with running(2) as brokers:
        brokers[2].deaf = True
        brokers.create_topic(configs={"min.insync.replicas": "1"})
        stream = await open_stream(brokers)
        stated: Any = replication_pb2.FollowerPositions()
        for number in range(MAX_HELLO_BYTES):
            position = stated.start.add(leader_epoch=0, log_end_offset=0, last_epoch=-1)
            position.partition.topic_id = TOPIC_ID
            position.partition.partition = number
        await stream.write(replication_pb2.ReplicationFetchRequest(positions=stated))
        answered = 0
        while answered < MAX_HELLO_BYTES:
            pushed = await asyncio.wait_for(stream.read(), READ_TIMEOUT_S)
            answered += len(pushed.records)
            said = replication_pb2.ReplicationFetchRequest(
                ack={"sequence": pushed.message.sequence}
            )
            await stream.write(said)
        await stream.close()


async def test_either_end_learns_that_the_other_is_gone() -> None:
    async with running(2) as brokers:
        stream = await open_stream(brokers)
        await eventually(lambda: len(brokers[1].manager._feeds) == 1)
        stream.cancel()
        await eventually(lambda: not brokers[1].manager._feeds)
        stream = await open_stream(brokers)
        await brokers[1].frames.stop()
        assert await asyncio.wait_for(stream.read(), READ_TIMEOUT_S) is EOF
        with pytest.raises(StreamBrokenError):
            await stream.write(replication_pb2.ReplicationFetchRequest(ack={"sequence": 1}))


async def test_a_newer_stream_of_the_same_follower_takes_the_place_of_the_older() -> None:
    async with running(2) as brokers:
        first = await open_stream(brokers)
        second = await open_stream(brokers)
        assert await asyncio.wait_for(first.read(), READ_TIMEOUT_S) is EOF
        assert len(brokers[1].manager._feeds) == 1
        await second.close()


async def test_a_follower_that_does_not_answer_is_sent_no_more_than_the_bound() -> None:
    async with running(2) as brokers:
        brokers[2].deaf = True
        brokers.create_topic(configs={"min.insync.replicas": "1"})
        stream = await open_stream(brokers)
        stated: Any = replication_pb2.FollowerPositions()
        position = stated.start.add(leader_epoch=0, log_end_offset=0, last_epoch=-1)
        position.partition.topic_id = TOPIC_ID
        await stream.write(replication_pb2.ReplicationFetchRequest(positions=stated))
        sequences = [(await asyncio.wait_for(stream.read(), READ_TIMEOUT_S)).message.sequence]
        for number in range(20):
            await brokers[1].append(bytes(400_000), acks=common_pb2.ACKS_NONE)
            if number < MAX_IN_FLIGHT - 1:
                pushed = await asyncio.wait_for(stream.read(), READ_TIMEOUT_S)
                sequences.append(pushed.message.sequence)
        [feed] = [entry[1] for entry in brokers[1].manager._feeds.values()]
        assert sequences == list(range(1, MAX_IN_FLIGHT + 1))
        assert feed.sequence == MAX_IN_FLIGHT  # type: ignore[attr-defined]
        await stream.write(replication_pb2.ReplicationFetchRequest(ack={"sequence": 1}))
        pushed = await asyncio.wait_for(stream.read(), READ_TIMEOUT_S)
        assert pushed.records_bytes > 2 * 400_000  # It gathered.
        await stream.close()


class Wire(asyncio.Transport):
    """A transport that keeps what is written, and is told how full it is."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.written = bytearray()
        self.high_water = 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high_water = high or 0

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def wired() -> tuple[FrameStream, Wire]:
    stream, wire = FrameStream(replication_pb2.ReplicationFetchRequest.FromString), Wire()
    stream.connection_made(wire)
    stream.trust()
    stream.data_received(PREAMBLE)
    return stream, wire


ACK = replication_pb2.ReplicationFetchRequest(ack={"sequence": 5})


async def test_what_nobody_reads_stays_with_the_sender() -> None:
    stream, wire = wired()
    count = frame_stream.MAX_UNREAD_FRAMES + 1
    for _ in range(count):
        assert wire.reading
        stream.data_received(framed(ACK))
    assert not wire.reading
    for _ in range(count):
        assert await stream.read() == ACK
    assert not wire.reading
    reading = asyncio.create_task(stream.read())
    await eventually(lambda: wire.reading)
    stream.data_received(framed(ACK))
    assert await reading == ACK


async def test_few_but_large_messages_are_bounded_as_well() -> None:
    stream, wire = wired()
    body = bytes(frame_stream.MAX_UNREAD_BYTES // 2 + 1)
    stream.data_received(encode_header(Kind.MESSAGE, len(body)) + body)
    assert wire.reading
    stream.data_received(encode_header(Kind.MESSAGE, len(body)) + body)
    assert not wire.reading


async def test_writing_waits_until_the_connection_takes_more() -> None:
    stream, wire = wired()
    # What may be unanswered is made without waiting for the follower to take it.
    assert wire.high_water >= MAX_IN_FLIGHT * MAX_PUSH_BYTES
    stream.pause_writing()
    writing = asyncio.create_task(stream.write(ACK))
    await asyncio.sleep(0)
    assert not writing.done()
    stream.resume_writing()
    await writing
    stream.pause_writing()
    writing = asyncio.create_task(stream.write(ACK))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait((writing,))
    stream.resume_writing()
    await stream.write(ACK)
    assert bytes(wire.written) == PREAMBLE + 3 * framed(ACK)


async def test_a_message_is_written_at_once_or_not_at_all() -> None:
    stream, wire = wired()
    assert stream.write_now(ACK)
    stream.pause_writing()
    assert not stream.write_now(ACK)
    stream.resume_writing()
    assert bytes(wire.written) == PREAMBLE + framed(ACK)


async def test_messages_are_handed_on_in_the_moment_in_which_they_come() -> None:
    stream, wire = wired()
    early = frame_stream.MAX_UNREAD_FRAMES + 1
    for _ in range(early):
        stream.data_received(framed(ACK))
    assert not wire.reading
    handed: list[object] = []
    reading = asyncio.create_task(stream.read_all(handed.append))
    await eventually(lambda: wire.reading)  # What had come before is handed on.
    assert len(handed) == early
    stream.data_received(2 * framed(ACK) + framed(ACK)[:3])
    assert handed == (early + 2) * [ACK]
    stream.data_received(framed(ACK)[3:])
    assert len(handed) == early + 3
    assert not reading.done()
    stream.eof_received()
    stream.connection_lost(None)
    await reading
    stream.data_received(framed(ACK))
    assert len(handed) == early + 3


@pytest.mark.parametrize("cause", ["handler", "bytes", "kind", "end", "broken"])
async def test_what_ends_the_handing_on_is_raised(cause: str) -> None:
    def handle(_: object) -> None:
        if cause == "handler":
            raise KeyError("a bug")

    stream, _ = wired()
    reading = asyncio.create_task(stream.read_all(handle))
    await asyncio.sleep(0)
    if cause == "broken":
        stream.connection_lost(OSError("gone"))
    elif cause == "bytes":
        stream.data_received(encode_header(Kind.MESSAGE, 3) + b"\xff\xff\xff")
    elif cause == "kind":
        stream.data_received(encode_header(Kind.WELCOME, 0))
    elif cause == "end":
        end = replication_pb2.StreamEnd(status=14, reason="farewell").SerializeToString()
        stream.data_received(encode_header(Kind.END, len(end)) + end)
    else:
        stream.data_received(framed(ACK))
    said = {"bytes": "no message", "kind": "out of place", "end": "farewell", "broken": "gone"}
    error = KeyError if cause == "handler" else StreamBrokenError
    with pytest.raises(error, match=said.get(cause, "a bug")):
        await reading


async def test_large_messages_arrive_whole() -> None:
    stream, wire = wired()
    other, _ = wired()
    message = replication_pb2.ReplicationFetchRequest()
    for number in range(40_000):
        message.positions.stop.add(topic_id=TOPIC_ID, partition=number)
    await stream.write(message)
    sent = bytes(wire.written[len(PREAMBLE) :])
    for begin in range(0, len(sent), 65_536):
        other.data_received(sent[begin : begin + 65_536])
    assert await other.read() == message


async def test_a_connection_that_breaks_within_a_message_has_not_ended_well() -> None:
    for whole in (True, False):
        stream, _ = wired()
        stream.data_received(framed(ACK) if whole else framed(ACK) + b"\x00")
        stream.eof_received()
        stream.connection_lost(None)
        assert await stream.read() == ACK
        if whole:
            assert await stream.read() is EOF
        else:
            with pytest.raises(StreamBrokenError, match="in the middle"):
                await stream.read()
