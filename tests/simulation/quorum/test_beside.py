"""What runs beside a controller's loop stands still at its disk, and dies with its process."""

from __future__ import annotations

from random import Random

import pytest

from tests.simulation.quorum.beside import CallBeside
from tests.simulation.quorum.disk import Crash, Disk, SimulatedPath


@pytest.fixture
def disk() -> Disk:
    return Disk(Random(1))


def written(disk: Disk) -> bytes | None:
    inode = disk.inode("file")
    return None if inode is None else inode.content


def begun(disk: Disk) -> CallBeside:
    def write() -> str:
        with SimulatedPath(disk, "file").open("wb") as file:
            file.write(b"one ")
            file.write(b"two")
        return "done"

    return CallBeside(write)


def test_it_stands_still_at_each_operation(disk):
    call = begun(disk)
    seen = [written(disk)]
    while not call.go_on():
        seen.append(written(disk))
    assert seen == [None, None, b"", b"one "]
    assert (written(disk), call.result()) == (b"one two", "done")
    call.abandon()


def test_a_disk_that_ends_the_process_does_so_from_there(disk):
    disk.fuse = 1
    call = begun(disk)
    while not call.go_on():
        pass
    with pytest.raises(Crash):
        call.result()
    assert written(disk) == b""
    call.abandon()


def test_what_is_abandoned_never_writes_again(disk):
    call = begun(disk)
    for _ in range(3):
        assert not call.go_on()
    call.abandon()
    assert written(disk) == b"one "
    assert not call._thread.is_alive()
