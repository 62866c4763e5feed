"""Rules of positions in transactions left out, in the cores or in the model of their shell."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from penstock.broker.core import group_codec, group_offsets
from penstock.broker.core.group_shard import GroupShard
from penstock.broker.core.group_state import GroupState
from penstock.broker.core.group_values import CommittedOffset, Producer
from penstock.chaos.simulator.known_bug import Bug
from penstock.chaos.simulator.transactions import group_hosting
from penstock.chaos.simulator.transactions.group_hosting import Marks
from penstock.chaos.simulator.transactions.leading import Leading
from penstock.v1 import groups_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicPartition

_TRANSACTIONS: Final[dict[str, object]] = {"transactions": True}
_LONG: Final[dict[str, object]] = {"transactions": True, "timeout_ms": 3000}

_put_pending = GroupState.put_pending


def _put_at_once(
    self: GroupState, partition: TopicPartition, offset: CommittedOffset, producer: Producer
) -> None:
    _put_pending(self, partition, offset, producer)
    self._set_offset(partition, offset)


def _anything_is_stable(_: GroupState, __: groups_pb2.FetchOffsetsRequest) -> None:
    """As for who does not ask for it."""


def _anybody_commits(_: GroupState, __: str, ___: int) -> None:
    """As for who commits from outside of an empty group."""


def _all_are_forgotten(_: deque[Marks]) -> deque[Marks]:
    return deque()


_end_transaction = GroupState.end_transaction


def _end_as_committed(self: GroupState, ended: Producer, *, commit: bool, up_to: int) -> None:
    _end_transaction(self, ended, commit=True, up_to=up_to)


def _count_at_once(self: GroupShard, _: Producer, key: bytes, value: bytes | None) -> bool:
    return self.replay(key, value)


_replay = GroupShard.replay


def _replay_but_positions(self: GroupShard, key: bytes, value: bytes | None) -> bool:
    replayed = group_codec.decode(key, value)
    if replayed is not None and isinstance(replayed.slot, TopicPartition):
        return True
    return _replay(self, key, value)


def _replay_nothing(_: GroupShard, __: Producer, ___: bytes, ____: bytes | None) -> bool:
    return True


def _nobody_is_asked(
    _: Leading, __: Any, ___: str, ____: tuple[int, int], done: Callable[[ErrorCode | None], None]
) -> None:
    done(None)


def _everybody_hears_it(code: ErrorCode) -> ErrorCode:
    return code


GROUP_BUGS: Final[dict[str, Bug]] = {
    "pending-positions-are-told": Bug(
        "a position counts as soon as it is sent, before its transaction's mark",
        GroupState,
        "put_pending",
        _put_at_once,
        given=_TRANSACTIONS,
    ),
    "unstable-positions-are-told": Bug(
        "who wants a stable position is told one that an open transaction decides about (KIP-447)",
        group_offsets,
        "_check_stable",
        _anything_is_stable,
        given=_LONG,
    ),
    "member-epochs-of-positions-are-not-checked": Bug(
        "positions are taken from who is not a member any more, or of another epoch",
        group_offsets,
        "_committer",
        _anybody_commits,
        ("hold up a client",),
        given=_LONG,
    ),
    "marks-of-a-load-are-forgotten": Bug(
        "marks that come while a group coordinator loads are followed by nobody",
        group_hosting,
        "kept_over_a_load",
        _all_are_forgotten,
        given=_TRANSACTIONS,
    ),
    "aborted-positions-count": Bug(
        "a position counts however its transaction has ended",
        GroupState,
        "end_transaction",
        _end_as_committed,
        given=_TRANSACTIONS,
    ),
    "loaded-positions-count-at-once": Bug(
        "who loads a group takes positions of transactions for its own before their marks",
        GroupShard,
        "replay_transactional",
        _count_at_once,
        given=_TRANSACTIONS,
    ),
    "positions-are-forgotten-by-loads": Bug(
        "who loads a group passes over its positions, and all begin anew",
        GroupShard,
        "replay",
        _replay_but_positions,
        given=_TRANSACTIONS,
        also=((GroupShard, "replay_transactional", _replay_nothing),),
    ),
    "positions-are-not-verified": Bug(
        "a group coordinator appends positions of which no transaction's coordinator knows",
        Leading,
        "verify",
        _nobody_is_asked,
        given=_TRANSACTIONS,
    ),
    "others-hear-that-a-producer-is-fenced": Bug(
        "who waits behind positions that come too late is told that it is fenced",
        group_hosting,
        "told_to_others",
        _everybody_hears_it,
        given=_TRANSACTIONS | {"timeout_ms": 250},
    ),
}
