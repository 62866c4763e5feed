"""A client process that fills a topic and reads it again with a ``Consumer``, in each of its ways.

The topic is filled by gRPC alone, with batches of the size that producers make by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
from children import Answer, serve, settings

from penstock.client import Consumer
from penstock.v1 import common_pb2, log_pb2
from penstock.v1.log_pb2_grpc import LogStub
from penstock.wire.records import RecordData, encode_batch
from penstock.wire.transport import CHANNEL_OPTIONS, quiet_grpc

_RECORD_OVERHEAD_BYTES: Final = 8
_TIMEOUT_MS: Final = 60_000
_IN_FLIGHT: Final = 3


class ConsumingClient:
    """Asked by the parent. ``leads`` gives it which partitions of the topic an address leads."""

    def __init__(self, given: Answer) -> None:
        self._topic: str = given["topic"]
        self._bootstrap: str = given["bootstrap"]
        self._leads: dict[str, list[int]] = given["leads"]
        self._rounds = 0

    async def fill(self, *, records: int, record_bytes: int, batch_bytes: int) -> Answer:
        """Write so many records at least, alike in every partition; how many they are."""
        count = max(1, batch_bytes // (record_bytes + _RECORD_OVERHEAD_BYTES))
        made = [
            RecordData(1_700_000_000_000, None, b"%0*d" % (record_bytes, number))
            for number in range(count)
        ]
        batch = encode_batch(made)
        partitions = sum(len(numbers) for numbers in self._leads.values())
        rounds = -(-records // (count * partitions))
        written = await asyncio.gather(
            *(
                asyncio.to_thread(self._fill, address, numbers, batch, rounds)
                for address, numbers in self._leads.items()
            )
        )
        return {"records": count * sum(written)}

    def _fill(self, address: str, numbers: list[int], batch: bytes, rounds: int) -> int:
        """Write the batch so often to each of the partitions; how often that was in all."""
        request = log_pb2.ProduceRequest(acks=common_pb2.ACKS_ALL, timeout_ms=_TIMEOUT_MS)
        for number in numbers:
            request.partitions.add(
                partition=common_pb2.TopicPartition(topic=self._topic, partition=number),
                current_leader_epoch=-1,
                records=batch,
            )
        done: list[int] = []

        def requests() -> Iterator[log_pb2.ProduceRequest]:
            for sent in range(rounds):
                while sent - len(done) >= _IN_FLIGHT:
                    time.sleep(0.0005)  # Paces what is under way; the stream has no such bound.
                yield request

        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = LogStub(channel)
            for response in stub.Produce(requests()):
                for result in response.partitions:
                    if result.HasField("error"):
                        raise RuntimeError(f"refused: {result.error}")
                done.append(1)
        return rounds * len(numbers)

    async def read(self, *, how: str, records: int, **arguments: Any) -> Answer:
        """Read so many records, from the beginning, as a group of its own; what that took."""
        ways: dict[str, Callable[..., None]] = {
            "iterate": _iterate,
            "poll": _poll,
            "poll_batch": _poll_batch,
            "fetch_arrow": _fetch_arrow,
        }
        return await asyncio.to_thread(self._read, ways[how], records, arguments)

    def _read(self, way: Callable[..., None], records: int, arguments: dict[str, Any]) -> Answer:
        self._rounds += 1
        with Consumer(
            self._bootstrap,
            topics=self._topic,
            group_id=f"bench-{self._rounds}",
            auto_offset_reset="earliest",
        ) as consumer:
            next(consumer)  # Joined, and fetching.
            begun, used = time.monotonic(), time.process_time()
            way(consumer, records - 1, **arguments)
            seconds, cpu = time.monotonic() - begun, time.process_time() - used
        return {"seconds": seconds, "cpu_seconds": cpu}


def _iterate(consumer: Consumer, records: int) -> None:
    for left, _record in zip(range(records, 0, -1), consumer, strict=False):
        if left == 1:
            break


def _poll(consumer: Consumer, records: int, **arguments: Any) -> None:
    while records > 0:
        records -= len(consumer.poll(**arguments))


def _poll_batch(consumer: Consumer, records: int, **arguments: Any) -> None:
    while records > 0:
        for run in consumer.poll_batch(**arguments).values():
            records -= len(run)


def _fetch_arrow(consumer: Consumer, records: int, **arguments: Any) -> None:
    while records > 0:
        records -= consumer.fetch_arrow(**arguments).num_rows


async def main(given: Answer) -> None:
    """Answer the parent until it is gone."""
    client = ConsumingClient(given)
    with contextlib.suppress(asyncio.CancelledError):
        await serve({"fill": client.fill, "read": client.read})


if __name__ == "__main__":
    quiet_grpc()
    asyncio.run(main(settings()))
