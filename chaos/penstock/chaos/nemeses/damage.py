"""Files that a node finds otherwise than it has left them: damaged, cut, older, another's, gone.

Each strikes when all replicas are in sync, and one node's records alone: what ``acks=all`` promises
stands up to that. Metadata are the controllers' own promise, so that no older ones are ever put
back, and an emptied controller is replaced as its documentation says.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from penstock.chaos.backends import files
from penstock.chaos.checkers.crashes import MAY_END
from penstock.chaos.checkers.refused import REFUSED
from penstock.chaos.cluster import Capability, Cluster
from penstock.chaos.errors import ClusterError, FaultError
from penstock.chaos.nemeses import Fault, Scene
from penstock.chaos.nemeses.asking import has_ended, until, wait_in_sync
from penstock.chaos.nemeses.membership import add_voter, address_of, remove_voter
from penstock.client import AdminClient, Consumer, OffsetSpec, PenstockError, TopicPartition
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import iter_batches, verify_batch

_FILES: Final = frozenset({Capability.FILES, Capability.PROCESSES})
_ONE: Final = ("a leader", "a leader", "random")
LOGS: Final = "logs"
"""Where in its directory a broker has its records."""
_READY_S: Final = 30.0
_REFUSED_S: Final = 30.0
_READ_S: Final = 15.0
_ALONE_S: Final = 0.5


def _one(scene: Scene, target: str) -> int:
    found = scene.resolve(target)
    if len(found) != 1 or len(scene.cluster.nodes) == 1:
        raise FaultError("this takes one node of several; next: more --nodes")
    return found[0]


def _stop(cluster: Cluster, node: int, how: str) -> None:
    if how == "kill":
        cluster.kill(node)
    else:
        cluster.terminate(node)


@contextlib.contextmanager
def _left_running(scene: Scene, node: int) -> Iterator[None]:
    """What fails inside leaves the node running, as it was found."""
    try:
        yield
    except OSError as error:
        scene.cluster.start_node(node)
        raise FaultError(f"the files of node {node} could not be changed: {error}") from error
    except Exception:
        scene.cluster.start_node(node)
        raise


@contextlib.contextmanager
def _others_paused(cluster: Cluster, node: int) -> Iterator[None]:
    """The node has taken records for a moment that no other one has, when the block begins."""
    others = [other for other in cluster.nodes if other != node]
    try:
        for other in others:
            cluster.pause(other)
        threading.Event().wait(_ALONE_S)
        yield
    finally:
        for other in others:
            cluster.resume(other)


# --- segments


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a segment that make a batch."""

    path: Path
    partition: TopicPartition
    offset: int
    start_byte: int
    end_byte: int


@dataclass(slots=True, eq=False)
class DamagedSegment:
    """Damages a segment of a partition of which the node is the preferred leader, and, when it runs
    again, has it lead and what is damaged be read, for nothing else need ever find it.
    """

    name: str
    summary: str
    damage: Callable[[Piece, Random], Mapping[str, Any]]
    needs: frozenset[Capability] = _FILES

    def plan(self, random: Random, nodes: int) -> Fault:
        """At whom, how the node is stopped, and on which side of the high watermark."""
        parameters = {
            "stop": random.choice(("kill", "terminate")),
            "where": random.choice(("below", "below", "above")),
        }
        if parameters["where"] == "above":
            parameters["stop"] = "kill"  # Whoever stops in order hands over what is there first.
        return Fault(self.name, self.name, random.choice(_ONE) if nodes > 1 else "all", parameters)

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when the node is down, and damaged."""
        node = _one(scene, fault.target)
        wait_in_sync(scene)
        where = fault.parameters["where"]
        ends: dict[TopicPartition, int] = {}

        def has_records() -> bool:
            with scene.admin() as admin:
                ends.update(_high_watermarks(admin, node))
            return where == "above" or any(ends.values())

        until(has_records, f"partitions of which node {node} is the preferred leader have records:")
        with _others_paused(scene.cluster, node) if where == "above" else contextlib.nullcontext():
            _stop(scene.cluster, node, fault.parameters["stop"])
        with _left_running(scene, node):
            found = pieces(scene.cluster.data_directory(node), ends, where)
            if not found:
                raise FaultError(f"node {node} has nothing {where} a high watermark; next: write")
            piece = scene.random.choice(found)
            damage = self.damage(piece, scene.random)
        return {
            "struck": [node],
            "topic": piece.partition.topic,
            "partition": piece.partition.partition,
            "offset": piece.offset,
            "file": piece.path.name,
            **damage,
        }

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Start the node, and have read what is damaged; returns when it was."""
        [node] = held["struck"]
        scene.cluster.start_node(node)
        partition = TopicPartition(held["topic"], held["partition"])
        segment = (
            scene.cluster.data_directory(node) / LOGS / _directory_of(partition) / held["file"]
        )
        until(
            lambda: (
                _is_read(scene, node, partition, held["offset"])
                and not _is_damaged(segment, held["offset"])
            ),
            f"{partition} is read from {held['offset']} where it is damaged, and mended:",
            2 * _READ_S,
        )


def _high_watermarks(admin: AdminClient, node: int) -> dict[TopicPartition, int]:
    """Of the partitions of clients' topics of which it is the preferred leader."""
    wanted: dict[TopicPartition, OffsetSpec] = {
        TopicPartition(topic.name, one.partition): "latest"
        for topic in admin.list_topics()
        for one in topic.partitions
        if one.replicas[0] == node
    }
    return {tp: found.offset for tp, found in admin.list_offsets(wanted).items()} if wanted else {}


def pieces(directory: Path, ends: Mapping[TopicPartition, int], where: str) -> list[Piece]:
    """The batches of these partitions that are ``below`` or ``above`` the high watermarks."""
    found = []
    for partition, end in sorted(ends.items()):
        for path in sorted((directory / LOGS / _directory_of(partition)).glob("*.log")):
            at = 0
            with contextlib.suppress(CorruptRecordError):
                for header, batch in iter_batches(path.read_bytes(), allow_torn_tail=True):
                    is_below = header.last_offset < end
                    if is_below if where == "below" else header.base_offset >= end:
                        piece = Piece(path, partition, header.base_offset, at, at + len(batch))
                        found.append(piece)
                    at += len(batch)
    return found


def _directory_of(partition: TopicPartition) -> str:
    return f"{partition.topic}-{partition.partition}"


def _is_damaged(segment: Path, offset: int) -> bool:
    """Whether a batch of the segment, of those up to an offset, is not what was written.

    Who has read need not have read it from there: a node that was started just now is the leader
    for those who have not heard yet that another one is.
    """
    try:
        for header, batch in iter_batches(segment.read_bytes()):
            if header.base_offset > offset:
                break
            verify_batch(batch)
    except CorruptRecordError:
        return True
    except FileNotFoundError:
        pass  # What is deleted or compacted is not damaged any more.
    return False


def _is_read(scene: Scene, node: int, partition: TopicPartition, offset: int) -> bool:
    """Whether the node leads the partition and somebody has read on from there; asks for both."""
    with scene.admin() as admin:
        topics = {topic.name: topic for topic in admin.list_topics()}
        if partition.topic not in topics:
            return True  # It was deleted meanwhile, and the damage with it.
        [found] = [
            one
            for one in topics[partition.topic].partitions
            if one.partition == partition.partition
        ]
        if found.replicas[0] != node:
            return True  # Moved away meanwhile.
        if found.leader != node:
            if node in found.isr:
                admin.elect_leaders([partition])
            return False
        if admin.list_offsets({partition: "latest"})[partition].offset <= offset:
            return True  # It was above the high watermark, and is cut off.
    with Consumer(scene.cluster.bootstrap, client_id="penstock-chaos") as consumer:
        consumer.assign([partition])
        consumer.seek(partition, offset)
        return bool(consumer.poll(int(_READ_S * 1000)))


def _flip(piece: Piece, random: Random) -> Mapping[str, Any]:
    at = random.randrange(piece.start_byte, piece.end_byte)
    with piece.path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))
    return {"byte": at}


def _cut(piece: Piece, random: Random) -> Mapping[str, Any]:
    at = random.randrange(piece.start_byte, piece.end_byte)
    return {"byte": at, "lost_bytes": files.truncate(piece.path, at)}


FLIPPED_BIT: Final = DamagedSegment(
    "flipped-bit",
    "a bit of a stopped node's segment is another one, below or above the high watermark",
    _flip,
)
TRUNCATED_FILE: Final = DamagedSegment(
    "truncated-file",
    "a stopped node's segment is shorter, cut below or above the high watermark",
    _cut,
)


# --- directories


class StaleDirectory:
    """Puts back the records that a node had when it last stopped before its present life."""

    name = "stale-directory"
    summary = "the records of one node are those that it had a life ago; the metadata stay"
    needs = _FILES

    def plan(self, random: Random, nodes: int) -> Fault:
        """At whom, and how old the copy is."""
        parameters = {"age_ms": random.randint(500, 3_000)}
        return Fault(self.name, self.name, random.choice(_ONE) if nodes > 1 else "all", parameters)

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when the node is down, and has the old ones."""
        cluster = scene.cluster
        node = _one(scene, fault.target)
        logs = cluster.data_directory(node) / LOGS
        copy = logs.parent.with_name(f".{logs.parent.name}.{LOGS}.old")
        wait_in_sync(scene)
        cluster.terminate(node)
        try:
            with _left_running(scene, node):
                files.snapshot(logs, copy)
            cluster.start_node(node)
            try:
                cluster.wait_ready(_READY_S)
            except ClusterError as error:
                raise FaultError(f"node {node} is not back from being copied: {error}") from error
            threading.Event().wait(fault.parameters["age_ms"] / 1000)
            wait_in_sync(scene)
            cluster.kill(node)
            with _left_running(scene, node):
                files.restore(logs, copy)
        finally:
            files.wipe(copy)
            with contextlib.suppress(FileNotFoundError):
                copy.rmdir()
        return {"struck": [node]}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Start it: it copies from others what it lacks."""
        for node in held["struck"]:
            scene.cluster.start_node(node)


class SwappedDirectories:
    """Gives two nodes each other's directory, at which both refuse to start, and then their own."""

    name = "swapped-directories"
    summary = "two nodes find each other's directory, and must refuse it; then their own again"
    needs = _FILES

    def plan(self, random: Random, nodes: int) -> Fault:
        """At whom; the other one is any."""
        return Fault(self.name, self.name, random.choice(_ONE) if nodes > 1 else "all")

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when both were started, with how many have ``refused``."""
        cluster = scene.cluster
        pair = [_one(scene, fault.target), *scene.resolve("random")]
        inodes = {str(node): cluster.data_directory(node).stat().st_ino for node in pair}
        held: dict[str, Any] = {"struck": pair, "inodes": inodes, MAY_END: "directory"}
        for node in pair:
            cluster.kill(node)
        try:
            files.swap(*map(cluster.data_directory, pair))
            for node in pair:
                cluster.start_node(node)
            held[REFUSED] = [node for node in pair if has_ended(scene, node, _REFUSED_S)]
        except Exception:
            self.heal(fault, scene, held)
            raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Each its own."""
        cluster = scene.cluster
        pair: Sequence[int] = held["struck"]
        first = cluster.data_directory(pair[0])
        if first.stat().st_ino != held["inodes"][str(pair[0])]:
            for node in pair:
                _take_down(cluster, node)
            files.swap(first, cluster.data_directory(pair[1]))
        for node in pair:
            cluster.start_node(node)


class WipedDisk:
    """Takes all that a node had: it must refuse to start, and is replaced by an empty one."""

    name = "wiped-disk"
    summary = "one node's disk is empty, and it must refuse to start; then it is replaced"
    needs = _FILES

    def plan(self, random: Random, nodes: int) -> Fault:
        """At whom."""
        return Fault(self.name, self.name, random.choice(_ONE) if nodes > 1 else "all")

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when it was started on nothing, with whether it has ``refused``."""
        cluster = scene.cluster
        node = _one(scene, fault.target)
        wait_in_sync(scene)
        try:
            with scene.admin() as admin:
                address = address_of(admin, node)
        except PenstockError as error:
            raise FaultError(f"nobody says who votes: {error}") from error
        held: dict[str, Any] = {"struck": [node], "address": address, MAY_END: "directory"}
        cluster.kill(node)
        try:
            files.wipe(cluster.data_directory(node))
            cluster.start_node(node)
            held[REFUSED] = [node] if has_ended(scene, node, _REFUSED_S) else []
        except Exception:
            self.heal(fault, scene, held)
            raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Replace it: what is not there can be no voter, and comes back as a new one."""
        cluster = scene.cluster
        for node in held["struck"]:
            with scene.admin() as admin:
                voters = {voter.node_id: voter for voter in admin.describe_quorum().voters}
            if node in voters and not voters[node].is_wiped and _has_voted(cluster, node):
                cluster.start_node(node)
                continue  # It was replaced already.
            _take_down(cluster, node)
            remove_voter(scene, node)
            files.wipe(cluster.data_directory(node))
            cluster.format(node)
            cluster.start_node(node)
            add_voter(scene, node, held["address"])


def _has_voted(cluster: Cluster, node: int) -> bool:
    return (cluster.data_directory(node) / "raft").exists()


def _take_down(cluster: Cluster, node: int) -> None:
    if node in cluster.running:
        cluster.kill(node)


DAMAGE: Final = (
    FLIPPED_BIT,
    TRUNCATED_FILE,
    StaleDirectory(),
    SwappedDirectories(),
    WipedDisk(),
)
