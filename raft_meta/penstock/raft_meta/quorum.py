"""The port of the metadata quorum: what the rest of Penstock knows of Raft, and no more.

Another engine can take this one's place behind it; tests/unit/raft_meta holds what it must keep.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from penstock.raft_meta.voters import Address, VoterSet


class Role(enum.Enum):
    """What a voter is in its term."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class Leadership:
    """Who leads, as one voter sees it. ``leader_id`` is -1 while it knows of nobody."""

    term: int
    leader_id: int
    leading: bool


@dataclass(frozen=True, slots=True)
class Hearing:
    """How a leader hears another controller.

    ``silent_ms`` is the time since its last answer, or since this leader began to send to it.
    """

    silent_ms: int
    ever_answered: bool
    is_reachable: bool
    """It answered within an election timeout."""


OLDEST_LEVEL: Final = 1
"""The feature level (metadata.version) that all software knows."""


@dataclass(frozen=True, slots=True)
class FeatureLevels:
    """What decides who can apply the log: the feature levels of the state machine.

    ``supported`` is the newest that this software knows. ``in_force`` says at which the commands
    applied so far are to be applied, and 0 while that is not decided; called on the event loop.
    ``why_unreadable`` says why the state machine could not be what a snapshot says, and nothing
    when it could; called on any thread.
    """

    supported: int = OLDEST_LEVEL
    in_force: Callable[[], int] = lambda: OLDEST_LEVEL
    why_unreadable: Callable[[bytes], str] = lambda _snapshot: ""


@dataclass(frozen=True, slots=True)
class MachineState:
    """How far a state machine is, and the feature level in force there, or 0."""

    applied_index: int
    level: int


@dataclass(frozen=True, slots=True)
class QuorumStatus:
    """One voter's view. ``match_index`` is known by the leader alone, and empty elsewhere.

    ``leader_id`` is -1 while it knows of nobody, and where it has not heard the leader for several
    election timeouts and found no majority to elect another one.
    """

    node_id: int
    role: Role
    term: int
    leader_id: int
    commit_index: int
    applied_index: int
    last_index: int
    match_index: Mapping[int, int] = field(default_factory=dict)
    directory_id: bytes = b""
    """Of this node's own metadata directory."""
    voters: VoterSet | None = None
    """The voter set in force here; None while none is known."""
    voters_index: int = 0
    """The index of the log entry that holds it; 0 while it is in no log."""
    directories: Mapping[int, bytes] = field(default_factory=dict)
    """The directory that each voter answers the leader out of; empty elsewhere."""
    awaited: tuple[int, ...] = ()
    """Without whom the first start of the cluster cannot go on."""
    founder_id: int = -1
    """Who founds the cluster, if nobody has."""
    needs_permission: bool = False
    """This node would found the cluster, if its directory were known to be a new cluster's."""
    hearings: Mapping[int, Hearing] = field(default_factory=dict)
    """How the leader hears the others; empty elsewhere."""
    catching_up: tuple[int, Address] | None = None
    """Who is on its way to become a voter, as the leader knows; it holds up all other changes."""
    founding_refusals: Mapping[int, str] = field(default_factory=dict)
    """Why others do not take part in the first start, by node id."""
    leaders_commit_index: int = 0
    """Up to where the leader said last that the log is decided: more than ``commit_index``, while
    this voter lacks entries. 0 as the leader, and before one was heard."""
    unconnected: frozenset[int] = frozenset()
    """The other voters that have no connection to this node: they ended, or started just now."""

    @property
    def is_voter(self) -> bool:
        """Whether this node votes."""
        voters = self.voters
        return voters is not None and voters.includes(self.node_id, self.directory_id)


class StateMachine(Protocol):
    """What the quorum keeps replicated. Called on the event loop's thread, in log order."""

    def apply(self, index: int, term: int, payload: bytes) -> bytes:
        """Apply one committed command and answer with its result.

        Must never raise: a command that makes no sense has a result that says so. An exception
        ends the process, since a state machine that skips a command is another state machine.
        """
        ...

    def freeze(self) -> Callable[[], bytes]:
        """Everything applied so far; what is returned encodes it later, on another thread."""
        ...

    def install(self, index: int, snapshot: bytes) -> None:
        """Forget everything, and be what ``snapshot`` says, which covers up to ``index``."""
        ...


LeadershipListener = Callable[[Leadership], None]


class Quorum(Protocol):
    """A replicated log that feeds a StateMachine. All methods belong to the event loop.

    Promises: a command whose result was returned is on the disks of a majority and is applied,
    in one order, on every voter that lives or comes back; commands are opaque bytes of at most
    MAX_COMMAND_BYTES; no command is applied twice by one voter.
    """

    async def start(self) -> None:
        """Read the disk and take part. Raises DataDirectoryError for one that is not ours."""
        ...

    async def hand_over(self) -> bool:
        """Have another voter lead, if this one does; whether another one is known to.

        For a planned stop: bounded by an election timeout, and proposals end with
        NotControllerError (nothing happened) meanwhile.
        """
        ...

    async def stop(self) -> None:
        """Leave. Proposals under way end with RequestTimedOutError. Safe to call twice."""
        ...

    def renounce(self) -> None:
        """Lead no more in this term, if this node leads: whoever acts on that could not go on.

        A voter that is alone leads again, in another term.
        """
        ...

    def submit(self, payload: bytes) -> asyncio.Future[bytes]:
        """Replicate a command; the future has its result once it is applied here.

        Commands enter the log in the order of the calls. The future ends with NotControllerError
        when this voter does not lead (nothing happened), and with RequestTimedOutError when
        leadership was lost, and with it the knowledge of the outcome. Raises InvalidRequestError
        for a command that is too large, NotControllerError (nothing happened) when stopped, or when
        so much waits for this voter's disk already that nothing more is taken.
        """
        ...

    async def propose(
        self, payload: bytes, *, timeout_ms: int | None = None, level: int = 0
    ) -> bytes:
        """Submit a command and wait for its result; ``level`` is the one that it raises the
        feature level to, if it does.

        Raises as the future of submit does, and RequestTimedOutError when time ran out; the
        command may take effect then and later. Raises UnsupportedMetadataVersionError where a
        controller that votes, or is being added, does not know the level, and NetworkError where
        one has not said; nothing happened then.
        """
        ...

    async def read_index(self, *, timeout_ms: int | None = None) -> int:
        """Wait until everything committed before the call is applied here (Raft thesis 6.4).

        Returns the index. Raises as propose does.
        """
        ...

    async def add_voter(
        self, node_id: int, address: Address, *, timeout_ms: int | None = None
    ) -> VoterSet:
        """Make a controller a voter once it is caught up; the voters from then on.

        Safe to repeat. Raises DuplicateVoterError, VoterChangeInProgressError,
        VoterNotCaughtUpError, NotEnoughVotersError or UnsupportedMetadataVersionError when
        nothing was changed, and what propose raises.
        """
        ...

    async def remove_voter(self, node_id: int, *, timeout_ms: int | None = None) -> VoterSet:
        """Make a controller no voter; the voters from then on.

        A leader that is to be removed hands over and raises NotControllerError: ask its successor.
        Raises UnknownVoterError, LastVoterError, VoterChangeInProgressError or
        NotEnoughVotersError when nothing was changed, and what propose raises.
        """
        ...

    async def wait_voters(self) -> None:
        """Return once a voter set is known here: before that this node is of no cluster."""
        ...

    def address_of(self, node_id: int) -> Address | None:
        """Where a controller is reached; None for one that is not known."""
        ...

    def status(self) -> QuorumStatus:
        """The voter's view now."""
        ...

    def add_leadership_listener(self, listener: LeadershipListener) -> None:
        """Have every change of leadership told, in order, after what was applied before it.

        The same is told again when the voters, or where they are, have changed.
        """
        ...

    def wait_failed(self) -> asyncio.Future[None]:
        """A future that fails with what ended the engine, and never ends otherwise."""
        ...
