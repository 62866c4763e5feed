"""What no run may show of positions that are sent in transactions; as ``anomalies``.

That each record is processed exactly once in what is committed, ``processed_twice_or_never`` says
there, of groups too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.chaos.simulator.history import check
from penstock.chaos.simulator.transactions.positions import Moves, PositionTold
from penstock.wire.ids import TopicIdPartition

if TYPE_CHECKING:
    from penstock.chaos.simulator.transactions.anomalies import Anomaly
    from penstock.chaos.simulator.transactions.history import History, Logs


class _Place(NamedTuple):
    group: str
    key: TopicIdPartition

    def __str__(self) -> str:
        return f"group {self.group}, partition {self.key.partition}"


class _Move(NamedTuple):
    """A move that is committed, and when that was."""

    before: int
    after: int
    at: int
    txn: int


def uncommitted_position(history: History, logs: Logs) -> None:
    """Somebody was told a position that no transaction had moved there that was committed by then:
    one that is open, or aborted, counts already.
    """
    moves = _committed(history)
    for at, told in history.of_kind(PositionTold):
        place = _Place(told.group, told.key)
        known = [move for move in moves.get(place, ()) if move.after == told.offset]
        check(
            told.offset < 0 or any(move.at < at for move in known),
            f"{place}: somebody was told position {told.offset}, which no transaction had that was "
            "committed",
        )


def position_went_back(history: History, logs: Logs) -> None:
    """Who asked for a position that no open transaction decides about was told one that is behind
    what was committed when it asked. So whoever goes on from there does again what is done.
    """
    moves = _committed(history)
    for _, told in history.of_kind(PositionTold):
        if not told.stable:
            continue
        place = _Place(told.group, told.key)
        newest = max(
            (move.after for move in moves.get(place, ()) if move.at < told.asked_at), default=-1
        )
        check(
            told.offset >= newest,
            f"{place}: position {newest} was committed, and then somebody was told {told.offset}",
        )


def position_moved_twice(history: History, logs: Logs) -> None:
    """Two committed transactions moved a group's position over the same records: one of their
    producers did not hold the partition any more (a zombie), or went on from where it was not.
    """
    for place, moves in _committed(history).items():
        reached, by = 0, -1
        for move in sorted(moves):
            check(
                move.before >= reached,
                f"{place}: transaction {by} moved the position to {reached}, and transaction "
                f"{move.txn} from {move.before} to {move.after}",
            )
            reached, by = move.after, move.txn


def _committed(history: History) -> Mapping[_Place, list[_Move]]:
    """By place the moves of transactions that are committed."""
    found: dict[_Place, list[_Move]] = {}
    for place, move in _moves(history):
        found.setdefault(place, []).append(move)
    return found


def _moves(history: History) -> Iterator[tuple[_Place, _Move]]:
    decisions = history.decisions()
    for _, moves in history.of_kind(Moves):
        decision = decisions.get(moves.txn)
        if decision is not None and decision.commit:
            place = _Place(moves.group, moves.key)
            yield place, _Move(moves.before, moves.after, decision.at, moves.txn)


OF_POSITIONS: Final[tuple[Anomaly, ...]] = (
    uncommitted_position,
    position_went_back,
    position_moved_twice,
)
"""What must not be there at any time."""
