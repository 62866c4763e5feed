"""What became of transactions, as far as their clients were told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from penstock.chaos.checkers.records import Records
from penstock.chaos.checkers.spans import Mask
from penstock.chaos.history import History, Operation, Type


class Fate(StrEnum):
    """Of a transaction."""

    COMMITTED = "committed"
    """Its commit was answered with ``ok``."""
    ABORTED = "aborted"
    """Its commit failed, or was never asked for: it is not committed, and never will be."""
    UNKNOWN = "unknown"
    """Its commit was asked for, and nobody knows what came of it."""


@dataclass(slots=True)
class Transaction:
    """One of them, with all that was done in it. ``operations`` are by time."""

    name: str
    commit: Operation | None = None
    operations: list[Operation] = field(default_factory=list)

    @property
    def fate(self) -> Fate:
        """What became of it."""
        if self.commit is None or self.commit.type is Type.FAIL:
            return Fate.ABORTED
        return Fate.COMMITTED if self.commit.type is Type.OK else Fate.UNKNOWN

    def of(self, *fs: str) -> list[Operation]:
        """What of these kinds was done in it."""
        return [one for one in self.operations if one.invoked.f in fs]


KINDS = ("begin", "append", "send-offsets", "read-from", "transfer", "commit", "abort")


def transactions(history: History) -> Mapping[str, Transaction]:
    """Of a history, by name."""
    found: dict[str, Transaction] = {}
    within = (one for one in history.of(*KINDS) if one.invoked.may_have("txn"))
    for one in within:
        name = one.invoked.value.get("txn")
        if name is None:
            continue
        transaction = found.get(name)
        if transaction is None:
            transaction = found[name] = Transaction(name)
        transaction.operations.append(one)
        if one.invoked.f == "commit":
            transaction.commit = one
    return found


def with_fate(history: History, *fates: Fate) -> Mask:
    """By the number of a transaction in the records whether its fate is one of these."""
    known = history.derived(transactions)
    names = history.derived(Records.of).transactions.names
    # The last place is that of NONE: what is in no transaction has no fate.
    return np.array([known[name].fate in fates for name in names] + [False], np.bool_)
