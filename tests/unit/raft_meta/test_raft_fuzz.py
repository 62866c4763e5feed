"""Random schedules of loss, duplication, reordering, cuts and crashes; see raft_fuzz.Network."""

from __future__ import annotations

import os

import pytest

from tests.unit.raft_meta.raft_fuzz import Network

SEEDS = int(os.environ.get("PENSTOCK_RAFT_SEEDS", "24"))


def misbehave(net: Network, rng) -> None:
    """Change the weather."""
    nodes = list(net.hosts)
    kind = rng.choice(["calm", "lossy", "slow", "cut", "one way", "isolate", "rough", "rough"])
    net.loss = net.duplication = 0.0
    net.delay_s = (0.0005, 0.003)
    net.cut = lambda _source, _target: False
    if kind in ("lossy", "rough"):
        net.loss, net.duplication = rng.uniform(0.02, 0.3), rng.uniform(0, 0.3)
    if kind in ("slow", "rough"):
        net.delay_s = (0.0005, rng.choice([0.02, 0.1, 0.3, 1.0]))
    if kind == "cut":
        side = set(rng.sample(nodes, rng.randint(1, len(nodes) - 1)))
        net.cut = lambda source, target: (source in side) != (target in side)
    if kind == "one way":
        victim, other = rng.sample(nodes, 2)
        net.cut = lambda source, target: (source, target) == (victim, other)
    if kind == "isolate":
        victim = rng.choice(nodes)
        net.cut = lambda source, target: victim in (source, target)


def crash_somebody(net: Network, rng) -> None:
    alive = [host for host in net.hosts.values() if host.voter is not None]
    if not alive:
        return
    host = rng.choice(alive)
    match rng.choice(["now", "before sync", "after sync", "all"]):
        case "now":
            net.crash(host)
        case "before sync":
            host.crash_before_sync = True
        case "after sync":
            host.crash_after_sync = True
        case "all" if rng.random() < 0.2:
            for each in alive:
                net.crash(each)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_acknowledged_is_lost(tmp_path, seed):
    nodes = (3, 5, 3, 2, 5)[seed % 5]
    net = Network(tmp_path, nodes, seed, compact_every=(40, 15, 10_000)[seed % 3], disconnects=True)
    rng = net.rng
    try:
        for _ in range(25):
            misbehave(net, rng)
            if rng.random() < 0.5:
                crash_somebody(net, rng)
            for _ in range(rng.randint(1, 8)):
                for host in net.leaders_by_their_own_account():
                    for _ in range(rng.choice([0, 1, 1, 4])):
                        net.propose(host)
                if rng.random() < 0.1:
                    net.propose(rng.choice(list(net.hosts.values())))
                net.run(rng.choice([0.002, 0.02, 0.1, 0.25]))
        net.settle()
        assert net.acknowledged
        assert net.crashes > 0
    finally:
        net.close()
