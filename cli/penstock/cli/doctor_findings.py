"""What is wrong with a cluster and what to do about it: pure functions of what was found out."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Final

from penstock.cli.output import format_bytes
from penstock.cli.quorum_table import leader_doubt
from penstock.wire.transport import format_address
from penstock.wire.wording import SHOWN, counted, some

if TYPE_CHECKING:
    from penstock.client.descriptions import (
        BrokerDescription,
        ClusterDescription,
        DirectoryDescription,
        NodeDescription,
        QuorumDescription,
        QuorumVoter,
    )

CLOCKS_APART_MS: Final = 500
LITTLE_FREE: Final = 0.15
VERY_LITTLE_FREE: Final = 0.05
SLOW_FSYNC_US: Final = 100_000
MANY_DESCRIPTORS: Final = 0.8
VERY_MANY_DESCRIPTORS: Final = 0.95
VOTER_BEHIND_ENTRIES: Final = 1_000
DRAIN_FORGOTTEN_MS: Final = 600_000
_MS_A_MINUTE: Final = 60_000
_LESS_OF_TOPICS: Final = (
    "shorten retention.ms or retention.bytes of large topics, move partitions away "
    "(`penstock partitions reassign`), or enlarge the disk"
)


class Severity(StrEnum):
    """Critical: something fails or is at risk now. A warning: it will be, or costs needlessly."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to act on: ``about`` whom it is, ``what`` is so, and what to do next."""

    severity: Severity
    about: str
    what: str
    next: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking a broker at its advertised address.

    ``resolved`` are the addresses that the host stands for, or ``resolve_error`` why there are
    none. ``sent_ms`` and ``received_ms`` are by the clock of who asked, in milliseconds since 1970.
    """

    broker: BrokerDescription
    resolved: tuple[str, ...]
    resolve_error: str
    node: NodeDescription | None
    error: str
    sent_ms: int
    received_ms: int

    @property
    def address(self) -> str:
        """As the broker advertises it."""
        return format_address(self.broker.host, self.broker.port)

    @property
    def setting(self) -> str:
        """The setting that this address is of."""
        broker = self.broker
        is_external = (broker.host, broker.port) == (broker.external_host, broker.external_port)
        return "external.advertised" if is_external else "broker.advertised"

    @property
    def node_id(self) -> int:
        """The broker's node id."""
        return self.broker.node_id

    @property
    def about(self) -> str:
        """The broker, for a person."""
        return f"broker {self.node_id}"


@dataclass(frozen=True, slots=True)
class ControllerAnswer:
    """What came of asking a controller that is no broker, through one; else as ``Answer``."""

    voter: QuorumVoter
    node: NodeDescription | None
    error: str
    sent_ms: int
    received_ms: int

    @property
    def address(self) -> str:
        """As the quorum has it."""
        return format_address(self.voter.host, self.voter.port)

    @property
    def node_id(self) -> int:
        """The controller's node id."""
        return self.voter.node_id

    @property
    def about(self) -> str:
        """The controller, for a person."""
        return f"controller {self.node_id}"


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """A partition with trouble in view; ``reasons`` say of each follower why it is out of sync."""

    name: str
    leader: int
    replicas: Sequence[int]
    isr: Sequence[int]
    min_isr: int
    reasons: Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Picture:
    """All that was found out."""

    cluster: ClusterDescription
    answers: Sequence[Answer]
    quorum: QuorumDescription | None
    quorum_error: str
    partitions: Sequence[PartitionFacts]
    now_ms: int
    controllers: Sequence[ControllerAnswer] = ()
    """Those that are no brokers."""

    @property
    def everybody(self) -> list[Answer | ControllerAnswer]:
        """What came of asking each node."""
        return [*self.answers, *self.controllers]


def findings(picture: Picture) -> list[Finding]:
    """Everything to act on, the worst first."""
    found = chain(
        _of_quorum(picture.quorum, picture.quorum_error),
        _of_controllers_without_vote(picture.quorum, picture.answers),
        chain.from_iterable(_of_broker(answer, picture.now_ms) for answer in picture.answers),
        _of_addresses(picture.answers),
        _of_external_addresses(picture.cluster.brokers),
        _of_partitions(picture.partitions),
        chain.from_iterable(
            _of_node(answer.about, answer.node)
            for answer in picture.everybody
            if answer.node is not None
        ),
        _of_silent_controllers(picture.controllers),
        _of_clocks(picture.everybody),
        _of_versions(picture),
    )
    return sorted(found, key=lambda finding: finding.severity is not Severity.CRITICAL)


def _critical(about: str, what: str, step: str) -> Finding:
    return Finding(Severity.CRITICAL, about, what, step)


def _warning(about: str, what: str, step: str) -> Finding:
    return Finding(Severity.WARNING, about, what, step)


# Controllers.


def _of_quorum(quorum: QuorumDescription | None, error: str) -> Iterator[Finding]:
    if quorum is None:
        what, _, step = error.partition("; next: ")
        yield _critical("controllers", what, step or "see `penstock quorum status`")
        return
    doubt, _, step = leader_doubt(quorum).partition("\nnext: ")
    if doubt:
        yield _critical("controllers", doubt, step)
        return
    lost = [voter for voter in quorum.voters if voter.is_unreachable or voter.is_wiped]
    spent = len(lost) >= max(1, quorum.tolerated_losses)
    for voter in quorum.voters:
        if why := _why_lost(voter):
            severity = Severity.CRITICAL if spent else Severity.WARNING
            yield Finding(severity, f"controller {voter.node_id}", *why)
        elif 0 <= voter.match_index < quorum.commit_index - VOTER_BEHIND_ENTRIES:
            behind = quorum.commit_index - voter.match_index
            yield _warning(
                f"controller {voter.node_id}",
                f"it lacks {behind} entries of the metadata log",
                "see whether `penstock quorum status` shows fewer soon; if not, look after its "
                "disk, its network and its log",
            )
    if len(quorum.voters) == 2:
        yield _warning(
            "controllers",
            "two of them tolerate no loss: nothing can be changed while either is down",
            "add a third with `penstock quorum add NODE@HOST:PORT`",
        )


def _of_controllers_without_vote(
    quorum: QuorumDescription | None, answers: Iterable[Answer]
) -> Iterator[Finding]:
    """Those that play the role in vain; one that is about to vote is not among them."""
    if quorum is None or leader_doubt(quorum):
        return
    known = {voter.node_id for voter in quorum.voters}
    if quorum.catching_up is not None:
        known.add(quorum.catching_up.node_id)
    for answer in answers:
        node = answer.node
        if node is not None and "controller" in node.roles and node.node_id not in known:
            yield _warning(
                f"controller {node.node_id}",
                "it does not vote, so that it makes up for no controller that is lost",
                f"`penstock quorum add {node.node_id}@HOST:PORT`; or if it is to be none: "
                "set node.roles=broker there and restart it",
            )


def _of_silent_controllers(controllers: Iterable[ControllerAnswer]) -> Iterator[Finding]:
    """Those that the others hear, and brokers do not; of who is lost the quorum tells."""
    for answer in controllers:
        if answer.node is None and _why_lost(answer.voter) is None:
            what, _, step = answer.error.partition("; next: ")
            yield _warning(answer.about, what, step or "look into its log")


def _why_lost(voter: QuorumVoter) -> tuple[str, str] | None:
    address = format_address(voter.host, voter.port)
    remove = f"`penstock quorum remove {voter.node_id}`"
    if voter.is_wiped:
        what = "it answers out of another metadata directory than the one it votes with"
        return what, f"{remove}, then `penstock quorum add {voter.node_id}@{address}`"
    if voter.is_unreachable:
        step = "start it, or mend the network between them; one that is gone for good: "
        return f"it does not answer the leader at {address}", step + remove
    return None


# Brokers and their addresses.


def _of_broker(answer: Answer, now_ms: int) -> Iterator[Finding]:
    broker = answer.broker
    unheard = _why_unheard(answer)
    if broker.fenced:
        what = "it is fenced: the controllers do not hear it, or it has yet to catch up"
        if unheard:
            what += f"; {unheard[0]}"
        yield _critical(
            answer.about,
            what,
            f"start node {broker.node_id}, or look into its log; if it is gone for good "
            f"`penstock decommission {broker.node_id}`",
        )
    elif unheard:
        yield _critical(answer.about, *unheard)
    if broker.drained_since_ms and now_ms - broker.drained_since_ms >= DRAIN_FORGOTTEN_MS:
        minutes = (now_ms - broker.drained_since_ms) // _MS_A_MINUTE
        yield _warning(
            answer.about,
            f"it has been drained for {counted(minutes, 'minute')}, and leads nothing that others "
            "can lead",
            f"go on with what it was drained for, or `penstock drain {broker.node_id} --undo`",
        )
    if broker.offline_replicas:
        yield _critical(
            answer.about,
            f"it can't serve {counted(broker.offline_replicas, 'replica')}: a disk failed, or a "
            "log is damaged",
            "look for `data_directory_failed` and `replica is offline` in its log, and see "
            "docs/operating/failures.md",
        )


def _why_unheard(answer: Answer) -> tuple[str, str] | None:
    """Why clients can't use the advertised address, and what to do; None if they can."""
    named = f"its advertised address {answer.address}"
    if answer.resolve_error:
        return (
            f"{named} does not resolve from here: {answer.resolve_error}",
            f"correct {answer.setting} on that node, or the name service",
        )
    stands_for = f" (which is {', '.join(answer.resolved[:SHOWN])})" if answer.resolved else ""
    if answer.node is None:
        step = (
            f"start node {answer.broker.node_id} if it is down; if it runs, correct "
            f"{answer.setting} there, or open the way to it: clients need it"
        )
        return f"{named}{stands_for} does not answer: {answer.error}", step
    if answer.node.node_id != answer.broker.node_id:
        return (
            f"at {named}{stands_for} node {answer.node.node_id} answers",
            f"give each node its own {answer.setting}",
        )
    return None


def _of_addresses(answers: Iterable[Answer]) -> Iterator[Finding]:
    """A loopback address among others works for nobody on another machine."""
    local = [answer for answer in answers if _is_local(answer)]
    others = [answer for answer in answers if answer.resolved and not _is_local(answer)]
    for answer in local if others else ():
        yield _warning(
            answer.about,
            f"it advertises {answer.address}, which is this machine ({answer.resolved[0]}) for "
            "whoever asks, and other brokers are elsewhere",
            f"set {answer.setting} to what clients can reach",
        )


def _of_external_addresses(brokers: Iterable[BrokerDescription]) -> Iterator[Finding]:
    """Clients from outside need all brokers, or none is meant for them."""
    lacking: list[int] = []
    having: list[int] = []
    for broker in brokers:
        (having if broker.external_host else lacking).append(broker.node_id)
    if having and lacking:
        ids = [", ".join(map(str, sorted(nodes))) for nodes in (having, lacking)]
        verb = "has" if len(having) == 1 else "have"
        yield _warning(
            "addresses",
            f"broker {ids[0]} {verb} an address for clients from outside, and {ids[1]} not: these "
            f"are told of broker.advertised instead, where they may not reach what {ids[1]} leads",
            f"set external.listen and external.advertised on node {ids[1]} too, and restart it; "
            "or on none",
        )


def _is_local(answer: Answer) -> bool:
    found = [ipaddress.ip_address(address.partition("%")[0]) for address in answer.resolved]
    return bool(found) and all(address.is_loopback for address in found)


# Nodes.


def _of_node(about: str, node: NodeDescription) -> Iterator[Finding]:
    for directory in node.directories:
        yield from _of_directory(about, directory, has_topics="broker" in node.roles)
    if node.max_descriptors > 0 and node.open_descriptors >= 0:
        part = node.open_descriptors / node.max_descriptors
        if part >= MANY_DESCRIPTORS:
            severe = part >= VERY_MANY_DESCRIPTORS
            yield Finding(
                Severity.CRITICAL if severe else Severity.WARNING,
                about,
                f"it has {node.open_descriptors} of at most {node.max_descriptors} files and "
                "connections open",
                "raise its limit (`ulimit -n`, LimitNOFILE), or see who holds so many connections",
            )
    if not node.codec_compiled and "broker" in node.roles:
        yield _warning(
            about,
            "its record codec is pure Python: many times slower where it is used",
            "install Penstock there where a C compiler is, or a wheel that was built with one",
        )


def _of_directory(
    about: str, directory: DirectoryDescription, *, has_topics: bool
) -> Iterator[Finding]:
    where = f"its directory {directory.path}"
    if directory.failure:
        yield _critical(
            about,
            f"{where} has failed: {directory.failure}",
            "replace the disk: docs/operating/failures.md, a failed directory",
        )
        return
    if directory.total_bytes > 0 and directory.free_bytes >= 0:
        part = directory.free_bytes / directory.total_bytes
        if part < LITTLE_FREE:
            severity = Severity.CRITICAL if part < VERY_LITTLE_FREE else Severity.WARNING
            yield Finding(
                severity,
                about,
                f"{where} has {format_bytes(directory.free_bytes)} of "
                f"{format_bytes(directory.total_bytes)} free",
                _LESS_OF_TOPICS if has_topics else "enlarge the disk, or see what else is on it",
            )
    if directory.fsync_us < 0:
        yield _critical(
            about,
            f"a small fsync in {where} failed, or was not over in 2 s",
            "look after the disk: it hangs, fails, is full, or is overloaded",
        )
    elif directory.fsync_us >= SLOW_FSYNC_US:
        yield _warning(
            about,
            f"a small fsync in {where} took {directory.fsync_us // 1000} ms; each "
            f"{'write with acks=all' if has_topics else 'change of the metadata'} waits for one",
            "see what else writes to that disk, or give the node a faster one",
        )


def _of_clocks(answers: Iterable[Answer | ControllerAnswer]) -> Iterator[Finding]:
    """Clocks that are apart for certain, however long the answers were on their way."""
    bounds = [
        (answer.node.clock_ms - answer.received_ms, answer.node.clock_ms - answer.sent_ms, answer)
        for answer in answers
        if answer.node is not None
    ]
    if len(bounds) < 2:
        return
    ahead = max(bounds, key=lambda bound: bound[0])
    behind = min(bounds, key=lambda bound: bound[1])
    apart_ms = ahead[0] - behind[1]
    if apart_ms >= CLOCKS_APART_MS:
        yield _warning(
            "clocks",
            f"that of {ahead[2].about} is ahead of that of {behind[2].about} by {apart_ms} ms at "
            "least: timestamps of records and retention by time go by them",
            "let NTP or chrony set the clocks of all nodes",
        )


def _of_versions(picture: Picture) -> Iterator[Finding]:
    by_version: dict[str, list[int]] = defaultdict(list)
    for answer in picture.everybody:
        if answer.node is not None:
            by_version[answer.node.version].append(answer.node_id)
    if len(by_version) > 1:
        told = "; ".join(
            f"{version} on {', '.join(map(str, nodes))}"
            for version, nodes in sorted(by_version.items())
        )
        yield _warning(
            "versions",
            f"the nodes run different software: {told}",
            "go on until all have the newer: `penstock can-roll` before each restart",
        )
    supported = [broker.max_metadata_version for broker in picture.cluster.brokers]
    level = picture.cluster.metadata_version
    if supported and min(supported) > level and len(by_version) <= 1:
        yield _warning(
            "versions",
            f"the cluster works at metadata.version {level}, and all brokers know {min(supported)}",
            "`penstock cluster upgrade`, once nobody is to go back to older software",
        )


# Partitions.


def _of_partitions(partitions: Iterable[PartitionFacts]) -> Iterator[Finding]:
    offline: list[PartitionFacts] = []
    short: list[PartitionFacts] = []
    fewer: list[PartitionFacts] = []
    for one in partitions:
        if one.leader < 0:
            offline.append(one)
        elif len(one.isr) < one.min_isr:
            short.append(one)
        elif len(one.isr) < len(one.replicas):
            fewer.append(one)
    if offline:
        nodes = sorted({node for one in offline for node in one.isr})
        yield _critical(
            "partitions",
            f"{_named(offline)} offline: nobody leads",
            f"start broker {' or '.join(map(str, nodes))}, which had the last replica in sync; "
            "what is lost for good: docs/operating/brokers.md, leaders",
        )
    for some_of_them, what, severity in (
        (short, "fewer replicas in sync than min.insync.replicas: acks=all is refused", "critical"),
        (fewer, "replicas that are not in sync", "warning"),
    ):
        for reason, those in _by_reason(some_of_them).items():
            why, step = _explained(*reason)
            verb = "has" if len(those) == 1 else "have"
            yield Finding(
                Severity(severity), "partitions", f"{_names(those)} {verb} {what}; {why}", step
            )


def _by_reason(
    partitions: Iterable[PartitionFacts],
) -> dict[tuple[int, str], list[PartitionFacts]]:
    """The partitions by each follower that is out of sync and why."""
    found: dict[tuple[int, str], list[PartitionFacts]] = defaultdict(list)
    for one in partitions:
        for reason in one.reasons or [(-1, "")]:
            found[reason].append(one)
    return dict(sorted(found.items()))


def _explained(node: int, reason: str) -> tuple[str, str]:
    """A follower's reason in words, and what to do."""
    match reason:
        case "offline":
            return (
                f"broker {node} is down or stopping, or the disk of its replica failed",
                f"start node {node}, or see its finding here",
            )
        case "damaged":
            return (
                f"the log on broker {node} is damaged, and is mended by itself",
                "wait; look after that disk",
            )
        case "bootstrapping":
            return (
                f"broker {node} copies what it lacks",
                "wait; replication.catchup.max.bytes.per.second bounds how fast it goes",
            )
        case "slow":
            return (
                f"broker {node} acknowledges, and never has all",
                f"look after the disk, the CPU and the network of node {node}",
            )
        case "stuck":
            return (
                f"broker {node} acknowledges nothing new",
                f"look into the log of node {node}, and after its disk",
            )
        case "":
            return ("it has fewer replicas than it asks for", "add replicas, or lower it")
        case _:
            return (
                f"why broker {node} is out, its leader did not say",
                "ask again; see the finding about the leader's broker",
            )


def _names(partitions: Sequence[PartitionFacts]) -> str:
    return some([one.name for one in partitions[:SHOWN]], len(partitions))


def _named(partitions: Sequence[PartitionFacts]) -> str:
    return f"{_names(partitions)} {'is' if len(partitions) == 1 else 'are'}"
