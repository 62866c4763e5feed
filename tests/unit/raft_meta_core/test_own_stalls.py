"""An active controller that itself stands still blames no broker for it, and waits no longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.raft_meta.core.controller_events import (
    CommandApplied,
    StoodStill,
    StreamClosed,
    Tick,
)
from penstock.v1 import cluster_pb2
from tests.unit.raft_meta_core.test_active_controller import TIMES, Shell

HEAR_MS = 100


def watching() -> Shell:
    """As that of test_active_controller: brokers 1 to 3 on streams 1 to 3."""
    made = Shell()
    made.become_active()
    for node in (1, 2, 3):
        made.beat(made.open(), node)
    return made


@pytest.fixture
def shell() -> Shell:
    return watching()


def test_no_broker_is_fenced_for_the_controllers_own_silence(shell: Shell) -> None:
    start = shell.now_ms
    shell.now_ms = start + 5900  # It stood still; the session's timer is not even late.
    shell.tell(StoodStill(5800))
    shell.run_until(start + 6500)
    assert shell.proposed == []
    shell.beat(1, 1)
    shell.run_until(start + 5800 + 5999, beating={1: 1})
    assert shell.proposed == []
    shell.run_until(start + 5800 + 6000, beating={1: 1})
    assert [shell.fenced(node) for node in (1, 2, 3)] == [False, True, True]


def test_a_broker_that_is_gone_is_fenced_by_a_controller_that_often_stands_still(
    shell: Shell,
) -> None:
    for _ in range(30):
        shell.now_ms += 300
        shell.tell(Tick())
        shell.now_ms += 300
        shell.tell(StoodStill(300))
    assert [shell.fenced(node) for node in (1, 2, 3)] == [True, True, True]


def test_a_stall_leaves_time_to_hear_what_waits_in_the_sockets(shell: Shell) -> None:
    shell.tell(StreamClosed(2))
    shell.now_ms += 200  # The grace is over just now, and the loop was late by a little.
    shell.tell(StoodStill(150))
    shell.tell(Tick())
    assert shell.proposed == []
    shell.beat(shell.open(), 2)
    shell.run_until(shell.now_ms + 1000, beating={1: 1, 3: 3})
    assert shell.proposed == []


def test_a_broker_that_was_almost_given_up_gets_no_more_than_time_to_be_heard(
    shell: Shell,
) -> None:
    shell.run_until(shell.now_ms + 5990, beating={1: 1, 3: 3})
    shell.now_ms += 13_000
    end = shell.now_ms
    shell.tell(StoodStill(12_900))
    shell.tell(Tick())
    shell.run_until(end + HEAR_MS - 1, beating={1: 1, 3: 3})
    assert not shell.fenced(2)
    shell.run_until(end + HEAR_MS, beating={1: 1, 3: 3})
    assert shell.fenced(2)


def test_who_was_heard_after_the_stall_has_a_session_from_then(shell: Shell) -> None:
    shell.now_ms += 60_000
    end = shell.now_ms
    shell.beat(2, 2)
    shell.tell(StoodStill(59_900))
    shell.run_until(end + 5999, beating={1: 1, 3: 3})
    assert not shell.fenced(2)
    shell.run_until(end + 6000, beating={1: 1, 3: 3})
    assert shell.fenced(2)


def test_a_stream_that_broke_in_the_stall_leaves_its_grace_and_no_more(shell: Shell) -> None:
    shell.now_ms += 13_000
    end = shell.now_ms
    shell.tell(StoodStill(12_900))
    shell.tell(StreamClosed(2))
    shell.tell(StoodStill(150))  # Whatever is said of it later.
    shell.run_until(end + 199, beating={1: 1, 3: 3})
    assert not shell.fenced(2)
    shell.run_until(end + 200, beating={1: 1, 3: 3})
    assert shell.fenced(2)


def test_a_node_that_seems_gone_at_a_takeover_is_given_no_more_than_its_grace() -> None:
    shell = Shell()
    shell.become_active(2)
    shell.now_ms += 13_000
    end = shell.now_ms
    shell.tell(StoodStill(12_900))
    shell.run_until(end + 499)  # It was awake for the other 100.
    assert not shell.fenced(2)
    shell.run_until(end + 500)
    assert shell.fenced(2)


def test_a_stall_is_no_silence_that_lets_another_process_take_a_brokers_number(
    shell: Shell,
) -> None:
    shell.now_ms += 4000
    shell.tell(StoodStill(3900))
    anew = shell.registration(2, life=2)
    assert shell.controller.registration_conflict(anew, shell.now_ms) is not None


def test_a_stall_while_a_broker_is_unregistered_finds_no_session_without_a_broker(
    shell: Shell,
) -> None:
    shell.tell(StreamClosed(2))
    shell.run_until(shell.now_ms + 1000, beating={1: 1, 3: 3})
    assert shell.fenced(2)
    driver = shell.driver
    driver.sequence += 1
    gone = cluster_pb2.Command(
        controller_epoch=driver.epoch,
        sequence=driver.sequence,
        unregister_broker=cluster_pb2.UnregisterBrokerCommand(node_id=2),
    )
    applied = driver.apply_bytes(gone.SerializeToString())
    shell.now_ms += 300
    shell.tell(StoodStill(300))  # The state is changed already, and nobody was told yet.
    assert shell.controller.next_deadline_ms() is not None
    shell.tell(CommandApplied(applied.result, applied.delta))
    shell.run_until(shell.now_ms + 1000, beating={1: 1, 3: 3})
    assert [shell.fenced(node) for node in (1, 3)] == [False, False]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["beat", "close", "stall", "tick"]),
            st.integers(0, 3000),
            st.integers(101, 9000),
        ),
        max_size=30,
    )
)
def test_no_stall_makes_a_deadline_later_than_if_it_were_set_now(
    history: list[tuple[str, int, int]],
) -> None:
    shell = watching()
    stream: int | None = 2
    silent_ms = stalls = 0  # Broker 2 was silent so long while this process was awake.
    for what, awake_ms, still_ms in history:
        shell.now_ms += awake_ms
        silent_ms += awake_ms
        shell.tell(Tick())
        if what == "beat":
            stream = stream or shell.open()
            shell.beat(stream, 2)
            silent_ms = stalls = 0
        elif what == "close" and stream is not None:
            shell.tell(StreamClosed(stream))
            stream = None
        elif what == "stall":
            shell.now_ms += still_ms
            shell.tell(StoodStill(still_ms))
            stalls += 1
        longest_ms = TIMES.session_timeout_ms if stream else TIMES.disconnect_grace_ms
        assert shell.fenced(2) or silent_ms < TIMES.session_timeout_ms + HEAR_MS * stalls
        due_ms = shell.controller._sessions[2].fence_at_ms
        assert shell.fenced(2) or due_ms <= shell.now_ms + longest_ms
