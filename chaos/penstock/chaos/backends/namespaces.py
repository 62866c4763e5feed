"""Network namespaces of this machine: one for each node, and one for the switch between them.

It wants root, ``ip`` and ``tc`` (iproute2) and ``nsenter`` (util-linux). This machine gets one
interface, with one address of a network that it had no route to, over which clients reach nodes;
nothing else of its own is touched.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network
from typing import Final

from penstock.chaos.backends.owner import boot, is_gone, this_owner
from penstock.chaos.backends.traffic import INTERFACE, plug
from penstock.chaos.cluster import CLIENTS
from penstock.chaos.errors import FaultError

_log: Final = logging.getLogger(__name__)
RANGE: Final = IPv4Network("198.18.0.0/15")
"""Set aside for tests of networks (RFC 2544): no network that somebody needs is there."""
_PREFIX: Final = "penstock-chaos-"
_OURS: Final = re.compile(_PREFIX + r"(\d+)-(\d+)-(\d+)-[0-9a-f]{8}-", re.ASCII)
"""With the process that made it, and when that began."""
_SUBNET_BITS: Final = 24
_OF_CLIENTS: Final = 254
_WIDEST_BITS: Final = 8
"""A route to more than that is one to all the world, in pieces."""
_TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_ENDS_S: Final = 10.0
_POLL_S: Final = 0.01


def why_not() -> str:
    """Why there can be no namespaces here, as far as that is seen at once; empty if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make network namespaces (CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (Debian's package {package})"
    return ""


def free_subnet(taken: Iterable[IPv4Network], first: int) -> IPv4Network | None:
    """A network that overlaps with none of these, the ``first`` one if it can be; None if none."""
    known = [one for one in taken if one.prefixlen >= _WIDEST_BITS]
    all_of_them = list(RANGE.subnets(new_prefix=_SUBNET_BITS))
    at = first % len(all_of_them)
    for subnet in (*all_of_them[at:], *all_of_them[:at]):
        if not any(subnet.overlaps(one) for one in known):
            return subnet
    return None


def owner_of(name: str) -> str:
    """Who made the namespace of that name; empty where it is none of ours."""
    found = _OURS.match(name)
    return f"{boot().partition('/')[0]}/{found[1]}:{found[2]}:{found[3]}" if found else ""


class Namespaces:
    """Those of one run. For one thread; every call raises FaultError where something refuses."""

    def __init__(self, nodes: Sequence[int]) -> None:
        """Find a network that is free. Makes nothing yet."""
        self._run: Final = _new_name()
        self._interface: Final = f"pch{secrets.token_hex(5)}"
        # Two runs that begin at once look at the same routes: they begin elsewhere.
        subnet = free_subnet(_networks(), os.getpid())
        if subnet is None:
            raise FaultError(f"this machine has routes to all of {RANGE}")
        self._subnet: Final = subnet
        self._names: Final = {node: f"{self._run}-node-{node}" for node in nodes}
        self._switch: Final = f"{self._run}-switch"

    def address(self, end: int | str) -> str:
        """That of a node, or of clients: the same over all of its lives."""
        return str(self._subnet[_OF_CLIENTS if end == CLIENTS else int(end)])

    def enter(self, node: int) -> list[str]:
        """What to put before a command that is to run in a node's namespace, as that process."""
        return _enter(self._names[node])

    def open(self) -> None:
        """Make all of it, without what runs left that could not clean up. ``close`` undoes it."""
        sweep()
        try:
            self._make()
        except BaseException:  # Ctrl-C too: whoever made half of it has nothing to close.
            self.close()
            raise

    def _make(self) -> None:
        _run(["ip", "-batch", "-"], [f"netns add {name}" for name in self._all])
        at_switch = ["link add name switch type bridge", "link set switch up"]
        for node, name in self._names.items():
            at_switch += [
                f"link add name {plug(node)} type veth peer name {INTERFACE} netns {name}",
                f"link set {plug(node)} master switch up",
            ]
        _run(["ip", "-n", self._switch, "-batch", "-"], at_switch)
        for node, name in self._names.items():
            _run(
                ["ip", "-n", name, "-batch", "-"],
                ["link set lo up", *self._interface_lines(INTERFACE, node)],
            )
        peer = f"peer name {plug(CLIENTS)} netns {self._switch}"
        _run(
            ["ip", "-batch", "-"],
            [
                f"link add name {self._interface} type veth {peer}",
                *self._interface_lines(self._interface, CLIENTS),
            ],
        )
        _run(["ip", "-n", self._switch, "link", "set", plug(CLIENTS), "master", "switch", "up"])

    def _interface_lines(self, interface: str, end: int | str) -> list[str]:
        return [
            f"address add {self.address(end)}/{_SUBNET_BITS} dev {interface}",
            # Packets of the wire's size: else forty at a time would be lost as one.
            f"link set {interface} gso_max_segs 1 up",
        ]

    def tc(self, lines: Sequence[str], node: int | None = None) -> None:
        """Run these lines of ``tc`` at a node, or at the switch; nothing where there are none."""
        if lines:
            name = self._switch if node is None else self._names[node]
            _run(["tc", "-n", name, "-batch", "-"], lines)

    def close(self) -> None:
        """End what runs in them, and remove all of them. Idempotent."""
        # The kernel takes a namespace to pieces later; this machine's end is to be gone now.
        with contextlib.suppress(FaultError):
            _run(["ip", "link", "delete", self._interface])
        there = set(_listed())
        with contextlib.ExitStack() as ending:  # One that does not go keeps no other here.
            for name in self._all:
                if name in there:
                    ending.callback(_remove, name)

    @property
    def _all(self) -> list[str]:
        return [*self._names.values(), self._switch]


class Scratch:
    """A namespace to try out what the kernel has; a context manager. Raises FaultError."""

    def __init__(self) -> None:
        self._name: Final = f"{_new_name()}-probe"

    def __enter__(self) -> Scratch:
        _run(["ip", "netns", "add", self._name])
        return self

    def __exit__(self, *_exc: object) -> None:
        _remove(self._name)

    def why_no_traffic(self, lines: Sequence[str]) -> str:
        """What ``tc`` says against these lines at a switch with node 1; empty if nothing."""
        try:
            ends = ["link", "add", plug(1), "type", "veth", "peer", "name", plug(CLIENTS)]
            _run(["ip", "-n", self._name, *ends])
            _run(["tc", "-n", self._name, "-batch", "-"], lines)
        except FaultError as error:
            return str(error)
        return ""

    def why_fails(self, command: Sequence[str]) -> str:
        """What a command in it says that fails; empty if it does not."""
        done = subprocess.run(  # noqa: S603 - fixed commands, without a shell.
            [*_enter(self._name), *command], capture_output=True, text=True, check=False
        )
        return " ".join((done.stdout or done.stderr).split()) if done.returncode else ""


def sweep() -> None:
    """Remove what runs left whose process was killed before it could.

    What does not go stays, with a warning: it is in nobody's way.
    """
    for name in _listed():
        owner = owner_of(name)
        if owner and is_gone(owner):
            try:
                _remove(name)
            except FaultError as error:
                if name in _listed():  # Else another run begins just now, and was quicker.
                    _log.warning("what a run left is not removed: %s", error)


def _new_name() -> str:
    """Ours, and no other run's of this process. No namespace is older than the boot."""
    own = this_owner().rpartition("/")[2].replace(":", "-")
    return f"{_PREFIX}{own}-{secrets.token_hex(4)}"


def _enter(name: str) -> list[str]:
    # `ip netns exec` would mount /sys anew, without what is mounted in it.
    return ["nsenter", f"--net=/run/netns/{name}", "--"]


def _listed() -> list[str]:
    """All there are, anybody's."""
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _remove(name: str) -> None:
    """With what runs in it: a namespace lives as long as a process does."""
    deadline = time.monotonic() + _ENDS_S
    while pids := _run(["ip", "netns", "pids", name]).split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise FaultError(f"processes {', '.join(pids)} in {name} do not end")
        time.sleep(_POLL_S)  # Nobody tells of the end of a process that is not a child.
    _run(["ip", "netns", "delete", name])


def _networks() -> list[IPv4Network]:
    """All that this machine has a route to, or an address in."""
    routes = json.loads(_run(["ip", "-4", "-json", "route", "show", "table", "all"]) or "[]")
    # An address without a prefix is a network of one.
    return [IPv4Network(one["dst"]) for one in routes if one.get("dst", "default") != "default"]


def _run(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """What a command prints. Raises FaultError with what it says where it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed commands, without a shell.
            command,
            input="".join(line + "\n" for line in lines),
            capture_output=True,
            text=True,
            check=False,
            process_group=0,  # Ctrl-C in the terminal is not for it: it is to come to its end.
        )
    except OSError as error:
        raise FaultError(f"`{command[0]}` cannot be run: {error.strerror}") from None
    if done.returncode:
        raise FaultError(_refusal(command, lines, done.stderr or done.stdout))
    return done.stdout


def _refusal(command: Sequence[str], lines: Sequence[str], said: str) -> str:
    """What was refused: of several lines the one that it was, which is told by its number."""
    words = " ".join(said.split())
    found = re.fullmatch(r"(.*) Command failed -:(\d+)", words)
    if found is None:
        return f"`{' '.join(command)}` failed: {words}"
    return f"`{command[0]} {lines[int(found[2]) - 1]}` failed: {found[1]}"
