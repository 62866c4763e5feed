"""Who has connected: every connection on loopback comes from the same address, but not process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.chaos.cluster import CLIENTS


class Owners:
    """The nodes' processes, told by their sockets; whatever is not theirs is the clients'."""

    def __init__(self) -> None:
        self._pids: Mapping[int, int] = {}

    def know(self, pids: Mapping[int, int]) -> None:
        """These are the processes now, and the nodes that they are."""
        self._pids = dict(pids)

    def whose(self, inode: str) -> int | str:
        """The node that has this socket open, or CLIENTS."""
        wanted = f"socket:[{inode}]"
        for pid, node in self._pids.items():
            if wanted in open_files(pid):
                return node
        return CLIENTS


def socket_inode(local_port: int, remote_port: int) -> str:
    """The socket on this machine that has connected from one port to the other; empty if gone."""
    # A socket of both families is in the table of the newer one.
    for table in ("tcp6", "tcp"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, remote, *others = line.split(maxsplit=10)
                if _port(local) == local_port and _port(remote) == remote_port:
                    return others[6]
    return ""


def open_files(pid: int) -> set[str]:
    """What a process has open, as its links say; empty where it is gone."""
    return set(_links(pid))


def _links(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(descriptor.readlink())


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
