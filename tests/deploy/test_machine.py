"""deploy/systemd and docs/operating/machine.md: a node as a service of systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from penstock.broker.config import NodeConfig
from penstock.broker.node_health import LIVE_S
from tests.deploy.objects import ROOT

UNIT = ROOT / "deploy" / "systemd" / "penstock.service"
OPERATING = ROOT / "docs" / "operating"
# What a node takes beyond controlled.shutdown.timeout.ms until it has ended, by force at the last.
STOP_S = 25


def lines() -> dict[str, str]:
    """The unit's settings; none of those looked at here stands twice."""
    found = re.findall(r"^(\w+)=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == len(dict(found))
    return dict(found)


def settings_of(page: str) -> str:
    """The first TOML file that a page shows."""
    text = (OPERATING / page).read_text(encoding="utf-8")
    shown = re.search(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    return shown[1]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("there is no systemd-analyze (Debian has it in systemd)")
    program = lines()["ExecStart"].split()[0]
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(program, "/bin/true"))
    done = subprocess.run(
        [found, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_stop_has_the_time_that_a_node_takes() -> None:
    unit = lines()
    assert unit["KillSignal"] == "SIGTERM"
    longest_s = NodeConfig().controlled_shutdown_timeout_ms / 1000 + STOP_S
    assert int(unit["TimeoutStopSec"]) >= 2 * longest_s
    page = (OPERATING / "machine.md").read_text(encoding="utf-8")
    assert f"**A stop has {unit['TimeoutStopSec']} s.**" in page


def test_a_start_that_recovers_for_long_is_let_and_a_loop_that_hangs_is_ended() -> None:
    unit = lines()
    # Only what it is told by the node itself tells the two apart.
    assert (unit["Type"], unit["TimeoutStartSec"]) == ("notify", "infinity")
    assert int(unit["WatchdogSec"]) >= 6 * LIVE_S
    page = (OPERATING / "machine.md").read_text(encoding="utf-8")
    assert f"for {unit['WatchdogSec']} s" in page


def test_a_node_has_descriptors_and_comes_back_unless_its_settings_are_wrong() -> None:
    unit = lines()
    assert int(unit["LimitNOFILE"]) >= 100_000
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2")


def test_the_unit_starts_what_the_page_installs() -> None:
    page = (OPERATING / "machine.md").read_text(encoding="utf-8")
    program, command, option, file = lines()["ExecStart"].split()
    assert (command, option) == ("node", "--config")
    assert f"`{file}`" in page
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    linked = program.removesuffix("/bin/penstock")
    assert f"python3 -m venv {linked}-{version}\n" in page
    assert f"--force {linked}-{version} {linked}\n" in page
    assert f"--system --home-dir /var/lib/{lines()['StateDirectory']} " in page
    data = tomllib.loads(settings_of("machine.md"))["data"]["dir"]
    assert data.startswith(lines()["RequiresMountsFor"] + "/")


def test_the_pages_settings_are_those_of_three_nodes(tmp_path: Path) -> None:
    for node in (1, 2, 3):
        text = settings_of("machine.md").replace("node.id = 1", f"node.id = {node}")
        text = text.replace('"broker-1.example:9092', f'"broker-{node}.example:9092')
        file = tmp_path / f"{node}.toml"
        file.write_text(text)
        config = NodeConfig.load(file, {})
        assert config.roles == {"controller", "broker"}
        assert config.advertised == (f"broker-{node}.example", 9092)
        assert config.voters[node] == (f"broker-{node}.example", 10092)
        assert config.tls_ca


def test_a_broker_that_is_added_is_no_controller(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(settings_of("brokers.md"))
    config = NodeConfig.load(file, {})
    assert config.roles == {"broker"}
    assert config.node_id not in config.voters
    assert len(config.voters) == 3
