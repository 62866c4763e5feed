"""What `penstock doctor` finds: each fault alone, with its next step; nothing where all is well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.cli import doctor_findings
from penstock.cli.doctor_findings import (
    DRAIN_FORGOTTEN_MS,
    Answer,
    ControllerAnswer,
    Finding,
    PartitionFacts,
    Picture,
    Severity,
    findings,
)
from penstock.client.descriptions import (
    BrokerDescription,
    ClusterDescription,
    DirectoryDescription,
    NodeDescription,
    QuorumDescription,
    QuorumVoter,
)
from tests.unit.cli.command_line import complaints

NOW_MS = 1_800_000_000_000
GB = 10**9


def broker(node_id: int, **changes: Any) -> BrokerDescription:
    made = BrokerDescription(node_id, f"host-{node_id}", 9092, "", False, False, 5, 1, 6)
    return replace(made, **changes)


def node(node_id: int, **changes: Any) -> NodeDescription:
    disk = DirectoryDescription("/data", 1000 * GB, 600 * GB, "", 900)
    made = NodeDescription(
        node_id, "1.2", 1, 6, True, ("broker",), NOW_MS, NOW_MS - 9, (disk,), 90, 1000, 5, ""
    )
    return replace(made, **changes)


def answer(node_id: int, **changes: Any) -> Answer:
    made = Answer(
        broker(node_id), (f"10.0.0.{node_id}",), "", node(node_id), "", NOW_MS - 5, NOW_MS + 5
    )
    return replace(made, **changes)


def quorum(**changes: Any) -> QuorumDescription:
    voters = tuple(QuorumVoter(n, f"host-{n}", 10092, 100) for n in (1, 2, 3))
    made = QuorumDescription(1, 7, 100, 100, voters, 1, 1, True, "leader", 100)
    return replace(made, **changes)


def with_voter(**changes: Any) -> QuorumDescription:
    sound = quorum()
    return replace(sound, voters=(*sound.voters[:2], replace(sound.voters[2], **changes)))


def picture(**changes: Any) -> Picture:
    answers = changes.pop("answers", [answer(n) for n in (1, 2, 3)])
    cluster = ClusterDescription("c", 1, 7, 100, tuple(one.broker for one in answers), 1, 6)
    made = Picture(cluster, answers, quorum(), "", [], NOW_MS)
    return replace(made, **changes)


def one_of(third: Answer) -> Picture:
    return picture(answers=[answer(1), answer(2), third])


def directory(**changes: Any) -> Picture:
    disk = replace(node(3).directories[0], **changes)
    return one_of(answer(3, node=node(3, directories=(disk,))))


def controllers(**changes: Any) -> Picture:
    """Brokers 1 and 2, and controller 3 that is none, with changes of it."""
    disk = DirectoryDescription("/raft", 1000 * GB, 600 * GB, "", 900)
    alone = node(3, **{"roles": ("controller",), "directories": (disk,), **changes.pop("node", {})})
    made = ControllerAnswer(quorum().voters[2], alone, "", NOW_MS - 5, NOW_MS + 5)
    return picture(
        answers=[answer(1), answer(2)],
        quorum=changes.pop("quorum", quorum()),
        controllers=[replace(made, **changes)],
    )


def partition(**changes: Any) -> Picture:
    made = PartitionFacts("orders-0", 1, (1, 2, 3), (1, 2), 2, [(3, "slow")])
    return picture(partitions=[replace(made, **changes)])


def test_a_level_that_not_all_know_or_amid_an_upgrade_is_not_to_be_raised() -> None:
    older = replace(picture().cluster, metadata_version=5)
    brokers = (broker(1), broker(2), broker(3, max_metadata_version=5))
    assert findings(picture(cluster=replace(older, brokers=brokers))) == []
    amid = replace(one_of(answer(3, node=node(3, version="1.3"))), cluster=older)
    (only,) = findings(amid)
    assert "different software" in only.what


def test_addresses_for_clients_from_outside_on_all_brokers_or_none_are_nothing_to_act_on() -> None:
    reached = [
        answer(n, broker=broker(n, external_host=f"b{n}.example.com", external_port=9094))
        for n in (1, 2, 3)
    ]
    assert findings(picture(answers=reached)) == []
    assert findings(picture()) == []


@pytest.mark.parametrize(
    ("port", "setting"), [(9092, "broker.advertised"), (9094, "external.advertised")]
)
@pytest.mark.parametrize(
    "unusable",
    [
        {"resolved": (), "resolve_error": "Name not known", "node": None},
        {"node": None, "error": "connection refused"},
        {"node": node(2)},
        {"resolved": ("127.0.0.1",)},
    ],
)
def test_the_setting_is_named_that_the_address_is_of(
    unusable: dict[str, Any], port: int, setting: str
) -> None:
    """Outside the doctor is told of external addresses as where brokers are."""
    answers = [
        answer(n, broker=broker(n, port=port, external_host=f"host-{n}", external_port=9094))
        for n in (1, 2, 3)
    ]
    answers[2] = replace(answers[2], **unusable)
    (found,) = findings(picture(answers=answers))
    assert setting in found.next


def test_one_that_does_not_answer_is_looked_after_before_its_address_is() -> None:
    """While no controller is active nobody is fenced, and a dead node is like a wrong address."""
    (found,) = findings(one_of(answer(3, node=None, error="connection refused")))
    assert found.next.startswith("start node 3 if it is down")
    assert "broker.advertised" in found.next


def test_a_controller_that_is_about_to_vote_is_nothing_to_act_on() -> None:
    answers = [answer(n, node=node(n, roles=("broker", "controller"))) for n in (1, 2, 3)]
    assert findings(picture(answers=answers)) == []
    answers.append(answer(4, node=node(4, roles=("broker", "controller"))))
    comes = quorum(catching_up=QuorumVoter(4, "host-4", 10092, 3))
    assert findings(picture(answers=answers, quorum=comes)) == []


def test_a_sound_cluster_has_nothing_to_act_on() -> None:
    assert findings(picture()) == []


def test_a_sound_controller_without_a_broker_is_nothing_to_act_on() -> None:
    assert findings(controllers()) == []
    assert findings(controllers(node={"codec_compiled": False})) == []


def test_of_a_lost_controller_the_quorum_alone_tells() -> None:
    lost = with_voter(is_unreachable=True)
    made = controllers(quorum=lost, error="controller 3 does not answer")
    silent = replace(made.controllers[0], voter=lost.voters[2], node=None)
    (found,) = findings(replace(made, controllers=[silent]))
    assert "it does not answer the leader" in found.what


CASES: dict[str, tuple[Callable[[], Picture], str, str, str]] = {
    "no name": (
        lambda: one_of(answer(3, resolved=(), resolve_error="Name not known", node=None)),
        "critical",
        "broker 3",
        "its advertised address host-3:9092 does not resolve from here: Name not known",
    ),
    "no answer": (
        lambda: one_of(answer(3, node=None, error="connection refused")),
        "critical",
        "broker 3",
        "host-3:9092 (which is 10.0.0.3) does not answer: connection refused",
    ),
    "another answers": (
        lambda: one_of(answer(3, node=node(2))),
        "critical",
        "broker 3",
        "at its advertised address host-3:9092 (which is 10.0.0.3) node 2 answers",
    ),
    "fenced": (
        lambda: one_of(answer(3, broker=broker(3, fenced=True), node=None, error="refused")),
        "critical",
        "broker 3",
        "it is fenced: the controllers do not hear it, or it has yet to catch up; its advertised",
    ),
    "loopback": (
        lambda: one_of(answer(3, resolved=("127.0.0.1",))),
        "warning",
        "broker 3",
        "is this machine (127.0.0.1) for whoever asks",
    ),
    "drained": (
        lambda: one_of(
            answer(3, broker=broker(3, drained_since_ms=NOW_MS - 3 * DRAIN_FORGOTTEN_MS))
        ),
        "warning",
        "broker 3",
        "it has been drained for 30 minutes",
    ),
    "offline replicas": (
        lambda: one_of(answer(3, broker=broker(3, offline_replicas=2))),
        "critical",
        "broker 3",
        "it can't serve 2 replicas",
    ),
    "clocks": (
        lambda: one_of(answer(3, node=node(3, clock_ms=NOW_MS - 2000))),
        "warning",
        "clocks",
        "is ahead of that of broker 3 by 1990 ms at least",
    ),
    "little room": (
        lambda: directory(free_bytes=100 * GB),
        "warning",
        "broker 3",
        "its directory /data has 100.00 GB of 1000.00 GB free",
    ),
    "very little room": (
        lambda: directory(free_bytes=GB),
        "critical",
        "broker 3",
        "its directory /data has 1.00 GB",
    ),
    "slow disk": (
        lambda: directory(fsync_us=250_000),
        "warning",
        "broker 3",
        "a small fsync in its directory /data took 250 ms",
    ),
    "hanging disk": (
        lambda: directory(fsync_us=-1, total_bytes=-1, free_bytes=-1),
        "critical",
        "broker 3",
        "failed, or was not over in 2 s",
    ),
    "failed disk": (
        lambda: directory(fsync_us=-1, failure="I/O error"),
        "critical",
        "broker 3",
        "its directory /data has failed: I/O error",
    ),
    "many descriptors": (
        lambda: one_of(answer(3, node=node(3, open_descriptors=800))),
        "warning",
        "broker 3",
        "it has 800 of at most 1000 files",
    ),
    "almost no descriptors": (
        lambda: one_of(answer(3, node=node(3, open_descriptors=990))),
        "critical",
        "broker 3",
        "it has 990 of at most 1000 files",
    ),
    "pure Python": (
        lambda: one_of(answer(3, node=node(3, codec_compiled=False))),
        "warning",
        "broker 3",
        "its record codec is pure Python",
    ),
    "a controller's disk": (
        lambda: controllers(
            node={"directories": (DirectoryDescription("/raft", 100 * GB, GB, "", 900),)}
        ),
        "critical",
        "controller 3",
        "its directory /raft has 1.00 GB of 100.00 GB free",
    ),
    "a controller's slow disk": (
        lambda: controllers(
            node={"directories": (DirectoryDescription("/raft", 9, 8, "", 250_000),)}
        ),
        "warning",
        "controller 3",
        "took 250 ms; each change of the metadata waits for one",
    ),
    "a controller's clock": (
        lambda: controllers(node={"clock_ms": NOW_MS - 2000}),
        "warning",
        "clocks",
        "is ahead of that of controller 3 by 1990 ms at least",
    ),
    "a controller's software": (
        lambda: controllers(node={"version": "1.3"}),
        "warning",
        "versions",
        "different software: 1.2 on 1, 2; 1.3 on 3",
    ),
    "a controller that brokers do not hear": (
        lambda: replace(
            controllers(),
            controllers=[
                ControllerAnswer(quorum().voters[2], None, "it is deaf; next: see", NOW_MS, NOW_MS)
            ],
        ),
        "warning",
        "controller 3",
        "it is deaf",
    ),
    "software": (
        lambda: one_of(answer(3, node=node(3, version="1.3"))),
        "warning",
        "versions",
        "different software: 1.2 on 1, 2; 1.3 on 3",
    ),
    "level": (
        lambda: picture(cluster=replace(picture().cluster, metadata_version=5)),
        "warning",
        "versions",
        "works at metadata.version 5, and all brokers know 6",
    ),
    "an address for clients from outside is missing": (
        lambda: picture(
            answers=[
                answer(1, broker=broker(1, external_host="b1.example.com", external_port=9094)),
                answer(2, broker=broker(2, external_host="b2.example.com", external_port=9094)),
                answer(3),
            ]
        ),
        "warning",
        "addresses",
        "broker 1, 2 have an address for clients from outside, and 3 not",
    ),
    "no quorum": (
        lambda: picture(quorum=None, quorum_error="no controller says; next: start them"),
        "critical",
        "controllers",
        "no controller says",
    ),
    "no majority": (
        lambda: picture(quorum=quorum(confirmed=False)),
        "critical",
        "controllers",
        "takes itself for the leader, and no majority",
    ),
    "no voter": (
        lambda: picture(
            answers=[
                *(answer(n) for n in (1, 2, 3)),
                answer(4, node=node(4, roles=("broker", "controller"))),
            ]
        ),
        "warning",
        "controller 4",
        "it does not vote",
    ),
    "lost voter": (
        lambda: picture(quorum=with_voter(is_unreachable=True)),
        "critical",
        "controller 3",
        "it does not answer the leader at host-3:10092",
    ),
    "wiped voter": (
        lambda: picture(quorum=with_voter(is_wiped=True)),
        "critical",
        "controller 3",
        "another metadata directory",
    ),
    "late voter": (
        lambda: picture(quorum=replace(quorum(), commit_index=2000, last_index=2000)),
        "warning",
        "controller 1",
        "it lacks 1900 entries",
    ),
    "two voters": (
        lambda: picture(quorum=replace(quorum(), voters=quorum().voters[:2])),
        "warning",
        "controllers",
        "two of them tolerate no loss",
    ),
    "out of sync": (
        partition,
        "warning",
        "partitions",
        "orders-0 has replicas that are not in sync; broker 3 acknowledges, and never has all",
    ),
    "under min ISR": (
        lambda: partition(isr=(1,), reasons=[(2, "offline")]),
        "critical",
        "partitions",
        "acks=all is refused; broker 2 is down or stopping",
    ),
    "offline": (
        lambda: partition(leader=-1, isr=(2,)),
        "critical",
        "partitions",
        "orders-0 is offline: nobody leads",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_with_its_next_step(name: str) -> None:
    made, severity, about, what = CASES[name]
    found = findings(made())
    fitting = [one for one in found if what in one.what and one.about == about]
    assert len(fitting) == 1, found
    assert fitting[0].severity == severity
    assert fitting[0].next
    assert list(complaints(f"{fitting[0].what} {fitting[0].next}")) == []
    if name != "late voter":  # Three of them are late there.
        assert len(found) == 1, found


def test_what_is_just_so_is_no_finding() -> None:
    fresh = answer(3, broker=broker(3, drained_since_ms=NOW_MS - DRAIN_FORGOTTEN_MS + 1))
    assert findings(one_of(fresh)) == []
    assert findings(one_of(answer(3, node=node(3, clock_ms=NOW_MS - 400)))) == []
    # Apart by no more than the answer was on its way.
    slow = answer(3, node=node(3, clock_ms=NOW_MS - 3000), sent_ms=NOW_MS - 4000)
    assert findings(one_of(slow)) == []
    all_local = [answer(n, resolved=("127.0.0.1", "::1")) for n in (1, 2, 3)]
    assert findings(picture(answers=all_local)) == []
    unknown = node(3, open_descriptors=-1, max_descriptors=-1, resident_bytes=-1)
    assert findings(one_of(answer(3, node=unknown))) == []


def test_many_partitions_are_one_finding_for_each_follower_and_reason() -> None:
    facts = [
        PartitionFacts(f"t-{n}", 1, (1, 2, 3), (1,), 1, [(2, "bootstrapping"), (3, reason)])
        for n, reason in enumerate(["stuck"] * 7 + ["damaged"])
    ]
    found = findings(picture(partitions=facts))
    assert [one.what.split(" replicas that are not in sync; ") for one in found] == [
        ["t-0, t-1, t-2 and 5 more have", "broker 2 copies what it lacks"],
        ["t-7 has", "the log on broker 3 is damaged, and is mended by itself"],
        ["t-0, t-1, t-2 and 4 more have", "broker 3 acknowledges nothing new"],
    ]


def test_the_worst_comes_first() -> None:
    third = answer(
        3,
        broker=broker(3, offline_replicas=1, drained_since_ms=1),
        node=node(3, codec_compiled=False, version="0.9"),
    )
    found = findings(one_of(third))
    severities = [one.severity for one in found]
    assert severities == sorted(severities)
    assert severities[0] is Severity.CRITICAL
    assert all(isinstance(one, Finding) for one in found)


def test_every_reason_that_leaders_give_is_explained() -> None:
    unknown = doctor_findings._explained(2, "unknown")
    for reason in ("slow", "stuck", "bootstrapping", "offline", "damaged"):
        assert doctor_findings._explained(2, reason) != unknown
