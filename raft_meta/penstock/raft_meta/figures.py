"""What a controller says of itself to whoever measures, on any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.quorum import Leadership, QuorumStatus


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """The cluster as the active controller knows it."""

    offline_partitions: int
    not_preferred_partitions: int
    cluster_partitions: int
    cluster_topics: int
    cluster_metadata_index: int
    """Of the last change that brokers are told of. Commands that change nothing come after it."""
    brokers: Mapping[str, int]
    """By state: active, fenced, shutting_down."""


@dataclass(frozen=True, slots=True)
class ControllerFigures:
    """One controller. ``cluster`` is known by the active one alone, and None elsewhere."""

    active_controller: bool
    raft_term: int
    raft_commit_index: int
    raft_applied_index: int
    raft_last_index: int
    metadata_version: int
    elections: int
    match_index: Mapping[int, int]
    cluster: ClusterFigures | None


class Elections:
    """Counts the leaders that were elected, as one controller learns of them."""

    def __init__(self) -> None:
        self.count = 0
        self._last = (-1, -1)

    def on_leadership(self, leadership: Leadership) -> None:
        """The quorum's news; the same may be told again."""
        told = (leadership.term, leadership.leader_id)
        if leadership.leader_id >= 0 and told != self._last:
            self._last = told
            self.count += 1


def figures_of(
    status: QuorumStatus,
    state: ClusterState,
    elections: int,
    *,
    is_active: bool,
    changed_index: int = 0,
) -> ControllerFigures:
    """The figures, of values that are replaced as a whole, or are one number each."""
    return ControllerFigures(
        active_controller=is_active,
        raft_term=status.term,
        raft_commit_index=status.commit_index,
        raft_applied_index=state.applied_index,
        raft_last_index=status.last_index,
        metadata_version=state.metadata_version,
        elections=elections,
        match_index={
            node_id: index
            for node_id, index in status.match_index.items()
            if node_id != status.node_id
        },
        cluster=_cluster_of(state, changed_index) if is_active else None,
    )


def _cluster_of(state: ClusterState, changed_index: int) -> ClusterFigures:
    brokers = {"active": 0, "fenced": 0, "shutting_down": 0}
    for broker in list(state.brokers.values()):
        if broker.fenced:
            brokers["fenced"] += 1
        elif broker.in_controlled_shutdown:
            brokers["shutting_down"] += 1
        else:
            brokers["active"] += 1
    return ClusterFigures(
        offline_partitions=state.leaderless_count,
        not_preferred_partitions=state.not_preferred_count,
        cluster_partitions=state.partition_count,
        cluster_topics=len(state.topics),
        cluster_metadata_index=changed_index,
        brokers=brokers,
    )
