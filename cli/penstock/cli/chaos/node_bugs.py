"""Known bugs of whole nodes: those of the cores, and rules left out around them.

The simulator runs cores alone; what is left out here it would never see. So these are found by
runs against real nodes (`penstock chaos run --bug`), each by the workload that it names.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Final

from penstock.broker.service.admin import AdminServicer
from penstock.broker.storage.cleaner.filtering import Filter
from penstock.chaos.simulator.bugs import BUGS as CORE_BUGS
from penstock.chaos.simulator.known_bug import Bug
from penstock.raft_meta.core import topic_commands
from penstock.v1 import admin_pb2, cluster_pb2
from penstock.wire.errors import TopicAlreadyExistsError

# --- what the controllers are to be asked is answered by what they said before

_REMEMBERED_S: Final = 1.0
_create_topic: Final = vars(AdminServicer)["_create_topic"]
_said: Final[dict[str, tuple[float, admin_pb2.TopicResult]]] = {}


async def _as_they_said_lately(
    self: Any, wish: cluster_pb2.CreateTopicCommand, timeout_ms: int
) -> admin_pb2.TopicResult:
    at, result = _said.get(wish.name, (float("-inf"), admin_pb2.TopicResult()))
    if wish.validate_only and time.monotonic() - at < _REMEMBERED_S:
        return result
    answer: admin_pb2.TopicResult = await _create_topic(self, wish, timeout_ms)
    if wish.validate_only:
        _said[wish.name] = time.monotonic(), answer
    return answer


# --- a topic made anew is taken for the deleted one

_made_already: Final = vars(topic_commands)["_made_already"]


def _with_the_id_of_its_name(
    tables: Any, command: cluster_pb2.CreateTopicCommand, result: cluster_pb2.CommandResult
) -> bool:
    command.topic_id = uuid.uuid5(uuid.NAMESPACE_DNS, command.name).bytes
    is_there: bool = _made_already(tables, command, result)
    return is_there and not command.validate_only


def _only_the_name_is_looked_at(tables: Any, command: cluster_pb2.CreateTopicCommand) -> None:
    if command.name in tables.topic_ids:
        raise TopicAlreadyExistsError(f"topic {command.name!r} exists already")


# --- compaction takes a key's last value for one that was replaced


def _last_ones_go_too(self: Any, span: Any, header: Any) -> bool:
    del header
    return span.key is not None and self.latest.get(span.key) < span.offset


_OF_NODES: Final[dict[str, Bug]] = {
    "checks-are-remembered": Bug(
        "a broker says by what the controllers said within the last second if a topic is there",
        AdminServicer,
        "_create_topic",
        _as_they_said_lately,
    ),
    "topic-ids-come-back": Bug(
        "a topic made anew gets the topic id of the deleted one of its name",
        topic_commands,
        "_made_already",
        _with_the_id_of_its_name,
        also=((topic_commands, "_check_new_topic", _only_the_name_is_looked_at),),
    ),
    "compaction-drops-last-values": Bug(
        "compaction drops the last value of a key, too",
        Filter,
        "_stays",
        _last_ones_go_too,
    ),
}


def _is_in_nodes(bug: Bug) -> bool:
    """Whether it changes something that a node runs, and not the simulator's model alone."""
    targets = [bug.target, *(target for target, _, _ in bug.also)]
    modules = [getattr(one, "__module__", None) or vars(one)["__name__"] for one in targets]
    return not all(module.startswith("penstock.chaos.") for module in modules)


SIMULATED: Final[dict[str, Bug]] = {
    name: bug for name, bug in CORE_BUGS.items() if not _is_in_nodes(bug)
}
"""Those of the simulator's disks, networks and models of shells: a node would not have them."""

BUGS: Final[dict[str, Bug]] = {
    **{name: bug for name, bug in CORE_BUGS.items() if name not in SIMULATED},
    **_OF_NODES,
}
"""All that a node can be started with, by name."""
