"""Who takes part in runs of each workload, and what its clients write down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.chaos.checkers.registry import common
from penstock.chaos.checkers.replicas import ReplicasIdentical
from penstock.chaos.errors import ClusterError, NotHereError, PlanError
from penstock.chaos.history import HistoryWriter
from penstock.chaos.nemeses.registry import find_nemesis
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import ClientSpec, Plan, Surroundings, TunesCheckers, TunesNodes
from penstock.chaos.workloads import compacted as compacted_module
from penstock.chaos.workloads.churn import next_change
from penstock.chaos.workloads.compacted import Compacted, delete_retention_ms, entry_of
from penstock.chaos.workloads.registry import WORKLOADS, find_workload, require_judged
from penstock.chaos.workloads.retention import BY_SIZE, BY_TIME, Retention
from penstock.client import AdminClient, ConsumerRecord, TopicPartition
from tests.unit.chaos.test_claims import Events

NEW = ("churn", "compacted", "register", "retention")


def plan(**options: Any) -> Plan:
    return Plan(7, 3, 40.0, 1_000.0, options)


@pytest.mark.parametrize("name", NEW)
def test_the_clients_are_a_function_of_the_plan(name: str) -> None:
    workload = WORKLOADS[name]
    specs = workload.clients(plan(workers=2))
    assert specs == workload.clients(plan(workers=2))
    assert len({spec.process for spec in specs}) == len(specs)
    assert {spec.worker for spec in specs} == {0, 1}
    for spec in specs:
        assert ClientSpec(**json.loads(json.dumps(asdict(spec)))) == spec
    more = workload.clients(plan(workers=1))
    assert {spec.worker for spec in more} == {0}
    for wrong in ({"colour": "red"}, {"workers": 0}, {"workers": "many"}):
        with pytest.raises(PlanError, match=r"next: "):
            workload.clients(plan(**wrong))


@pytest.mark.parametrize("name", NEW)
def test_every_client_can_be_made_and_everything_has_a_checker(name: str) -> None:
    workload = WORKLOADS[name]
    for spec in workload.clients(plan()):
        recorder = Recorder(cast(HistoryWriter, Events()), spec.process, 0)
        workload.client(Surroundings("127.0.0.1:1", plan(), spec, Random(1), recorder))
    assert workload.checkers(plan())


class Keeping:
    """Of an AdminClient what making topics needs, at nodes that outlive a run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def list_topics(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self.names]

    def create_topic(self, name: str, **_how: Any) -> None:
        self.names.append(name)


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"churn", "register"}))
def test_what_an_earlier_run_wrote_is_not_taken_for_this_ones(name: str) -> None:
    """On pods that run on a second run found duplicates, and records that nobody had written."""
    admin = Keeping()
    WORKLOADS[name].prepare(cast(AdminClient, admin), plan())
    assert admin.names
    with pytest.raises(ClusterError, match=r"an earlier run left .* next: `penstock topics delete"):
        WORKLOADS[name].prepare(cast(AdminClient, admin), plan())


def test_the_same_seed_changes_topics_in_the_same_way() -> None:
    drawn = [[next_change(Random(seed), 2, 0) for _ in range(20)] for seed in (3, 3)]
    assert drawn[0] == drawn[1]
    every = {next_change(Random(seed), 2, 0) for seed in range(50)}
    assert every == {"delete", "reassign", "add-partitions"}
    assert "add-partitions" not in {next_change(Random(seed), 2, 2) for seed in range(50)}


def test_common_checkers_know_what_is_compacted_and_what_expires() -> None:
    workload = Compacted()
    assert isinstance(workload, TunesNodes)
    assert isinstance(workload, TunesCheckers)
    assert workload.node_settings(plan())
    assert workload.settings(plan()).compacted == {"compacted"}
    assert Retention().settings(plan()).expiring == {BY_SIZE, BY_TIME}
    assert not isinstance(WORKLOADS["append"], TunesNodes | TunesCheckers)


@pytest.mark.parametrize("duration_s", [10.0, 600.0, 86_400.0])
def test_tombstones_outlive_the_run(duration_s: float) -> None:
    # Healing, recovery, final reads and judging come on top of the load.
    assert delete_retention_ms(duration_s) > (duration_s + 600) * 1000


def record(offset: int, key: str, number: str | None, value: bytes | None = b"v") -> ConsumerRecord:
    headers = () if number is None else (("number", number.encode()),)
    return ConsumerRecord("compacted", 0, offset, 0, key.encode(), value, headers, 0)


def test_an_entry_says_which_put_it_is() -> None:
    assert entry_of(record(4, "writer-1-3", "17")) == [4, "writer-1-3", 17]
    assert entry_of(record(5, "writer-1-3", "18", None)) == [5, "writer-1-3", 18]
    assert entry_of(record(6, "k", None)) == [6, "k", -1]
    assert entry_of(record(6, "k", "x")) == [6, "k", -1]


class FakeConsumer:
    """A log that grows while it is read: by ``more`` once its end was asked for."""

    log: Sequence[ConsumerRecord] = ()
    more: Sequence[ConsumerRecord] = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0
        self._log = list(self.log)
        self._ends = 0

    async def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Take them."""

    async def beginning_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        return dict.fromkeys(partitions, self._log[0].offset)

    async def end_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        self._ends += 1
        if self._ends == 2:
            self._log += self.more
        return dict.fromkeys(partitions, self._log[-1].offset + 1)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        self._at = offset

    async def position(self, partition: TopicPartition) -> int:
        return self._at

    async def poll(self, timeout_ms: float) -> list[ConsumerRecord]:
        found = [one for one in self._log if one.offset >= self._at][:2]
        self._at = found[-1].offset + 1
        return found

    async def close(self, timeout_ms: float) -> None:
        """Free it."""


def scanner(events: Events, lag_ms: int) -> Any:
    spec = ClientSpec("scanner-0", "scanner", 0, {"partitions": 1, "lag_ms": lag_ms})
    recorder = Recorder(cast(HistoryWriter, events), spec.process, 0)
    return Compacted().client(Surroundings("", plan(), spec, Random(1), recorder))


async def test_a_scan_goes_up_to_the_end_as_it_is_when_it_gets_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compacted_module, "AsyncConsumer", FakeConsumer)
    monkeypatch.setattr(FakeConsumer, "log", [record(n, "k", str(n)) for n in (3, 4, 8)])
    monkeypatch.setattr(FakeConsumer, "more", [record(n, "k", str(n)) for n in (9, 12)])
    events = Events()
    await scanner(events, 2_000).finish()
    assert events.outcomes == [("scan", "ok")]
    told = events.added[-1].value
    assert [entry[0] for entry in told["entries"]] == [3, 4, 8, 9, 12]
    assert told["end"] == 13


async def test_a_scan_that_took_longer_than_values_are_safe_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compacted_module, "AsyncConsumer", FakeConsumer)
    monkeypatch.setattr(FakeConsumer, "log", [record(3, "k", "3")])
    events = Events()
    assert not await scanner(events, 0)._scan(0, within_s=0.0)
    assert events.outcomes == [("scan", "info")]


def test_the_replicas_of_compacted_topics_are_not_compared() -> None:
    from penstock.chaos.checkers import Evidence, ReplicaRecords

    evidence = Evidence(
        replicas=[
            ReplicaRecords("compacted", 0, node, 0, 5, [(0, 4, digest)])
            for node, digest in ((1, b"a"), (2, b"b"))
        ]
    )
    judges = common(evidence, Compacted().settings(plan()))
    (its,) = [one for one in judges if isinstance(one, ReplicasIdentical)]
    assert its.check(cast(Any, None), evidence).found == 0


def test_what_nothing_is_promised_of_is_refused_before_the_run() -> None:
    clock, kill = find_nemesis("clock"), find_nemesis("kill")
    with pytest.raises(NotHereError, match=r"compacted cannot be judged under clock: .*; next: "):
        require_judged(find_workload("compacted"), [kill, clock])
    require_judged(find_workload("compacted"), [kill])
    require_judged(find_workload("retention"), [kill, clock])
