"""A new project of Spark Declarative Pipelines that reads one topic and writes to another one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from penstock.pipeline.configured import DEFAULTS_NAME, configured, read_properties
from penstock.pipeline.errors import PipelineError
from penstock.pipeline.session import DEFAULT_MASTER, settings

BOOTSTRAP_KEY: Final = "spark.penstock.bootstrap"
"""Where a project keeps its cluster's address: Spark hands on what begins with ``spark.``."""

SPEC_NAMES: Final = ("spark-pipeline.yml", "spark-pipeline.yaml")

_SPEC: Final = """\
name: {name}
# Where the checkpoints are: what was read and written. Without them a run begins anew.
storage: {storage}
libraries:
  - glob:
      include: transformations/**
configuration:
  {key}: "{bootstrap}"
"""

_PYTHON: Final = '''\
"""Every line of the topic "{name}-in", in capitals, to the topic "{name}-out"."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

BOOTSTRAP = spark.conf.get("{key}")

dp.create_sink(
    "shouts", "penstock", {{"penstock.bootstrap.servers": BOOTSTRAP, "topic": "{name}-out"}}
)


@dp.temporary_view
def lines() -> DataFrame:
    """What is in the topic, from its beginning."""
    return (
        spark.readStream.format("penstock")
        .option("penstock.bootstrap.servers", BOOTSTRAP)
        .option("subscribe", "{name}-in")
        .option("startingOffsets", "earliest")
        .load()
    )

{view}
@dp.append_flow(target="shouts")
def shout() -> DataFrame:
    """The records to write: value, and key where there is one."""
    return spark.readStream.table("capitals")
'''

_PYTHON_VIEW: Final = '''
@dp.temporary_view
def capitals() -> DataFrame:
    """The same lines in capitals."""
    value = F.upper(F.col("value").cast("string")).alias("value")
    return spark.readStream.table("lines").select("key", value)

'''

_SQL_VIEW: Final = """\
-- The same lines in capitals. Spark has sinks in Python alone: what reads and what writes is there.
CREATE TEMPORARY VIEW capitals AS
SELECT key, upper(CAST(value AS STRING)) AS value FROM STREAM lines;
"""

_DEFAULTS: Final = """\
# Spark's settings for this project. `penstock pipeline` reads them, and so do Spark's own tools by
# SPARK_CONF_DIR.
"""


class ProjectError(PipelineError):
    """There is no project where one was looked for, or one where a new one was to be made."""


def make_project(parent: Path, name: str, *, bootstrap: str, in_sql: bool) -> list[Path]:
    """Write a project into the new directory ``parent/name``; the files that were written.

    Its transformation is in Python or in SQL; it reads the topic ``NAME-in`` of the cluster at
    ``bootstrap`` and writes to ``NAME-out``. Its master is the one that is configured. Raises
    ProjectError where the directory exists.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ProjectError(
            f"'{name}' is no name of a project; next: use letters, digits, '.', '_' and '-'"
        )
    root = (parent / name).resolve()
    if root.exists():
        raise ProjectError(f"{root} exists already; next: choose another name, or remove it")
    transformations = root / "transformations"
    transformations.mkdir(parents=True)
    storage = (root / "pipeline-storage").as_uri()
    values = {"name": name, "key": BOOTSTRAP_KEY, "bootstrap": bootstrap, "storage": storage}
    defaults = settings(master=configured().get("spark.master", DEFAULT_MASTER))
    texts = {
        root / SPEC_NAMES[0]: _SPEC.format(**values),
        root / DEFAULTS_NAME: _DEFAULTS + "".join(f"{k} {v}\n" for k, v in defaults.items()),
        transformations / "topics.py": _PYTHON.format(
            **values, view="" if in_sql else _PYTHON_VIEW
        ),
    }
    if in_sql:
        python = texts[transformations / "topics.py"]
        unused = "from pyspark.sql import functions as F\n"
        texts[transformations / "topics.py"] = python.replace(unused, "")
        texts[transformations / "capitals.sql"] = _SQL_VIEW
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def find_spec(start: Path) -> Path:
    """The specification: ``start`` itself, or of the directory ``start`` or the next one above it.

    Raises ProjectError where there is none, or where a directory has it under both of its names.
    """
    start = start.absolute()
    if start.is_file():
        return start
    if not start.exists():
        raise ProjectError(
            f"there is no {start}; next: name a {SPEC_NAMES[0]}, or a directory in its project, "
            "with --spec"
        )
    for directory in (start, *start.parents):
        found = [name for name in SPEC_NAMES if (directory / name).is_file()]
        if len(found) > 1:
            raise ProjectError(
                f"{directory} has both {' and '.join(found)}; next: remove one, or name the one "
                "that counts with --spec"
            )
        if found:
            return directory / found[0]
    raise ProjectError(
        f"no {SPEC_NAMES[0]} in {start} or above it; next: name one with --spec FILE, or make a "
        "project with `penstock pipeline init NAME`"
    )


def read_defaults(directory: Path) -> dict[str, str]:
    """What the project's spark-defaults.conf sets; nothing where there is none."""
    return read_properties(directory / DEFAULTS_NAME)
