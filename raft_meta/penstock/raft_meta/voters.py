"""The voter set: who votes, where it is reached, and on which disk its promises are kept.

It is an entry of the log like any other, and in force from the moment it is in a node's log,
committed or not (Raft thesis 4.1). Two sets that follow each other differ by one voter, so that
any majority of one and any majority of the other have a voter in common.

A voter is a node *and* the directory that holds its term, its vote and its log. A node with another
directory is another voter: it has forgotten what the first one promised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from penstock.v1 import raft_pb2

DIRECTORY_ID_BYTES: Final = 16
ANY_DIRECTORY: Final = b""
"""The directory of a voter in a set that was made before directories had ids: all count."""
MAX_VOTERS: Final = 15
"""More than anybody should have; a message that says more is malformed."""

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One voter."""

    node_id: int
    host: str
    port: int
    directory_id: bytes = ANY_DIRECTORY

    @property
    def address(self) -> Address:
        """Where the others reach it."""
        return self.host, self.port

    def is_kept_in(self, directory_id: bytes) -> bool:
        """Whether this directory's votes and acknowledgements are the voter's."""
        return self.directory_id in (ANY_DIRECTORY, directory_id)


@dataclass(frozen=True, slots=True)
class VoterSet:
    """The voters by ascending node id; at least one."""

    members: tuple[Member, ...]
    _by_id: Mapping[int, Member] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_id = {member.node_id: member for member in sorted(self.members)}
        if len(by_id) != len(self.members) or not 0 < len(by_id) <= MAX_VOTERS:
            raise ValueError(f"no voter set: {self.members}")
        object.__setattr__(self, "members", tuple(by_id.values()))
        object.__setattr__(self, "_by_id", by_id)

    @classmethod
    def of(
        cls, node_ids: Iterable[int], addresses: Mapping[int, Address] | None = None
    ) -> VoterSet:
        """Voters whose directories are not known."""
        known = addresses or {}
        return cls(tuple(Member(n, *known.get(n, ("", 0))) for n in sorted(node_ids)))

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._by_id

    @property
    def node_ids(self) -> frozenset[int]:
        """The voters' node ids."""
        return frozenset(self._by_id)

    @property
    def majority(self) -> int:
        """So many voters decide."""
        return len(self.members) // 2 + 1

    def get(self, node_id: int) -> Member | None:
        """The voter of this node id, if it is one."""
        return self._by_id.get(node_id)

    def includes(self, node_id: int, directory_id: bytes) -> bool:
        """Whether what this node says, out of this directory, counts."""
        member = self._by_id.get(node_id)
        return member is not None and member.is_kept_in(directory_id)

    def with_member(self, member: Member) -> VoterSet:
        """The set with this voter, in the place of one with its node id."""
        return VoterSet((*self.without(member.node_id), member))

    def without(self, node_id: int) -> tuple[Member, ...]:
        """The voters but this one."""
        return tuple(member for member in self.members if member.node_id != node_id)

    def may_follow(self, before: VoterSet) -> bool:
        """Whether a log may hold this set next after ``before``: one voter was added or removed.

        Where no voter is, addresses and directories that were not known may be filled in.
        """
        ours, theirs = self.node_ids, before.node_ids
        if len(ours ^ theirs) > 1:
            return False
        return all(before._by_id[n].is_kept_in(self._by_id[n].directory_id) for n in ours & theirs)

    def encode(self) -> bytes:
        """As an entry holds it."""
        return self.to_proto().SerializeToString(deterministic=True)

    def to_proto(self) -> raft_pb2.VoterSet:
        """As messages hold it."""
        return raft_pb2.VoterSet(
            voters=[
                raft_pb2.RaftVoter(
                    node_id=member.node_id,
                    host=member.host,
                    port=member.port,
                    directory_id=member.directory_id,
                )
                for member in self.members
            ]
        )

    @classmethod
    def from_proto(cls, proto: raft_pb2.VoterSet) -> VoterSet:
        """The set that a message holds. Raises ValueError for what is none."""
        for voter in proto.voters:
            if voter.node_id < 0 or len(voter.directory_id) not in (0, DIRECTORY_ID_BYTES):
                raise ValueError(f"no voter: {voter}")
        return cls(tuple(Member(v.node_id, v.host, v.port, v.directory_id) for v in proto.voters))

    @classmethod
    def decode(cls, payload: bytes) -> VoterSet:
        """The set that an entry holds. Raises ValueError for what is none."""
        try:
            return cls.from_proto(raft_pb2.VoterSet.FromString(payload))
        except DecodeError as error:
            raise ValueError(f"no voter set: {error}") from None


class VoterHistory:
    """The voter sets of one log, by the index of their entries.

    ``base`` is in force before all entries of the log that hold one; ``base_index`` is where the
    log had it, or 0 for a set that no log holds yet.
    """

    def __init__(self, base: VoterSet | None = None, base_index: int = 0) -> None:
        self.base = base
        self.base_index = base_index
        self._changes: list[tuple[int, VoterSet]] = []

    @property
    def newest(self) -> VoterSet | None:
        """The set in force."""
        return self._changes[-1][1] if self._changes else self.base

    @property
    def newest_index(self) -> int:
        """The index of the set in force."""
        return self._changes[-1][0] if self._changes else self.base_index

    def at(self, index: int) -> VoterSet | None:
        """The set that was in force when the log ended with ``index``."""
        found = self.base
        for at, voters in self._changes:
            if at > index:
                break
            found = voters
        return found

    def append(self, index: int, voters: VoterSet) -> None:
        """The log's new end holds a set."""
        self._changes.append((index, voters))

    def cut_from(self, index: int) -> None:
        """The log ends before ``index`` now: the set before it is in force again."""
        while self._changes and self._changes[-1][0] >= index:
            self._changes.pop()

    def compact_to(self, index: int) -> bool:
        """The log begins with ``index`` now; whether the base is another one than before."""
        moved = False
        while self._changes and self._changes[0][0] <= index:
            self.base_index, self.base = self._changes.pop(0)
            moved = True
        return moved
