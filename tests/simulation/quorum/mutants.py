"""The rules, one left out at a time: what each of them is for, and that its absence is noticed.

A mutant changes a few words in one function of the production code. It is caught by seeds of the
simulator, or by a deterministic test where chance would take too long;
``leaving_out.hunt`` says by which.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.raft_meta import (
    active,
    appending,
    elections,
    guard,
    journal,
    raft_quorum,
    recovery,
    snapshots,
    taking,
    voter,
    voters,
)
from penstock.raft_meta.core import (
    broker_commands,
    cluster_state,
    election,
    partition_commands,
    reassignment,
    sessions,
    tables,
    topic_commands,
)
from penstock.raft_meta.rules import (
    changing,
    founding,
    levels,
    reading,
    replicating,
    snapshotting,
    terms,
    voting,
)
from tests.simulation.quorum import test_disk
from tests.simulation.quorum.leaving_out import Mutant
from tests.simulation.quorum.liveness_mutants import LIVENESS
from tests.simulation.quorum.mutants_of_time import OF_TIME
from tests.unit.raft_meta import test_catching_up_under_load as loads
from tests.unit.raft_meta import test_changing, test_recovery
from tests.unit.raft_meta import test_guard_rules as rules
from tests.unit.raft_meta import test_levels as levels_tests
from tests.unit.raft_meta import test_taking_snapshots as taken

_RESET: Final = (
    "    self._journal.reset_to_snapshot(snapshot.index, snapshot.term, snapshot.voters)\n"
)
_INSTALL: Final = (
    """\
    while True:
        try:
            self._snapshots.save(snapshot)
            break
        except OSError as error:
            if not is_full(error):
                raise
            self._await_room(error)
    self._snapshot = snapshot
"""
    + _RESET
)

MUTANTS: Final[dict[str, Mutant]] = {
    # Rule 1.
    "newer terms are not entered": Mutant(
        "an answer of a newer term does not end a leadership",
        terms.Terms.is_current,
        "self.step_down(peer, message.term)",
        "pass",
        (rules.test_a_newer_term_in_an_answer_ends_leadership,),
    ),
    "older terms are obeyed": Mutant(
        "whoever leads an older term is followed",
        terms.Terms.is_over,
        "message.term >= self._desk.engine.term()",
        "True",
    ),
    "no term notice": Mutant(
        "a leader of an older term is not told",
        terms.Terms.is_over,
        "self._desk.queue(peer, Message(term_notice=raft_pb2.TermNotice()))",
        "pass",
        (rules.test_a_leader_of_an_old_term_is_told_and_obeyed_no_more,),
    ),
    # Rule 2.
    "appends always cut": Mutant(
        "what a follower has already is cut and appended again (S:991)",
        appending.decide,
        "        agreeing += 1\n",
        "        break\n",
    ),
    "previous term not compared": Mutant(
        "a follower appends after an entry of another term",
        appending.decide,
        "journal.term_at(previous) != append.previous_term",
        "False",
    ),
    "commit index not capped": Mutant(
        "a follower commits what a message did not show to be the leader's",
        appending.decide,
        "min(append.commit_index, matched)",
        "min(append.commit_index, max(journal.last_index, matched))",
        (rules.test_the_commit_index_stays_within_what_the_message_matched,),
    ),
    "matches its whole log": Mutant(
        "a follower acknowledges all that it has, not what the message showed",
        appending.decide,
        "next_index=matched + 1",
        "next_index=max(matched, journal.last_index) + 1",
        (rules.test_a_message_delivered_twice_cuts_nothing,),
    ),
    # Rule 3.
    "refusals are not void": Mutant(
        "every refusal of what was under way is acted upon",
        replicating.Replicating.on_reply,
        "reply.reset and reply.round > progress.void_until",
        "reply.reset",
        (rules.test_refusals_of_what_was_under_way_are_void,),
    ),
    "refusals go back one entry": Mutant(
        "a refusal goes back one entry, not a whole term",
        appending._start_of_term,
        "index -= 1",
        "break",
        (rules.test_a_refusal_goes_back_a_whole_term_but_not_to_what_is_committed,),
    ),
    # Rule 4.
    "answers of any term count": Mutant(
        "an acknowledgement of an older term commits (S:1070)",
        terms.Terms.is_current,
        "return message.term == term",
        "return True",
        (rules.test_answers_of_another_term_commit_nothing,),
    ),
    "answers beyond the log count": Mutant(
        "an acknowledgement of what this leader does not have",
        replicating.Replicating.on_reply,
        "not known or reply.next_index > desk.journal.last_index + 1",
        "False",
        (rules.test_answers_beyond_the_log_are_dropped,),
    ),
    "votes are counted by message": Mutant(
        "a vote that comes twice counts twice (S:1063)",
        voting.Voting.on_vote,
        "peer not in self._votes",
        "True",
        (rules.test_a_vote_delivered_again_and_again_is_one_vote,),
    ),
    "votes for a shorter log": Mutant(
        "pre-votes go to whoever asks, whatever it has",
        voting.Voting.on_pre_vote,
        "(request.last_log_term, request.last_log_index) >= ours",
        "True",
        (rules.test_a_pre_vote_changes_nothing_and_wants_a_fresh_log,),
    ),
    # Rule 5.
    "no PreVote": Mutant(
        "a voter whose timer ran out stands at once",
        elections.Elections.may_stand,
        "and len(self._round.granted) >= self._majority",
        "",
    ),
    "no stickiness": Mutant(
        "candidates are heard while a leader is alive",
        voting.Voting._hears_leader,
        "return self._desk.leads or self._elections.leader_is_alive(self._desk.now_s)",
        "return self._desk.leads",
        (rules.test_candidates_are_ignored_while_a_leader_is_alive,),
    ),
    "the gate stays open": Mutant(
        "the engine may stand again without another pre-vote",
        voting.Voting.after_tick,
        "self._desk.engine.disconnect(peer)",
        "pass",
        (rules.test_a_second_candidacy_does_not_open_the_way_to_a_third,),
    ),
    **OF_TIME,
    # Rule 6.
    "snapshots replace what is there": Mutant(
        "a snapshot is installed though the log has its last entry",
        snapshotting.Receiving.on_chunk,
        "last <= journal.commit_index or journal.term_at(last) == chunk.last_term",
        "False",
    ),
    "the log goes before a snapshot arrives": Mutant(
        "the log is shortened though a voter that is sent a snapshot needs what follows it",
        snapshotting.Sending.first_needed,
        "if not needs or min(needs) >= index:",
        "if True:",
        (
            lambda directory: loads.test_the_log_after_a_snapshot_is_kept_for_who_is_sent_it(
                loads.Sending(directory)
            ),
        ),
    ),
    "snapshots are not checked": Mutant(
        "a snapshot is installed whatever its checksum says",
        snapshotting.Receiving.on_chunk,
        "snapshot.crc != chunk.crc32c",
        "False",
        (rules.test_a_damaged_snapshot_is_refused,),
    ),
    # Rule 7.
    "entries of any kind": Mutant(
        "an entry whose kind is not known counts as a no-op",
        appending.decode_entries,
        "        else:\n            return None\n",
        "        else:\n            command = NO_OP\n",
        (lambda lone: rules.test_malformed_entries_are_dropped(lone, _bad_entry()),),
    ),
    # Rule 8.
    "reads are not confirmed": Mutant(
        "a leader answers a read without asking whether it still leads",
        reading.Reading._is_confirmed,
        "return echoes + 1 >= desk.majority",
        "return True",
    ),
    "reads before a commit of its own": Mutant(
        "a new leader answers reads before it knows what is committed",
        reading.Reading.ready,
        "    if self._is_older_term(commit):\n        return []\n",
        "",
        (rules.test_a_new_leader_answers_no_read_before_it_committed_in_its_term,),
    ),
    # The voters.
    "an empty directory is a voter": Mutant(
        "whoever has a voter's number counts, whatever its directory has forgotten",
        voters.Member.is_kept_in,
        "return self.directory_id in (ANY_DIRECTORY, directory_id)",
        "return True",
    ),
    "anybody founds": Mutant(
        "controllers whose disks were lost take themselves for a new cluster",
        founding.Founding._has_permission,
        "self._desk.journal.may_found",
        "True",
    ),
    "voter sets in a row": Mutant(
        "a set is begun before the last one is committed",
        changing.Changing._is_settled,
        "0 < journal.voters_index <= journal.commit_index",
        "0 < journal.voters_index",
        (test_changing.test_two_changes_never_overlap,),
    ),
    "a set before an entry of its own": Mutant(
        "a new leader changes the voters before it knows what is in force (thesis 4.1)",
        changing.Changing._is_settled,
        "journal.term_at(journal.commit_index) == self._desk.engine.term()",
        "True",
        (test_changing.test_a_leader_changes_nothing_before_it_committed_in_its_term,),
    ),
    # The disk.
    "said before it is on disk": Mutant(
        "messages leave before the journal is synced",
        guard.Guard.flush,
        "self._desk.journal.sync()",
        "self._desk.journal.sync() if self._desk.now_s % 1 < 0.5 else None",
    ),
    "the journal is not flushed": Mutant(
        "LMDB is opened without fsync",
        journal.LmdbJournal.__init__,
        "sync=True, metasync=True",
        "sync=False, metasync=False",
    ),
    "votes are not kept": Mutant(
        "a vote is written with the next entry, not by itself",
        journal.LmdbJournal.setCurrentTerm,
        "self._hard_state_dirty |= (term, vote) != (self._term, self._vote)",
        "pass",
        (rules.test_a_vote_that_comes_with_no_entry_is_on_disk_too,),
    ),
    "snapshots are not flushed": Mutant(
        "the snapshot's file is renamed before it is on disk",
        snapshots.SnapshotStore._write,
        "os.fsync(file.fileno())",
        "file.fileno()",
    ),
    "a snapshot's name is not flushed": Mutant(
        "the directory is not synced after the rename",
        snapshots.SnapshotStore._rename,
        "os.fsync(descriptor)",
        "pass",
    ),
    "the log is cut before the snapshot": Mutant(
        "a snapshot is installed into the journal before it is in its file",
        voter.Voter._install,
        _INSTALL,
        _RESET + _INSTALL.replace(_RESET, ""),
    ),
    "the log is shortened before the snapshot": Mutant(
        "what a snapshot covers leaves the log before the snapshot is written",
        voter.Voter.snapshot_of,
        "return Snapshot(",
        "self._journal.compact_to(index)\n    return Snapshot(",
    ),
    "an older snapshot replaces a newer one": Mutant(
        "a snapshot takes the place of one that was installed while it was written",
        voter.Voter.keep,
        "self._has_snapshot_of(snapshot.index)",
        "False",
        (taken.test_a_snapshot_that_was_installed_during_the_write_stays,),
    ),
    "the directory is let go of during a write": Mutant(
        "a controller stops without waiting for the snapshot that it writes",
        raft_quorum.RaftQuorum.stop,
        "await self._taking.stop()",
        "pass",
    ),
    "a write without room passes for done": Mutant(
        "a voter whose disk is full goes on as if it had written",
        journal.LmdbJournal.sync,
        "self._await_room(error)",
        "break",
    ),
    "a failed flush is tried again": Mutant(
        "a flush of the journal that failed is tried again, and goes well: what it was for is gone",
        journal.LmdbJournal.sync,
        "if not is_full(error):\n                raise\n            self._await_room(error)",
        "if is_full(error):\n                self._await_room(error)",
    ),
    "what a failed flush left is believed": Mutant(
        "a journal builds on what it finds in the cache after a flush that failed",
        journal.LmdbJournal._open,
        "self._hard_state_dirty = found is not None",
        "pass",
        (
            lambda _directory: (
                test_disk.test_what_is_said_after_a_failed_flush_outlives_a_loss_of_power()
            ),
        ),
    ),
    "a snapshot's failed flush is ignored": Mutant(
        "a snapshot whose flush failed is put in place, and the log cut to it",
        snapshots.SnapshotStore._write,
        "    except OSError:\n        _remove(path)\n        raise\n",
        "    except OSError as error:\n        if is_full(error):\n            raise\n",
    ),
    "failures are lived with": Mutant(
        "an active controller that failed half-way goes on with what it has",
        active.ControllerShell._handle,
        "self._renounce()",
        "self._set_timer()",
    ),
    "an office is not given up": Mutant(
        "who gives up the office of the active controller goes on to lead the quorum",
        active.ControllerShell._renounce,
        "self._quorum.renounce()",
        "pass",
    ),
    "recovery keeps what was known to be committed": Mutant(
        "who becomes the only voter drops what it did not know to be committed",
        journal.LmdbJournal.take_over,
        "index = self.last_index + 1",
        "del self._entries[self._commit - self.first_index + 1 :]\n    index = self.last_index + 1",
    ),
    "a recovered set is like any other": Mutant(
        "a set that an operator put in force must follow the one before",
        recovery.become_the_only_voter,
        "VoterSet((me,), recovered=True)",
        "VoterSet((me,))",
    ),
    "recovery leaves the lost ones voters": Mutant(
        "after a recovery the voters that were lost still count",
        recovery.become_the_only_voter,
        "VoterSet((me,), recovered=True)",
        "journal.voters or VoterSet((me,))",
    ),
    # Who can apply the log.
    "voters of old software": Mutant(
        "a controller becomes a voter whose software does not know the level in force",
        changing.Changing._catch_up,
        "NOT_KNOWN < progress.level < needed",
        "False",
        (levels_tests.test_whose_software_is_too_old_does_not_become_a_voter,),
    ),
    "voters that apply nothing": Mutant(
        "a controller becomes a voter as soon as it has stored the log",
        changing.Changing._catch_up,
        "applied >= catching.to_apply",
        "True",
        (levels_tests.test_a_new_voter_has_applied_what_there_was_when_it_came,),
    ),
    "levels beyond a voter": Mutant(
        "the level is raised whatever the voters know",
        voter.Voter._submit,
        "lacking := self._guard.levels.lacking(level)",
        "lacking := {}",
        (levels_tests.test_a_level_that_a_voter_does_not_know_is_not_raised_to,),
    ),
    "levels beyond who is added": Mutant(
        "the level is raised whatever a controller knows that is being added",
        levels.Levels.lacking,
        "(*desk.peers, *desk.observers)",
        "desk.peers",
        (
            levels_tests.test_a_level_is_not_raised_beyond_what_a_controller_that_is_being_added_knows,
        ),
    ),
    "levels under way": Mutant(
        "whoever is added needs not know the level that is about to be raised",
        levels.Levels.raising,
        "level > self._raised",
        "False",
        (levels_tests.test_who_does_not_know_a_level_that_is_about_to_be_raised_is_not_added,),
    ),
    "levels of earlier leaders": Mutant(
        "a leader takes what it has applied for all that the log holds",
        levels.Levels.needed,
        "journal.term_at(machine.applied_index) != self._desk.engine.term()",
        "False",
        (levels_tests.test_nobody_is_added_before_the_level_in_force_is_known,),
    ),
    "recovery looks at the journal alone": Mutant(
        "a survivor that died as it installed a snapshot is said to have what its journal has",
        recovery._describe,
        "look(journal, snapshots)",
        "journal",
        (test_recovery.test_a_snapshot_that_the_journal_lacks_counts_for_a_survivor,),
    ),
    "snapshots of another index": Mutant(
        "a snapshot is taken for one of the next index",
        taking.SnapshotTaking._take,
        "voter.snapshot_of(index, data)",
        "voter.snapshot_of(index - 1, data)",
    ),
    # The controllers.
    "stale broker epochs": Mutant(
        "whoever has a broker's number may speak for it",
        broker_commands.require_registration,
        "broker.broker_epoch != broker_epoch",
        "False",
    ),
    "stale leader epochs": Mutant(
        "a former leadership may change the in-sync set",
        partition_commands._check_authority,
        "entry.leader_epoch < partition.leader_epoch",
        "False",
    ),
    "stale partition epochs": Mutant(
        "a change may rest on an in-sync set that is not in force",
        partition_commands._check_authority,
        "entry.partition_epoch != partition.partition_epoch",
        "False",
    ),
    "anybody changes in-sync sets": Mutant(
        "who does not lead a partition may change its in-sync set",
        partition_commands._check_authority,
        "partition.leader != leader.node_id",
        "False",
    ),
    "strangers in sync": Mutant(
        "who is no replica may be in sync",
        partition_commands._checked_members,
        "or not wanted.issubset(partition.replicas)",
        "",
        (),
    ),
    "a leader leaves the in-sync set": Mutant(
        "a leader may take itself out",
        partition_commands._checked_members,
        "leader.node_id not in wanted",
        "False",
    ),
    "fenced brokers in sync": Mutant(
        "a fenced broker may be in sync",
        partition_commands._ineligible,
        "if broker.fenced:",
        "if False:",
    ),
    "refused in-sync sets asked for again": Mutant(
        "an in-sync set that was refused for a member may take effect later",
        partition_commands._use_up,
        "draft.metadata_version >= REFUSALS_USE_UP_EPOCHS_SINCE",
        "False",
    ),
    "earlier lives in sync": Mutant(
        "a broker that registered anew since it caught up is in sync (KIP-903)",
        partition_commands._ineligible,
        "broker.broker_epoch != member.broker_epoch",
        "False",
    ),
    "brokers that shut down in sync": Mutant(
        "a broker that shuts down may join an in-sync set",
        partition_commands._ineligible,
        "if broker.in_controlled_shutdown and broker.node_id != leader.node_id:",
        "if False:",
    ),
    "duplicates take effect": Mutant(
        "a proposal may be applied twice",
        cluster_state.ClusterState._check_epoch,
        "command.sequence <= self._last_sequence",
        "False",
    ),
    "stale controller epochs": Mutant(
        "what a former controller proposed takes effect",
        cluster_state.ClusterState._check_epoch,
        "self._controller_epoch == 0 or command.controller_epoch != self._controller_epoch",
        "False",
    ),
    "an epoch is claimed again": Mutant(
        "a controller claims an epoch that is over",
        cluster_state.ClusterState._become_controller,
        "command.controller_epoch <= self._controller_epoch",
        "False",
    ),
    "let in before caught up": Mutant(
        "a fenced broker is let in whatever it has seen of the metadata",
        sessions.Session.wish,
        "request.metadata_index >= max(self.broker_epoch, self.unfence_index)",
        "True",
    ),
    "leader epochs stay": Mutant(
        "a new leader has the epoch of the one before",
        election.bumped,
        "partition.leader_epoch + (partition.leader != led_before_by)",
        "partition.leader_epoch",
    ),
    "anybody leads": Mutant(
        "a replica that is not in sync is elected though the topic forbids it",
        election._elect,
        "if leader == NO_LEADER and (rules.unclean or rules.ordered):",
        "if leader == NO_LEADER:",
    ),
    "fenced brokers keep what they have": Mutant(
        "fencing takes neither leaderships nor memberships",
        broker_commands.fence,
        "_withdraw(draft, broker.node_id, unclean=False)",
        "pass",
    ),
    "unclean restarts stay eligible": Mutant(
        "a broker that lost its page cache stays an eligible leader (KIP-966)",
        broker_commands.register,
        "unclean=not whole_since",
        "unclean=False",
    ),
    "late registrations count": Mutant(
        "an earlier process takes the place of the live one with a request that comes late",
        broker_commands._require_newest,
        "command.follows_broker_epoch != newest",
        "False",
    ),
    "movers leave too early": Mutant(
        "a move ends before those who come are in sync (KIP-455)",
        reassignment.has_arrived,
        "in_sync.issuperset(partition.adding) and",
        "",
    ),
    "a replica leaves in the same epoch": Mutant(
        "who leaves and comes back with an empty log counts for what it was",
        reassignment._starts_anew,
        "or not set(before.replicas).issubset(now.replicas)",
        "",
    ),
    "deletions have no effect": Mutant(
        "a topic whose deletion was acknowledged is still there",
        topic_commands.delete_topic,
        "draft.remove_topic(",
        "(lambda _topic_id: None)(",
    ),
    "producer ids twice": Mutant(
        "a block of producer ids is handed out again",
        tables.Draft.commit,
        "tables.next_producer_id = self.next_producer_id",
        "pass",
    ),
    **LIVENESS,
}


def _bad_entry() -> Any:
    from penstock.v1 import raft_pb2  # Only this one needs it.

    return raft_pb2.RaftEntry(index=2, term=1)
