"""One voter of a metadata quorum as a process: the engine, its journal and gRPC; no state machine.

For bench/quorum_commit.py, which asks it over pipes (bench/children.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop
from children import Answer, serve, settings
from grpc import aio

from penstock.raft_meta.authentication import PeerAuthentication
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.credentials import NodeTls
from penstock.raft_meta.exposure import TlsFiles
from penstock.raft_meta.guarding import Guarded, NodesOnly
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.listening import bind
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.v1 import raft_pb2_grpc
from penstock.wire.transport import SERVER_OPTIONS, quiet_grpc, tune_malloc

_COMMAND: Final = b"x" * 100
_SYNCS: Final = [0]


class Counter:
    """The smallest state machine: it counts."""

    def __init__(self) -> None:
        self.applied = 0

    def apply(self, _index: int, _term: int, _payload: bytes) -> bytes:
        """Count one command."""
        self.applied += 1
        return b""

    def freeze(self) -> Callable[[], bytes]:
        """The count, to be encoded."""
        return partial(self.applied.to_bytes, 8, "big")

    def install(self, _index: int, snapshot: bytes) -> None:
        """Take over another's count."""
        self.applied = int.from_bytes(snapshot, "big")


def count_syncs() -> None:
    """Count the journal's transactions; each is durable when it ends."""
    sync = LmdbJournal.sync

    def counted(journal: LmdbJournal) -> None:
        _SYNCS[0] += journal.dirty
        sync(journal)

    LmdbJournal.sync = counted  # type: ignore[method-assign]  # A benchmark looks inside.


class Voter:
    """What the parent asks of a voter."""

    def __init__(self, quorum: RaftQuorum) -> None:
        self._quorum = quorum

    async def status(self) -> Answer:
        """Who leads, and how often the journal was synced."""
        status = self._quorum.status()
        return {"leader": status.leader_id, "commit": status.commit_index, "syncs": _SYNCS[0]}

    async def load(self, *, clients: int, seconds: float) -> Answer:
        """Propose all the time, each client one command after the other."""
        until_s = time.perf_counter() + seconds
        latencies_ms: list[float] = []

        async def propose() -> None:
            while (began_s := time.perf_counter()) < until_s:
                await self._quorum.propose(_COMMAND)
                latencies_ms.append((time.perf_counter() - began_s) * 1000)

        began_s = time.perf_counter()
        await asyncio.gather(*(propose() for _ in range(clients)))
        return {"seconds": time.perf_counter() - began_s, "latencies_ms": latencies_ms}


async def main(given: Answer) -> None:
    """Run one voter until the parent is gone."""
    given["data_dir"] = Path(given["data_dir"])
    given["listen"] = tuple(given["listen"])
    given["voters"] = {int(n): tuple(at) for n, at in given["voters"].items()}
    files = given.pop("tls")
    config = ControllerConfig(**given, may_found=True)
    tls: NodeTls | None = None
    if files is not None:
        paths = TlsFiles(*(Path(path) for path in files))
        tls = NodeTls(paths, cluster_id=config.cluster_id, node_id=config.node_id)
    quorum = RaftQuorum(config, Counter(), tls)
    server = aio.server(options=SERVER_OPTIONS)
    bind(server, config.listen, setting="controller.listen", tls=tls)
    authentication = PeerAuthentication(config.cluster_id, tls=tls is not None)
    guarded: Any = Guarded(server, NodesOnly(authentication))
    raft_pb2_grpc.add_RaftServicer_to_server(quorum.link, guarded)
    await quorum.start()
    await server.start()
    gc.collect()
    gc.freeze()
    voter = Voter(quorum)
    serving = asyncio.create_task(serve({"status": voter.status, "load": voter.load}))
    failed = asyncio.ensure_future(quorum.wait_failed())
    await asyncio.wait((serving, failed), return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(asyncio.CancelledError):
        await quorum.stop()
    await server.stop(None)


if __name__ == "__main__":
    tune_malloc()
    quiet_grpc()
    count_syncs()
    uvloop.run(main(settings()))
