"""One run: a cluster, its clients, what goes wrong, and the verdict."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from google.protobuf import text_format

from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.transaction_values import LAST_EPOCH
from penstock.chaos.shrinking import OutOfTrialsError, smallest_failing
from penstock.chaos.simulator.chance import Chance
from penstock.chaos.simulator.checkers import Violation, check
from penstock.chaos.simulator.clients import EachPartition, Workload
from penstock.chaos.simulator.cluster import Cluster
from penstock.chaos.simulator.faults import (
    DAMAGED_LOG,
    Fault,
    draw_damaged_logs,
    draw_faults,
    draw_quiet_faults,
    draw_transaction_faults,
)
from penstock.chaos.simulator.final_reads import FinalReads
from penstock.chaos.simulator.history import noting
from penstock.chaos.simulator.judging import judge_recording
from penstock.chaos.simulator.pace import Pace
from penstock.chaos.simulator.plan import Plan, draw_plan
from penstock.chaos.simulator.recording import Recording
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.chaos.simulator.strikes import REPLICATION_FACTOR, SECOND_TOPIC, TOPIC, Strikes
from penstock.chaos.simulator.transactions.broker import TRANSACTIONS_TOPIC
from penstock.chaos.simulator.transactions.history import History
from penstock.chaos.simulator.transactions.observer import Observer
from penstock.chaos.simulator.transactions.positions import (
    OFFSETS_PARTITIONS,
    OFFSETS_TOPIC,
    OFFSETS_TOPIC_ID,
)
from penstock.chaos.simulator.transactions.scripts import ScriptPlace
from penstock.chaos.simulator.transactions.told import Told
from penstock.chaos.simulator.transactions.workload import TransactionalClients
from penstock.chaos.simulator.workload import NEVER_MS, ClientPlace
from penstock.chaos.verdict import Valid, Verdict, compose
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.transactional_ids import coordinating_key

FAULTS_UNTIL_MS: Final = 12_000
AFTER_QUIET_MS: Final = 3_000
"""For so long there is load again after a quiet time, before all faults are over."""
ASK_AGAIN_MS: Final = 500
RECOVERY_MS: Final = 30_000
STATE_PARTITIONS: Final = 2
"""Of the topic in which coordinators keep transactions."""
STATE_TOPIC_ID: Final = TopicId(b"transaction-logs")

FINAL_READS_MS: Final = 20_000
_COLLECTED_AFTER: Final = 50_000  # So many new objects.
_MOST_BROKEN: Final = 1000
"""Then a recorded run ends: what is broken by now is enough."""

PERSON_AFTER_MS: Final = 8_000
"""Until then logs that do not open have to be copied anew that another replica has all of."""


@dataclass(slots=True)
class Report:
    """How a run went. ``violation`` is None when every promise was kept."""

    seed: int
    plan: Plan
    faults: list[Fault]
    violation: str | None = None
    steps: int = 0
    virtual_ms: int = 0
    acknowledged: int = 0
    read: int = 0
    committed: int = 0
    entries: int = 0
    leaderships: int = 0
    losses: int = 0
    passed_over: int = 0
    of_transactions: Counter[str] = field(default_factory=Counter)
    verdicts: Sequence[Verdict] = ()  # Of the harness's checkers, where the run was recorded.
    story: list[str] = field(default_factory=list)  # What happened last.

    @property
    def replay(self) -> str:
        """The command that repeats the run; with --story it tells what happened."""
        what = " --transactions" if self.plan.transactions else ""
        what += f" --quiet-for {self.plan.quiet_ms // 1000}" if self.plan.quiet_ms else ""
        return f"python -m penstock.chaos.simulator --seed {self.seed}{what}"

    @property
    def flagged(self) -> Sequence[Verdict]:
        """What the harness's checkers found to be broken."""
        return [verdict for verdict in self.verdicts if verdict.valid is Valid.FALSE]

    @property
    def judged(self) -> Valid:
        """What those of the harness's checkers say together that had something to look at."""
        return compose(one for one in self.verdicts if one.looked_at or one.found)

    @property
    def totals(self) -> Counter[str]:
        """What happened, in figures, to be added up over many runs."""
        figures = {
            "seeds": 1,
            "steps": self.steps,
            "virtual seconds": self.virtual_ms // 1000,
            "batches acknowledged by all": self.acknowledged,
            "batches read": self.read,
            "records committed": self.committed,
            "metadata entries": self.entries,
            "leaderships": self.leaderships,
            "elections with allowed loss": self.losses,
            "of what an unharmed disk had": self.passed_over,
            "runs with a quiet time": int(self.plan.quiet_ms > 0),
            f"runs with flush.policy {self.plan.flush_policy}": 1,
            "runs with unclean elections": int(self.plan.unclean),
            "runs with too many producers": int(not self.plan.hands_over),
            "runs to the end of epochs": int(self.plan.last_epoch < LAST_EPOCH),
        }
        faults = Counter(f"fault: {fault.kind}" for fault in self.faults)
        return Counter(figures) + faults + self.of_transactions

    def __str__(self) -> str:
        return self.told(f"{self.replay} --story")

    def told(self, replay: str) -> str:
        """All of it for a person, with the command that repeats it."""
        verdict = "VIOLATION" if self.violation else "ok"
        summary = (
            f"seed {self.seed}: {verdict} after {self.virtual_ms} ms and {self.steps} steps; "
            f"{self.entries} metadata entries, {self.leaderships} leaderships, {self.committed} "
            f"records committed, {self.acknowledged} batches acknowledged by all, {self.read} read"
        )
        lines = [summary]
        if self.violation:
            lines += [f"  {self.violation}", f"  with {self.plan}"]
            lines += (
                f"  {verdict.checker} ({verdict.found}): {verdict.anomalies[0].what}"
                for verdict in self.flagged
            )
            lines += ["  what went wrong, and when:", *(f"  {fault}" for fault in self.faults)]
            lines.append(f"  replay: {replay}")
        return "\n".join(lines)


class Simulation:
    """A run of one seed.

    ``faults``: instead of those that the seed draws. ``only``: the seed draws faults of these
    kinds. ``often``: besides, it draws more of these. ``given``: fields of the Plan, instead of
    what the seed draws. ``recorded``: what clients did and were told is written down, and judged by
    the checkers of the chaos harness. Such a run goes on after a broken promise, so that they may
    see what clients see of it.
    """

    def __init__(
        self,
        seed: int,
        faults: Sequence[Fault] | None = None,
        *,
        only: Collection[str] | None = None,
        often: Collection[str] = (),
        given: Mapping[str, object] | None = None,
        recorded: bool = False,
    ) -> None:
        self.seed = seed
        self._rng = Chance(f"{seed}/cluster")
        damage = Chance(f"{seed}/damaged logs")
        quiet = Chance(f"{seed}/quiet")
        self.plan = draw_plan(self._rng, damage, quiet, only, given or {})
        chance = Chance(f"{seed}/faults")
        drawn = draw_faults(chance, self.plan.nodes, until_ms=FAULTS_UNTIL_MS, only=self.plan.kinds)
        if DAMAGED_LOG in self.plan.kinds:
            drawn += draw_damaged_logs(damage, self.plan.nodes, until_ms=FAULTS_UNTIL_MS)
            drawn.sort(key=lambda fault: fault.at_ms)
        if self.plan.transactions:
            drawn += draw_transaction_faults(
                Chance(f"{seed}/faults of transactions"),
                until_ms=FAULTS_UNTIL_MS,
                only=self.plan.kinds,
            )
            drawn.sort(key=lambda fault: fault.at_ms)
        if often:
            of_its_own = Chance(f"{seed}/faults of {', '.join(sorted(often))}")
            drawn += draw_faults(of_its_own, self.plan.nodes, until_ms=FAULTS_UNTIL_MS, only=often)
            drawn.sort(key=lambda fault: fault.at_ms)
        if self.plan.quiet_ms:
            drawn += draw_quiet_faults(
                quiet,
                self.plan.nodes,
                from_ms=FAULTS_UNTIL_MS,
                for_ms=self.plan.quiet_ms,
                only=self.plan.kinds,
            )
        self.faults = drawn if faults is None else list(faults)
        self.scheduler = Scheduler(Chance(f"{seed}/order"))
        self.cluster = Cluster(seed, self.plan, self.scheduler, self._on_entry)
        self.checkers = self.cluster.checkers
        self._strikes = Strikes(
            self.cluster,
            self.plan,
            self._rng,
            damage,
            end_producer=lambda: self._workload.end_one(self._rng),
            hold_up=lambda for_ms: self._workload.hold_up_one(self._rng, for_ms),
        )
        self.pace = Pace(self.scheduler, transactions=self.plan.transactions)
        self.history = History()
        self.recording = Recording(self.scheduler, kept=recorded)
        self._told = Told(self.recording)
        self._noted: list[Violation] = []  # Of a recorded run.
        self._workload: Workload = self._make_workload()
        self._faulty = True

    def _make_workload(self) -> Workload:
        producer_ids = count(1_000_000_000 if self.plan.transactions else 1)
        place = ClientPlace(
            scheduler=self.scheduler,
            network=self.cluster.network,
            rng=Chance(f"{self.seed}/clients"),
            checkers=self.checkers,
            recording=self.recording,
            brokers=self.plan.nodes,
            new_producer_id=lambda: next(producer_ids),
            pace=self.pace,
            patience_ms=self.plan.producer_expiration_ms // 2 or NEVER_MS,
        )
        if not self.plan.transactions:
            return EachPartition(place)
        scripts = self._script_place("scripts")
        observer = Observer(
            self.history, self.checkers.log_of, lambda key: key.topic_id == STATE_TOPIC_ID
        )
        return TransactionalClients(
            place,
            scripts,
            observer,
            TOPIC,
            timeout_ms=self.plan.timeout_ms,
            cast=self.plan.cast,
        )

    def _script_place(self, chance: str) -> ScriptPlace:
        return ScriptPlace(
            scheduler=self.scheduler,
            network=self.cluster.network,
            rng=Chance(f"{self.seed}/{chance}"),
            checkers=self.checkers,
            history=self.history,
            told=self._told,
            brokers=self.plan.nodes,
            coordinator_of=self._coordinator_of,
            topic_of=self._topic_of,
            pace=self.pace,
        )

    def _coordinator_of(self, transactional_id: str) -> TopicIdPartition:
        partition = partition_for_group(coordinating_key(transactional_id), STATE_PARTITIONS)
        return TopicIdPartition(STATE_TOPIC_ID, partition)

    def _topic_of(self, key: TopicIdPartition) -> str:
        if key.topic_id == OFFSETS_TOPIC_ID:
            return OFFSETS_TOPIC
        topic = self.cluster.metadata().topic(TOPIC)
        is_first = topic is not None and topic.topic_id == key.topic_id
        return TOPIC if is_first else SECOND_TOPIC

    # The run.

    def run(self) -> Report:
        """Run to the end, or to the first broken promise."""
        report = Report(self.seed, self.plan, self.faults)
        with _seldom_collected():
            self._run_whole(report)
        if self._noted:
            report.violation = str(self._noted[0])
        return report

    def _run_whole(self, report: Report) -> None:
        if self.recording.kept:
            with noting() as self._noted:
                self._attempt(self._run)
                self._sum_up(report)
                self._attempt(self._read_finally)
            self._judge(report)
        else:
            self._attempt(self._run)
            self._sum_up(report)

    def _attempt(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self._noted.append(_broken(error))

    def _sum_up(self, report: Report) -> None:
        report.of_transactions = self.history.totals()
        report.story = list(self.scheduler.story)
        report.steps = self.scheduler.steps
        report.virtual_ms = self.scheduler.now_ms
        report.acknowledged = self.checkers.acknowledged
        report.read = self.checkers.read
        report.committed = self.checkers.committed
        report.entries = len(self.cluster.quorum.entries)
        report.leaderships = self.checkers.leaderships
        report.losses = self.checkers.losses
        report.passed_over = self.checkers.passed_over

    def _judge(self, report: Report) -> None:
        report.verdicts = judge_recording(
            self.recording,
            without=self.checkers.given_up(),
            expiring=self.checkers.deleted_from(),
            transactions=self.plan.transactions,
        )
        for verdict in report.flagged[:1]:
            self._noted.append(Violation(f"{verdict.checker}: {verdict.anomalies[0].what}"))

    def _read_finally(self) -> None:
        internal = (STATE_TOPIC_ID, OFFSETS_TOPIC_ID)
        reads = FinalReads(
            self._script_place("final reads"),
            sorted(key for key in self.checkers.partitions if key.topic_id not in internal),
            transactional=self.plan.transactions,
        )

        def is_done() -> bool:
            self.cluster.touched.clear()
            return reads.is_done

        self._advance(self.scheduler.now_ms + FINAL_READS_MS, is_done)

    def _advance(self, end_ms: int, after_step: Callable[[], bool]) -> bool:
        """Let time pass, as ``Scheduler.run_until``. What a recorded run breaks is noted."""
        while True:
            try:
                return self.scheduler.run_until(end_ms, after_step)
            except Exception as error:
                if not self.recording.kept or len(self._noted) >= _MOST_BROKEN:
                    raise
                self._noted.append(_broken(error))

    def _run(self) -> None:
        for node_id in self.plan.nodes:
            self.cluster.start(node_id)
        self._until("the brokers are there", 20_000, self._all_unfenced)
        self._ask_for_topic()
        self._until("the topic is there", 5_000, self._all_host)
        for fault in self.faults:
            self.scheduler.after(fault.at_ms, partial(self._strike, fault))
        self._advance(self.scheduler.now_ms + FAULTS_UNTIL_MS, self._after_step)
        self._be_quiet()
        self._workload.judge()
        self._heal()
        self._until("everything is in order again", RECOVERY_MS, self._all_in_order)
        self.checkers.at_rest(self.cluster.hosted())
        self._workload.at_rest()

    def _be_quiet(self) -> None:
        if not self.plan.quiet_ms:
            return
        self.scheduler.note("it is quiet")
        self.pace.be_quiet(self.plan.quiet_ms)
        self._advance(self.scheduler.now_ms + self.plan.quiet_ms, self._after_step)
        self.scheduler.note("there is load again")
        self._advance(self.scheduler.now_ms + AFTER_QUIET_MS, self._after_step)

    def _strike(self, fault: Fault) -> None:
        if self._faulty:
            self._strikes.strike(fault)

    def _heal(self) -> None:
        self._faulty = False
        self.scheduler.note("all faults are over")
        self.cluster.network.calm()
        self.scheduler.held_until_ms.clear()
        if any(fault.kind == "move" for fault in self.faults):
            self._strikes.move_back()
        if any(fault.kind == "bit flip" for fault in self.faults):
            self._strikes.delete_what_is_lost()
        if any(fault.kind == DAMAGED_LOG for fault in self.faults):
            self.scheduler.after(PERSON_AFTER_MS, self._strikes.put_logs_right)
        for node in self.cluster.nodes.values():
            node.disk.hurry()
            node.disk.flush_fails = False
            self.cluster.start_later(node.node_id, self._rng.randint(0, 500))
        self._workload.stop()

    def _after_step(self) -> bool:
        touched = self.cluster.touched
        if touched:
            partitions = list(touched.values())
            touched.clear()
            self.checkers.after_step(partitions)
            self._workload.after_step(partitions)
        return False

    def _ask_for_topic(self) -> None:
        """As an operator does: again, where a broker was fenced for a moment or nobody led."""
        topics = {TOPIC: (self.plan.partitions, b"")}
        if self.plan.transactions:
            topics[TRANSACTIONS_TOPIC] = STATE_PARTITIONS, STATE_TOPIC_ID
            topics[OFFSETS_TOPIC] = OFFSETS_PARTITIONS, OFFSETS_TOPIC_ID
        missing = [name for name in topics if self.cluster.metadata().topic(name) is None]
        for name in missing:
            self._strikes.create_topic(name, *topics[name])
        if missing:
            self.scheduler.after(ASK_AGAIN_MS, self._ask_for_topic)

    def _until(self, what: str, patience_ms: int, condition: Callable[[], bool]) -> None:
        def reached() -> bool:
            self._after_step()
            # Conditions look at everything: not after each step.
            return self.scheduler.steps % 50 == 0 and condition()

        done = self._advance(self.scheduler.now_ms + patience_ms, reached)
        if not done and not condition():
            self._workload.overdue()  # That may say more.
        check(done or condition(), f"not within {patience_ms} ms: {what}; {self._state()}")

    def _on_entry(self, state: ClusterState, entry: cluster_pb2.Command) -> None:
        told = text_format.MessageToString(entry, as_one_line=True, print_unknown_fields=True)
        self.scheduler.note(f"entry {state.applied_index}: {told}")
        self.recording.topics_are(
            (TopicId(topic_id), topic.name) for topic_id, topic in state.topics.items()
        )
        self._workload.partitions_changed()

    # Conditions.

    def _all_unfenced(self) -> bool:
        brokers = self.cluster.metadata().brokers
        return len(brokers) == len(self.plan.nodes) and all(
            broker.usable for broker in brokers.values()
        )

    def _all_host(self) -> bool:
        partitions = self.checkers.partitions
        hosted = {(part.broker.node_id, part.key) for part in self.cluster.hosted()}
        wanted = {(node, key) for key, part in partitions.items() for node in part.replicas}
        return bool(partitions) and hosted == wanted

    def _all_in_order(self) -> bool:
        partitions = self.checkers.partitions.values()
        if not self._all_host() or not self._all_unfenced():
            return False
        if any(len(part.isr) < REPLICATION_FACTOR or part.target for part in partitions):
            return False
        if not self._workload.is_done():
            return False
        return self._all_up_to_date() and self._all_mended() and self._nothing_is_left_over()

    def _all_up_to_date(self) -> bool:
        ends = {key: self.checkers.log_of(key).end for key in self.checkers.partitions}
        return all(
            partition.log.log_end_offset
            == partition.replica.high_watermark
            == partition.log.durable_offset
            == ends[partition.key]
            for partition in self.cluster.hosted()
        ) and self._workload.is_at(ends)

    def _all_mended(self) -> bool:
        return all(partition.log.first_damage() is None for partition in self.cluster.hosted())

    def _nothing_is_left_over(self) -> bool:
        """Of partitions that were deleted or moved away, no disk has anything."""
        partitions = self.checkers.partitions
        return all(
            key in partitions and node.node_id in partitions[key].replicas
            for node in self.cluster.nodes.values()
            for key in node.disk.partitions()
        )

    def _state(self) -> str:
        parts = [str(part) for part in self.checkers.partitions.values()]
        for partition in self.cluster.hosted():
            replica, log = partition.replica, partition.log
            parts.append(
                f"{partition.key.partition} on {partition.broker.node_id}: {replica.role.value} "
                f"in epoch {replica.leader_epoch}, {replica.high_watermark} of "
                f"{log.durable_offset}/{log.log_end_offset}, isr {sorted(replica.isr)}"
            )
        return "; ".join([*parts, self._workload.state()])


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """A run makes many objects and few cycles: looking for those costs a twentieth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECTED_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _broken(error: Exception) -> Violation:
    """What a run is broken by, in words."""
    if isinstance(error, Violation):
        return error
    if isinstance(error, AssertionError):
        return Violation(f"an invariant of a core: {str(error) or repr(error)}")
    return Violation(f"a core raised {error!r}")


def shrink(report: Report, *, runs: int = 200) -> Report:
    """A run of the same seed that fails with fewer faults, if one is found in so many runs."""
    best, tries = report, 0
    given = {name: getattr(report.plan, name) for name in report.plan.__slots__}
    by_clients = bool(report.flagged)

    def fails(faults: Sequence[Fault]) -> bool:
        nonlocal best, tries
        if tries >= runs:
            raise OutOfTrialsError
        tries += 1
        run = Simulation(report.seed, faults, given=given, recorded=bool(report.verdicts))
        tried = run.run()
        fails = bool(tried.flagged) if by_clients else tried.violation is not None
        if fails and len(faults) < len(best.faults):
            best = tried
        return fails

    smallest_failing(report.faults, fails)
    return best
