"""What a refusal of the operating system says beyond its own words."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

import pytest

from penstock.raft_meta.denied import said

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_who_may_not_is_named_and_what_would_let_him(number: int, tmp_path: Path) -> None:
    text = said(OSError(number, os.strerror(number)), tmp_path)
    assert text == (
        f"{os.strerror(number)}; have it belong to the user that runs this: "
        f"`chown --recursive {ME} {tmp_path}`"
    )


def test_a_file_is_given_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.touch()
    text = said(PermissionError(errno.EACCES, "Permission denied"), file)
    assert text.endswith(f"`chown {ME} {file}`")


def test_a_user_without_a_name_goes_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_001)
    text = said(PermissionError(errno.EACCES, "Permission denied"), tmp_path)
    assert f"`chown --recursive 4000000001 {tmp_path}`" in text


def test_a_directory_above_that_lets_nobody_through_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "home"
    closed.mkdir()
    # The tests may run as root, whom nothing is denied.
    monkeypatch.setattr(os, "access", lambda path, _mode: path != closed)
    text = said(PermissionError(errno.EACCES, "Permission denied"), closed / "etc" / "key.pem")
    assert f"; let the user {ME} pass through {closed}, run this as" in text


def test_what_is_not_there_could_not_be_made_in_the_directory_above(tmp_path: Path) -> None:
    text = said(PermissionError(errno.EACCES, "Permission denied"), tmp_path / "penstock" / "data")
    assert text.endswith(
        f"; let the user {ME} write to {tmp_path}, or run this as the user who may"
    )


def test_read_only_may_be_the_service_and_not_the_disk(tmp_path: Path) -> None:
    text = said(OSError(errno.EROFS, "Read-only file system"), tmp_path)
    assert text.startswith("Read-only file system; ")
    assert f"`findmnt --target {tmp_path}`" in text
    assert "ReadWritePaths=" in text


def test_other_errors_say_what_they_say(tmp_path: Path) -> None:
    assert said(OSError(errno.EIO, "Input/output error"), tmp_path) == "Input/output error"
    assert said(OSError("no number"), tmp_path) == "no number"
