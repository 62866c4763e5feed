"""What is judged of a cluster beside its clients' history."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from penstock.chaos.checkers import Evidence, HeldFault, ReplicaRecords, Sample
from penstock.chaos.checkers.availability import Availability, Objective, percentile
from penstock.chaos.checkers.crashes import Crashes, tells_of_a_crash
from penstock.chaos.checkers.leaders import OneLeader, StaleEpoch, WatermarksForward
from penstock.chaos.checkers.leaks import Leaks, kendall, theil_slope
from penstock.chaos.checkers.refused import DirectoryRefused
from penstock.chaos.checkers.replicas import ReplicasIdentical
from tests.unit.chaos.histories import FAIL, MS, OK, Script, is_false, is_true, is_unknown

S = 1000 * MS
NO_CLIENTS = Script()


def replica(node: int, *batches: tuple[int, int, bytes], start: int = 0, **more: Any):
    end = more.get("high_watermark", batches[-1][1] + 1 if batches else 0)
    return ReplicaRecords(more.get("topic", "orders"), 0, node, start, end, batches)


A, B, C = (0, 4, b"a"), (5, 9, b"b"), (10, 14, b"c")


def test_replicas_that_hold_the_same_pass() -> None:
    replicas = [replica(node, A, B, C) for node in (1, 2, 3)]
    replicas += [replica(1, A, topic="__offsets"), replica(2, C, topic="__offsets")]
    evidence = Evidence(replicas=replicas)
    assert is_true(ReplicasIdentical(), NO_CLIENTS, evidence).looked_at == 3


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        (
            [A, (5, 9, b"x"), C],
            "orders-0: the replica of node 2 differs from the others at offset 5",
        ),
        ([A, C], "differs from the others at offset 5"),
        ([A, (5, 7, b"b"), (8, 9, b"b"), C], "differs from the others at offset 5"),
    ],
)
def test_replicas_that_hold_other_bytes_differ(batches, says) -> None:
    replicas = [replica(1, A, B, C), replica(2, *batches), replica(3, A, B, C)]
    is_false(ReplicasIdentical(), NO_CLIENTS, says, evidence=Evidence(replicas=replicas))
    everything = ReplicasIdentical(is_compacted=lambda topic: topic == "orders")
    nothing = "of no partition two replicas' records were gathered"
    is_unknown(everything, NO_CLIENTS, nothing, Evidence(replicas=replicas))
    is_unknown(ReplicasIdentical(), NO_CLIENTS, nothing, Evidence(replicas=replicas[:1]))


def test_replicas_are_compared_where_all_of_them_have_records() -> None:
    replicas = [
        replica(1, A, B, C),
        replica(2, B, C, start=5),
        replica(3, A, B, (10, 14, b"later"), high_watermark=12),
    ]
    verdict = is_true(ReplicasIdentical(), NO_CLIENTS, Evidence(replicas=replicas))
    assert verdict.looked_at == 1


def said(t: int, node: int, epoch: int, high: int, *, start: int = 0, leads: bool = True):
    return {
        "t": t,
        "node": node,
        "topic": "orders",
        "partition": 0,
        "leader_epoch": epoch,
        "high_watermark": high,
        "log_start_offset": start,
        "is_leader": leads,
    }


# Node 1 leads, and dies; node 2 knows of less at first.
SAID = (
    said(1, 1, 4, 10),
    said(2, 2, 4, 8, leads=False),
    said(3, 1, 4, 20, start=2),
    said(5, 2, 5, 18, start=1),
    said(6, 2, 5, 30, start=2),
    said(7, 1, 5, 25, leads=False),
)


@pytest.mark.parametrize("checker", [WatermarksForward(), OneLeader(), StaleEpoch()])
def test_a_topic_made_anew_begins_anew(checker) -> None:
    lives = [
        {**said(1, 1, 4, 10), "topic_id": "first"},
        {**said(2, 2, 0, 3), "topic_id": "second"},
        {**said(3, 1, 0, 1), "topic_id": "third"},
    ]
    is_true(checker, NO_CLIENTS, Evidence(watermarks=lives))


@pytest.mark.parametrize("checker", [WatermarksForward(), OneLeader(), StaleEpoch()])
def test_leaders_that_follow_each_other_pass(checker) -> None:
    is_true(checker, NO_CLIENTS, Evidence(watermarks=SAID))
    is_unknown(checker, NO_CLIENTS, "no broker was asked for its high watermarks")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (said(8, 2, 5, 29, start=2), "the high watermark of node 2 in leader epoch 5 went back"),
        (said(8, 2, 5, 30, start=1), "the log start offset of node 2 in leader epoch 5 went back"),
        (said(8, 1, 6, 25, start=2), "after healing the high watermark is 25; it has been 30"),
    ],
)
def test_watermarks_only_go_forward(more, says) -> None:
    is_false(WatermarksForward(), NO_CLIENTS, says, evidence=Evidence(watermarks=[*SAID, more]))


def test_an_unclean_leader_may_have_less() -> None:
    evidence = Evidence(watermarks=[*SAID, said(8, 1, 6, 25, start=2)])
    verdict = is_true(WatermarksForward(unclean=True), NO_CLIENTS, evidence)
    assert verdict.figures["lost_high_watermarks"] == 1
    still_struck = HeldFault("kill", "kill", 7, 8, 9, [2])
    is_true(
        WatermarksForward(), NO_CLIENTS, Evidence([still_struck], watermarks=evidence.watermarks)
    )


def test_an_epoch_has_one_leader() -> None:
    evidence = Evidence(watermarks=[*SAID, said(8, 3, 5, 30), said(9, 3, 5, 30)])
    says = "orders-0: both node 2 and node 3 lead it in leader epoch 5"
    is_false(OneLeader(), NO_CLIENTS, says, evidence=evidence)


def test_a_node_does_not_lead_in_an_epoch_older_than_it_knows() -> None:
    evidence = Evidence(watermarks=[*SAID, said(8, 1, 4, 20)])
    says = "node 1 leads it in leader epoch 4, though it knew of 5"
    is_false(StaleEpoch(), NO_CLIENTS, says, evidence=evidence)
    following = Evidence(watermarks=[*SAID, said(8, 1, 4, 20, leads=False)])
    is_true(StaleEpoch(), NO_CLIENTS, following)


def load(*silences: tuple[int, int], until: int = 20_000, every: int = 10) -> Script:
    """Appends one after the other; in the silences (milliseconds) they come to nothing."""
    script = Script()
    number = 0
    while script.t < until * MS:
        script.invoke("p", "append", asked := {
            "topic": "orders", "partition": 0, "producer": "p", "first": number, "count": 1,
        })  # fmt: skip
        silent = [end for start, end in silences if start <= script.t // MS < end]
        script.t = max(script.t + every * MS, *(end * MS for end in silent), 0)
        answer = None if silent else {**asked, "runs": [[number, 1, number]]}
        script.complete("p", "append", answer, type_=FAIL if silent else OK)
        number += 1
    return script


def kill(at_ms: int, node: int = 1) -> HeldFault:
    return HeldFault("kill", "kill", at_ms * MS, (at_ms + 10) * MS, (at_ms + 1000) * MS, [node])


def test_windows_are_told_by_fault() -> None:
    script = load((5_000, 5_800), (12_000, 14_000))
    kills = [kill(4_990), kill(11_900), kill(18_900)]
    asked = said(1, 1, 1, 0)
    evidence = Evidence(faults=kills, watermarks=[asked, said(17_000 * MS, 2, 2, 0)])
    verdict = is_true(Availability(), script, evidence)
    assert [round(one["ms"], -2) for one in verdict.figures["windows"]] == [2000, 800]
    assert verdict.figures["leader_kills"]["count"] == 2, "the last one led nothing"
    assert round(verdict.figures["leader_kills"]["p50_ms"], -2) == 800
    assert [bool(one["longest"]) for one in verdict.figures["by_fault"]] == [True, True, False]


def test_an_objective_is_kept_or_not() -> None:
    script = load((5_000, 5_800), (12_000, 14_000))
    evidence = Evidence(faults=[kill(4_990), kill(11_900)])
    kept = Objective(window_ms=2_500, kill_p50_ms=1_000, kill_p99_ms=3_000)
    is_true(Availability(kept), script, evidence)
    broken = Objective(window_ms=1_500, kill_p50_ms=500, kill_p99_ms=3_000)
    says = ("orders-0: nothing succeeded for 20", "the 50th percentile of 2 leader kills is 8")
    is_false(Availability(broken), script, *says, evidence=evidence)
    is_unknown(Availability(kept), script, "no leader was killed", Evidence())
    is_unknown(Availability(), Script(), "no write succeeded")


def test_what_nobody_asks_for_is_not_unavailable() -> None:
    script = Script()
    for number in range(3):
        script.append("p", number, 1, number)
        script.t += 10 * S
    script.invoke("gone", "append", {
        "topic": "orders", "partition": 0, "producer": "gone", "first": 0, "count": 1,
    })  # fmt: skip
    script.t += 10 * S
    script.append("p", 3, 1, 3)
    verdict = is_true(Availability(), script)
    assert [round(one["ms"], -3) for one in verdict.figures["windows"]] == [10_000]
    script.do("w", "write", {"register": "x", "value": 1})
    is_true(Availability(), script)


def test_a_partition_that_never_comes_back_is_unavailable_to_the_end() -> None:
    script = load(until=2_000)
    script.append("p", 5000, 1, None, type_=FAIL)
    script.t += 3 * S
    script.append("p", 5001, 1, None, type_=FAIL)
    verdict = is_false(Availability(Objective(window_ms=1000)), script, "nothing succeeded for 30")
    assert not verdict.anomalies[0].records[0]["ended"]


def test_percentiles_are_by_nearest_rank() -> None:
    assert [percentile([4, 1, 3, 2], share) for share in (1, 50, 51, 99)] == [1, 2, 3, 4]


def samples(memory, descriptors=lambda s: 50, *, seconds: int = 300, pid: int = 7) -> list[Sample]:
    return [Sample(s * S, 1, pid, int(memory(s)), int(descriptors(s)), 20) for s in range(seconds)]


def test_what_goes_up_and_down_is_no_leak() -> None:
    random = Random(1)
    noisy = samples(lambda s: (200 << 20) + random.randrange(50 << 20))
    is_true(Leaks(), NO_CLIENTS, Evidence(samples=noisy))
    # Caches fill, and are full.
    filled = samples(lambda s: (100 << 20) + min(s, 140) * (1 << 20))
    is_true(Leaks(), NO_CLIENTS, Evidence(samples=filled))
    # A new process begins anew.
    both = samples(lambda s: 100 << 20) + samples(lambda s: 300 << 20, pid=8)
    is_true(Leaks(), NO_CLIENTS, Evidence(samples=both))
    # What grows while a fault holds is the fault's.
    struck = HeldFault("disk", "disk", 40 * S, 41 * S, 100 * S, [1])
    held = samples(lambda s: (100 << 20) + (s << 21 if 40 <= s <= 100 else 0))
    is_true(Leaks(), NO_CLIENTS, Evidence([struck], held))


def test_what_only_goes_up_is_a_leak() -> None:
    random = Random(1)
    leaking = samples(lambda s: (100 << 20) + s * (1 << 19) + random.randrange(20 << 20))
    says = "node 1, process 7: memory bytes grow by"
    is_false(Leaks(), NO_CLIENTS, says, evidence=Evidence(samples=leaking))
    leaking = samples(lambda s: 100 << 20, lambda s: 50 + s // 5)
    is_false(Leaks(), NO_CLIENTS, "descriptors grow by 5", evidence=Evidence(samples=leaking))


def test_too_few_samples_say_nothing() -> None:
    few = samples(lambda s: s << 24, seconds=80)
    is_unknown(Leaks(), NO_CLIENTS, "no process was sampled for 60 s", Evidence(samples=few))


def test_trends_are_robust() -> None:
    line = [(t, 3.0 * t) for t in range(30)]
    assert theil_slope([*line, (30, 1e9)]) == 3.0
    assert kendall(line) > 6
    assert kendall([(t, 1.0) for t in range(30)]) == 0
    assert kendall([(t, float(-t)) for t in range(30)]) < -6


def test_crashes_in_logs() -> None:
    calm = {1: [], 2: ['{"level": "info", "event": "started"}']}
    is_true(Crashes(), NO_CLIENTS, Evidence(logs=calm))
    lines = ["Traceback (most recent call last):", "python: x.c:3: f: Assertion `a' failed."]
    says = ("node 1: Traceback", "node 1: python: x.c:3")
    is_false(Crashes(), NO_CLIENTS, *says, evidence=Evidence(logs={1: lines}))
    is_true(Crashes(expected=["Traceback", "x.c"]), NO_CLIENTS, Evidence(logs={1: lines}))
    is_unknown(Crashes(), NO_CLIENTS, "no node's log was gathered", Evidence())
    assert not tells_of_a_crash("Killed")


def ended(how: str, node: int = 1) -> str:
    return f"line 9: penstock.chaos: node {node} (pid 7) ended by itself: {how}"


def may_end(reason: str, node: int = 1) -> HeldFault:
    return HeldFault("disk", "failing-disk", 0, 1, 2, [node], {"may_end": reason})


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("disk", "exit status 1"),
        ("directory", "exit status 2"),
        ("memory", "killed by SIGABRT"),
    ],
)
def test_an_end_that_is_documented_for_a_fault_is_no_crash(reason: str, how: str) -> None:
    def judged(lines: list[str], *faults: HeldFault) -> Evidence:
        return Evidence(faults, logs={1: lines})

    once, is_crash = [ended(how)], f"node 1: {ended(how)}"
    is_false(Crashes(), NO_CLIENTS, is_crash, evidence=judged(once))
    is_true(Crashes(), NO_CLIENTS, judged(once, may_end(reason)))
    is_false(Crashes(), NO_CLIENTS, is_crash, evidence=judged(once, may_end(reason, node=2)))
    twice = judged([*once, *once], may_end(reason))
    is_false(Crashes(), NO_CLIENTS, is_crash, evidence=twice)
    is_true(Crashes(), NO_CLIENTS, judged([*once, *once], may_end(reason), may_end(reason)))
    others = judged(["Traceback (most recent call last) ... ValueError: 7"], may_end(reason))
    is_false(Crashes(), NO_CLIENTS, "node 1: Traceback", evidence=others)


def test_only_the_end_that_is_documented_is_none() -> None:
    for reason, how in (
        ("disk", "killed by SIGSEGV"),
        ("disk", "exit status 2"),
        ("directory", "exit status 1"),
        ("another", "exit status 1"),
    ):
        evidence = Evidence([may_end(reason)], logs={1: [ended(how)]})
        is_false(Crashes(), NO_CLIENTS, f"node 1: {ended(how)}", evidence=evidence)


def test_a_node_without_memory_may_say_so() -> None:
    lines = ["line 3: x Traceback (most recent call last) ... MemoryError"]
    says = "node 1: line 3: x Traceback"
    is_true(Crashes(), NO_CLIENTS, Evidence([may_end("memory")], logs={1: lines}))
    is_false(Crashes(), NO_CLIENTS, says, evidence=Evidence([may_end("disk")], logs={1: lines}))


def test_wrong_directories_are_refused() -> None:
    def on_wrong(refused: list[int]) -> Evidence:
        details = {"refused": refused}
        return Evidence([HeldFault("disk", "swapped-directories", 0, 1, 2, [1, 2], details)])

    is_true(DirectoryRefused(), NO_CLIENTS, on_wrong([1, 2]))
    is_false(
        DirectoryRefused(),
        NO_CLIENTS,
        "node 2 runs in a directory that it should refuse",
        evidence=on_wrong([1]),
    )
    is_unknown(DirectoryRefused(), NO_CLIENTS, "no node was started on a wrong", Evidence())
