"""The import contracts of pyproject.toml hold, and each of them fires on what it forbids."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = ("proto", "raft_meta", "broker", "client", "cli", "pipeline", "chaos")
CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}

# A module to add, what it imports, and the contract that must not let it pass.
VIOLATIONS = [
    ("layers", "wire", "import penstock.client"),
    ("layers", "v1", "import penstock.wire.errors"),
    ("layers", "raft_meta", "import penstock.broker.config"),
    ("layers", "raft_meta", "import penstock.client"),
    ("layers", "broker", "import penstock.cli"),
    ("layers", "broker", "import penstock.chaos"),
    ("layers", "client", "import penstock.raft_meta"),
    ("layers", "client", "import penstock.pipeline"),
    ("layers", "pipeline", "import penstock.broker"),
    ("layers", "chaos", "import penstock.cli"),
    ("layers", "chaos", "import penstock.broker.core.ports"),
    ("layers", "chaos/simulator", "import penstock.broker.config"),
    ("broker-not-client", "broker", "import penstock.client"),
    ("pipeline-on-client", "pipeline", "import penstock.raft_meta.core"),
    ("chaos-black-box", "chaos", "import penstock.raft_meta"),
    ("chaos-black-box", "chaos", "import penstock.raft_meta.core.cluster_state"),
    ("chaos-black-box", "chaos/simulator", "import penstock.raft_meta.engine"),
    ("client-core-private", "chaos", "import penstock.client.core"),
    ("client-core-private", "pipeline", "import penstock.client.core"),
    ("thin-client", "client", "import structlog"),
    ("thin-client", "client", "import penstock.wire.sneaky_lmdb"),
    ("thin-client", "wire", "import typer"),
    ("pure-cores", "wire", "import os"),
    ("pure-cores", "broker/core", "from time import monotonic"),
    ("pure-cores", "broker/core", "from os.path import join"),
    ("pure-cores", "raft_meta/core", "import random"),
    ("pure-cores", "raft_meta/core", "import grpc"),
    ("pure-cores", "client/core", "import asyncio"),
    ("one-engine", "raft_meta", "import pysyncobj"),
    ("one-engine", "broker", "from pysyncobj.syncobj import SyncObj"),
    ("one-engine", "cli", "import pysyncobj.pickle"),
]
ALLOWED = [
    ("chaos/simulator", "import penstock.broker.core.ports"),
    ("chaos/simulator", "import penstock.raft_meta.core.cluster_state"),
    ("chaos/simulator", "from penstock.client.core import accumulator"),
    ("chaos", "import penstock.client"),
    ("cli", "import penstock.broker, penstock.client, penstock.raft_meta, penstock.chaos"),
    ("broker", "import penstock.raft_meta.core.cluster_state, lmdb, structlog"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The packages once more, to be broken at will."""
    root = tmp_path_factory.mktemp("layering")
    for tree in TREES:
        shutil.copytree(
            ROOT / tree, root / tree, ignore=shutil.ignore_patterns("__pycache__", "*.proto")
        )
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def package_directory(root: Path, package: str) -> Path:
    top = package.partition("/")[0]
    tree = "proto" if top in ("v1", "wire") else top
    return root / tree / "penstock" / package


def lint(root: Path, added: list[tuple[str, str]]) -> str:
    """What import-linter says of the tree at ``root`` with the added modules in it."""
    files = [
        package_directory(root, package) / f"sneaky_{index}.py"
        for index, (package, _) in enumerate(added)
    ]
    helper = package_directory(root, "wire") / "sneaky_lmdb.py"
    for file, (_, statement) in zip(files, added, strict=True):
        file.write_text(statement + "\n")
        if "sneaky_lmdb" in statement:
            helper.write_text("import lmdb\n")
    try:
        return subprocess.run(
            [
                sys.executable,
                "-c",
                "from importlinter.cli import lint_imports_command; lint_imports_command()",
                "--no-cache",
                "--no-logo",
            ],
            cwd=root,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(root / tree) for tree in TREES),
                "PYTHONDONTWRITEBYTECODE": "1",
                "COLUMNS": "200",
                "NO_COLOR": "1",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stdout
    finally:
        helper.unlink(missing_ok=True)
        for file in files:
            file.unlink()


def verdicts(output: str) -> dict[str, bool]:
    """Whether each contract was kept."""
    return {
        identity: re.search(re.escape(name) + r" (KEPT|BROKEN)", output)[1] == "KEPT"
        for identity, name in CONTRACTS.items()
    }


def test_every_contract_is_kept(copy):
    output = lint(copy, ALLOWED)
    assert all(verdicts(output).values()), output


def test_every_contract_has_a_violation_here():
    assert {contract for contract, _, _ in VIOLATIONS} == set(CONTRACTS)


@pytest.mark.parametrize("contract", list(CONTRACTS))
def test_each_contract_fires(copy, contract):
    added = [
        (package, statement) for identity, package, statement in VIOLATIONS if identity == contract
    ]
    output = lint(copy, added)
    assert not verdicts(output)[contract], output
    # Every single one of them is reported, not just the first.
    for index, (package, statement) in enumerate(added):
        module = f"penstock.{package.replace('/', '.')}.sneaky_{index}"
        assert f"{module} -> " in output, f"{statement!r} in {package} passed:\n{output}"
