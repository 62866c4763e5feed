"""`penstock drain`: a broker hands its leaderships over before it is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.errors import report
from penstock.cli.output import print_json
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT32
from penstock.wire.errors import PenstockError, RequestTimedOutError
from penstock.wire.wording import SHOWN, counted, some

if TYPE_CHECKING:
    from penstock.client import AsyncAdminClient

LOOK_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 1.0
_BOOTSTRAP_MS: Final = 5_000
_BOOTSTRAP_SHARE: Final = 0.75
"""Of the time, for a broker to answer at all: in the rest it is found out why none did."""


def drain(
    ctx: typer.Context,
    node: Annotated[
        int, typer.Argument(help="The broker's node id.", metavar="NODE", min=0, max=MAX_INT32)
    ],
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Let it lead again.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0.1,
            metavar="SECONDS",
            help="How long to wait until it leads nothing; then the exit status is 1.",
        ),
    ] = 60.0,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Hand a broker's leaderships to others in sync, so that it can be stopped unnoticed.

    It keeps its replicas, and leads only what no other replica in sync can lead, until it is
    started anew or --undo. Standard error says how much it leads still.
    """
    settings = resolve(ctx, bootstrap, output)
    work = Drain(settings, node, timeout)
    asyncio.run(work.undo() if undo else work.drain())


class Drain:
    """One run of the command. What takes longer than ``timeout_s`` raises RequestTimedOutError."""

    def __init__(self, settings: Settings, node: int, timeout_s: float) -> None:
        self._settings = settings
        self._node = node
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._asked = False
        self._wanted = "is drained"
        self._left = -1  # Leaderships, as far as was heard.

    async def drain(self) -> None:
        """Ask for it, and wait until the broker leads nothing."""
        await self._in_time(self._until_drained)
        if self._settings.as_json:
            print_json({"node_id": self._node, "drained": True, "remaining_leaderships": 0})
        else:
            print(
                f"drained broker {self._node}: it leads nothing, until it is started anew or "
                f"`penstock drain {self._node} --undo`"
            )

    async def undo(self) -> None:
        """Ask that it may lead again."""
        await self._in_time(self._let_lead)
        if self._settings.as_json:
            print_json({"node_id": self._node, "drained": False})
        else:
            print(
                f"broker {self._node} may lead again; what it leads by preference comes back by "
                "itself, or at once with `penstock partitions elect`"
            )

    async def _let_lead(self, admin: AsyncAdminClient) -> None:
        self._wanted = "may lead again"
        await admin.drain_broker(self._node, undo=True)

    async def _until_drained(self, admin: AsyncAdminClient) -> None:
        self._left = await admin.drain_broker(self._node)
        self._asked = True
        while self._left:
            report(
                f"broker {self._node} leads {counted(self._left, 'partition')} still, for which "
                "no other replica is in sync"
            )
            before = self._left
            while self._left == before:
                await asyncio.sleep(LOOK_SECONDS)
                self._left = await self._leaderships(admin)

    async def _leaderships(self, admin: AsyncAdminClient) -> int:
        cluster = await admin.describe_cluster()
        for broker in cluster.brokers:
            if broker.node_id == self._node:
                return broker.leaderships
        return 0  # Unregistered meanwhile.

    async def _in_time(self, work: Callable[[AsyncAdminClient], Awaitable[None]]) -> None:
        """Carry it out with a client, all of it within the time."""
        from penstock.client import AsyncAdminClient  # noqa: PLC0415 - it imports gRPC.

        # A little less: who is asked knows better why nothing came of it.
        milliseconds = max(1, int((self._deadline_s - time.monotonic()) * 900))
        admin = AsyncAdminClient(
            self._settings.bootstrap,
            client_id="penstock-cli",
            default_api_timeout_ms=milliseconds,
            request_timeout_ms=milliseconds,
            bootstrap_timeout_ms=max(1, min(_BOOTSTRAP_MS, int(milliseconds * _BOOTSTRAP_SHARE))),
            **self._settings.tls.client_settings(),
        )
        try:
            async with asyncio.timeout(self._deadline_s - time.monotonic()):
                await work(admin)
        except TimeoutError:
            raise await self._late(admin) from None
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await admin.close()

    async def _late(self, admin: AsyncAdminClient) -> RequestTimedOutError:
        """What is left to be said when the time is over; asks for names, but not for long."""
        within = f"within {self._timeout_s:g} s"
        if not self._asked:
            return RequestTimedOutError(
                f"the cluster did not say {within} that broker {self._node} {self._wanted}; next: "
                "see `penstock cluster describe` for whether it is so, and `penstock quorum status`"
            )
        names = ""
        with suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                names = f" ({await self._names(admin)})"
        return RequestTimedOutError(
            f"broker {self._node} is drained, and {within} nobody else came in sync with "
            f"{counted(self._left, 'partition')} that it leads still{names}; next: wait until "
            "others are in sync, as `penstock doctor` says; to stop it now leaves these without a "
            "leader"
        )

    async def _names(self, admin: AsyncAdminClient) -> str:
        led = [
            f"{topic.name}-{one.partition}"
            for topic in await admin.list_topics(include_internal=True)
            for one in topic.partitions
            if one.leader == self._node
        ]
        return some(led[:SHOWN], len(led))
