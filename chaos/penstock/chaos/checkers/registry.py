"""All checkers by name, and which of them judge what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.chaos.checkers import Checker, Evidence
from penstock.chaos.checkers.availability import Availability, Objective
from penstock.chaos.checkers.churn import DeletedRecords, TopicIds
from penstock.chaos.checkers.commits import CommittedForward, GroupProcessed
from penstock.chaos.checkers.compacted import CompactedLast, CompactedPast
from penstock.chaos.checkers.crashes import Crashes
from penstock.chaos.checkers.cycles import CircularRead
from penstock.chaos.checkers.exactly_once import ProcessedOnce, TransferTotal
from penstock.chaos.checkers.groups import GroupComplete, GroupExclusive, ZombieCommit
from penstock.chaos.checkers.leaders import OneLeader, StaleEpoch, WatermarksForward
from penstock.chaos.checkers.leaks import Leaks
from penstock.chaos.checkers.lost import AcksLevels, LostWrite, UnseenWrite
from penstock.chaos.checkers.placed import Duplicate, InconsistentOffset, Reorder
from penstock.chaos.checkers.polls import PollOrder, SkippedPoll
from penstock.chaos.checkers.refused import DirectoryRefused, is_about_directories
from penstock.chaos.checkers.registers import LinearizableRegister
from penstock.chaos.checkers.replicas import ReplicasIdentical
from penstock.chaos.checkers.seeks import SeekHonoured
from penstock.chaos.checkers.transactions import (
    AbortedRead,
    PrecommittedRead,
    TornTransaction,
    TransactionOffsets,
    TransactionsEnd,
)
from penstock.chaos.checkers.written import ErrorHonesty, Phantom
from penstock.chaos.history import History
from penstock.chaos.verdict import Findings, Verdict

SUMMARIES: Final[Mapping[type[Checker], str]] = {
    LostWrite: "what all replicas acknowledged is gone, by its place in the partition",
    UnseenWrite: "what was acknowledged is passed over by the final reads",
    AcksLevels: "what acks=1 acknowledged is gone though nothing failed; figures of acks=0 and 1",
    Duplicate: "a record is at two offsets, or is given twice to one reader",
    InconsistentOffset: "an offset has two records, or a record was acknowledged elsewhere",
    Reorder: "a producer's records are out of their order",
    Phantom: "a record is read that nobody had written",
    ErrorHonesty: "a record is read whose append had failed",
    PollOrder: "a reader goes back or jumps without a seek",
    SkippedPoll: "a reader passes over a record that is there",
    SeekHonoured: "a seek leads elsewhere than to what it asked for",
    GroupExclusive: "two members have one partition in one generation",
    GroupComplete: "a partition of a group is left out",
    ZombieCommit: "a member commits for a partition that is another's by now",
    CommittedForward: "a committed offset goes back, or comes from nowhere",
    GroupProcessed: "a group has committed past a record that no member was given",
    AbortedRead: "a record of a transaction that is not committed is read (G1a)",
    PrecommittedRead: "a record of a transaction is read before its commit",
    TornTransaction: "a part of a transaction is read, and the rest never",
    TransactionsEnd: "a transaction does not end, and withholds what follows",
    TransactionOffsets: "a transaction's offsets are not committed with it",
    CircularRead: "transactions have read from each other in a circle (G1c)",
    ProcessedOnce: "committed transactions have read a record twice, or never",
    TransferTotal: "money is made or lost between accounts",
    LinearizableRegister: "a register's operations have no order that explains them",
    TopicIds: "a topic id comes back, or a topic is there twice",
    DeletedRecords: "a deleted topic's records are in the one that came after it",
    CompactedLast: "compaction has not kept the last value of a key",
    CompactedPast: "a key has an older value again, or one that nobody put",
    ReplicasIdentical: "replicas differ below the high watermark",
    WatermarksForward: "a high watermark or a log start offset goes back",
    OneLeader: "a leader epoch has two leaders",
    StaleEpoch: "a node leads in an older epoch than it knows",
    Availability: "for how long nothing succeeded, against the objective",
    Leaks: "a process takes more and more memory, descriptors or threads",
    Crashes: "a node's log tells of a crash or a broken assertion",
    DirectoryRefused: "a node runs in an empty directory, or in another node's",
}

CHECKERS: Final[Mapping[str, type[Checker]]] = {made.name: made for made in SUMMARIES}
"""By name."""


def definition(name: str) -> str:
    """What the checker's anomaly is exactly, in one paragraph or several."""
    return "\n".join(line.strip() for line in (CHECKERS[name].__doc__ or "").splitlines())


@dataclass(frozen=True, slots=True)
class Settings:
    """What checkers must know of a run that neither its history nor its evidence tells."""

    expiring: frozenset[str] = frozenset()
    """Topics with retention."""
    compacted: frozenset[str] = frozenset()
    """Topics that are compacted, beside those of the coordinators."""
    unclean: bool = False
    """Whether leaders that were not in sync may be elected."""
    objective: Objective | None = None
    """Of availability."""
    expected: Sequence[str] = ()
    """Parts of logs' lines that tell of a crash which a fault is meant to bring about."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of other checkers by the name of the argument: ``limit_ms``, ``budget`` ..."""


def appends(settings: Settings = Settings()) -> list[Checker]:
    """Of appends and what is read of them."""
    expiring = settings.expiring
    return [
        LostWrite(expiring=expiring),
        UnseenWrite(),
        Duplicate(),
        InconsistentOffset(),
        Reorder(),
        Phantom(),
        ErrorHonesty(),
        PollOrder(),
        SkippedPoll(expiring=expiring),
    ]


def groups(settings: Settings = Settings()) -> list[Checker]:
    """Of groups that commit what they have processed."""
    return [
        GroupExclusive(),
        GroupComplete(**_some(settings.limits, "limit_ms")),
        ZombieCommit(),
        CommittedForward(),
        GroupProcessed(**_some(settings.limits, "from_earliest")),
    ]


def transactional() -> list[Checker]:
    """Of transactions that write."""
    return [AbortedRead(), PrecommittedRead(), TornTransaction(), TransactionsEnd()]


def compacted() -> list[Checker]:
    """Of compacted topics."""
    return [CompactedLast(), CompactedPast()]


def registers(settings: Settings = Settings()) -> list[Checker]:
    """Of registers."""
    return [LinearizableRegister(**_some(settings.limits, "budget"))]


def churn() -> list[Checker]:
    """Of topics that come and go."""
    return [TopicIds(), DeletedRecords()]


def _some(limits: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: limits[name] for name in names if name in limits}


def common(evidence: Evidence, settings: Settings = Settings()) -> list[Checker]:
    """What judges every run: the cluster itself, as far as evidence of it was gathered."""
    out = left_out(evidence)
    return [
        checker
        for checker in (
            ReplicasIdentical(
                is_compacted=lambda topic: topic.startswith("__") or topic in settings.compacted
            ),
            WatermarksForward(unclean=settings.unclean),
            OneLeader(),
            StaleEpoch(),
            Availability(settings.objective),
            Leaks(**_some(settings.limits, "warm_up_s", "settle_s", "least_s")),
            Crashes(expected=settings.expected),
            DirectoryRefused(),
        )
        if checker.name not in out
    ]


_LEAST_SAMPLED_T: Final = 120_000_000_000


def left_out(evidence: Evidence) -> Mapping[str, str]:
    """The common checkers that do not judge a run, and why: to be told in its report."""
    sampled = [sample.t for sample in evidence.samples]
    reasons = {
        ReplicasIdentical.name: "" if evidence.replicas else "no replica's records were gathered",
        Crashes.name: "" if evidence.logs else "no node's log was gathered",
        DirectoryRefused.name: ""
        if is_about_directories(evidence)
        else "no node was started on a wrong directory",
        Leaks.name: ""
        if sampled and max(sampled) - min(sampled) >= _LEAST_SAMPLED_T
        else "processes were not sampled for two minutes, in which a trend may show",
    }
    for checker in (WatermarksForward, OneLeader, StaleEpoch):
        reasons[checker.name] = "" if evidence.watermarks else "no broker was asked"
    return {name: reason for name, reason in reasons.items() if reason}


def applicable(
    history: History, evidence: Evidence, settings: Settings = Settings()
) -> list[Checker]:
    """All that have something to say of a stored history, of which the workload is not known."""
    return [*_of_history(history, settings), *common(evidence, settings)]


def _of_history(history: History, settings: Settings) -> Iterator[Checker]:
    did = history.kinds
    rules: Sequence[tuple[bool, Callable[[], Iterable[Checker]]]] = (
        ({"append", "poll"} <= did, lambda: appends(settings)),
        (_has_weak_appends(history), lambda: [AcksLevels()]),
        (
            any(one.invoked.phase == "" for one in history.of("seek")),
            lambda: [SeekHonoured(expiring=settings.expiring)],
        ),
        ("assigned" in did, lambda: groups(settings)),
        ("commit" in did, transactional),
        ("send-offsets" in did, lambda: [TransactionOffsets()]),
        ("read-from" in did, lambda: [CircularRead()]),
        ({"read-from", "send-offsets"} <= did, lambda: [ProcessedOnce()]),
        ("transfer" in did, lambda: [TransferTotal()]),
        (bool({"write", "cas"} & did), lambda: registers(settings)),
        ("create" in did, lambda: [TopicIds()]),
        ("delete" in did, lambda: [DeletedRecords()]),
        ("scan" in did, compacted),
    )
    for is_about, make in rules:
        if is_about:
            yield from make()


def _has_weak_appends(history: History) -> bool:
    return any(
        str(one.invoked.value.get("acks", "all")) not in {"all", "-1"}
        for one in history.of("append")
    )


def judge(checkers: Iterable[Checker], history: History, evidence: Evidence) -> list[Verdict]:
    """All verdicts. A checker that breaks, at something that no history should hold, says unknown:
    it takes nothing from what the others find.
    """
    return [_judge(checker, history, evidence) for checker in checkers]


def _judge(checker: Checker, history: History, evidence: Evidence) -> Verdict:
    try:
        return checker.check(history, evidence)
    except Exception as error:  # Whatever it is, the run is not judged by it.
        findings = Findings(checker.name)
        findings.doubt(f"the checker broke: {type(error).__name__}: {error}")
        return findings.verdict("")
