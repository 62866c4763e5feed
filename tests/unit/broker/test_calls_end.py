"""A loop is left when the calls that its server ended by force have ended, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio

from penstock.broker.__main__ import calls_end


async def test_a_call_that_never_ends_by_itself_is_over_when_the_server_has_stopped() -> None:
    begun = asyncio.Event()

    async def handle(messages: AsyncIterator[bytes], _: Any) -> bytes:
        async for _message in messages:
            begun.set()
        return b""

    async def speak() -> AsyncIterator[bytes]:
        yield b"hello"
        await asyncio.Event().wait()

    server = aio.server()
    handlers = {"Listen": grpc.stream_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = aio.insecure_channel(f"127.0.0.1:{port}")
    call = channel.stream_unary("/a.Test/Listen")(speak())  # type: ignore[call-arg]
    await asyncio.wait_for(begun.wait(), 30)
    await server.stop(0)
    # What is left is the server's, then: the client's end of it is not.
    await channel.close()  # type: ignore[call-arg]  # The stubs want more.
    await asyncio.wait([asyncio.ensure_future(call.code())])
    await calls_end(30)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == []


async def test_what_does_not_end_is_not_waited_for_for_ever() -> None:
    stuck = asyncio.ensure_future(asyncio.Event().wait())
    await asyncio.wait_for(calls_end(0.01), 30)
    assert not stuck.done()
    stuck.cancel()
