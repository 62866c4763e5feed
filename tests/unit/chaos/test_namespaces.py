from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import cast

import pytest

from penstock.chaos.backends import namespaces, shapers
from penstock.chaos.backends.namespaces import Namespaces, free_subnet, owner_of
from penstock.chaos.backends.owner import is_gone, this_owner
from penstock.chaos.backends.shapers import NetemShaper
from penstock.chaos.cluster import CLIENTS, OFFERED, Capability, Link, LinkFault, PacketFault
from penstock.chaos.errors import FaultError, PlanError
from penstock.chaos.nemeses import Fault, ScheduledFault
from penstock.chaos.run_plan import RunPlan
from penstock.cli.chaos.backends import make_cluster
from penstock.cli.chaos.namespaced import Namespaced

CUT = LinkFault(cut=True)


def test_a_subnet_is_one_that_this_machine_has_no_route_to() -> None:
    all_of_them = list(namespaces.RANGE.subnets(new_prefix=24))
    assert free_subnet([], 3) == all_of_them[3]
    assert free_subnet([], 3 + len(all_of_them)) == all_of_them[3]
    taken = [IPv4Network("198.18.3.7/32"), IPv4Network("198.18.4.0/23"), IPv4Network("10.0.0.0/8")]
    assert free_subnet(taken, 3) == all_of_them[6]
    assert free_subnet([IPv4Network("198.19.255.0/24")], 511) == all_of_them[0]
    # All the world in two pieces, as tunnels have it, is no network of its own.
    assert free_subnet([IPv4Network("128.0.0.0/1")], 3) == all_of_them[3]
    assert free_subnet([IPv4Network("198.16.0.0/12")], 3) is None


def test_a_name_tells_who_made_it() -> None:
    _, _, rest = this_owner().partition("/")
    tag = rest.replace(":", "-")
    assert owner_of(f"penstock-chaos-{tag}-0a1b2c3d-node-1") == this_owner()
    assert not is_gone(owner_of(f"penstock-chaos-{tag}-0a1b2c3d-switch"))
    dead = owner_of(f"penstock-chaos-{tag}1-0a1b2c3d-switch")  # Began at another time.
    assert is_gone(dead)
    foreign = ["penstock-chaos-1", "penstock-chaos-", "penstock-chaos-1-2", "penstock-chaos-1-2-3"]
    foreign += ["penstock-chaos-1-2-3-mine", "penstock-chaos-1-2-\u00b3-0a1b2c3d-switch"]
    for strange in (*foreign, "blue", "penstock-chaos-blue", "cni-1-2-3-4", ""):
        assert owner_of(strange) == ""


def test_only_what_dead_runs_left_is_swept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tag = this_owner().partition("/")[2].replace(":", "-")
    living = f"penstock-chaos-{tag}-0a1b2c3d-switch"
    dead = [f"penstock-chaos-{tag}1-0a1b2c3d-{what}" for what in ("switch", "node-1")]
    there = ["blue", dead[0], living, dead[1]]
    monkeypatch.setattr(namespaces, "_listed", lambda: list(there))
    monkeypatch.setattr(namespaces, "_remove", there.remove)
    namespaces.sweep()
    assert there == ["blue", living]

    def too_late(name: str) -> None:
        there.remove(name)
        raise FaultError("another run has removed it")

    there.append(dead[0])
    monkeypatch.setattr(namespaces, "_remove", too_late)
    namespaces.sweep()

    def in_vain(name: str) -> None:
        raise FaultError(f"{name} does not go")

    there += dead
    tried: list[str] = []
    monkeypatch.setattr(namespaces, "_remove", lambda name: tried.append(name) or in_vain(name))
    namespaces.sweep()
    assert tried == dead, "what does not go keeps no other here, and no run from beginning"
    assert caplog.text.count("does not go") == 2


def test_of_many_lines_the_refused_one_is_named() -> None:
    said = "Error: Specified qdisc kind is unknown.\nCommand failed -:2\n"
    told = namespaces._refusal(["tc", "-n", "x", "-batch", "-"], ["one", "two"], said)
    assert told == "`tc two` failed: Error: Specified qdisc kind is unknown."
    assert namespaces._refusal(["ip", "netns"], [], "no\nroom") == "`ip netns` failed: no room"


def test_what_is_missing_is_said_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert namespaces.why_not() == "there is no `tc` (Debian's package iproute2)"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PlanError, match=r"only root may make .*; next: take --backend local"):
        Namespaced([1])


def test_a_run_without_root_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    plan = RunPlan("append", "kill", 1, 5, 1, 100, 5, backend="namespaces")
    with pytest.raises(PlanError, match="only root"):
        make_cluster(plan, tmp_path, [])
    assert list(tmp_path.iterdir()) == []
    told = RunPlan(
        "append", "kill", 1, 5, 1, 100, 5, backend="namespaces", backend_options={"image": "x"}
    )
    with pytest.raises(PlanError, match="has no option 'image'; next: take of shaping"):
        make_cluster(told, tmp_path, [])


class PaperNamespaces:
    """Namespaces that refuse the lines with ``refusing`` in them."""

    def __init__(self, nodes: Sequence[int] = (1, 2)) -> None:
        self.nodes = nodes
        self.said: list[tuple[int | None, str]] = []
        self.refusing = "nothing"
        self.open_now = False

    def address(self, end: int | str) -> str:
        return f"10.0.0.{254 if end == CLIENTS else end}"

    def tc(self, lines: Sequence[str], node: int | None = None) -> None:
        for line in lines:
            if self.refusing in line:
                raise FaultError(f"tc: {line}")
            self.said.append((node, line))

    def enter(self, node: int) -> list[str]:
        return ["enter", str(node)]

    def open(self) -> None:
        self.open_now = True

    def close(self) -> None:
        self.open_now = False


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> PaperNamespaces:
    """What Namespaced makes instead of real ones."""
    made = PaperNamespaces()
    monkeypatch.setattr(namespaces, "why_not", lambda: "")
    monkeypatch.setattr(namespaces, "Namespaces", lambda _nodes: made)
    monkeypatch.setattr(shapers, "why_not", lambda: {"netem": "", "nfqueue": ""})
    return made


def netem(paper: PaperNamespaces) -> NetemShaper:
    shaper = NetemShaper(cast("Namespaces", paper), [1, 2])
    paper.said.clear()
    return shaper


def test_links_are_broken_at_the_switch_and_packets_at_the_node(paper: PaperNamespaces) -> None:
    shaper = netem(paper)
    shaper.set_links({Link(1, CLIENTS): CUT})
    shaper.set_packets(2, PacketFault(loss=1))
    assert [node for node, _ in paper.said] == [None, 2]
    shaper.set_packets(2, None)
    shaper.set_packets(2, None)
    assert len(paper.said) == 3


def test_where_one_link_is_refused_all_are_whole(paper: PaperNamespaces) -> None:
    shaper = netem(paper)
    paper.refusing = "dev clients parent 1:2 "
    with pytest.raises(FaultError, match="dev clients"):
        shaper.set_links({Link(1, 2): CUT, Link(2, CLIENTS): CUT})
    paper.refusing = "nothing"
    paper.said.clear()
    shaper.set_links({Link(1, 2): CUT})
    assert [line.split(": ")[1] for _, line in paper.said if "blackhole" in line] == ["blackhole"]


def test_where_packets_are_refused_they_suffer_nothing(paper: PaperNamespaces) -> None:
    shaper = netem(paper)
    paper.refusing = "duplicate"
    with pytest.raises(FaultError, match="duplicate"):
        shaper.set_packets(1, PacketFault(duplicate=5))
    shaper.set_packets(1, PacketFault(loss=1))
    assert paper.said[-1][1].endswith("loss 1%")


def test_the_quickest_that_the_kernel_has_is_taken_and_told(
    paper: PaperNamespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Namespaced([1, 2]).versions == {"shaping": "netem"}
    assert Namespaced([1, 2], shaping="nfqueue").versions == {"shaping": "nfqueue"}
    with pytest.raises(PlanError, match="no shaping 'toffee'; next: take of netem, nfqueue"):
        Namespaced([1, 2], shaping="toffee")
    monkeypatch.setattr(shapers, "why_not", lambda: {"netem": "none", "nfqueue": ""})
    assert Namespaced([1, 2]).versions == {"shaping": "nfqueue"}
    with pytest.raises(PlanError, match=r"tc netem: none\); next: .*sch_netem"):
        Namespaced([1, 2], shaping="netem")
    monkeypatch.setattr(shapers, "why_not", lambda: {"netem": "none", "nfqueue": "neither"})
    with pytest.raises(PlanError, match="tc netem: none; iptables and nfnetlink_queue: neither"):
        Namespaced([1, 2])
    assert Namespaced([1, 2], breaks_network=False).capabilities == frozenset()


def test_a_run_needs_the_network_only_for_what_breaks_it(
    paper: PaperNamespaces, tmp_path: Path
) -> None:
    plan = RunPlan("append", "kill", 2, 5, 1, 100, 5, backend="namespaces")
    kill = [ScheduledFault(0, 1, Fault("kill", "kill", "random"))]
    assert Capability.LINKS not in make_cluster(plan, tmp_path / "kill", kill).capabilities
    lossy = [ScheduledFault(0, 1, Fault("lossy", "lossy", "random", {"loss": 1}))]
    made = make_cluster(plan, tmp_path / "lossy", lossy)
    assert Capability.PACKETS in made.capabilities
    assert made.capabilities <= OFFERED["namespaces"]
    assert made.bootstrap == "10.0.0.1:9092,10.0.0.2:9093"


def test_it_holds_no_messages_and_breaks_nothing_before_it_is_started(
    paper: PaperNamespaces, tmp_path: Path
) -> None:
    network = Namespaced([1, 2])
    layout = network.lay_out(tmp_path, 2, {"some.setting": 1})
    text = layout.plan(2).config_path.read_text()
    for line in (
        'broker.listen = "10.0.0.2:9093"',
        'controller.listen = "10.0.0.2:10093"',
        'controller.quorum.voters = "1@10.0.0.1:10092,2@10.0.0.2:10093"',
        "controller.insecure.allow = true",
        "some.setting = 1",
    ):
        assert f"{line}\n" in text
    with pytest.raises(FaultError, match="holds no messages; next: take local"):
        network.set_links({Link(1, 2): LinkFault(hold=("Produce",))})
    with pytest.raises(FaultError, match="is not started"):
        network.set_links({Link(1, 2): CUT})
    network.set_links({})
    network.set_packets(1, None)
    network.start(layout.plans)
    network.start(layout.plans)
    assert paper.open_now
    network.set_links({Link(1, 2): CUT})
    network.stop()
    network.stop()
    assert not paper.open_now
    network.set_links({})


def test_namespaces_go_where_what_breaks_them_does_not_start(
    paper: PaperNamespaces, tmp_path: Path
) -> None:
    network = Namespaced([1, 2])
    layout = network.lay_out(tmp_path, 2, None)
    paper.refusing = "htb"
    with pytest.raises(FaultError, match="htb"):
        network.start(layout.plans)
    network.stop()
    assert not paper.open_now
