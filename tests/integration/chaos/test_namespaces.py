"""Network namespaces with a real switch between them: what each fault does to real packets.

It wants root and iproute2, and a kernel with netem or nfnetlink_queue: each half skips without.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.chaos.backends import namespaces, shapers
from penstock.chaos.backends.namespaces import Namespaces
from penstock.chaos.backends.shapers import Shaper, make_shaper
from penstock.chaos.cluster import CLIENTS, Link, LinkFault, PacketFault
from tests.integration.chaos.commands import chaos, finish, start, write_schedule
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NODES = (1, 2, 3)
CUT = LinkFault(cut=True)
PORT = 7007
PATIENCE_S = 1.0
"""Whoever has not heard within this does not hear: whole, it takes some milliseconds."""

ECHO = f"""
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
socketserver.TCPServer.allow_reuse_address = True
with socketserver.ThreadingTCPServer(("0.0.0.0", {PORT}), Echo) as server:
    print("ready", flush=True)
    server.serve_forever()
"""
DATAGRAMS = f"""
import json, socket, sys
sent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    sent.sendto(str(number).encode(), (sys.argv[1], {PORT}))
"""
GATHER = f"""
import json, socket, sys
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
# As root beyond what is usual (SO_RCVBUFFORCE): only the network is to lose any.
heard.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)
heard.bind(("0.0.0.0", {PORT}))
print("ready", flush=True)
heard.settimeout(20)
got = []
try:
    while True:
        got.append(int(heard.recv(100)))
        heard.settimeout({PATIENCE_S})
except TimeoutError:
    print(json.dumps(got), flush=True)
"""
TALK = f"""
import json, socket, sys, time
# A connection that stands before the fault, and what is heard over it and over a new one.
def ask(talk):
    began = time.monotonic()
    try:
        talk.sendall(b"word\\n")
        return (time.monotonic() - began) * 1000 if talk.recv(100) else None
    except OSError:
        return None
def join(patience_s={PATIENCE_S}):
    return socket.create_connection((sys.argv[1], {PORT}), patience_s)
old = join(30)  # Nothing is cut yet, and machines are busy.
print(json.dumps(ask(old)), flush=True)
old.settimeout({PATIENCE_S})
for line in sys.stdin:
    new_ms = None
    try:
        with join() as new:
            new_ms = ask(new)
    except OSError:
        pass
    print(json.dumps([ask(old) if line.strip() == "old too" else None, new_ms]), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def rooted() -> None:
    if why := namespaces.why_not():
        pytest.skip(why)


@pytest.fixture(scope="module", params=[shapers.NETEM, shapers.QUEUE])
def kind(request: pytest.FixtureRequest, rooted: None) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def missing(kind: str) -> str:
    """What the kernel lacks for it; empty if nothing."""
    return shapers.why_not()[kind]


@pytest.fixture(scope="module")
def able(missing: str) -> None:
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="module")
def made(kind: str, missing: str) -> Iterator[tuple[Namespaces, Shaper]]:
    # Cuts take no netem, and only what every kernel with a traffic control has.
    if missing and (kind == shapers.QUEUE or "netem" not in missing):
        pytest.skip(missing)
    found = Namespaces(NODES)
    found.open()
    shaper = None
    try:
        shaper = make_shaper(kind, found, NODES, 1)
        yield found, shaper
    finally:
        if shaper is not None:
            shaper.close()
        found.close()


@pytest.fixture
def net(made: tuple[Namespaces, Shaper]) -> Namespaces:
    return made[0]


@pytest.fixture
def shaper(made: tuple[Namespaces, Shaper]) -> Iterator[Shaper]:
    yield made[1]
    for _ in range(2):  # Idempotent.
        made[1].set_links({})
        for node in NODES:
            made[1].set_packets(node, None)


def run_at(net: Namespaces, end: int | str, code: str, *words: str) -> subprocess.Popen[str]:
    inside = [] if end == CLIENTS else net.enter(int(end))
    return subprocess.Popen(
        [*inside, sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def echo(net: Namespaces) -> Iterator[None]:
    """At node 2."""
    server = run_at(net, 2, ECHO)
    try:
        assert line_of(server) == "ready"
        yield
    finally:
        end(server)


class Talk:
    """One end that talks with node 2, over a connection from before any fault, and new ones."""

    def __init__(self, net: Namespaces, source: int | str) -> None:
        self._process = run_at(net, source, TALK, net.address(2))

    def greet(self) -> None:
        """Wait until it stands."""
        greeted = line_of(self._process)
        assert greeted, "it could not connect; its standard error says why"
        assert json.loads(greeted) is not None

    def ask(self, *, old: bool = False) -> tuple[float | None, float | None]:
        """How long an answer took over the old connection and a new one; None without an answer."""
        assert self._process.stdin is not None
        self._process.stdin.write("old too\n" if old else "\n")
        self._process.stdin.flush()
        over_old, over_new = json.loads(line_of(self._process))
        return over_old, over_new

    def close(self) -> None:
        end(self._process)


@pytest.fixture
def talks(net: Namespaces, echo: None) -> Iterator[dict[int | str, Talk]]:
    found: dict[int | str, Talk] = {}
    with ExitStack() as stack:
        for source in (1, 3, CLIENTS):
            found[source] = Talk(net, source)
            stack.callback(found[source].close)
        for talk in found.values():
            talk.greet()
        yield found


def datagrams(net: Namespaces, source: int, target: int, count: int) -> list[int]:
    """The numbers of those that came, as they came."""
    gathering = run_at(net, target, GATHER)
    try:
        assert line_of(gathering) == "ready"
        sending = run_at(net, source, DATAGRAMS, net.address(target), str(count))
        assert sending.communicate()[0] == ""
        found: list[int] = json.loads(line_of(gathering))
    finally:
        end(gathering)
    return found


@pytest.mark.parametrize("direction", [Link(1, 2), Link(2, 1)])
def test_a_cut_of_either_direction_ends_all_talk_of_the_two_and_no_other(
    shaper: Shaper, talks: dict[int | str, Talk], direction: Link
) -> None:
    shaper.set_links({direction: CUT})
    assert talks[1].ask(old=True) == (None, None)
    for other in (3, CLIENTS):
        over_old, over_new = talks[other].ask(old=True)
        assert over_old is not None
        assert over_new is not None
    shaper.set_links({})
    wait_until(lambda: talks[1].ask()[1] is not None, "node 1 reaches node 2 again")


def test_clients_are_cut_off_from_a_node_alone(
    shaper: Shaper, talks: dict[int | str, Talk]
) -> None:
    shaper.set_links({Link(CLIENTS, 2): CUT, Link(2, CLIENTS): CUT})
    assert talks[CLIENTS].ask()[1] is None
    assert talks[1].ask()[1] is not None
    shaper.set_links({})
    wait_until(lambda: talks[CLIENTS].ask()[1] is not None, "clients reach node 2 again")


def test_a_one_way_cut_is_of_that_way(shaper: Shaper, net: Namespaces) -> None:
    shaper.set_links({Link(1, 2): CUT})
    assert datagrams(net, 1, 3, 20) == list(range(20))
    assert datagrams(net, 2, 1, 20) == list(range(20))
    # Whoever gathers waits for the first for long: sent first is one from elsewhere.
    gathering = run_at(net, 2, GATHER)
    try:
        assert line_of(gathering) == "ready"
        for source, count in ((1, 20), (3, 2)):
            run_at(net, source, DATAGRAMS, net.address(2), str(count)).communicate()
        assert json.loads(line_of(gathering)) == [0, 1]
    finally:
        end(gathering)


def quickest_ms(talk: Talk) -> float:
    """Of up to so many new connections, the first that is quick, else the quickest."""
    found = float("inf")
    for _ in range(30):
        found = min(found, talk.ask()[1] or found)
        if found < 100:
            break
    return found


@pytest.mark.usefixtures("able")
def test_what_is_late_is_so_much_late_in_its_direction(
    shaper: Shaper, talks: dict[int | str, Talk]
) -> None:
    shaper.set_links({Link(1, 2): LinkFault(latency_ms=100)})
    over_old, over_new = talks[1].ask(old=True)
    assert over_old is not None
    assert over_new is not None
    assert over_old >= 100
    assert over_new >= 100
    shaper.set_links({Link(1, 2): LinkFault(latency_ms=100), Link(2, 1): LinkFault(latency_ms=150)})
    both, _ = talks[1].ask(old=True)
    assert both is not None
    assert both >= 250
    # A machine that is busy has any answer come late; that the quickest of many does is no chance.
    assert quickest_ms(talks[3]) < 100
    shaper.set_links({})
    assert quickest_ms(talks[1]) < 100


@pytest.mark.usefixtures("able")
def test_jitter_keeps_the_order(shaper: Shaper, net: Namespaces) -> None:
    shaper.set_links({Link(1, 2): LinkFault(latency_ms=20, jitter_ms=100)})
    assert datagrams(net, 1, 2, 300) == list(range(300))


@pytest.mark.usefixtures("able")
def test_a_narrow_link_takes_its_time(shaper: Shaper, talks: dict[int | str, Talk]) -> None:
    # A new connection sends some hundred bytes with all headers, in each direction.
    shaper.set_links({Link(2, 1): LinkFault(rate_bytes=500)})
    _, over_new = talks[1].ask()
    assert over_new is not None
    assert over_new >= 100
    shaper.set_links({})


@pytest.mark.usefixtures("able")
def test_so_many_packets_are_lost_doubled_or_overtaken(shaper: Shaper, net: Namespaces) -> None:
    sent = 300  # More at once, and interfaces would lose some.
    shaper.set_packets(1, PacketFault(loss=30))
    got = datagrams(net, 1, 2, sent)
    assert got == sorted(set(got))
    assert len(got) == pytest.approx(sent * 0.7, abs=sent * 0.15)
    assert datagrams(net, 2, 3, 20) == list(range(20))

    shaper.set_packets(1, PacketFault(duplicate=50))
    got = datagrams(net, 1, 2, sent)
    assert set(got) == set(range(sent))
    assert len(got) == pytest.approx(sent * 1.5, abs=sent * 0.15)

    shaper.set_packets(1, PacketFault(reorder=25, delay_ms=30))
    got = datagrams(net, 1, 2, sent)
    assert sorted(got) == list(range(sent))
    assert got != sorted(got)

    shaper.set_packets(1, None)
    assert datagrams(net, 1, 2, sent) == list(range(sent))


# --- whole runs, and what they leave


def named_by(pid: int) -> list[str]:
    """The namespaces that the process of that number has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    return [name for name in names if re.match(rf"penstock-chaos-\d+-{pid}-", name)]


def addresses_here() -> str:
    return subprocess.run(
        ["ip", "-4", "address"], capture_output=True, text=True, check=True
    ).stdout


def test_nothing_is_left_when_they_are_closed() -> None:
    before = set(named_by(os.getpid()))
    found = Namespaces(NODES)
    found.open()
    assert len(set(named_by(os.getpid())) - before) == len(NODES) + 1
    assert found.address(CLIENTS) in addresses_here()
    lingering = run_at(found, 1, "import time; print('ready', flush=True); time.sleep(600)")
    assert line_of(lingering) == "ready"
    found.close()
    assert found.address(CLIENTS) not in addresses_here()
    found.close()
    assert lingering.wait(10) == -signal.SIGKILL
    lingering.communicate()
    assert set(named_by(os.getpid())) == before


ABANDONED = """
import os, signal
from penstock.chaos.backends.namespaces import Namespaces
found = Namespaces([1, 2])
found.open()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_the_next_one_removes() -> None:
    with subprocess.Popen([sys.executable, "-c", ABANDONED]) as killed:
        assert killed.wait(60) == -signal.SIGKILL
    assert len(named_by(killed.pid)) == 3
    living = Namespaces([1])
    living.open()  # Which sweeps first.
    try:
        assert named_by(killed.pid) == []
        namespaces.sweep()
        assert len(named_by(os.getpid())) >= 2
    finally:
        living.close()


@pytest.mark.usefixtures("able")
def test_a_run_is_judged_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    schedule = write_schedule(
        tmp_path / "faults.json",
        [(1_000, 2_000, "isolate", "a leader"), (5_000, 2_000, "slow", "all")],
    )
    entries = json.loads(schedule.read_text())
    entries[1]["fault"]["parameters"] = {"latency_ms": 50, "jitter_ms": 20}
    entries.append(
        {
            "at_ms": 9_000,
            "hold_ms": 2_000,
            "fault": {
                "nemesis": "lossy",
                "kind": "lossy",
                "target": "a leader",
                "parameters": {"loss": 10},
            },
        }
    )
    schedule.write_text(json.dumps(entries))
    running = start(
        *("run", "--backend", "namespaces", "--backend-set", f"shaping={kind}"),
        *("--schedule", schedule, "--duration", 13, "--rate", 500, "--output", "json"),
        *("--out", tmp_path / "run"),
    )
    done = finish(running)
    assert done.status == 0, done.stderr
    assert done.json["figures"]["faults"] == {"planned": 3, "held": 3, "failed": 0}
    assert named_by(running.pid) == []
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["versions"]["shaping"] == kind


def test_ctrl_c_ends_a_run_and_leaves_nothing(tmp_path: Path) -> None:
    running = start(
        *("run", "--backend", "namespaces", "--nemesis", "kill", "--nodes", 1),
        *("--duration", 600, "--rate", 100, "--out", tmp_path / "run"),
    )
    history = tmp_path / "run"
    wait_until(lambda: any(history.glob("history-*")), "the load begins", 60)
    assert len(named_by(running.pid)) == 2
    running.send_signal(signal.SIGINT)
    done = finish(running)
    assert done.status == 130, done.stderr
    assert named_by(running.pid) == []


def test_messages_by_name_are_for_the_relay(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    done = chaos("run", "--backend", "namespaces", "--nemesis", "late-acks", *out)
    assert done.status == 2
    assert "needs messages, which the backend namespaces has not" in " ".join(done.stderr.split())
