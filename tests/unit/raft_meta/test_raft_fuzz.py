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
    if len(nodes) < 2:
        return
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


def change_somebody(net: Network, rng) -> None:
    """Ask whoever leads, or thinks so, to change the voters; or lose a disk of a minority."""
    leaders = net.leaders_by_their_own_account()
    if not leaders:
        return
    host = rng.choice(leaders)
    voters = host.voter.status().voters
    known = sorted(net.hosts)
    match rng.choice(["add", "add", "remove", "remove", "two", "hand over", "wipe"]):
        case "add":
            outside = [node for node in known if node not in voters]
            if not outside and len(known) < 7:
                outside = [net.join().node_id]
            net.add(rng.choice(outside or known), host, timeout_s=rng.choice([0.3, 2.0]))
        case "remove" if len(voters) > 1:
            net.remove(rng.choice(sorted(voters.node_ids)), host)
        case "two" if len(voters) > 2:
            for node in rng.sample(sorted(voters.node_ids), 2):
                net.remove(node, host)
        case "hand over":
            net._at(net.now_s, host, lambda voter: voter.hand_over(net.now_s))
        case "wipe":
            lose_a_disk(net, rng, voters)


def lose_a_disk(net: Network, rng, voters) -> None:
    """One that is no voter, for an acknowledged entry may need every voter's: Raft outlives the
    loss of a disk only while a majority is left, and these schedules crash the others as well."""
    spare = [
        host
        for host in net.hosts.values()
        if host.voter is not None
        and not any(
            other.journal.voters_at(other.journal.commit_index) is not None
            and host.node_id in other.journal.voters_at(other.journal.commit_index)
            for other in net.hosts.values()
            if other.voter is not None
        )
        and host.node_id not in voters
    ]
    if spare:
        net.wipe(rng.choice(spare), down_s=rng.uniform(0.05, 0.5))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_acknowledged_is_lost_while_the_voters_change(tmp_path, seed):
    nodes = (1, 3, 2, 3, 5)[seed % 5]
    net = Network(
        tmp_path, nodes, 1000 + seed, compact_every=(40, 15, 10_000)[seed % 3], disconnects=True
    )
    rng = net.rng
    try:
        net.run_until(lambda: net.voters() != set(), 30)
        for _ in range(25):
            misbehave(net, rng)
            if rng.random() < 0.4:
                crash_somebody(net, rng)
            for _ in range(rng.randint(1, 8)):
                if rng.random() < 0.3:
                    change_somebody(net, rng)
                for host in net.leaders_by_their_own_account():
                    for _ in range(rng.choice([0, 1, 1, 4])):
                        net.propose(host)
                net.run(rng.choice([0.002, 0.02, 0.1, 0.25]))
        net.settle()
        assert net.acknowledged
        assert net.changed > 0
    finally:
        net.close()
