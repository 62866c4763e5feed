"""What clients of transactions do and are told, in the words of the chaos harness's histories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from penstock.chaos.simulator.recording import Append, Recording, Underway
from penstock.chaos.simulator.transactions.history import (
    Acknowledged,
    Began,
    Consumed,
    EndAsked,
    Ended,
    Event,
    GroupAsked,
    GroupTold,
    Sent,
)
from penstock.client.core.subscription import Rebalance
from penstock.v1 import groups_pb2
from penstock.wire.ids import TopicPartition


def txn_name(txn: int) -> str:
    """As histories name a transaction, the process that writes it, and its producer."""
    return f"txn-{txn}"


class Told:
    """Writes down the events of transactions. What readers are given they write down themselves.

    A transaction is asked to commit when its producer, or a driver for its attempt, first asks for
    it. Each is a producer of its own: its name is never used for another one.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._appends: dict[tuple[bytes, ...], Append] = {}
        self._amounts: dict[int, list[int]] = defaultdict(list)
        self._attempts: dict[str, int] = {}
        self._ends: dict[tuple[int, bool], Underway] = {}
        self._ended: set[tuple[int, bool]] = set()

    def note(self, event: Event) -> None:
        """Something happened."""
        if not self.recording.kept:
            return
        match event:
            case Began(txn, transactional_id, _, attempt):
                if attempt is not None:
                    self._attempts[attempt.handle] = txn
                self._say("begin", txn, transactional_id=transactional_id)
            case Sent(txn, key, values, amounts):
                name = txn_name(txn)
                append = self.recording.append(name, key, values, process=name, txn=name)
                self._appends[values] = append
                self._amounts[txn] += amounts
            case Acknowledged(_, values, offset):
                self._appends.pop(values).acknowledged(offset)
            case Consumed(txn, values, _, places):
                runs = [
                    run
                    for (key, offset), value in zip(places, values, strict=True)
                    for run in self.recording.runs(key, [(offset, value)])
                ]
                self._say("read-from", txn, runs=runs)
            case _:
                self._note_end(event)

    def sends_positions(self, txn: int, commit: groups_pb2.CommitOffsetsRequest) -> Underway:
        """A member asks for positions of its group to be moved with its transaction."""
        name = txn_name(txn)
        asked = {
            "txn": name,
            "group": commit.group_id,
            "member": commit.member_id,
            "generation": commit.member_epoch,
            "offsets": {
                f"{one.partition.topic}-{one.partition.partition}": one.offset
                for one in commit.offsets
            },
        }
        return self.recording.begin(name, "send-offsets", asked)

    def rebalanced(self, group: str, member: str, generation: int, change: Rebalance) -> None:
        """A member has heard of what it gets and gives up, and acts on it at once."""
        steps: tuple[tuple[str, tuple[TopicPartition, ...]], ...] = (
            ("lost", change.lost),
            ("revoked", change.revoked),
            ("assigned", change.assigned),
        )
        for f, partitions in steps:
            if partitions:
                asked = {
                    "group": group,
                    "member": member,
                    "generation": generation,
                    "partitions": [str(one) for one in partitions],
                }
                self.recording.begin(f"member-{member}", f, asked).ok()

    def _note_end(self, event: Event) -> None:
        match event:
            case EndAsked(txn, commit):
                self._asked(txn, commit=commit)
            case Ended(txn, commit):
                self._told(txn, commit=commit)
            case GroupAsked(_, _, winners):
                for txn in self._named(winners):
                    self._asked(txn, commit=True)
            case GroupTold(_, _, winners, _):
                for txn in self._named(winners):
                    self._told(txn, commit=True)
            case _:
                pass

    def _named(self, handles: Iterable[str]) -> list[int]:
        return [self._attempts[handle] for handle in handles]

    def _say(self, f: str, txn: int, **what: Any) -> None:
        """What needs no answer."""
        name = txn_name(txn)
        self.recording.begin(name, f, {"txn": name, **what}).ok()

    def _asked(self, txn: int, *, commit: bool) -> Underway:
        known = self._ends.get((txn, commit))
        if known is not None:
            return known
        if commit and any(self._amounts[txn]):
            self._say("transfer", txn, amounts=self._amounts[txn])
        name = txn_name(txn)
        what = "commit" if commit else "abort"
        begun = self.recording.begin(name, what, {"txn": name})
        self._ends[txn, commit] = begun
        return begun

    def _told(self, txn: int, *, commit: bool) -> None:
        self._end(txn, self._asked(txn, commit=commit), commit=commit)
        other = self._ends.get((txn, not commit))
        if other is not None:
            self._end(txn, other, commit=not commit, refused=True)

    def _end(self, txn: int, end: Underway, *, commit: bool, refused: bool = False) -> None:
        """The first word about each end counts."""
        if (txn, commit) in self._ended:
            return
        self._ended.add((txn, commit))
        if refused:
            end.fail("INVALID_TXN_STATE: it has ended otherwise")
        else:
            end.ok()
