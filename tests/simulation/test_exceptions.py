"""What the checkers do not take for a broken promise, and where that ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.chaos.simulator.checkers import Checkers, Violation
from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.chaos.simulator.runs import Runs
from penstock.raft_meta.core.model import Partition
from penstock.wire.ids import LeaderEpoch
from penstock.wire.records import RecordData, encode_batch
from tests.simulation.test_checkers import (
    KEY,
    checkers_of,
    elected,
    flushed,
    log_of,
    replica,
)


@pytest.mark.parametrize(
    ("late_id", "outcome"),
    [
        (3, nullcontext()),
        (4, pytest.raises(Violation, match="'p-3' is committed at 1, but number 5")),
    ],
    ids=["of an id that was given up", "of the same id"],
)
def test_a_record_that_comes_after_later_ones(
    late_id: int, outcome: AbstractContextManager[Any]
) -> None:
    log = MemoryLog(Contents())
    for value, producer_id in ((b"p-5", 4), (b"p-3", late_id)):
        sequence = 1 if producer_id == 4 and value == b"p-3" else 0
        records = encode_batch(
            [RecordData(0, None, value)],
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=sequence,
        )
        log.append_as_leader(records, LeaderEpoch(0), now_ms=0)
    with outcome:
        Checkers().after_step([replica(1, log, high_watermark=2)])


@pytest.mark.parametrize(("epoch", "agreed"), [(1, 2), (0, 1)])
def test_a_flipped_batch_is_what_was_committed_if_the_same_leadership_wrote_it(
    epoch: int, agreed: int
) -> None:
    checkers = Checkers()
    committed = log_of(b"a")
    committed.append_as_leader(encode_batch([RecordData(0, None, b"b")]), LeaderEpoch(1), now_ms=0)
    checkers.after_step([replica(1, committed, high_watermark=2, epoch=1)])
    found = log_of(b"a")
    found.append_as_leader(encode_batch([RecordData(0, None, b"?")]), LeaderEpoch(epoch), now_ms=0)
    found.contents.flipped.add(1)
    assert checkers._agreed_end(found.contents, checkers.log_of(KEY)) == agreed


def test_a_broker_whose_disk_was_lost_is_not_set_back_though_it_has_everything_again() -> None:
    full, empty = flushed(b"a"), flushed()
    checkers = checkers_of((1,), n1=full, n2=full, n3=empty)
    runs = SimpleNamespace(waits=True, was_doubted=False, heard_epoch=1)
    checkers._disks[1].runs = runs  # type: ignore[assignment]
    checkers._registered = {1: 1}
    checkers.records_lost(3, 3, [KEY])
    checkers.after_step([replica(1, full, high_watermark=1)])
    checkers.records_lost(1, 1, [KEY])
    before = checkers.partitions[KEY]._replace(elr=(3,))
    now = checkers.partitions[KEY] = Partition((1, 2, 3), (3,), (), -1, 1, 1)
    checkers._note_set_back(KEY, before, now, 1, 2)
    del checkers._damaged[1, KEY]  # It has copied all anew by the time of the election.
    elected(checkers, 3, epoch=2)
    checkers.after_step([replica(3, empty, high_watermark=0, epoch=2)])
    assert (checkers.losses, checkers.passed_over) == (1, 0)


@pytest.mark.parametrize("registers_anew", [False, True])
@pytest.mark.parametrize("stops", [False, True])
def test_a_run_whose_disk_lost_records_says_so_whatever_follows(
    registers_anew: bool, stops: bool
) -> None:
    runs = Runs(waits=True)
    runs.begin()
    runs.registered(7, failed=False)
    runs.records_lost()
    if registers_anew:
        runs.registered(8, failed=False)
    if stops:
        runs.stopped(7)
    assert runs.begin() == -1
    runs.registered(9, failed=False)
    assert runs.begin() == 9  # What that run found is all that it began with.


def test_a_run_that_never_registered_leaves_what_the_one_before_had() -> None:
    runs = Runs(waits=True)
    assert runs.begin() == -1
    runs.registered(7, failed=False)
    assert runs.begin() == 7  # After a crash.
    runs.stopped(-1)
    assert runs.begin() == 7
    runs.registered(9, failed=False)
    runs.stopped(9)
    assert runs.begin() == 9
