"""What a user installs: the wheel and the source distribution, built as a release is."""

from __future__ import annotations

import email
import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TREES = ("proto", "raft_meta", "broker", "client", "cli", "pipeline", "chaos")
PACKAGES = ("v1", "wire", "raft_meta", "broker", "client", "cli", "pipeline", "chaos")
DIST_INFO = f"penstock-{PROJECT['version']}.dist-info"
CLIENT_DEPENDENCIES = {"cramjam", "crc32c", "grpcio", "lz4", "protobuf", "zstandard"}

# Spark looks for data sources in modules at the top, named so.
SPARKS_MODULES = {
    "pyspark_penstock.py", "pyspark_penstock_amqp.py", "pyspark_penstock_elasticsearch.py",
    "pyspark_penstock_mqtt.py",
}  # fmt: skip

COMPILED = f"penstock/wire/_codec{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(source: Path, target: str, directory: Path, **environment: str) -> Path:
    """Build with what is installed: no network, no isolated environment."""
    result = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", directory],
        cwd=source,
        # Bytecode of the build hook, left in the unpacked source, would seem to have come with it.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert ("codec was not built" in result.stderr) == ("CC" in environment)
    (built,) = directory.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def source(sdist, tmp_path_factory) -> Path:
    """The unpacked source distribution."""
    directory = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(directory, filter="data")
        else:  # Python 3.11 before 3.11.4, as Debian has it; the archive is our own.
            archive.extractall(directory)
    return directory / f"penstock-{PROJECT['version']}"


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """The wheel, built from the source distribution alone, which must suffice."""
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture(scope="module")
def metadata(installed) -> email.message.Message:
    return email.message_from_string((installed / DIST_INFO / "METADATA").read_text())


def names_in(directory: Path) -> set[str]:
    return {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }


def test_only_penstock_is_at_the_top(installed):
    found = {path.name for path in installed.iterdir()}
    assert found == {"penstock", DIST_INFO, *SPARKS_MODULES}


def test_penstock_stays_a_namespace(installed):
    assert not (installed / "penstock" / "__init__.py").exists()
    assert {path.name for path in (installed / "penstock").iterdir()} == set(PACKAGES)


def test_every_module_and_stub_is_in_the_wheel(installed):
    expected = {
        path.relative_to(ROOT / tree).as_posix()
        for tree in TREES
        for suffix in ("*.py", "*.pyi", "*.pyx", "*.pxi", "preload.c", "*.proto", "py.typed")
        for path in (ROOT / tree / "penstock").rglob(suffix)
    }
    assert {f"penstock/{package}/py.typed" for package in PACKAGES} <= expected
    assert "penstock/v1/log_pb2.pyi" in expected
    found = {name for name in names_in(installed) if not name.startswith(DIST_INFO)}
    assert found == {*expected, COMPILED, *SPARKS_MODULES}


@pytest.mark.parametrize("environment", [{"PENSTOCK_PURE_PYTHON": "1"}, {"CC": "no-compiler"}])
def test_without_a_compiler_the_wheel_is_pure_and_works(source, tmp_path, environment):
    wheel = build(source, "wheel", tmp_path / "built", **environment)
    assert wheel.name == f"penstock-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert COMPILED not in names_in(tmp_path / "site")
    imported_from(tmp_path / "site", is_compiled=False)


def test_the_licence_is_in_both(installed, source):
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert (installed / DIST_INFO / "licenses" / "LICENSE").read_text() == text
    assert (source / "LICENSE").read_text() == text


def test_the_base_install_is_the_client_alone(metadata):
    base = set()
    for requirement in metadata.get_all("Requires-Dist"):
        name, _, marker = requirement.partition(";")
        if "extra ==" not in marker:
            base.add(name.split(">")[0].split("=")[0].split("<")[0].strip())
    assert base == CLIENT_DEPENDENCIES
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert {"broker", "pipeline", "chaos", "dev"} <= set(metadata.get_all("Provides-Extra"))


def test_the_metadata_is_whole(metadata, installed):
    assert metadata["Name"] == "penstock"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload().startswith("# Penstock")
    entry_points = (installed / DIST_INFO / "entry_points.txt").read_text()
    assert "penstock = penstock.cli.__main__:main" in entry_points


def test_the_source_distribution_has_what_is_needed_and_no_more(source, sdist):
    names = names_in(source)
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "CHANGELOG.md"} <= names
    assert {"tests/test_packaging.py", "proto/penstock/v1/log.proto"} <= names
    unwanted = (".ci/", ".venv/", "build/", "dist/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/")
    assert not [name for name in names if name.startswith(unwanted) or "__pycache__" in name]
    assert sdist.stat().st_size < 5 * 1024 * 1024


def test_the_same_source_gives_the_same_wheel(wheel, source, tmp_path):
    again = build(source, "wheel", tmp_path)
    assert again.name == wheel.name
    assert wheel.name.startswith(f"penstock-{PROJECT['version']}-cp")
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (again, wheel)}
    assert len(digests) == 1


IMPORT_CLIENT = """
    import importlib, pkgutil, sys

    NOT_INSTALLED = {
        "grpc_health", "grpc_reflection", "lmdb", "prometheus_client", "pysyncobj", "rich",
        "structlog", "typer", "uvloop",
    }

    class NotInstalled:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in NOT_INSTALLED:
                raise ModuleNotFoundError(f"{name} is not in the base install", name=name)

    sys.meta_path.insert(0, NotInstalled())
    import penstock.client, penstock.wire, penstock.v1
    for package in (penstock.client, penstock.wire, penstock.v1):
        assert package.__file__.startswith(sys.argv[1]), package.__file__
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    ours = {name for name in sys.modules if name.startswith("penstock.")}
    strangers = {name for name in ours if name.split(".")[1] not in ("client", "wire", "v1")}
    assert not strangers, strangers
    assert len(ours) > 30, ours
    print("compiled" if penstock.wire.codec.IS_COMPILED else "pure")
"""


def test_the_client_works_from_the_base_install(installed):
    imported_from(installed, is_compiled=True)


def imported_from(site: Path, *, is_compiled: bool) -> None:
    """All that the base install has can be imported from there, and nothing more is needed."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IMPORT_CLIENT), str(site)],
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ("compiled\n" if is_compiled else "pure\n")
