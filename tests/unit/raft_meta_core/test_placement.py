from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.raft_meta.core.placement import place


def spread(counts: Counter[int], nodes: list[int]) -> int:
    values = [counts[node] for node in nodes]
    return max(values) - min(values)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.integers(1, 60),
)
def test_leaders_and_replicas_are_even_without_racks(sizes: tuple[int, int], count: int) -> None:
    brokers, factor = sizes
    nodes = list(range(10, 10 + brokers))
    placed = place(count, factor, dict.fromkeys(nodes, ""), cluster_leaders={}, cluster_replicas={})
    assert len(placed) == count
    assert all(len(set(replicas)) == factor for replicas in placed)
    assert spread(Counter(replicas[0] for replicas in placed), nodes) <= 1
    assert spread(Counter(node for replicas in placed for node in replicas), nodes) <= 2
    if factor > 1:
        heirs = Counter(replicas[:2] for replicas in placed)
        for leader in nodes:
            counts = [heirs[leader, node] for node in nodes if node != leader]
            assert max(counts) - min(counts) <= 2


@settings(max_examples=100, deadline=None)
@given(
    racks=st.integers(1, 4),
    a_rack=st.integers(1, 3),
    factor=st.integers(1, 4),
    count=st.integers(1, 48),
)
def test_replicas_take_a_rack_each_as_far_as_there_are(
    racks: int, a_rack: int, factor: int, count: int
) -> None:
    nodes = {node: f"rack-{node % racks}" for node in range(racks * a_rack)}
    factor = min(factor, len(nodes))
    placed = place(count, factor, nodes, cluster_leaders={}, cluster_replicas={})
    for replicas in placed:
        a_rack_each = Counter(nodes[node] for node in replicas)
        assert len(a_rack_each) == min(racks, factor)
        assert max(a_rack_each.values()) - min(a_rack_each.values()) <= 1 or len(a_rack_each) == 1
    assert spread(Counter(replicas[0] for replicas in placed), list(nodes)) <= 1
    assert spread(Counter(node for replicas in placed for node in replicas), list(nodes)) <= 2


def test_a_dead_leaders_work_falls_on_many() -> None:
    placed = place(60, 2, dict.fromkeys(range(6), ""), cluster_leaders={}, cluster_replicas={})
    heirs = Counter(replicas[1] for replicas in placed if replicas[0] == 0)
    assert len(heirs) == 5
    assert max(heirs.values()) - min(heirs.values()) <= 1


def test_many_small_topics_spread_over_the_cluster() -> None:
    leaders: Counter[int] = Counter()
    replicas: Counter[int] = Counter()
    for _ in range(31):
        [placed] = place(
            1, 2, dict.fromkeys((1, 2, 3), ""), cluster_leaders=leaders, cluster_replicas=replicas
        )
        leaders[placed[0]] += 1
        replicas.update(placed)
    assert spread(leaders, [1, 2, 3]) <= 1
    assert spread(replicas, [1, 2, 3]) <= 2


def test_an_empty_new_broker_is_not_given_every_leader_of_a_new_topic() -> None:
    loaded = Counter({1: 100, 2: 100})
    placed = place(
        6, 1, dict.fromkeys((1, 2, 3), ""), cluster_leaders=loaded, cluster_replicas=loaded
    )
    assert Counter(placed) == {(1,): 2, (2,): 2, (3,): 2}


def test_new_partitions_even_out_those_that_are_there() -> None:
    placed = place(
        4,
        2,
        dict.fromkeys((1, 2, 3), ""),
        topic=[(1, 2), (1, 2)],
        cluster_leaders={1: 2},
        cluster_replicas={1: 2, 2: 2},
    )
    leaders = Counter(replicas[0] for replicas in [*placed, (1, 2), (1, 2)])
    assert leaders == {1: 2, 2: 2, 3: 2}


def test_placement_is_fast_enough_for_the_largest_topic() -> None:
    placed = place(10_000, 3, dict.fromkeys(range(12), ""), cluster_leaders={}, cluster_replicas={})
    assert spread(Counter(replicas[0] for replicas in placed), list(range(12))) <= 1


def plainly(count, factor, racks, *, topic, cluster_leaders, cluster_replicas):
    """The rules as they are written, for each partition over all brokers."""
    nodes, placed = sorted(racks), []
    rack_of = {node: racks[node] or f"alone {node}" for node in nodes}
    led, everywhere_led = Counter(), Counter(cluster_leaders)
    held, everywhere_held = Counter(), Counter(cluster_replicas)
    heirs: Counter[tuple[int, ...]] = Counter()

    def note(replicas, *, new):
        led[replicas[0]] += 1
        held.update(replicas)
        heirs[replicas[:2]] += 1
        if new:
            everywhere_led[replicas[0]] += 1
            everywhere_held.update(replicas)

    def as_leader(node):
        return led[node], held[node], everywhere_led[node], everywhere_held[node], node

    for replicas in topic:
        note(replicas, new=False)
    for _ in range(count):
        chosen = [min(nodes, key=as_leader)]

        def as_follower(node, chosen=chosen):
            return (
                sum(rack_of[other] == rack_of[node] for other in chosen),
                held[node] + 2 * heirs[chosen[0], node] * (len(chosen) == 1),
                everywhere_held[node],
                (nodes.index(node) - nodes.index(chosen[0])) % len(nodes),
            )

        while len(chosen) < factor:
            chosen.append(min((node for node in nodes if node not in chosen), key=as_follower))
        placed.append(tuple(chosen))
        note(placed[-1], new=True)
    return placed


counts = st.dictionaries(st.integers(0, 12), st.integers(0, 50))


@settings(max_examples=200, deadline=None)
@given(
    racks=st.dictionaries(st.integers(0, 9), st.sampled_from(["", "a", "b"]), min_size=1),
    factor=st.integers(1, 10),
    count=st.integers(1, 25),
    topic=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True).map(tuple)),
    cluster_leaders=counts,
    cluster_replicas=counts,
)
def test_the_fast_way_places_as_the_rules_say(racks, factor, count, **present):
    factor = min(factor, len(racks))
    assert place(count, factor, racks, **present) == plainly(count, factor, racks, **present)
