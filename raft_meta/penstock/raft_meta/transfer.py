"""Snapshots on their way: the leader's side and the follower's, one chunk in flight at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from penstock.raft_meta.snapshots import MAX_SNAPSHOT_BYTES, Snapshot
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import raft_pb2

CHUNK_BYTES: Final = 256 * 1024
RESEND_AFTER_S: Final = 1.0
"""A chunk not acknowledged by then is sent again."""

HELD_S: Final = 600.0
"""For so long since a snapshot began to be sent, the log after it is kept for who gets it..."""

HELD_BYTES: Final = 64 * 1024 * 1024
"""... while no more than this would have been dropped otherwise."""


@dataclass(slots=True)
class OutgoingSnapshot:
    """A leader sends a snapshot to one follower. An empty chunk probes, and shows a live leader."""

    snapshot: Snapshot
    crc: int
    began_s: float
    offset_bytes: int = 0
    round: int = -1  # Of the chunk in flight.
    chunk_sent_s: float = -math.inf
    sent_s: float = -math.inf

    def next_chunk(self, now_s: float, *, probe: bool = False) -> raft_pb2.SnapshotChunk:
        """The chunk at the offset reached, or an empty one there."""
        self.sent_s = now_s
        if not probe:
            self.chunk_sent_s = now_s
        end = self.offset_bytes + (0 if probe else CHUNK_BYTES)
        return raft_pb2.SnapshotChunk(
            last_index=self.snapshot.index,
            last_term=self.snapshot.term,
            offset_bytes=self.offset_bytes,
            total_bytes=len(self.snapshot.data),
            crc32c=self.crc,
            voters=None if self.snapshot.voters is None else self.snapshot.voters.to_proto(),
            data=self.snapshot.data[self.offset_bytes : end],
        )

    def acknowledge(self, round_: int) -> bool:
        """The chunk of ``round_`` arrived; whether there is another one to send."""
        if round_ != self.round:
            return False
        self.round = -1
        self.offset_bytes = min(self.offset_bytes + CHUNK_BYTES, len(self.snapshot.data))
        return self.offset_bytes < len(self.snapshot.data)

    def restart(self) -> None:
        """The follower has nothing of it."""
        self.offset_bytes = 0


@dataclass(slots=True)
class IncomingSnapshot:
    """A follower collects a snapshot. ``identity`` tells one transfer from another."""

    identity: tuple[int, ...]
    data: bytearray = field(default_factory=bytearray)

    @staticmethod
    def identify(peer: int, term: int, chunk: raft_pb2.SnapshotChunk) -> tuple[int, ...]:
        """Who sends what."""
        return (
            peer, term, chunk.last_index, chunk.last_term, chunk.total_bytes, chunk.crc32c,
        )  # fmt: skip


def is_well_formed(chunk: raft_pb2.SnapshotChunk, term: int) -> bool:
    """The chunk lies within the snapshot that it announces, which is of a believable size."""
    return (
        chunk.offset_bytes >= 0
        and chunk.offset_bytes + len(chunk.data) <= chunk.total_bytes <= MAX_SNAPSHOT_BYTES
        and len(chunk.data) <= CHUNK_BYTES
        and chunk.last_index > 1
        and 0 <= chunk.last_term <= term
        and _has_sound_voters(chunk)
    )


def _has_sound_voters(chunk: raft_pb2.SnapshotChunk) -> bool:
    if not chunk.HasField("voters"):
        return True
    try:
        VoterSet.from_proto(chunk.voters)
    except ValueError:
        return False
    return True
