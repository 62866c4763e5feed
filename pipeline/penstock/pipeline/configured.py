"""What is configured of Spark outside of a program: spark-defaults.conf and the environment.

A session sets what pipelines need where nothing is said of it. So it has to know what is said
before Spark is started, which takes what a program sets over all of it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

DEFAULTS_NAME: Final = "spark-defaults.conf"


def read_properties(path: Path) -> dict[str, str]:
    """What a file like spark-defaults.conf sets; nothing where there is none."""
    if not path.is_file():
        return {}
    values = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            key, _, value = re.sub(r"\s*[\s=]\s*", " ", text, count=1).partition(" ")
            values[key] = value.strip()
    return values


def configured(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Spark's settings as they are before a program sets any.

    What counts most comes last: MASTER; spark-defaults.conf, in SPARK_CONF_DIR or else in ``conf``
    of SPARK_HOME or of PySpark; PYSPARK_SUBMIT_ARGS. Of what spark-env.sh sets nothing is known.
    """
    given = os.environ if environment is None else environment
    values = {"spark.master": given["MASTER"]} if given.get("MASTER") else {}
    submit = list(_options(shlex.split(given.get("PYSPARK_SUBMIT_ARGS", ""))))
    files = [Path(text) for name, text in submit if name == "--properties-file"]
    for path in files or [directory / DEFAULTS_NAME for directory in _directories(given)]:
        values |= read_properties(path)
    masters: list[str] = []  # An option wins over --conf, wherever it stands.
    for name, text in submit:
        if name in ("--conf", "-c"):
            key, _, value = text.partition("=")
            values[key] = value
        if name == "--master":
            masters.append(text)
    return values | {"spark.master": masters[-1]} if masters else values


def _directories(environment: Mapping[str, str]) -> Iterator[Path]:
    """The one where spark-defaults.conf is looked for; none without Spark."""
    if place := environment.get("SPARK_CONF_DIR"):
        yield Path(place)
    elif home := environment.get("SPARK_HOME"):
        yield Path(home) / "conf"
    elif (spec := importlib.util.find_spec("pyspark")) is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "conf"


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options that have a value: ``--name value``, ``--name=value``."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.startswith("--") and equals:
            yield name, value
        elif name in ("--conf", "-c", "--master", "--properties-file"):
            yield name, next(rest, "")
