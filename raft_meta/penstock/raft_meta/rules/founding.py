"""The first start of a cluster: how the first voter set comes to be, and only once.

Every other voter set follows from the one before it, by a log. The first follows from
controller.quorum.voters, which says who, but not in which directories; and an empty directory may
be a lost one. So one node alone makes the first set, the founder (the least node id), and only
after all others have said that their directories are empty too, and have promised, on disk, to
follow this very directory of the founder's and no other. The set names all their directories.

The others that it knows of need not be all there are: the cluster may have grown since that setting
was written, and all whom it names may have lost their disks. So a founder founds only with a
permission that ``penstock format`` gives to a new cluster, once (``journal.may_found``); without,
it waits to be added like any other newcomer.

From then on an empty directory is nobody's voter. It does not matter which one is emptied, or
when: the founder's successor finds others pledged or in use, and the set lacks everybody else's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from penstock.raft_meta.rules.desk import Desk, Message
from penstock.raft_meta.voters import DIRECTORY_ID_BYTES, Address, Member, VoterSet
from penstock.v1 import raft_pb2

IN_USE: Final = "its directory is in use already"
"""Why one refuses that belongs to a cluster."""


class Founding:
    """``configured`` are the node ids of controller.quorum.voters; addresses may be missing."""

    def __init__(
        self, desk: Desk, configured: Collection[int], addresses: Mapping[int, Address]
    ) -> None:
        self._desk = desk
        self._configured = sorted(configured)
        self._addresses = addresses
        self._pledged: dict[int, bytes] = {}  # The directories that follow this founder.
        self._invite_again_s = -math.inf
        self.refusals: dict[int, str] = {}
        """Why others do not take part, by node id."""

    @property
    def founder_id(self) -> int:
        """Who founds the cluster, if nobody has."""
        return self._configured[0] if self._configured else -1

    @property
    def is_under_way(self) -> bool:
        """This node is the founder, and the cluster is not founded."""
        return self._is_founder() and self._has_permission()

    @property
    def needs_permission(self) -> bool:
        """This node would be the founder, and is not known to be of a new cluster."""
        return self._is_founder() and not self._has_permission()

    def _is_founder(self) -> bool:
        return self._desk.journal.is_fresh and self.founder_id == self._desk.node_id

    def _has_permission(self) -> bool:
        return self._desk.journal.may_found

    @property
    def missing(self) -> tuple[int, ...]:
        """Whom the founder waits for."""
        if not self.is_under_way:
            return ()
        known = {self._desk.node_id, *self._pledged}
        return tuple(node for node in self._configured if node not in known)

    def before_tick(self) -> bool:
        """As the founder: invite who is missing, or found; whether the cluster was founded."""
        desk = self._desk
        if not self.is_under_way:
            return False
        missing = self.missing
        if not missing:
            desk.journal.found(self._voters())
            return True
        if desk.now_s >= self._invite_again_s:
            self._invite_again_s = desk.now_s + desk.timing.heartbeat_s
            for peer in missing:
                invitation = raft_pb2.Invitation(node_ids=self._configured)
                desk.queue(peer, Message(invitation=invitation))
        return False

    def _voters(self) -> VoterSet:
        directories = self._pledged | {self._desk.node_id: self._desk.journal.directory_id}
        return VoterSet(
            tuple(
                Member(node, *self._addresses.get(node, ("", 0)), directories[node])
                for node in self._configured
            )
        )

    def deadline_s(self) -> float:
        """When ``before_tick`` has something to do."""
        return self._invite_again_s if self.is_under_way else math.inf

    def on_invitation(self, peer: int, message: Message) -> None:
        """A founder asks for this directory's promise."""
        reason = self._why_not(peer, message)
        if not reason:
            self._desk.journal.give_pledge(message.directory_id)
        reply = raft_pb2.InvitationReply(
            accepted=not reason, reason=reason, founder_directory_id=message.directory_id
        )
        self._desk.queue(peer, Message(invitation_reply=reply))

    def _why_not(self, peer: int, message: Message) -> str:
        journal = self._desk.journal
        if not journal.is_fresh:
            return IN_USE
        if list(message.invitation.node_ids) != self._configured or peer != self._configured[0]:
            return f"its controller.quorum.voters are {self._configured}"
        if len(message.directory_id) != DIRECTORY_ID_BYTES:
            return "the founder's directory has no id"
        if journal.pledge not in (b"", message.directory_id):
            return "it promised to follow another directory of the founder's"
        return ""

    def on_reply(self, peer: int, message: Message) -> None:
        """Somebody promised to follow this founder, or did not.

        What was answered to a directory that this node had before says nothing about this one; and
        whoever has a term is in use by now, and promises nothing.
        """
        if not self.is_under_way or peer not in self._configured:
            return
        reply = message.invitation_reply
        is_old = reply.founder_directory_id != self._desk.journal.directory_id
        if is_old or (message.term and reply.accepted):
            self._desk.dropped += 1
            return
        if reply.accepted and len(message.directory_id) == DIRECTORY_ID_BYTES:
            self._pledged[peer] = message.directory_id
            self.refusals.pop(peer, None)
        else:
            self._pledged.pop(peer, None)
            self.refusals[peer] = reply.reason
