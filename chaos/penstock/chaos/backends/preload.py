"""The library that stands between a node and its disk and clock: built, and told what to do.

What it does is said in ``preload.c``. It is built with the machine's C compiler into the run's
directory; without a compiler, or another system than Linux, there are no such faults.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.chaos.backends.unsynced import Lost, lose_power
from penstock.chaos.cluster import DiskFault
from penstock.chaos.errors import FaultError

_SOURCE: Final = Path(__file__).with_name("preload.c")
_CONTROL: Final = struct.Struct("=QIIIIq")  # ``struct control``: delay, errnos, journal, clock.
_BUILD_S: Final = 120.0


def why_not() -> str:
    """Why there can be no such library here, to be told to people; empty where there can."""
    if not sys.platform.startswith("linux"):
        return f"faults of disks and clocks need Linux, and this is {sys.platform}"
    if _compiler() is None:
        return "faults of disks and clocks need a C compiler, and there is no cc"
    return ""


def build(directory: Path) -> Path:
    """The library, made in ``directory`` if it is not there. Raises FaultError."""
    target = directory / "preload.so"
    compiler = _compiler()
    if compiler is None:
        raise FaultError(f"{why_not()}; next: install one, or leave these faults out")
    if not target.exists():
        made = target.with_suffix(".tmp")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(_SOURCE), "-ldl"]
        try:
            subprocess.run(  # noqa: S603 - the machine's compiler, and a source of ours.
                [*command, "-lpthread"], check=True, capture_output=True, timeout=_BUILD_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            raise FaultError(
                f"{_SOURCE.name} could not be built ({error}): "
                f"{said.decode(errors='replace').strip()}"
            ) from None
        made.replace(target)
    return target


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class Preload:
    """What one node's disk and clock do: over all of its lives, from its next call on."""

    def __init__(self, library: Path, root: Path, notes: Path) -> None:
        """For what is under ``root``; ``notes`` is a directory beside it, on the same disk."""
        self._library = library
        self._root = root.resolve()
        self._notes = notes.resolve()
        self._notes.mkdir(parents=True, exist_ok=True)
        path = self._notes / "control"
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._disk: DiskFault | None = None
        self._clock = (0, 0)
        self._journal = 0

    @property
    def environment(self) -> Mapping[str, str]:
        """What the node is to be started with."""
        others = os.environ.get("LD_PRELOAD", "")
        return {
            "LD_PRELOAD": f"{self._library}:{others}" if others else str(self._library),
            "PENSTOCK_CHAOS_ROOT": str(self._root),
            "PENSTOCK_CHAOS_CONTROL": str(self._notes / "control"),
            "PENSTOCK_CHAOS_JOURNAL": str(self._notes),
        }

    def set_disk(self, fault: DiskFault | None) -> None:
        """From now on the disk does this. Raises FaultError for an errno that there is not."""
        if fault is not None and fault.errno and not hasattr(errno, fault.errno):
            raise FaultError(
                f"{fault.errno} is no errno; next: name one that disks give, such as ENOSPC or EIO"
            )
        before, self._disk = self._disk, fault
        if not _forgets(before) and _forgets(fault):
            self._journal += 1
        self._write()
        if _forgets(before) and not _forgets(fault):
            self._forget_notes()

    def set_clock(self, offset_ms: int, strobe_ms: int = 0) -> None:
        """From now on its wall clock is off by so much, with ``strobe_ms`` every other so long."""
        self._clock = (offset_ms, strobe_ms)
        self._write()

    def killed(self) -> Lost | None:
        """The node was killed: take from its files what power would have; None if it has it."""
        if not _forgets(self._disk):
            return None
        lost = lose_power(self._root, self._notes, self._notes.glob(f"journal-{self._journal}-*"))
        self._forget_notes()
        return lost

    def close(self) -> None:
        """Let go of the memory; the node is to be gone by then. Idempotent."""
        self._control.close()

    def _write(self) -> None:
        fault = self._disk or DiskFault()
        number = getattr(errno, fault.errno) if fault.errno else 0
        offset_ms, strobe_ms = self._clock
        self._control[: _CONTROL.size] = _CONTROL.pack(
            int(fault.delay_ms * 1000),
            0 if fault.of_sync else number,
            number if fault.of_sync else 0,
            self._journal if _forgets(fault) else 0,
            strobe_ms * 1000,
            offset_ms * 1000,
        )

    def _forget_notes(self) -> None:
        for path in self._notes.iterdir():
            if path.name != "control":
                path.unlink(missing_ok=True)


def _forgets(fault: DiskFault | None) -> bool:
    return fault is not None and not fault.keep_unsynced
