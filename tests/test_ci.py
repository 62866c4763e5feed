"""What CI installs before it runs the tests."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
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
    for name in ("chmod", "ln", "rm"):
        (programs / name).symlink_to(f"/bin/{name}")
    return programs


KUBECTL = """echo '{"clientVersion": {"minor": "32"}, "kustomizeVersion": "v%s"}'"""


def program(machine: Path, name: str, text: str) -> None:
    (machine / name).write_text(f"#!/bin/sh\n{text}\n")
    (machine / name).chmod(0o755)


def install(machine: Path, *arguments: str) -> tuple[str, str]:
    """What apt-get was told, and what the script said."""
    told = machine.parent / "told"
    done = subprocess.run(
        ["/bin/bash", str(SCRIPT), *arguments],
        env={
            "PATH": str(machine),
            "SBIN": str(machine),
            "POLICY_RC_D": str(machine.parent / "policy"),
            "TOLD": str(told),
            "VENV_PYTHON": str(machine / "python"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (machine.parent / "policy").exists()
    return told.read_text() if told.exists() else "", done.stderr


APT = """
# It must be forbidden to start servers while packages are installed.
"$POLICY_RC_D"; [ $? = 101 ] || exit 1
echo "$@" >> "$TOLD"
# All or nothing. A program that is installed is there from then on.
case "$1 $*" in "update "* | *UNAVAILABLE*) [ "$1" = update ]; exit ;; esac
for name; do
    case $name in
        default-jre-headless) ln -s /bin/true "${0%/*}/java" ;;
        postgresql) ln -s /bin/true "${0%/*}/initdb" ;;
        iproute2) ln -s /bin/true "${0%/*}/tc" ;;
        prometheus) ln -s /bin/true "${0%/*}/promtool" ;;
        systemd) ln -s /bin/true "${0%/*}/systemd-analyze" ;;
        install | -*) ;;
        *) ln -s /bin/true "${0%/*}/$name" ;;
    esac
done
"""


def test_what_is_missing_is_installed_and_no_server_started(machine: Path) -> None:
    program(machine, "id", "echo 0")
    program(machine, "apt-get", APT.replace("UNAVAILABLE", "none"))
    program(machine, "mosquitto", "exit 1")
    program(machine, "kubectl", KUBECTL % "5.5.0")
    told, said = install(machine)
    update, install_them = told.splitlines()
    assert update.startswith("update")
    assert "default-jre-headless" in install_them
    assert "iproute2" in install_them
    assert "mosquitto" not in install_them
    assert said == ""


def test_one_that_is_not_to_be_had_keeps_no_other_away(machine: Path) -> None:
    program(machine, "id", "echo 0")
    program(machine, "apt-get", APT.replace("UNAVAILABLE", "rabbitmq-server"))
    program(machine, "kubectl", KUBECTL % "5.5.0")
    _, said = install(machine)
    assert (machine / "java").exists()
    assert "NOT INSTALLED: rabbitmq-server (apt-get install failed)" in said
    # The last word of a run, after all tests.
    told, said = install(machine, "--missing")
    assert told.count("update") == 1
    assert "NOT INSTALLED: rabbitmq-server\n" in said
    program(machine, "rabbitmq-server", "exit 1")
    assert install(machine, "--missing")[1] == ""


@pytest.mark.parametrize("kubectl", [None, "exit 1", KUBECTL % "4.5.7"])
def test_what_debian_has_not_is_named_and_not_installed(machine: Path, kubectl: str | None) -> None:
    program(machine, "id", "echo 0")
    program(machine, "apt-get", APT.replace("UNAVAILABLE", "none"))
    if kubectl is not None:
        program(machine, "kubectl", kubectl)
    program(machine, "python", "exit 1")
    told, said = install(machine)
    assert "kubectl" not in told
    for heard in (said, install(machine)[1], install(machine, "--missing")[1]):
        assert "NOT INSTALLED" not in heard
        assert "CI: NOT HERE, AND NOT IN DEBIAN: kubectl 1.27 or later\n" in heard
        assert "CI: NOT HERE, AND NOT IN DEBIAN: Helm's engine, helm-python\n" in heard
        assert "is NOT tested here" in heard


@pytest.mark.parametrize(
    ("user", "apt", "why"),
    [
        ("1000", "exit 0", "only root may"),
        ("0", None, "there is no apt-get"),
        ("0", "exit 100", "apt-get update failed; apt-get install failed"),
        ("0", '[ "$1" = update ]', "apt-get install failed"),
        # It succeeds where its lists cannot be had, and may say so of what it did not install.
        ("0", "exit 0", "apt-get install said that it was done"),
    ],
)
def test_where_it_cannot_it_says_so_and_goes_on(
    machine: Path, user: str, apt: str | None, why: str
) -> None:
    program(machine, "id", f"echo {user}")
    if apt is not None:
        program(machine, "apt-get", apt)
    _, said = install(machine)
    assert f"({why})\n" in said
    assert "NOT INSTALLED: " in said
    assert "the summary of that test run lists" in said
    assert "mosquitto" in said


@pytest.mark.parametrize("status", [0, 2])
def test_a_run_says_at_its_end_what_was_not_tested(
    machine: Path, tmp_path: Path, status: int
) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(SCRIPT.parent, repository / ".ci")
    for name in ("bash", "dirname"):
        (machine / name).symlink_to(f"/usr/bin/{name}")
    program(machine, "id", "echo 1000")
    program(machine, "make", f"echo tested >&2; exit {status}")
    done = subprocess.run(
        ["/bin/bash", str(repository / ".ci" / "run")],
        env={"PATH": str(machine), "SBIN": str(machine)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    before, after = done.stderr.split("tested\n")
    assert "NOT INSTALLED: default-jre-headless" in before
    assert "NOT INSTALLED: default-jre-headless" in after


def test_pytest_names_each_test_that_is_skipped() -> None:
    settings = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())
    given = settings["tool"]["pytest"]["ini_options"]["addopts"].split()
    assert {"-rs", "--no-fold-skipped"} <= set(given)
