"""Who votes can apply the log: the feature levels (metadata.version) of the voters' software.

Software that does not know the level in force ends rather than apply the log its own way, so that a
voter of that kind is a voter lost. Two things could make one: a controller is added that does not
know the level, or the level is raised to one that a voter does not know. Both are entries of the
log, and the leader decides about both on one thread, where each sees the other:

- whoever is added knows the level that the whole log leads to, whether it is applied or not;
- the level is raised only when everybody has said to know it: voters, and whoever is being added.
"""

from __future__ import annotations

from typing import Final

from penstock.raft_meta.quorum import OLDEST_LEVEL
from penstock.raft_meta.rules.desk import Desk

NOT_KNOWN: Final = 0
"""Of a level: nobody has said it yet."""


class Levels:
    """The leader's side. Followers say with each answer which level they know."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._raised = NOT_KNOWN  # The greatest level that is asked for in the log and not applied.
        self._raised_index: int | None = None  # The log's end when it was in; None: not yet.

    def needed(self) -> int:
        """The level that the whole log leads to at the most; NOT_KNOWN while it can't be said.

        What earlier leaders put into the log is applied here as soon as something of this term is.
        """
        machine, journal = self._desk.machine(), self._desk.journal
        if machine is None:  # No state machine that has levels.
            return max(OLDEST_LEVEL, self._raised)
        if not machine.level or journal.term_at(machine.applied_index) != self._desk.engine.term():
            return NOT_KNOWN
        if self._raised_index is not None and machine.applied_index >= self._raised_index:
            self.stop()
        return max(machine.level, self._raised)

    def lacking(self, level: int) -> dict[int, int]:
        """Who hinders a raise to this level, with what each knows, or NOT_KNOWN."""
        desk, machine = self._desk, self._desk.machine()
        if level <= (OLDEST_LEVEL if machine is None else machine.level):
            return {}
        known = {peer: desk.progress(peer).level for peer in (*desk.peers, *desk.observers)}
        known[desk.node_id] = desk.supported_level
        return {node_id: known[node_id] for node_id in sorted(known) if known[node_id] < level}

    def raising(self, level: int) -> None:
        """A command that may raise the level so far is appended in this step."""
        if level > self._raised:
            self._raised, self._raised_index = level, None

    def after_tick(self) -> None:
        """What was proposed is in the log."""
        if self._raised and self._raised_index is None:
            self._raised_index = self._desk.journal.last_index

    def stop(self) -> None:
        """This node leads no more, or has applied what was asked for."""
        self._raised, self._raised_index = NOT_KNOWN, None
