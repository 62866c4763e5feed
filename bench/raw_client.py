"""A client process that does nothing but gRPC: requests encoded before, answers left undecoded.

What it moves a second is therefore what brokers and transport can, whatever a client SDK costs.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import uvloop
from children import Answer, serve, settings
from grpc import aio

from penstock.v1 import common_pb2, log_pb2
from penstock.wire.batch import iter_batches
from penstock.wire.records import RecordData, encode_batch
from penstock.wire.transport import CHANNEL_OPTIONS, quiet_grpc, tune_malloc

_PRODUCE: Final = "/penstock.v1.Log/Produce"
_FETCH: Final = "/penstock.v1.Log/Fetch"
_RECORD_BYTES: Final = 1_000
_BATCH_OVERHEAD_BYTES: Final = 61
_RECORD_OVERHEAD_BYTES: Final = 10
_TIMEOUT_MS: Final = 30_000


class RawClient:
    """Asked by the parent. ``leads`` gives it which partitions of the topic an address leads."""

    def __init__(self, given: Answer) -> None:
        self._topic: str = given["topic"]
        self._leads: dict[str, list[int]] = given["leads"]
        self._channels = {
            address: aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            for address in self._leads
        }

    async def produce(
        self, *, megabytes: int, request_bytes: int, in_flight: int, acks: str
    ) -> Answer:
        """Write so much in all, as fast as the answers come with so many requests under way."""
        requests = {
            address: [self._encode(number, request_bytes, acks) for number in partitions]
            for address, partitions in self._leads.items()
        }
        share = megabytes * 1_000_000 // request_bytes // len(self._leads)
        begun, used = time.monotonic(), time.process_time()
        await asyncio.gather(
            *(
                self._produce(self._channels[address], encoded, share, in_flight)
                for address, encoded in requests.items()
            )
        )
        seconds, cpu = time.monotonic() - begun, time.process_time() - used
        written = sum(share * len(encoded[0]) for encoded in requests.values())
        return {"bytes": written, "seconds": seconds, "cpu_seconds": cpu}

    async def _produce(
        self, channel: aio.Channel, requests: Sequence[bytes], count: int, in_flight: int
    ) -> None:
        stream: Any = channel.stream_stream(_PRODUCE)()
        room = asyncio.Semaphore(in_flight)

        async def read() -> None:
            for _ in range(count):
                answer = await stream.read()
                response = log_pb2.ProduceResponse.FromString(answer)
                for result in response.partitions:
                    if result.HasField("error"):
                        raise RuntimeError(f"refused: {result.error}")
                room.release()

        reading = asyncio.create_task(read())
        for number in range(count):
            await room.acquire()
            if reading.done():
                break
            await stream.write(requests[number % len(requests)])
        await reading
        stream.cancel()

    def _encode(self, partition: int, request_bytes: int, acks: str) -> bytes:
        each = _RECORD_BYTES + _RECORD_OVERHEAD_BYTES
        records = [
            RecordData(1_700_000_000_000, None, os.urandom(_RECORD_BYTES))
            for _ in range(max(1, (request_bytes - _BATCH_OVERHEAD_BYTES) // each))
        ]
        request = log_pb2.ProduceRequest(
            acks={"1": common_pb2.ACKS_LEADER, "all": common_pb2.ACKS_ALL}[acks],
            timeout_ms=_TIMEOUT_MS,
        )
        request.partitions.add(
            partition=common_pb2.TopicPartition(topic=self._topic, partition=partition),
            current_leader_epoch=-1,
            records=encode_batch(records),
        )
        return request.SerializeToString()

    async def consume(self, *, answer_bytes: int, readers: int) -> Answer:
        """Read all partitions once from their beginning; so many partitions at the same time."""
        work = [
            (channel, number)
            for address, channel in self._channels.items()
            for number in self._leads[address]
        ]
        begun, used = time.monotonic(), time.process_time()
        read = answers = 0

        async def reader() -> None:
            nonlocal read, answers
            while work:
                channel, number = work.pop()
                async for size in self._fetch_all(channel, number, answer_bytes):
                    read += size
                    answers += 1

        await asyncio.gather(*(reader() for _ in range(readers)))
        seconds, cpu = time.monotonic() - begun, time.process_time() - used
        return {"bytes": read, "seconds": seconds, "cpu_seconds": cpu, "answers": answers}

    async def _fetch_all(
        self, channel: aio.Channel, partition: int, answer_bytes: int
    ) -> AsyncIterator[int]:
        decode = log_pb2.FetchResponse.FromString
        fetch: Any = channel.unary_unary(_FETCH, response_deserializer=decode)
        offset = 0
        while True:
            request = log_pb2.FetchRequest(min_bytes=0, max_bytes=answer_bytes)
            request.partitions.add(
                partition=common_pb2.TopicPartition(topic=self._topic, partition=partition),
                fetch_offset=offset,
                current_leader_epoch=-1,
                last_fetched_epoch=-1,
                partition_max_bytes=answer_bytes,
            )
            response = await fetch(request.SerializeToString())
            (result,) = response.partitions
            if result.HasField("error"):
                raise RuntimeError(f"refused: {result.error}")
            if not result.records:
                return
            yield len(result.records)
            offset = _after(result.records)


def _after(records: bytes) -> int:
    """The offset after the last whole batch: the headers alone are looked at."""
    end = 0
    for header, _ in iter_batches(records, allow_torn_tail=True):
        end = header.last_offset + 1
    return end


async def main(given: Answer) -> None:
    """Answer the parent until it is gone."""
    client = RawClient(given)
    gc.collect()
    gc.freeze()
    await serve({"produce": client.produce, "consume": client.consume})


if __name__ == "__main__":
    tune_malloc()
    quiet_grpc()
    uvloop.run(main(settings()))
