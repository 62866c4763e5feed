"""One run, from its plan to its verdict: the five phases of docs/internals/chaos.md."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from penstock.chaos import completeness
from penstock.chaos.checkers import Checker, Evidence, ReplicaRecords
from penstock.chaos.checkers.availability import objective_of
from penstock.chaos.checkers.registry import Settings, judge, left_out
from penstock.chaos.checkers.registry import common as all_common
from penstock.chaos.cluster import Capability, Cluster
from penstock.chaos.errors import ChaosError, ClusterError, NotHereError, PlanError
from penstock.chaos.evidence import ProcessSampler, crash_lines, read_replica, write_evidence
from penstock.chaos.fault_thread import FaultThread
from penstock.chaos.history import History, read_history
from penstock.chaos.judging import Judgement, write_judgement
from penstock.chaos.live import Gauge, Nobody, Onlooker
from penstock.chaos.nemeses import Nemesis, ScheduledFault
from penstock.chaos.nemeses.registry import (
    find_nemeses,
    find_nemesis,
    least_nodes,
    require,
    those_of,
)
from penstock.chaos.roles import AskedPicture
from penstock.chaos.run_plan import RunPlan
from penstock.chaos.schedule import schedule, write_schedule
from penstock.chaos.verdict import Anomaly, Valid, Verdict
from penstock.chaos.watermarks import WatermarkWatcher
from penstock.chaos.worker import WorkerSpec
from penstock.chaos.workers import WORKER_COMMAND, Workers
from penstock.chaos.workloads import ClientSpec, TunesCheckers, Workload
from penstock.chaos.workloads.registry import find_workload, require_judged
from penstock.client import AdminClient, OffsetSpec, PenstockError, TopicPartition

Common = Callable[[Evidence, Settings], Sequence[Checker]]
"""What makes the checkers that judge every run, of its evidence and its workload's settings."""

HISTORY_FILE: Final = "history.jsonl"
SCHEDULE_FILE: Final = "schedule.json"
FAULTS_FILE: Final = "faults.jsonl"
EVIDENCE_DIRECTORY: Final = "evidence"
_LOOK_S: Final = 0.5
_HEAL_S: Final = 60.0
"""So long the faults' thread has to heal what it holds: a node may take its time to stop."""
_AFTER_S: Final = 1.0
"""Load goes on for so long after the cluster has recovered, so that a report shows that it has."""
_IN_SYNC_S: Final = 30.0
_ADMIN_MS: Final = 20_000
_FINAL_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run; everything else is in its directory."""

    directory: Path
    judgement: Judgement
    interrupted: bool

    @property
    def valid(self) -> Valid:
        """The verdict."""
        return self.judgement.valid


class Runner:
    """Carries out one plan against one cluster, which it starts and stops. For one thread.

    ``stop`` is set by whoever wants it to end early: then what is under way is healed, and judged.
    """

    def __init__(
        self,
        plan: RunPlan,
        cluster: Cluster,
        directory: Path,
        *,
        faults: Sequence[ScheduledFault] | None = None,
        onlooker: Onlooker | None = None,
        stop: threading.Event | None = None,
        common: Common = all_common,
        worker_command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._worker_command: Final = worker_command
        self._plan: Final = plan
        self._cluster: Final = cluster
        self._directory: Final = directory
        self._onlooker: Final[Onlooker] = onlooker or Nobody()
        self._stop: Final = stop or threading.Event()
        self._workload: Final[Workload] = find_workload(plan.workload)
        self._faults: Final = plan_faults(plan) if faults is None else list(faults)
        self._nemeses: Final = _nemeses_of(self._faults)
        self._common: Final = common
        striking = _striking(self._faults)
        require(striking, cluster.capabilities, plan.backend)
        require_judged(self._workload, striking)
        self._gauge: Final = Gauge(plan.duration_s)
        self._figures: dict[str, Any] = {}
        self._own: list[Verdict] = []
        self._records: Sequence[Any] = ()
        self._epoch_ns = 0

    def run(self) -> Outcome:
        """The run. Raises ClusterError where it did not get as far as its load.

        Whatever happens, the cluster is stopped in the end.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._plan.write(self._directory)
        write_schedule(self._faults, self._directory / SCHEDULE_FILE)
        try:
            self._set_up()
            evidence, histories = self._under_load()
        finally:
            self._onlooker.phase("stop the nodes")
            self._cluster.stop()
        return self._judge(evidence, histories)

    def _set_up(self) -> None:
        self._onlooker.phase("start the nodes")
        self._cluster.start()
        try:
            with self._admin() as admin:
                self._workload.prepare(admin, self._plan.for_workload())
        except PenstockError as error:
            raise ClusterError(f"the topics could not be made: {error}") from error

    def _admin(self) -> AdminClient:
        return AdminClient(
            self._cluster.bootstrap, client_id="penstock-chaos", default_api_timeout_ms=_ADMIN_MS
        )

    # --- load, heal, final reads

    def _under_load(self) -> tuple[Evidence, list[Path]]:
        with ExitStack() as watching:
            workers = self._workers(is_final=False)
            try:
                self._onlooker.phase("load")
                self._epoch_ns = workers.begin()
                sampler = ProcessSampler(self._cluster, self._epoch_ns)
                watermarks = WatermarkWatcher(self._cluster.bootstrap, self._epoch_ns)
                for watcher in (sampler, watermarks):
                    watcher.start()
                    watching.callback(watcher.stop)
                faults = self._fault_thread()
                faults.start()
                recovered = self._load_and_heal(workers, faults)
            finally:
                workers.stop()
            histories = list(workers.histories)
            if recovered:
                histories += self._final_reads()
        self._records = faults.records
        return (
            Evidence(
                [held for one in faults.records if (held := one.evidence()) is not None],
                sampler.samples,
                self._replicas() if recovered else [],
                {},
                watermarks.seen,
            ),
            histories,
        )

    def _load_and_heal(self, workers: Workers, faults: FaultThread) -> bool:
        """Whether the cluster is whole again in the end. It is healed whatever happens."""
        try:
            self._wait(self._plan.duration_s, workers)
            if self._stop.is_set() and self._since_load_s() < self._plan.duration_s:
                self._figures["interrupted_after_s"] = round(self._since_load_s(), 1)
        finally:
            self._onlooker.phase("heal")
            recovered = self._heal(faults)
        if recovered:
            self._wait(self._since_load_s() + _AFTER_S, workers)
        return recovered

    def _fault_thread(self) -> FaultThread:
        return FaultThread(
            self._faults,
            self._nemeses,
            self._cluster,
            AskedPicture(self._cluster.bootstrap),
            seed=self._plan.seed,
            epoch_ns=self._epoch_ns,
            path=self._directory / FAULTS_FILE,
            on_change=self._gauge.fault,
        )

    def _since_load_s(self) -> float:
        return (time.monotonic_ns() - self._epoch_ns) / 1e9

    def _wait(self, until_s: float, workers: Workers) -> None:
        """Let the load go on. Returns early where somebody wants it to stop."""
        while (left_s := until_s - self._since_load_s()) > 0:
            if self._stop.wait(min(_LOOK_S, left_s)):
                return
            workers.check()
            self._onlooker.status(self._gauge.look("load", self._since_load_s()))

    def _heal(self, faults: FaultThread) -> bool:
        """Heal everything and wait until the cluster is whole; whether it is."""
        ended = faults.stop(_HEAL_S)
        began = time.monotonic()
        why = "" if ended else f"a fault was not healed within {_HEAL_S:.0f} s; "
        try:
            self._cluster.heal_all()
            self._cluster.wait_ready(self._plan.recovery_s)
        except ChaosError as error:
            why += str(error)
            self._own.append(
                Verdict(
                    "recovery",
                    Valid.FALSE,
                    1,
                    1,
                    [
                        Anomaly(
                            f"the cluster was not whole again after everything was healed: {why}"
                        )
                    ],
                )
            )
            return False
        recovery_ms = (time.monotonic() - began) * 1000
        self._figures["recovery_ms"] = round(recovery_ms)
        self._own.append(
            Verdict("recovery", Valid.TRUE, 1, figures={"recovery_ms": round(recovery_ms)})
        )
        return True

    def _final_reads(self) -> list[Path]:
        self._onlooker.phase("final reads")
        workers = self._workers(is_final=True)
        try:
            workers.begin(self._epoch_ns)
            if not workers.wait_finished(_FINAL_S):
                self._figures["final_reads"] = f"not complete after {_FINAL_S:.0f} s"
        finally:
            workers.stop()
        return workers.histories

    def _workers(self, *, is_final: bool) -> Workers:
        return Workers(
            self._specs(is_final=is_final),
            self._directory,
            (lambda _: None) if is_final else self._gauge.add,
            self._worker_command,
        )

    def _specs(self, *, is_final: bool) -> dict[int, WorkerSpec]:
        plan = self._plan.for_workload()
        clients = sorted(self._workload.clients(plan), key=lambda one: one.worker)
        if is_final:
            clients = [_renamed(one) for one in clients]
        return {
            number: WorkerSpec(
                self._plan.workload, self._cluster.bootstrap, plan, list(group), "", is_final
            )
            for number, group in groupby(clients, key=lambda one: one.worker)
        }

    # --- evidence and verdict

    def _replicas(self) -> list[ReplicaRecords]:
        """What each in-sync replica of each partition of clients' topics holds."""
        if Capability.FILES not in self._cluster.capabilities:
            return []
        self._onlooker.phase("read the replicas")
        deadline = time.monotonic() + _IN_SYNC_S
        try:
            with self._admin() as admin:
                while True:
                    topics = admin.list_topics()
                    behind = [
                        partition
                        for topic in topics
                        for partition in topic.partitions
                        if set(partition.isr) != set(partition.replicas)
                    ]
                    if not behind or time.monotonic() > deadline:
                        break
                    time.sleep(_LOOK_S)
                return self._read_replicas(admin, topics)
        except PenstockError as error:
            self._figures["replicas"] = f"not read: {error}"
            return []

    def _read_replicas(self, admin: AdminClient, topics: Sequence[Any]) -> list[ReplicaRecords]:
        found = []
        for topic in topics:
            wanted: dict[TopicPartition, OffsetSpec] = {
                TopicPartition(topic.name, one.partition): "latest" for one in topic.partitions
            }
            ends = admin.list_offsets(wanted)
            for one in topic.partitions:
                end = ends[TopicPartition(topic.name, one.partition)].offset
                for node in one.isr:
                    directory = self._cluster.data_directory(node)
                    found.append(read_replica(directory, topic.name, one.partition, node, end))
        return found

    def _judge(self, evidence: Evidence, histories: Sequence[Path]) -> Outcome:
        self._onlooker.phase("judge")
        logs = {}
        for node in self._cluster.nodes:
            path = self._cluster.log(node)
            if path is not None and path.exists():
                shutil.copyfile(path, self._directory / f"node-{node}.log")
                logs[node] = crash_lines(path)
        evidence = replace(evidence, logs=logs)
        write_evidence(evidence, self._directory / EVIDENCE_DIRECTORY)
        history = read_history(*histories)
        history.write(self._directory / HISTORY_FILE)
        self._figures[completeness.FIGURE] = completeness.seal(
            self._directory / HISTORY_FILE, history
        )
        for path in histories:
            path.unlink()
        judgement = conclude(
            self._plan,
            history,
            evidence,
            [*self._own, *self._of_faults()],
            self._figures,
            common=self._common,
        )
        write_judgement(judgement, self._directory)
        return Outcome(self._directory, judgement, self._stop.is_set())

    def _of_faults(self) -> list[Verdict]:
        """Whether faults were injected at all, where they were wanted."""
        wanted = [one for one in self._faults if one.fault.nemesis != "quiet"]
        began = [one for one in self._records if one.fault.nemesis != "quiet"]
        held = [one for one in began if one.held is not None]
        failed = [one for one in began if one.error]
        self._figures["faults"] = {"planned": len(wanted), "held": len(held), "failed": len(failed)}
        if held or not wanted:
            return []
        why = failed[0].error if failed else "the run ended before the first one"
        return [Verdict("faults", Valid.UNKNOWN, 0, reason=f"no fault was injected: {why}")]


def conclude(
    plan: RunPlan,
    history: History,
    evidence: Evidence,
    own: Sequence[Verdict],
    figures: Mapping[str, Any],
    *,
    common: Common = all_common,
) -> Judgement:
    """What the checkers of the workload, and the common ones, say of a history."""
    judges = find_workload(plan.workload).checkers(plan.for_workload())
    verdicts = judge(judges, history, evidence)
    not_judged = dict(left_out(evidence))
    for verdict in judge(common(evidence, _settings(plan)), history, evidence):
        # What had nothing to look at, such as a trend between faults that never left off, casts no
        # doubt on what the run was about.
        if verdict.valid is Valid.UNKNOWN and not verdict.looked_at:
            not_judged[verdict.checker] = verdict.reason
        else:
            verdicts.append(verdict)
    return Judgement([*own, *verdicts], {**figures, "not_judged": not_judged})


def checkers_of(plan: RunPlan, evidence: Evidence, common: Common = all_common) -> list[Checker]:
    """All that judge runs of a plan: the workload's, and the common ones."""
    own = find_workload(plan.workload).checkers(plan.for_workload())
    return [*own, *common(evidence, _settings(plan))]


def _settings(plan: RunPlan) -> Settings:
    workload = find_workload(plan.workload)
    told = Settings()
    if isinstance(workload, TunesCheckers):
        told = workload.settings(plan.for_workload())
    return replace(told, objective=objective_of(plan.objective) or told.objective)


def check_plan(plan: RunPlan) -> None:
    """Raise PlanError where it cannot be, as far as that is known without a cluster."""
    find_workload(plan.workload).clients(plan.for_workload())
    objective_of(plan.objective)
    faults = plan_faults(plan)
    if not plan.nemesis or plan.nemesis == "none":
        return
    for nemesis in find_nemeses(plan.nemesis, plan.backend):
        least = least_nodes(nemesis.name)
        if plan.nodes < least:
            raise NotHereError(
                f"the nemesis {nemesis.name} takes {least} nodes, and there "
                f"{'is' if plan.nodes == 1 else 'are'} {plan.nodes}; next: more --nodes, or leave "
                "it out"
            )
    if not faults and not plan.schedule:
        raise PlanError(
            f"no fault of {plan.nemesis} fits into {plan.duration_s:g} s with one every "
            f"{plan.interval_s:g} s; next: a smaller --interval or a longer --duration"
        )


def plan_faults(plan: RunPlan) -> list[ScheduledFault]:
    """The schedule that the plan's seed makes, of what its backend has."""
    nemeses = find_nemeses("" if plan.nemesis == "none" else plan.nemesis, plan.backend)
    return schedule(
        plan.seed,
        nemeses,
        plan.nodes,
        int(plan.duration_s * 1000),
        int(plan.interval_s * 1000),
    )


def needs_of(faults: Sequence[ScheduledFault]) -> frozenset[Capability]:
    """What a cluster must be able to do for these faults."""
    return frozenset().union(*(one.needs for one in _striking(faults)))


def _striking(faults: Sequence[ScheduledFault]) -> list[Nemesis]:
    """Each nemesis that carries out a part of them, once: of families those that were drawn."""
    return list({one.name: one for fault in faults for one in those_of(fault.fault)}.values())


def _nemeses_of(faults: Sequence[ScheduledFault]) -> dict[str, Nemesis]:
    return {name: find_nemesis(name) for name in {one.fault.nemesis for one in faults}}


def _renamed(spec: ClientSpec) -> ClientSpec:
    return replace(spec, process=f"{spec.process}/final")
