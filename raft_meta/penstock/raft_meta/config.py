"""What a controller needs to know before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.raft_meta.voters import Address
from penstock.wire.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """One controller's settings; a combination that cannot work raises ConfigurationError.

    The three Raft times hang together: a follower that misses about three heartbeats stands for
    election, and every peer must have had the chance of a round trip before that.
    """

    node_id: int
    """This node's id, one of the voters'."""
    cluster_id: str
    """The cluster that the data directory was formatted for; nobody of another is spoken to."""
    data_dir: Path
    """Holds the journal and the snapshot. One process at a time."""
    listen: Address
    """Where the Raft and Controller services listen; port 0 takes a free one."""
    voters: Mapping[int, Address]
    """The voters of the cluster's first start by node id, and where they are. From then on the log
    says who votes; a node that is not among them waits until it is added."""
    may_found: bool = False
    """This start is the first of a new cluster: the node of the least id in ``voters`` founds it.
    Kept by the journal until then; without it such a node waits to be added."""
    advertised: Address | None = None
    """Where the others reach this controller; by default as ``voters`` say, or else ``listen``."""
    insecure_allowed: bool = False
    """Whether ``listen`` may be an address that other machines reach although there is no TLS."""
    election_timeout_min_ms: int = 500
    """A follower waits at least this long in silence before it asks to be elected."""
    election_timeout_max_ms: int = 1000
    """... and at most this long; drawn anew each time, so that votes rarely split."""
    raft_heartbeat_ms: int = 150
    """A leader with nothing to say says so this often. Below a third of the least timeout."""
    broker_session_timeout_ms: int = 6000
    """A broker silent for this long is fenced."""
    broker_disconnect_grace_ms: int = 200
    """A broker whose heartbeat stream broke has this long to open another."""
    takeover_grace_ms: int = 400
    """Brokers on nodes that seem gone have this long to find a new active controller before it
    fences them; all others have up to a session's time."""
    balance: bool = True
    """Leaderships go back to the preferred leaders that are in sync again."""
    balance_interval_ms: int = 5000
    """... in rounds so far apart,"""
    balance_threshold_percent: int = 0
    """... to brokers that lack more than this part of those that are theirs by preference."""
    propose_timeout_ms: int = 10_000
    """A command that is not committed within this time has an unknown outcome."""
    snapshot_entries: int = 5_000
    """A snapshot is taken after so many entries; bounds replay at start and the log's memory."""
    snapshot_bytes: int = 16 * 1024 * 1024
    """... or after so many bytes of entries."""
    snapshot_apply_ms: int = 1_000
    """... or after applying them took so much CPU time: replaying them would take it again."""

    @property
    def reached_at(self) -> Address:
        """Where the others reach this controller."""
        return self.advertised or self.voters.get(self.node_id) or self.listen

    def __post_init__(self) -> None:
        if not self.voters:
            raise ConfigurationError(
                "controller.quorum.voters is empty; name the controllers as id@host:port"
            )
        if not self.cluster_id:
            raise ConfigurationError("the cluster id is empty; format the data directory first")
        if not 0 < self.election_timeout_min_ms < self.election_timeout_max_ms:
            raise ConfigurationError(
                "controller.election.timeout.max.ms must be above "
                f"controller.election.timeout.min.ms, which is {self.election_timeout_min_ms}"
            )
        if not 0 < self.raft_heartbeat_ms * 3 < self.election_timeout_min_ms:
            raise ConfigurationError(
                f"controller.raft.heartbeat.ms={self.raft_heartbeat_ms} must be below a third of "
                f"controller.election.timeout.min.ms={self.election_timeout_min_ms}"
            )
        if self.snapshot_entries < 10 or self.snapshot_bytes < 1024 or self.snapshot_apply_ms < 1:
            raise ConfigurationError(
                "snapshot_entries must be at least 10, snapshot_bytes 1024, snapshot_apply_ms 1"
            )
