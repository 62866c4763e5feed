from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.pipeline import JavaMissingError
from penstock.pipeline.java import (
    Java,
    find_java,
    inspect_java,
    java_at,
    read_release,
    usable_home,
)

NOWHERE = Path("/nonexistent")


def a_java(home: Path, version: str, modules: str = "java.base jdk.incubator.vector") -> Path:
    """The home of a Java that says what it is, and prints what it is called with."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nfor one in "$@"; do printf "<%s>" "$one"; done\n')
    program.chmod(0o755)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


def test_java_home_comes_first(tmp_path: Path) -> None:
    home = a_java(tmp_path / "home", "21.0.8")
    other = a_java(tmp_path / "other", "17.0.1")
    environment = {"JAVA_HOME": str(home), "PATH": str(other / "bin")}
    assert find_java(environment, system=NOWHERE).home == home


def test_path_is_searched_and_its_link_followed(tmp_path: Path) -> None:
    home = a_java(tmp_path / "home", "17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(tmp_path / "bin")}, system=NOWHERE).home == home


def test_of_the_systems_javas_the_oldest_that_will_do_is_taken(tmp_path: Path) -> None:
    for version in ("25.0.1", "1.8.0_402", "21.0.2", "11.0.9"):
        a_java(tmp_path / f"java-{version}", version)
    (tmp_path / "empty").mkdir()
    assert find_java({}, system=tmp_path).release == 21


def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old = a_java(tmp_path / "old", "11.0.2")
    a_java(tmp_path / "system" / "new", "17.0.2")
    found = find_java({"JAVA_HOME": str(old)}, system=tmp_path / "system")
    assert found.home == tmp_path / "system" / "new"


def test_java_from_pip_comes_last() -> None:
    found = find_java({}, system=NOWHERE)
    assert (found.home.name, found.release, found.lacks_vectors) == ("java-runtime", 21, True)


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.java._home_from_pip", lambda: None)


@pytest.mark.usefixtures("without_pip")
def test_without_java_the_error_names_what_to_install(tmp_path: Path) -> None:
    old = a_java(tmp_path / "old", "11.0.2")
    broken = tmp_path / "broken" / "bin" / "java"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(JavaMissingError) as caught:
        find_java({"JAVA_HOME": str(old), "PATH": str(broken.parent)}, system=NOWHERE)
    message = str(caught.value)
    assert "17 or newer" in message
    assert f"{old}/bin/java (JAVA_HOME) is Java 11" in message
    assert f"{broken} (PATH) is no Java that works" in message
    assert "apt-get install default-jre-headless" in message
    assert "pip install 'penstock[java]'" in message


def test_a_home_that_is_named_must_hold_a_java(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError, match=f"{tmp_path} holds no Java that works; next: "):
        java_at(tmp_path)
    with pytest.raises(JavaMissingError, match="old holds Java 11; next: "):
        java_at(a_java(tmp_path / "old", "11"))
    assert java_at(a_java(tmp_path / "good", "17")).release == 17


def test_a_java_that_has_no_release_file_is_asked(tmp_path: Path) -> None:
    home = a_java(tmp_path / "java", "17")
    (home / "release").unlink()
    (home / "bin" / "java").write_text(
        "#!/bin/sh\n"
        "echo '    java.home = /opt/java' >&2\n"
        "echo '    java.specification.version = 1.8' >&2\n"
    )
    assert inspect_java(home / "bin" / "java") == Java(Path("/opt/java"), 8)


def test_a_directory_and_a_plain_file_are_no_javas(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("java")
    assert inspect_java(tmp_path) is None
    assert inspect_java(tmp_path / "text") is None


@pytest.mark.parametrize(
    ("version", "release"), [("17.0.15", 17), ("1.8.0_402", 8), ("25", 25), ("21-ea", 21)]
)
def test_releases_are_read(version: str, release: int) -> None:
    assert read_release(NOWHERE, f'JAVA_VERSION="{version}"\n').release == release


def test_a_java_with_all_modules_is_used_as_it_is(tmp_path: Path) -> None:
    home = a_java(tmp_path / "java", "17")
    assert usable_home(java_at(home), tmp_path / "cache") == home
    assert not (tmp_path / "cache").exists()


def test_the_module_that_a_java_lacks_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    home = a_java(tmp_path / "it's java", "21", "java.base")
    wrapper = usable_home(java_at(home), tmp_path / "cache")
    assert wrapper.is_relative_to(tmp_path / "cache")
    line = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "two words", "", "*", "--add-modules=x"]
    called = subprocess.run(
        [wrapper / "bin" / "java", *line], capture_output=True, text=True, check=True
    )
    assert called.stdout == "<-Xmx1g><two words><><*><--add-modules=x>"
    assert usable_home(java_at(home), tmp_path / "cache") == wrapper


def test_where_the_cache_cannot_be_written_a_temporary_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("not a directory")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    home = a_java(tmp_path / "java", "21", "java.base")
    wrapper = usable_home(java_at(home), tmp_path / "cache")
    assert (wrapper / "bin" / "java").exists()
    assert wrapper.is_relative_to(tmp_path)
