"""Which cluster and node a directory belongs to: ``meta.json``, written once by ``format``."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from penstock.broker.storage.disk import Disk, make_directories
from penstock.raft_meta.denied import said
from penstock.wire.errors import DataDirectoryError, ErrorCode, InconsistentClusterIdError

META_FILE: Final = "meta.json"
_LOCK_FILE: Final = ".lock"
_VERSION: Final = 1
# What a directory may hold before it is formatted: a file system's own directory, the node's
# configuration and messages, and what a format that was cut short leaves.
_NO_DATA: Final = frozenset({"lost+found", "node.toml", "node.log", "meta.tmp", _LOCK_FILE})


class DirectoryUnreadableError(DataDirectoryError, code=ErrorCode.DATA_DIRECTORY):
    """The disk fails: what is there can't be told. Another directory may do."""


@dataclass(frozen=True, slots=True)
class DirectoryMeta:
    """The owner of a directory.

    ``contains`` names the directories inside that were put to use: one of them that is gone has
    taken votes or records with it, and must not come back empty. ``may_found`` permits the first
    start of a new cluster, until that start.
    """

    cluster_id: str
    node_id: int
    version: int = _VERSION
    contains: tuple[str, ...] = ()
    may_found: bool = False


def new_cluster_id() -> str:
    """A fresh cluster id: 22 characters that are safe in file names, URLs and command lines."""
    while True:
        identity = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        # One that begins with "-" would be taken for an option.
        if identity[0].isalnum():
            return identity


def format_directory(path: Path, cluster_id: str, node_id: int, *, may_found: bool = False) -> bool:
    """Make ``path`` a directory of this cluster and node; False when it was one already.

    ``may_found`` lets a controller found the cluster: for a cluster that is new for certain. A
    directory that was formatted before gets it too; a controller that has ever voted or followed
    there makes nothing of it.

    Raises DataDirectoryError when it belongs to another cluster or node, holds data of nobody
    knows whom, or can't be written.
    """
    wanted = DirectoryMeta(cluster_id, node_id, may_found=may_found)
    try:
        make_directories(Disk(), path)
        if (path / META_FILE).exists():
            check_directory(path, wanted)
            if may_found:
                _rewrite_meta(path, replace(read_meta(path), may_found=True))
            return False
        _refuse_foreign_data(path)
        _write_durably(path / META_FILE, json.dumps(asdict(wanted)) + "\n")
    except OSError as error:
        raise DataDirectoryError(f"cannot format {path}: {said(error, path)}") from None
    return True


def read_meta(path: Path, expected: int | None = None) -> DirectoryMeta:
    """The owner of ``path``. Raises DataDirectoryError when it is not formatted or not readable.

    ``expected`` is the node whose it should be, for the message.
    """
    file = path / META_FILE
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return DirectoryMeta(
            str(fields["cluster_id"]),
            int(fields["node_id"]),
            contains=tuple(str(name) for name in fields.get("contains", ())),
            may_found=fields.get("may_found", False) is True,
        )
    except FileNotFoundError:
        raise _not_formatted(path, expected) from None
    except OSError as error:
        raise DirectoryUnreadableError(f"cannot read {file}: {said(error, path)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataDirectoryError(f"{file} is damaged: {error}; restore it from a backup") from None


def _not_formatted(path: Path, node_id: int | None) -> DataDirectoryError:
    """What a directory without ``meta.json`` is. An empty one is first of all a disk away."""
    try:
        held = _held_in(path)
        what = "is empty: no disk is mounted there, or it was never formatted"
    except FileNotFoundError:
        held, what = [], "is not there: its disk is not mounted, or it was never formatted"
    except OSError as error:
        return DirectoryUnreadableError(f"cannot read {path}: {said(error, path)}")
    if held:
        return _without_owner(path, held)
    return DataDirectoryError(
        f"{path} {what}; next: see whether its disk is mounted (`findmnt --target {path}`), and "
        "mount it. Format it only for a new node, or where the disk is lost for good: that makes "
        "an empty node, which has nothing of what this one stored and voted. `penstock format "
        f"--data-dir {path} --node-id {'N' if node_id is None else node_id} --cluster-id ID`"
    )


def check_directory(path: Path, wanted: DirectoryMeta, root: Path | None = None) -> None:
    """Raise unless ``path`` belongs to the cluster and node wanted, those of ``root`` if given."""
    found = read_meta(path, wanted.node_id)
    says = f"{path / META_FILE} says that {path} belongs to"
    other, step = "", "set node.id, or restore that file if it is damaged"
    if root is not None:
        # Which of the two is wrong can't be told: a bit may have flipped in either.
        other = f", as {root / META_FILE} says"
        step = "or restore the one of the two files that is damaged"
    if found.cluster_id != wanted.cluster_id:
        step = step if root is not None else "or format an empty directory"
        raise InconsistentClusterIdError(
            f"{says} cluster {found.cluster_id}, not to {wanted.cluster_id}{other}; "
            f"mount the right disk, {step}"
        )
    if found.node_id != wanted.node_id:
        raise DataDirectoryError(
            f"{says} node {found.node_id}, not to node {wanted.node_id}{other}; "
            f"mount the right disk, {step}"
        )


def open_directories(root: Path, node_id: int, others: Iterable[Path]) -> DirectoryMeta:
    """Check ``root`` and give the directories inside it its identity on first use.

    A directory outside of ``root`` (a disk of its own) must have been formatted: an empty mount
    point is refused instead of being taken for a disk that lost its data. Raises
    DirectoryUnreadableError where a disk fails, and DataDirectoryError for what is not as it should
    be.
    """
    meta = read_meta(root, node_id)
    check_directory(root, DirectoryMeta(meta.cluster_id, node_id))
    for path in others:
        if path.is_relative_to(root) and not _is_there(path / META_FILE):
            meta = _put_to_use(root, path, meta)
        check_directory(path, meta, root)
    return meta


def _is_there(file: Path) -> bool:
    try:
        file.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DirectoryUnreadableError(f"cannot read {file}: {said(error, file.parent)}") from None
    return True


def _put_to_use(root: Path, path: Path, meta: DirectoryMeta) -> DirectoryMeta:
    """Make ``path`` inside ``root`` the node's, once."""
    name = str(path.relative_to(root))
    if name in meta.contains:
        held = _still_held_in(path)
        if held:
            wanted = json.dumps({"cluster_id": meta.cluster_id, "node_id": meta.node_id})
            raise DataDirectoryError(
                f"{path / META_FILE} is gone, and other files of that directory are there "
                f"({', '.join(held)}); restore that file, or write `{wanted}` into it if it is "
                "certain that all else there is this node's own, and no older copy"
            )
        raise DataDirectoryError(
            f"{path} was in use and is gone or emptied, and with it what this node had promised "
            "to keep; bring back that very disk. An old copy is as dangerous as an empty one: "
            "docs/operating/failures.md says how to replace a node's part. To start without it, "
            f"knowing that, take {name!r} out of {root / META_FILE}"
        )
    format_directory(path, meta.cluster_id, meta.node_id)
    # Noted after it is made: a crash in between leaves a directory that is found to be ours.
    noted = replace(meta, contains=(*meta.contains, name))
    _rewrite_meta(root, noted)
    return noted


def use_up_founding(root: Path) -> None:
    """Take the permission to found out of ``root``: the metadata directory keeps it by now."""
    meta = read_meta(root)
    if meta.may_found:
        _rewrite_meta(root, replace(meta, may_found=False))


def _rewrite_meta(root: Path, meta: DirectoryMeta) -> None:
    try:
        _write_durably(root / META_FILE, json.dumps(asdict(meta)) + "\n")
    except OSError as error:
        raise DataDirectoryError(f"cannot write {root / META_FILE}: {said(error, root)}") from None


def lock_directory(path: Path) -> int:
    """Hold ``path`` for this process until the descriptor returned is closed.

    Raises DataDirectoryError when another process holds it, DirectoryUnreadableError when the disk
    fails or is read-only.
    """
    file = path / _LOCK_FILE
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DirectoryUnreadableError(f"cannot write {file}: {said(error, path)}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise DataDirectoryError(
            f"{path} is in use by another process; stop that node first"
        ) from None
    return descriptor


def holds_data(path: Path) -> bool:
    """Whether files are in it that may be somebody's. Raises DataDirectoryError if unreadable."""
    return bool(_still_held_in(path))


def _refuse_foreign_data(path: Path) -> None:
    held = _held_in(path)
    if held:
        raise _without_owner(path, held)


def _held_in(path: Path) -> list[str]:
    """The names of what may be data in a directory. Raises OSError."""
    found = sorted(entry.name for entry in path.iterdir() if entry.name not in _NO_DATA)
    # Empty directories are mount points, or made by an image: their turn comes in _put_to_use.
    return [name for name in found if not (path / name).is_dir() or any((path / name).iterdir())]


def _still_held_in(path: Path) -> list[str]:
    try:
        return _held_in(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DirectoryUnreadableError(f"cannot read {path}: {said(error, path)}") from None


def _without_owner(path: Path, held: Sequence[str]) -> DataDirectoryError:
    return DataDirectoryError(
        f"{path} has files but no {META_FILE} ({', '.join(held)}): it is not known whose data "
        "this is; restore the file, or move the files away"
    )


def _write_durably(file: Path, text: str) -> None:
    """Write all or nothing: a crash leaves no file or the whole file."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(file)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
