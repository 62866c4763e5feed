"""Who plays which part when a fault strikes: a role in words becomes the ids of nodes.

=============================  ======================================================
role                           who
=============================  ======================================================
``node N``                     that one
``random``                     any one that is not down
``a minority``                 any of them that are fewer than half (one of two or less)
``a majority``                 any of them that are just more than half
``all``                        all of them
``the active controller``      the one that the controllers follow
``not the active controller``  any other
``a leader``                   the leader of any partition of a topic of clients
``leader of TOPIC-N``          the leader of that partition
``follower of TOPIC-N``        any replica of it that does not lead it
``a coordinator``              any that coordinates groups or transactions
``a coordinator or a leader``  the same; where clients have neither, ``a leader``
``coordinator of group ID``    the one of that group
``coordinator of transactional id ID``  the one of that id
=============================  ======================================================

Nodes that faults hold down are left out, except where ``all`` or ``node N`` says who is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final, Protocol

from penstock.chaos.errors import FaultError
from penstock.client import AdminClient, PenstockError

ASK_MS: Final = 3_000
"""So long the cluster has to say who plays a role."""
A_COORDINATOR: Final = "a coordinator or a leader"
"""For nemeses, which do not know whether a workload has groups or transactions."""
_COORDINATING: Final = ("__consumer_offsets", "__transaction_state")


class Picture(Protocol):
    """What is asked about the cluster. Each raises PenstockError where nobody answers in time."""

    def controller(self) -> int:
        """The active controller, or -1."""
        ...

    def leaders(self, *, internal: bool) -> dict[tuple[str, int], int]:
        """The leader (-1: none) of each partition of clients' topics, or of internal ones."""
        ...

    def replicas(self, topic: str, partition: int) -> Sequence[int]:
        """Who holds the partition, the leader first; nothing where there is no such partition."""
        ...

    def group_coordinator(self, group: str) -> int:
        """Who coordinates the group; -1 for a group that does not exist."""
        ...

    def transaction_coordinator(self, transactional_id: str) -> int:
        """Who coordinates the id; -1 for an unknown one."""
        ...


class AskedPicture:
    """The picture that an administration client gives, with a deadline for each question."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap: Final = bootstrap

    def _admin(self) -> AdminClient:
        # A new one each time: it begins at whoever answers now.
        return AdminClient(
            self._bootstrap,
            client_id="penstock-chaos",
            default_api_timeout_ms=ASK_MS,
            request_timeout_ms=ASK_MS // 3,
            bootstrap_timeout_ms=ASK_MS,
        )

    def controller(self) -> int:
        """The active controller, or -1."""
        with self._admin() as admin:
            return admin.describe_cluster().controller_id

    def leaders(self, *, internal: bool) -> dict[tuple[str, int], int]:
        """The leader (-1: none) of each partition of clients' topics, or of internal ones."""
        with self._admin() as admin:
            return {
                (topic.name, partition.partition): partition.leader
                for topic in admin.list_topics(include_internal=internal)
                for partition in topic.partitions
                if topic.internal == internal
            }

    def replicas(self, topic: str, partition: int) -> Sequence[int]:
        """Who holds the partition, the leader first; nothing where there is no such partition."""
        with self._admin() as admin:
            for described in admin.list_topics(include_internal=True):
                for one in described.partitions:
                    if (described.name, one.partition) == (topic, partition):
                        rest = [node for node in one.replicas if node != one.leader]
                        return [one.leader, *rest]
        return []

    def group_coordinator(self, group: str) -> int:
        """Who coordinates the group; -1 for a group that does not exist."""
        with self._admin() as admin:
            found = {one.group_id: one.coordinator for one in admin.list_groups()}
        return found.get(group, -1)

    def transaction_coordinator(self, transactional_id: str) -> int:
        """Who coordinates the id; -1 for an unknown one."""
        with self._admin() as admin:
            found = {one.transactional_id: one.coordinator for one in admin.list_transactions()}
        return found.get(transactional_id, -1)


def resolve(
    role: str, nodes: Sequence[int], down: Iterable[int], picture: Picture, random: Random
) -> list[int]:
    """The nodes that play the role now, in order. Raises FaultError where nobody does."""
    held = set(down)
    up = [node for node in nodes if node not in held]
    try:
        found = _resolve(role, nodes, up, picture, random)
    except PenstockError as error:
        raise FaultError(
            f"who is {role!r} could not be found out ({error}); next: see whether a majority of "
            "the nodes is up, or plan faults further apart"
        ) from error
    if not found:
        raise FaultError(
            f"nobody is {role!r} now; next: give the cluster longer to recover between faults"
        )
    return sorted(found)


def _resolve(
    role: str, nodes: Sequence[int], up: Sequence[int], picture: Picture, random: Random
) -> Sequence[int]:
    for pattern, find in _ROLES:
        if (named := re.fullmatch(pattern, role)) is not None:
            return find(_Question(nodes, up, picture, random), *named.groups())
    raise FaultError(
        f"{role!r} is no role; next: take one of those that penstock.chaos.roles lists"
    )


class _Question:
    def __init__(
        self, nodes: Sequence[int], up: Sequence[int], picture: Picture, random: Random
    ) -> None:
        self.nodes, self.up, self.picture, self.random = nodes, up, picture, random

    def some(self, count: int) -> list[int]:
        return self.random.sample(self.up, min(count, len(self.up)))

    def one_of(self, candidates: Iterable[int]) -> list[int]:
        found = sorted(set(candidates) & set(self.up))
        return [self.random.choice(found)] if found else []

    def leader_among(self, *, internal: bool, topics: Sequence[str] = ()) -> list[int]:
        """That of any partition: who leads more is struck more often."""
        leaders = self.picture.leaders(internal=internal)
        found = [
            node
            for (topic, _), node in sorted(leaders.items())
            if node in self.up and (not topics or topic in topics)
        ]
        return [self.random.choice(found)] if found else []

    def coordinator(self) -> list[int]:
        return self.leader_among(internal=True, topics=_COORDINATING)

    def leader_of(self, topic: str, partition: str) -> list[int]:
        replicas = self.picture.replicas(topic, int(partition))
        return self.one_of(replicas[:1])

    def follower_of(self, topic: str, partition: str) -> list[int]:
        return self.one_of(self.picture.replicas(topic, int(partition))[1:])


_ROLES: Final[Sequence[tuple[str, Callable[..., Sequence[int]]]]] = (
    (r"node (\d+)", lambda asked, node: [one for one in asked.nodes if one == int(node)]),
    (r"random", lambda asked: asked.some(1)),
    (r"a minority", lambda asked: asked.some(max(1, (len(asked.nodes) - 1) // 2))),
    (r"a majority", lambda asked: asked.some(len(asked.nodes) // 2 + 1)),
    (r"all", lambda asked: asked.nodes),
    (r"the active controller", lambda asked: asked.one_of([asked.picture.controller()])),
    (
        r"not the active controller",
        lambda asked: asked.one_of(set(asked.nodes) - {asked.picture.controller()}),
    ),
    (r"a leader", lambda asked: asked.leader_among(internal=False)),
    (r"leader of (.+)-(\d+)", lambda asked, *place: asked.leader_of(*place)),
    (r"follower of (.+)-(\d+)", lambda asked, *place: asked.follower_of(*place)),
    (r"a coordinator", lambda asked: asked.coordinator()),
    (
        A_COORDINATOR,
        lambda asked: asked.coordinator() or asked.leader_among(internal=False),
    ),
    (
        r"coordinator of group (.+)",
        lambda asked, group: asked.one_of([asked.picture.group_coordinator(group)]),
    ),
    (
        r"coordinator of transactional id (.+)",
        lambda asked, name: asked.one_of([asked.picture.transaction_coordinator(name)]),
    ),
)
