"""Whom a new active controller waits for, and for how long."""

from __future__ import annotations

from penstock.raft_meta.core.controller_events import LostLeadership, StoodStill
from penstock.wire.errors import ErrorCode
from tests.unit.raft_meta_core.test_active_controller import Shell
from tests.unit.raft_meta_core.test_own_stalls import watching


def test_after_a_takeover_whoever_does_not_come_is_fenced() -> None:
    shell = watching()
    shell.tell(LostLeadership())
    assert shell.controller.next_deadline_ms() is None
    assert shell.ended == dict.fromkeys((1, 2, 3), ErrorCode.NOT_CONTROLLER)
    shell.become_active(1, 2)
    start = shell.now_ms
    assert shell.controller.next_deadline_ms() == start + 600
    stream = shell.open()
    shell.beat(stream, 1)
    shell.open()  # An open stream that says nothing is nobody's.
    shell.run_until(start + 600)
    assert [shell.fenced(node) for node in (1, 2, 3)] == [False, True, False]
    shell.run_until(start + 5999, beating={stream: 1})
    assert not shell.fenced(3), "nothing says that it is gone: it has a whole session"
    shell.run_until(start + 6000, beating={stream: 1})
    assert [shell.fenced(node) for node in (1, 2, 3)] == [False, True, True]


def test_who_stays_away_while_most_come_is_fenced_before_a_whole_session() -> None:
    shell = Shell()
    shell.become_active(former_ended=True)  # A broker died with the active controller's process.
    start = shell.now_ms
    streams = {shell.open(): 1, shell.open(): 2}
    for stream, node in streams.items():
        shell.beat(stream, node)
    shell.run_until(start + 1999, beating=streams)
    assert not shell.fenced(3)
    shell.run_until(start + 2000, beating=streams)
    assert [shell.fenced(node) for node in (1, 2, 3)] == [False, False, True]
    shell.beat(shell.open(), 3)
    assert not shell.fenced(3), "it comes late, and is let in as ever"


def test_nobody_is_fenced_early_unless_most_have_come() -> None:
    shell = Shell(brokers=4)
    shell.become_active(voters=(1, 2, 3, 4), former_ended=True)
    start = shell.now_ms
    streams = {shell.open(): 1, shell.open(): 2}  # As on a busy host: half of them.
    for stream, node in streams.items():
        shell.beat(stream, node)
    shell.run_until(start + 5999, beating=streams)
    assert shell.proposed == []
    shell.run_until(start + 6000, beating=streams)
    assert shell.proposed == ["fence_broker"] * 2


def test_only_who_must_know_of_the_takeover_is_missed_early() -> None:
    shell = Shell(brokers=5)
    shell.become_active(voters=(1, 2, 3))  # Who hangs lets its brokers' streams hang as well.
    start = shell.now_ms
    streams = {shell.open(): 2, shell.open(): 3, shell.open(): 5}
    for stream, node in streams.items():
        shell.beat(stream, node)
    shell.run_until(start + 2000, beating=streams)
    assert shell.fenced(1), "Raft told its node"
    shell.run_until(start + 5999, beating=streams)
    assert not shell.fenced(4), "it may wait for the answer of the one that hangs"
    shell.run_until(start + 6000, beating=streams)
    assert shell.fenced(4)


def test_a_roll_call_is_later_by_what_this_process_stood_still() -> None:
    shell = Shell()
    shell.become_active(voters=(1, 2, 3))
    shell.now_ms += 1900
    streams = {shell.open(): 1, shell.open(): 2}
    for stream, node in streams.items():
        shell.beat(stream, node)
    shell.now_ms += 1500
    end = shell.now_ms
    shell.tell(StoodStill(1500))
    shell.run_until(end + 99, beating=streams)
    assert not shell.fenced(3)
    shell.run_until(end + 100, beating=streams)
    assert shell.fenced(3)
