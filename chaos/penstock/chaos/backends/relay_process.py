"""The relay as a process of its own, so that what it costs is not taken from whoever runs it.

``Network`` is the handle; ``python -m penstock.chaos.backends.relay_process`` the process, which is
told what to do in lines of JSON, says when it is done, and ends with the pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from penstock.chaos.backends.relay import Relay, Route
from penstock.chaos.cluster import Link, LinkFault
from penstock.chaos.errors import FaultError

_ANSWER_S: Final = 30.0


class Network:
    """The links of a cluster; a process that ends with this one. Calls block, for one thread."""

    def __init__(self, routes: Sequence[Route], seed: int = 0) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter.
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C in the terminal is not for it: links are to be healed first.
        )
        try:
            self._ask("listen", routes=[asdict(route) for route in routes], seed=seed)
        except FaultError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process, to be measured."""
        return self._process.pid

    def set_faults(self, faults: Mapping[Link, LinkFault]) -> None:
        """From now on these links do that, and all others nothing. Raises FaultError."""
        links = [[link.source, link.target, asdict(fault)] for link, fault in faults.items()]
        self._ask("set_faults", links=links)

    def set_owners(self, pids: Mapping[int, int]) -> None:
        """These processes are those nodes from now on. Raises FaultError."""
        self._ask("set_owners", pids=list(pids.items()))

    def close(self) -> None:
        """End it, and every connection with it. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, what: str, **said: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps({"do": what, **said}).encode() + b"\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
                line = self._process.stdout.readline()
        if not line:
            raise FaultError(
                "the relay between the nodes does not answer, so that nobody knows what links do; "
                "next: begin anew, and look at its errors above"
            )
        if error := json.loads(line)["error"]:
            raise FaultError(f"the relay between the nodes: {error}")


class _Orders:
    """What comes on standard input."""

    def __init__(self) -> None:
        self._relay = Relay()
        self._over = asyncio.Event()
        self._begun = b""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self._on_readable)
        await self._over.wait()
        loop.remove_reader(0)
        self._relay.close()

    def _on_readable(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            self._over.set()
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            error = ""
            try:
                self._carry_out(json.loads(line))
            except OSError as failure:
                error = str(failure.strerror)
            os.write(1, json.dumps({"error": error}).encode() + b"\n")

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        if order["do"] == "listen":
            self._relay.listen([Route(**route) for route in order["routes"]], order["seed"])
        elif order["do"] == "set_faults":
            self._relay.set_faults(
                {
                    Link(source, target): LinkFault(**{**fault, "hold": tuple(fault["hold"])})
                    for source, target, fault in order["links"]
                }
            )
        else:
            self._relay.set_owners(dict(order["pids"]))


if __name__ == "__main__":
    asyncio.run(_Orders().run())
