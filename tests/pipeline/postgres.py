"""A PostgreSQL server of the test's own, from Debian's package, on loopback."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.integration.ports import free_ports

_DEBIAN = Path("/usr/lib/postgresql")


def programs() -> Path | None:
    """Where initdb and pg_ctl are; None where they are not installed."""
    for directory in sorted(_DEBIAN.glob("*/bin"), reverse=True):
        if (directory / "initdb").exists():
            return directory
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Its URL, while it runs. It refuses to run as root, so that root starts it as nobody."""
    home = programs()
    assert home is not None
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    # Not in pytest's directory, which only its owner may enter.
    directory = Path(tempfile.mkdtemp(prefix="penstock-postgres-"))
    try:
        if user is not None:
            os.chown(directory, user.pw_uid, user.pw_gid)
        who = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid}
        (port,) = free_ports(1)
        options = (
            f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={directory} -F"
        )

        def run(program: str, *arguments: str) -> None:
            with (directory / "errors").open("ab") as errors:
                done = subprocess.run(
                    [home / program, "-D", directory / "data", *arguments],
                    cwd=directory,
                    # The server keeps what its starter has open: a pipe of ours would never end.
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    extra_groups=None if user is None else [],
                    check=False,
                    **who,
                )
            assert done.returncode == 0, (directory / "errors").read_text()

        run("initdb", "-A", "trust", "-U", "penstock", "-E", "UTF8", "--no-sync")
        run("pg_ctl", "-w", "-l", str(directory / "log"), "-o", options, "start")
        try:
            yield f"postgresql://penstock@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
