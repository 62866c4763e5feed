"""The preloaded library in processes of Python, without nodes: their disks."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.chaos.backends import preload
from penstock.chaos.backends.preload import Preload
from penstock.chaos.backends.unsynced import Lost
from penstock.chaos.cluster import DiskFault
from penstock.chaos.errors import FaultError

pytestmark = pytest.mark.skipif(bool(preload.why_not()), reason=preload.why_not())

FORGETS = DiskFault(keep_unsynced=False)


class Disk:
    """A directory with a library before it."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.root = directory / "root"
        self.root.mkdir(parents=True)
        self.preload = Preload(library, self.root, directory / "notes")

    def run(self, script: str) -> Any:
        """What a process prints that has this disk, as JSON; ``fails`` gives a call's errno.

        It is killed at its end, as a node would be.
        """
        whole = _BEGIN + textwrap.dedent(script) + "\nsys.stdout.flush(); os.kill(os.getpid(), 9)"
        environment = {**os.environ, **self.preload.environment}
        done = subprocess.run(
            [sys.executable, "-c", whole],
            cwd=self.root,
            env=environment,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == -9, done.stderr.decode()
        return json.loads(done.stdout) if done.stdout else None

    def lose_power(self) -> Lost:
        lost = self.preload.killed()
        assert lost is not None
        return lost

    def contents(self) -> dict[str, bytes]:
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}


_BEGIN = """
import json, os, sys, time

def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.strerror
    return ""

def opened(name, flags=os.O_RDWR | os.O_CREAT):
    return os.open(name, flags)

def sync_names(directory="."):
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)

"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("library")
    assert preload.build(directory) == preload.build(directory)
    return preload.build(directory)


@pytest.fixture
def disk(tmp_path: Path, library: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, library)
    yield made
    made.preload.close()


def test_without_a_fault_nothing_is_different(disk: Disk) -> None:
    disk.run("""
        fd = opened("a")
        os.pwritev(fd, [b"one", b"two"], 0)
        os.fsync(fd)
        os.rename("a", "b")
    """)
    assert disk.contents() == {"b": b"onetwo"}
    assert disk.preload.killed() is None
    assert [path.name for path in (disk.root.parent / "notes").iterdir()] == ["control"]


_CALLS = """
fd = opened("old", os.O_RDWR)
held = os.open("../outside", os.O_RDWR | os.O_CREAT)
print(json.dumps({
    "write": fails(os.write, fd, b"x"),
    "pwrite": fails(os.pwrite, fd, b"x", 0),
    "pwritev": fails(os.pwritev, fd, [b"x"], 0),
    "writev": fails(os.writev, fd, [b"x"]),
    "grow": fails(os.ftruncate, fd, 1000),
    "shrink": fails(os.ftruncate, fd, 2),
    "allocate": fails(os.posix_fallocate, fd, 0, 1000),
    "make": fails(opened, "new"),
    "mkdir": fails(os.mkdir, "directory"),
    "link": fails(os.link, "old", "second"),
    "rename": fails(os.rename, "old", "older"),
    "read": fails(os.pread, fd, 1, 0),
    "fsync": fails(os.fsync, fd),
    "fdatasync": fails(os.fdatasync, fd),
    "unlink": fails(os.unlink, "older"),
    "free": os.statvfs(".").f_bavail,
    "elsewhere": fails(os.write, held, b"x") + fails(os.fsync, held),
}))
"""


def which_fail(disk: Disk, fault: DiskFault | None) -> dict[str, Any]:
    (disk.root / "old").write_bytes(b"content")
    disk.preload.set_disk(fault)
    said = disk.run(_CALLS)
    disk.preload.set_disk(None)
    for path in disk.root.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    return {call: answer for call, answer in said.items() if answer}


def test_a_full_disk_has_no_room_and_can_be_made_some(disk: Disk) -> None:
    full = which_fail(disk, DiskFault(errno="ENOSPC"))
    assert set(full) == {
        *("write", "pwrite", "pwritev", "writev", "grow", "allocate", "make", "mkdir", "link"),
    }
    assert set(full.values()) == {"No space left on device"}
    healed = which_fail(disk, None)
    assert set(healed) == {"free"}


def test_a_dying_disk_takes_nothing(disk: Disk) -> None:
    dying = which_fail(disk, DiskFault(errno="EIO"))
    assert set(dying) - {"free"} == {
        *("write", "pwrite", "pwritev", "writev", "grow", "shrink", "allocate"),
        *("make", "mkdir", "link", "rename", "unlink"),
    }
    assert dying["write"] == "Input/output error"


def test_syncs_fail_alone(disk: Disk) -> None:
    failing = which_fail(disk, DiskFault(errno="EIO", of_sync=True))
    assert set(failing) == {"fsync", "fdatasync", "free"}


def test_each_write_and_sync_is_slow(disk: Disk) -> None:
    disk.preload.set_disk(DiskFault(delay_ms=50))
    took = disk.run("""
        fd = opened("a")
        began = time.monotonic()
        os.write(fd, b"x")
        os.fsync(fd)
        print(json.dumps(time.monotonic() - began))
    """)
    assert took >= 0.1


def test_an_unknown_errno_is_refused(disk: Disk) -> None:
    with pytest.raises(FaultError, match="ENOSUCH is no errno"):
        disk.preload.set_disk(DiskFault(errno="ENOSUCH"))


# --- clocks

_TIMES = """
import datetime
print(json.dumps({
    "realtime": time.time(), "coarse": time.clock_gettime(5),
    "date": datetime.datetime.now().timestamp(),
    "monotonic": time.monotonic(), "boot": time.clock_gettime(time.CLOCK_BOOTTIME),
}))
"""


@pytest.mark.parametrize("offset_ms", [-3_600_250, -1, 750, 86_400_000])
def test_the_wall_clock_alone_is_wrong(disk: Disk, offset_ms: int) -> None:
    disk.preload.set_clock(offset_ms)
    early, monotonic = time.time(), time.monotonic()
    told = disk.run(_TIMES)
    late = time.time()
    for clock in ("realtime", "coarse", "date"):
        # The coarse clock is that of the last tick, a hundredth of a second ago at most.
        assert early - 0.02 <= told[clock] - offset_ms / 1000 <= late + 0.001, clock
    assert monotonic <= told["monotonic"] <= time.monotonic()
    disk.preload.set_clock(0)
    early = time.time()
    assert early <= disk.run(_TIMES)["realtime"] <= time.time()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are x86_64's")
def test_who_asks_the_kernel_itself_is_told_the_same(disk: Disk) -> None:
    disk.preload.set_clock(-3_000_000)
    by_libc, by_kernel, waited = disk.run("""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        class Timespec(ctypes.Structure):
            _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
        now, word = Timespec(), ctypes.c_uint(0)
        assert libc.syscall(228, 0, ctypes.byref(now), 0, 0, 0, 0) == 0  # clock_gettime
        asked = now.s + now.ns / 1e9
        until = Timespec(now.s + 1, now.ns)
        began = time.monotonic()
        # FUTEX_WAIT_BITSET_PRIVATE until a time of the wall clock.
        libc.syscall(202, ctypes.byref(word), 9 | 128 | 256, 0, ctypes.byref(until), 0, 0xFFFFFFFF)
        print(json.dumps([time.time(), asked, time.monotonic() - began]))
    """)
    assert 0 <= by_libc - by_kernel < 4
    assert 0.9 <= waited < 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are x86_64's")
@pytest.mark.parametrize("by", ["futex", "semaphore"])
def test_a_wait_until_long_ago_is_over_and_no_error(disk: Disk, by: str) -> None:
    # gRPC asks for the year 1970 where a deadline has passed, and aborts for any other answer.
    disk.preload.set_clock(3_000_000)
    error = disk.run(f"by = {by!r}" + _WAIT.format(until="Timespec(0, 0)", bits="9 | 128 | 256"))[1]
    assert error == errno.ETIMEDOUT


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are x86_64's")
def test_a_wait_for_so_long_is_no_wait_until_then(disk: Disk) -> None:
    # FUTEX_WAIT_PRIVATE takes a time from now on, also where it goes by the wall clock.
    for offset_ms in (3_000_000, -3_000_000):
        disk.preload.set_clock(offset_ms)
        script = "by = 'futex'" + _WAIT.format(
            until="Timespec(0, 300_000_000)", bits="0 | 128 | 256"
        )
        waited, error = disk.run(script)
        if error == errno.ENOSYS:
            pytest.skip("this kernel has no such wait that goes by the wall clock")
        assert error == errno.ETIMEDOUT
        assert 0.25 <= waited < 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are x86_64's")
@pytest.mark.parametrize("by", ["futex", "semaphore"])
@pytest.mark.parametrize("offset_ms", [3_000_000, -3_000_000])
def test_a_wait_lasts_by_the_time_that_the_waiting_was_told(
    disk: Disk, by: str, offset_ms: int
) -> None:
    # The clock may strobe between the look at it and the wait: an hour must not come of that.
    disk.preload.set_clock(offset_ms)
    script = f"by = {by!r}" + _WAIT.format(
        until="Timespec(now.s + 1, now.ns)", bits="9 | 128 | 256"
    )
    before = script.replace("# Between.", _CLOCK_IS_RIGHT)
    assert before != script
    waited, error = disk.run(before)
    assert error == errno.ETIMEDOUT
    assert 0.9 <= waited < 3


_WAIT = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
now, word, semaphore = Timespec(), ctypes.c_uint(0), ctypes.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
libc.clock_gettime(0, ctypes.byref(now))
until = {until}
# Between.
began = time.monotonic()
ctypes.set_errno(0)
if by == "futex":
    libc.syscall(202, ctypes.byref(word), {bits}, 0, ctypes.byref(until), 0, 0xFFFFFFFF)
else:
    libc.sem_timedwait(semaphore, ctypes.byref(until))
print(json.dumps([time.monotonic() - began, ctypes.get_errno()]))
"""
_CLOCK_IS_RIGHT = """
with open(os.environ["PENSTOCK_CHAOS_CONTROL"], "r+b") as page:
    page.seek(24)
    page.write(bytes(8))
"""

_CALLS_IN_TIME = """
import asyncio, grpc

async def answer_aio(request, context):
    await asyncio.sleep(5 if request == b"late" else 0)  # As above.
    return repr(context.time_remaining()).encode()

async def timed(call, request):
    began = time.monotonic()
    try:
        said = float(await call(request, timeout=1))
    except grpc.RpcError as error:
        said = error.code().name
    return said, time.monotonic() - began

async def main():
    server, port = grpc.aio.server(), 0
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer_aio)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("S", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/S/Ask")
        print(json.dumps([await timed(ask, b"now"), await timed(ask, b"late")]))
    await server.stop(None)

asyncio.run(main())
"""


@pytest.mark.parametrize("offset_ms", [-3_000_000, 3_000_000])
def test_calls_of_who_has_a_wrong_clock_take_as_long_as_they_may(
    disk: Disk, offset_ms: int
) -> None:
    disk.preload.set_clock(offset_ms)
    (remaining, _), (late, took) = disk.run(_CALLS_IN_TIME)
    # gRPC reckons it from one clock to another, at the cost of milliseconds; not of 3,000 s.
    assert 0 < remaining < 2
    assert late == "DEADLINE_EXCEEDED"
    assert 0.9 <= took < 4


def test_a_strobing_clock_is_wrong_and_right_by_turns(disk: Disk) -> None:
    disk.preload.set_clock(-60_000, strobe_ms=5)
    jumps = disk.run("""
        jumps, before, until = [0, 0], time.time(), time.monotonic() + 0.5
        while time.monotonic() < until:
            now = time.time()
            jumps[0] += now < before - 30
            jumps[1] += now > before + 30
            before = now
        print(json.dumps(jumps))
    """)
    assert min(jumps) >= 5
    assert abs(jumps[0] - jumps[1]) <= 1


def test_a_wrong_clock_and_a_broken_disk_do_not_undo_each_other(disk: Disk) -> None:
    disk.preload.set_clock(60_000)
    assert set(which_fail(disk, DiskFault(errno="EIO", of_sync=True))) >= {"fsync", "fdatasync"}
    assert disk.run(_TIMES)["realtime"] > time.time() + 50


# --- power


def test_what_was_not_synced_is_gone(disk: Disk) -> None:
    (disk.root / "log").write_bytes(b"before ")
    disk.preload.set_disk(FORGETS)
    disk.preload.set_disk(FORGETS)  # Idempotent.
    disk.run("""
        fd = opened("log", os.O_WRONLY | os.O_APPEND)
        os.write(fd, b"synced ")
        os.fdatasync(fd)
        os.write(fd, b"lost ")
        os.write(fd, b"lost too")
    """)
    lost = disk.lose_power()
    assert (lost.writes, lost.write_bytes, lost.names) == (2, 13, [])
    assert disk.contents() == {"log": b"before synced "}
    assert disk.lose_power() == Lost(), "it is gone once"


def test_what_was_overwritten_cut_or_grown_is_as_it_was(disk: Disk) -> None:
    for name in ("over", "cut", "grown", "emptied"):
        (disk.root / name).write_bytes(b"0123456789")
    disk.preload.set_disk(FORGETS)
    disk.run("""
        fd = opened("over")
        os.pwrite(fd, b"ABCD", 3)
        os.pwrite(fd, b"xy", 4)
        os.pwrite(fd, b"past the end", 9)
        os.ftruncate(opened("cut"), 4)
        os.ftruncate(opened("grown"), 20)
        os.close(opened("emptied", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    """)
    disk.lose_power()
    assert set(disk.contents().values()) == {b"0123456789"}
    assert len(disk.contents()) == 4


def test_names_are_those_of_the_last_sync_of_their_directory(disk: Disk) -> None:
    (disk.root / "kept").mkdir()
    for name in ("moved", "replaced", "removed", "kept/removed"):
        (disk.root / name).write_bytes(name.encode())
    disk.preload.set_disk(FORGETS)
    disk.run("""
        for name in ("new", "kept/new"):
            fd = opened(name)
            os.write(fd, b"content")
            os.fsync(fd)
        os.unlink("kept/removed")
        sync_names("kept")
        os.mkdir("directory")
        os.mkdir("directory/below")
        os.close(opened("directory/below/file"))
        os.unlink("removed")
        os.rename("moved", "replaced")
        os.link("replaced", "second")
    """)
    lost = disk.lose_power()
    assert disk.contents() == {
        "moved": b"moved",
        "replaced": b"replaced",
        "removed": b"removed",
        "kept/new": b"content",
    }
    assert not (disk.root / "directory").exists()
    assert "renamed moved" in lost.names


def test_what_was_renamed_and_synced_stays(disk: Disk) -> None:
    (disk.root / "state").write_bytes(b"old")
    disk.preload.set_disk(FORGETS)
    disk.run("""
        fd = opened("state.tmp")
        os.write(fd, b"new")
        os.fsync(fd)
        os.rename("state.tmp", "state")
        sync_names()
        os.pwrite(fd, b"X", 0)
    """)
    disk.lose_power()
    assert disk.contents() == {"state": b"new"}


def test_a_file_for_synced_writes_keeps_those_alone(disk: Disk) -> None:
    """As LMDB writes its meta pages."""
    (disk.root / "data").write_bytes(b"meta pages")
    disk.preload.set_disk(FORGETS)
    disk.run("""
        pages = opened("data")
        meta = os.open("data", os.O_WRONLY | os.O_DSYNC)
        os.pwrite(pages, b"PAGES", 5)
        os.pwrite(meta, b"META", 0)
    """)
    disk.lose_power()
    assert disk.contents() == {"data": b"META pages"}


def test_what_a_failed_sync_has_lost_no_later_one_brings(disk: Disk) -> None:
    (disk.root / "log").write_bytes(b"one ")
    disk.preload.set_disk(DiskFault(errno="EIO", of_sync=True, keep_unsynced=False))
    first = """
        fd = opened("log", os.O_WRONLY | os.O_APPEND)
        os.write(fd, b"two ")
        print(json.dumps(fails(os.fsync, fd)))
    """
    assert disk.run(first) == "Input/output error"
    disk.preload.set_disk(FORGETS)
    disk.run("""
        fd = opened("log", os.O_WRONLY | os.O_APPEND)
        os.write(fd, b"three")
        os.fsync(fd)
    """)
    disk.lose_power()
    assert disk.contents() == {"log": b"one \0\0\0\0three"}


def test_the_lives_of_a_node_are_one_story(disk: Disk) -> None:
    """What one life has not synced is not synced in the next one either, until it is."""
    disk.preload.set_disk(FORGETS)
    (disk.root / "log").write_bytes(b"")
    (disk.root / "other").write_bytes(b"")
    for said in ("one ", "two "):
        disk.run(f"""
            for name in ("log", "other"):
                os.write(opened(name, os.O_WRONLY | os.O_APPEND), b"{said}")
        """)
    disk.run("os.fsync(opened('log', os.O_RDONLY))")
    disk.run("os.write(opened('log', os.O_WRONLY | os.O_APPEND), b'three ')")
    lost = disk.lose_power()
    assert lost.writes == 3
    assert disk.contents() == {"log": b"one two ", "other": b""}


def test_power_that_stays_takes_nothing(disk: Disk) -> None:
    disk.preload.set_disk(FORGETS)
    disk.run("os.write(opened('log'), b'content')")
    disk.preload.set_disk(None)
    disk.preload.set_disk(None)
    assert disk.preload.killed() is None
    assert disk.contents() == {"log": b"content"}
    disk.preload.set_disk(FORGETS)  # From now on, not for what was before.
    disk.run("os.write(opened('other'), b'content')")
    disk.lose_power()
    assert disk.contents() == {"log": b"content"}
