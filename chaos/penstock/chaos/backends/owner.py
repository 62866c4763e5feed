"""Who made what a run has on an engine, so that what a dead run left can be told from others'."""

from __future__ import annotations

import os
from pathlib import Path


def this_owner() -> str:
    """This process, as no other is called before or after it on any machine; empty if unknown."""
    return _owner(os.getpid())


def is_gone(owner: str) -> bool:
    """Whether that process certainly does not live any more: never of one on another machine."""
    machine, _, rest = owner.partition(":")
    pid = rest.partition(":")[0]
    if not pid.isdigit() or machine != boot():
        return False
    return _owner(int(pid)) != owner


def _owner(pid: int) -> str:
    try:
        # Behind the name, which may have any letters in it, the start time is the 20th field.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return f"{boot()}:{pid}:{stat[19]}"
    except (OSError, IndexError):
        return ""


def boot() -> str:
    """This boot of this machine, and where process ids mean what they mean to us."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # A run from within a container has ids of its own, which say nothing here.
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""
