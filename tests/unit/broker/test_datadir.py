"""Whose directory it is: formatting, identity, and the refusals that protect data."""

from __future__ import annotations

import errno
import getpass
import os
import re
import shutil
from pathlib import Path

import pytest

from penstock.broker.datadir import (
    META_FILE,
    DirectoryMeta,
    format_directory,
    lock_directory,
    new_cluster_id,
    open_directories,
    read_meta,
    use_up_founding,
)
from penstock.wire.errors import DataDirectoryError, InconsistentClusterIdError


def test_a_format_is_read_back_and_repeating_it_changes_nothing(tmp_path: Path) -> None:
    assert format_directory(tmp_path / "d", "c1", 3)
    assert not format_directory(tmp_path / "d", "c1", 3)
    assert read_meta(tmp_path / "d") == DirectoryMeta("c1", 3)


def test_another_cluster_or_node_is_refused(tmp_path: Path) -> None:
    format_directory(tmp_path, "c1", 3)
    with pytest.raises(InconsistentClusterIdError, match="belongs to cluster c1, not to c2"):
        format_directory(tmp_path, "c2", 3)
    with pytest.raises(DataDirectoryError, match="belongs to node 3, not to node 4"):
        open_directories(tmp_path, 4, [])


@pytest.mark.parametrize("is_there", [True, False])
def test_an_empty_directory_is_taken_for_a_disk_that_is_not_mounted_first(
    tmp_path: Path, is_there: bool
) -> None:
    path = tmp_path / "disk"
    if is_there:
        (path / "lost+found").mkdir(parents=True)
    with pytest.raises(DataDirectoryError, match="; next: see whether its disk is mounted") as told:
        open_directories(path, 1, [])
    message = told.value.message
    assert str(path) in message.partition("; next: ")[0]
    assert "--node-id 1 " in message
    # What formatting costs is said before the command is.
    assert "makes an empty node" in message.partition("`penstock format --data-dir")[0]


def test_files_without_an_owner_are_not_to_be_formatted(tmp_path: Path) -> None:
    (tmp_path / "orders-0").mkdir()
    (tmp_path / "orders-0" / "00000000000000000000.log").touch()
    with pytest.raises(DataDirectoryError, match=r"no meta\.json \(orders-0\)") as told:
        read_meta(tmp_path)
    assert "penstock format" not in told.value.message


def test_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / META_FILE).write_text("{")
    with pytest.raises(DataDirectoryError, match=r"meta\.json is damaged"):
        read_meta(tmp_path)


def test_directories_inside_take_over_the_identity_once(tmp_path: Path) -> None:
    format_directory(tmp_path, "c1", 1)
    logs = tmp_path / "logs"
    open_directories(tmp_path, 1, [logs])
    assert read_meta(logs) == DirectoryMeta("c1", 1)


def test_a_directory_that_was_in_use_does_not_come_back_empty(tmp_path: Path) -> None:
    format_directory(tmp_path, "c1", 1)
    inside = [tmp_path / "raft", tmp_path / "logs"]
    open_directories(tmp_path, 1, inside)
    assert open_directories(tmp_path, 1, inside).contains == ("raft", "logs")
    shutil.rmtree(tmp_path / "raft")
    with pytest.raises(DataDirectoryError, match="raft was in use and is gone or emptied"):
        open_directories(tmp_path, 1, inside)
    assert not (tmp_path / "raft").exists()


def test_one_flipped_bit_blames_neither_of_two_files(tmp_path: Path) -> None:
    format_directory(tmp_path, "c1", 1)
    open_directories(tmp_path, 1, [tmp_path / "raft"])
    file = tmp_path / META_FILE
    file.write_text(file.read_text().replace("c1", "c3"))
    with pytest.raises(InconsistentClusterIdError) as told:
        open_directories(tmp_path, 1, [tmp_path / "raft"])
    assert str(file) in told.value.message
    assert str(tmp_path / "raft" / META_FILE) in told.value.message
    assert "restore the one of the two files that is damaged" in told.value.message


def test_a_node_id_that_is_another_may_be_damaged(tmp_path: Path) -> None:
    format_directory(tmp_path, "c1", 1)
    with pytest.raises(DataDirectoryError, match="restore that file if it is damaged") as told:
        open_directories(tmp_path, 3, [])
    assert str(tmp_path / META_FILE) in told.value.message


def test_a_directory_that_lost_only_what_says_whose_it_is_is_not_called_gone(
    tmp_path: Path,
) -> None:
    format_directory(tmp_path, "c1", 1)
    raft = tmp_path / "raft"
    open_directories(tmp_path, 1, [raft])
    (raft / "journal").touch()
    (raft / META_FILE).unlink()
    with pytest.raises(DataDirectoryError) as told:
        open_directories(tmp_path, 1, [raft])
    assert f"{raft / META_FILE} is gone" in told.value.message
    assert "gone or emptied" not in told.value.message
    [wanted] = re.findall("`(.*)`", told.value.message)
    (raft / META_FILE).write_text(wanted)
    open_directories(tmp_path, 1, [raft])


def test_data_without_an_identity_is_never_taken_over(tmp_path: Path) -> None:
    format_directory(tmp_path, "c1", 1)
    (tmp_path / "logs" / "orders-0").mkdir(parents=True)
    (tmp_path / "logs" / "orders-0" / "00000000000000000000.log").touch()
    with pytest.raises(DataDirectoryError, match="it is not known whose data this is"):
        open_directories(tmp_path, 1, [tmp_path / "logs"])


def test_an_empty_mount_point_elsewhere_is_refused(tmp_path: Path) -> None:
    root, disk = tmp_path / "root", tmp_path / "disk"
    disk.mkdir()
    format_directory(root, "c1", 1)
    with pytest.raises(DataDirectoryError, match="is empty: no disk is mounted there"):
        open_directories(root, 1, [disk])


def test_a_log_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    root, disk = tmp_path / "root", tmp_path / "disk"
    format_directory(root, "c1", 1)
    format_directory(disk, "c2", 1)
    with pytest.raises(InconsistentClusterIdError, match="mount the right disk"):
        open_directories(root, 1, [disk])


def test_a_locked_directory_is_refused_until_it_is_free(tmp_path: Path) -> None:
    held = lock_directory(tmp_path)
    with pytest.raises(DataDirectoryError, match="is in use by another process"):
        lock_directory(tmp_path)
    os.close(held)
    os.close(lock_directory(tmp_path))


def test_cluster_ids_differ() -> None:
    assert len({new_cluster_id() for _ in range(100)}) == 100


def test_a_cluster_id_is_no_option_of_a_command_line() -> None:
    # Unchecked, one in 32 would begin with "-" or "_".
    assert all(new_cluster_id()[0].isalnum() for _ in range(1000))


def test_data_whose_owner_is_unknown_is_not_given_a_new_one(tmp_path: Path) -> None:
    format_directory(tmp_path, "c1", 1)
    open_directories(tmp_path, 1, [tmp_path / "raft", tmp_path / "logs"])
    (tmp_path / META_FILE).unlink()
    with pytest.raises(DataDirectoryError, match="it is not known whose data this is") as refused:
        format_directory(tmp_path, "c2", 1)
    assert "logs, raft" in str(refused.value)
    assert not (tmp_path / META_FILE).exists()


def test_what_is_no_data_does_not_stop_a_format(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()  # A file system's own, on a fresh disk.
    (tmp_path / "node.toml").touch()
    (tmp_path / "meta.tmp").touch()  # A format that a crash cut short.
    (tmp_path / "logs").mkdir()  # A mount point, or made by an image: empty.
    assert format_directory(tmp_path, "c1", 1)
    assert open_directories(tmp_path, 1, [tmp_path / "logs"]).contains == ("logs",)


def test_the_permission_to_found_is_given_by_a_format_and_used_once(tmp_path):
    root = tmp_path / "d"
    format_directory(root, "c1", 1, may_found=True)
    assert open_directories(root, 1, [root / "raft"]).may_found
    assert read_meta(root).may_found
    assert not read_meta(root / "raft").may_found
    use_up_founding(root)
    assert read_meta(root) == DirectoryMeta("c1", 1, contains=("raft",))
    assert not format_directory(root, "c1", 1)
    assert not read_meta(root).may_found
    # It was forgotten at the first format, say; a directory in use makes nothing of it.
    assert not format_directory(root, "c1", 1, may_found=True)
    assert read_meta(root) == DirectoryMeta("c1", 1, contains=("raft",), may_found=True)


def test_a_directory_of_another_user_says_how_it_becomes_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format_directory(tmp_path, "c1", 3)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # The tests may run as root, whom nothing is denied.
    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(DataDirectoryError, match="Permission denied; have it belong to") as told:
        open_directories(tmp_path, 3, [])
    assert f"`chown --recursive {getpass.getuser()} {tmp_path}`" in told.value.message
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(DataDirectoryError, match=r"\.lock: Permission denied; have it belong to"):
        lock_directory(tmp_path)
