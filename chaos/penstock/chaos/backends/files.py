"""What can be done to a node's directory while the node is down."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from penstock.chaos.errors import FaultError


def segments(data_directory: Path, topic: str = "*") -> list[Path]:
    """The segments with records of a topic's partitions, or of all, in an order that is always the
    same.
    """
    return sorted(path for path in data_directory.rglob(f"{topic}-*/*.log") if path.is_file())


def flip_bits(path: Path, random: Random, count: int = 1, first_byte: int = 0) -> list[int]:
    """Turn so many bits of a file round; the bytes they are in. Raises FaultError without bytes."""
    size = path.stat().st_size
    if size <= first_byte:
        raise FaultError(f"{path} has no byte {first_byte} that could be damaged: it has {size}")
    positions = []
    with path.open("r+b", buffering=0) as file:
        for _ in range(count):
            at = random.randrange(first_byte, size)
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << random.randrange(8)]), at)
            positions.append(at)
    return positions


def truncate(path: Path, size_bytes: int) -> int:
    """Cut a file; how many bytes are gone. Nothing where it is shorter."""
    before = path.stat().st_size
    if before > size_bytes:
        os.truncate(path, size_bytes)
    return max(0, before - size_bytes)


def snapshot(directory: Path, target: Path) -> None:
    """Copy a directory as it is, in place of what ``target`` was."""
    _make_in_place(target, lambda made: shutil.copytree(directory, made, symlinks=True))


def restore(directory: Path, source: Path) -> None:
    """Have a directory be again as it was when ``source`` was made of it, which stays.

    A copy that fails leaves it as it is.
    """
    if not source.is_dir():
        raise FaultError(f"there is no snapshot of {directory} in {source} that could come back")
    _make_in_place(directory, lambda made: shutil.copytree(source, made, symlinks=True))


def swap(first: Path, second: Path) -> None:
    """Each directory has the other one's name from now on."""
    aside = first.with_name(f".{first.name}.swapped")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def wipe(directory: Path, keep: Sequence[str] = ()) -> None:
    """Empty a directory but for these names in it. Nothing where there is none."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _make_in_place(target: Path, make: Callable[[Path], object]) -> None:
    made = target.with_name(f".{target.name}.making")
    shutil.rmtree(made, ignore_errors=True)
    make(made)
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
