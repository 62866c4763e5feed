"""Which failures of a controller are its disk's, and told so."""

from __future__ import annotations

import errno
from pathlib import Path

import lmdb
import pytest

from penstock.raft_meta.room import told_by_name
from penstock.wire.errors import StorageError

DIRECTORY = Path("/data/controller")


@pytest.mark.parametrize(
    "error",
    [
        lmdb.Error("mdb_txn_commit: Input/output error"),
        lmdb.DiskError("mdb_txn_commit: No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
    ids=repr,
)
def test_a_disk_that_fails_is_named_with_what_to_do(error: Exception) -> None:
    told = told_by_name(error, DIRECTORY)
    assert isinstance(told, StorageError)
    assert told.__cause__ is error
    assert str(DIRECTORY) in told.message
    assert str(error) in told.message
    assert "; next: " in told.message


@pytest.mark.parametrize(
    "error",
    [
        lmdb.BadTxnError("mdb_put: Transaction must abort"),
        lmdb.CorruptedError("mdb_get: Located page was wrong type"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        OSError("the link is broken"),
        AssertionError("a fault of ours"),
    ],
    ids=repr,
)
def test_all_else_stays_what_it_is_with_its_stack(error: Exception) -> None:
    assert told_by_name(error, DIRECTORY) is error
