"""What CI installs before it runs the tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "packages"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A directory of programs: all that a machine has."""
    if not SCRIPT.exists():
        pytest.skip("a source distribution has no CI")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("chmod", "rm"):
        (programs / name).symlink_to(f"/bin/{name}")
    return programs


def program(machine: Path, name: str, text: str) -> None:
    (machine / name).write_text(f"#!/bin/sh\n{text}\n")
    (machine / name).chmod(0o755)


def install(machine: Path) -> tuple[str, str]:
    """What apt-get was told, and what the script said."""
    told = machine.parent / "told"
    done = subprocess.run(
        ["/bin/bash", str(SCRIPT)],
        env={
            "PATH": str(machine),
            "POLICY_RC_D": str(machine.parent / "policy"),
            "TOLD": str(told),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (machine.parent / "policy").exists()
    return told.read_text() if told.exists() else "", done.stderr


def test_what_is_missing_is_installed_and_no_server_started(machine: Path) -> None:
    program(machine, "id", "echo 0")
    # It must be forbidden to start servers while packages are installed.
    program(machine, "apt-get", '"$POLICY_RC_D"; [ $? = 101 ] || exit 1; echo "$@" >> "$TOLD"')
    program(machine, "mosquitto", "exit 1")
    told, said = install(machine)
    update, install_them = told.splitlines()
    assert update.startswith("update")
    assert "default-jre-headless" in install_them
    assert "mosquitto" not in install_them
    assert said == ""


@pytest.mark.parametrize(
    ("user", "apt", "why"),
    [
        ("1000", "exit 0", "only root may"),
        ("0", None, "there is no apt-get"),
        ("0", '[ "$1" = update ]', "apt-get install failed"),
    ],
)
def test_where_it_cannot_it_says_so_and_goes_on(
    machine: Path, user: str, apt: str | None, why: str
) -> None:
    program(machine, "id", f"echo {user}")
    if apt is not None:
        program(machine, "apt-get", apt)
    _, said = install(machine)
    assert f"({why}); tests of pipelines that want them will skip" in said
    assert "rabbitmq-server" in said or "default-jre-headless" in said
