"""What the active controller refuses before it becomes a command of the log.

A rule that came after logs were written can't be one of applying: old entries must do what they
did. It is kept here, by the state as the active controller has it now. That is a courtesy to who
asks, and no invariant: two commands on their way at once may break it together, and what old logs
have made stays. Whatever relies on it must hold without it. All else is judged where a command is
applied, what is malformed too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.v1 import cluster_pb2
from penstock.wire.errors import InvalidConfigError
from penstock.wire.topic_config import TOPIC_CONFIGS

_BATCH: Final = "max.message.bytes"
_SEGMENT: Final = "segment.bytes"


def check_proposal(state: ClusterState, command: cluster_pb2.Command) -> None:
    """Raise InvalidConfigError for configs of a topic that can't hold together."""
    match command.WhichOneof("body"):
        case "create_topic":
            created = command.create_topic
            # One that is there is answered as the first time, or is said to be there.
            if created.topic_id not in state.topics and state.topic(created.name) is None:
                _check_sizes(created.configs)
        case "alter_topic_configs":
            altered = command.alter_topic_configs
            topic = state.topic(altered.topic)
            # A topic that has it so already can have its other configs altered.
            if topic is not None and {_BATCH, _SEGMENT} & altered.set.keys():
                kept = {key: topic.configs[key] for key in topic.configs.keys() - altered.remove}
                _check_sizes({**kept, **altered.set})


def _check_sizes(configs: Mapping[str, str]) -> None:
    """Refuse a largest batch above the size of a segment: no log would ever take it.

    Only where both are set. The defaults are not asked for: segments of a topic without a size
    are as large as its batches (``TopicLogConfig``), and whoever sets small segments alone means
    batches that fit.
    """
    batch_bytes, segment_bytes = _size(configs, _BATCH), _size(configs, _SEGMENT)
    if batch_bytes is not None and segment_bytes is not None and batch_bytes > segment_bytes:
        raise InvalidConfigError(
            f"topic config {_BATCH}={batch_bytes} is above {_SEGMENT}={segment_bytes}: a batch "
            f"lies in one segment, so that none of this size could be written; set {_SEGMENT} to "
            f"at least {batch_bytes}, or {_BATCH} to at most {segment_bytes}"
        )


def _size(configs: Mapping[str, str], key: str) -> int | None:
    """What is set; None for nothing, and for what is refused for itself."""
    text = configs.get(key)  # A map of a message would make an entry that is only asked for.
    if text is None:
        return None
    try:
        value = TOPIC_CONFIGS[key].parse(text)
    except ValueError:
        return None
    assert isinstance(value, int)
    return value
