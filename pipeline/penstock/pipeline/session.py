"""Spark as pipelines need it: a session, and the same as plain settings for Spark's own tools.

Importing this starts nothing and needs no Spark.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.pipeline.configured import configured
from penstock.pipeline.errors import SparkMissingError
from penstock.pipeline.java import find_java, java_at, usable_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = "local[2,4]"
"""Two tasks at a time, each with four attempts: of a plain ``local[2]`` a task has one."""

ROCKSDB_STATE: Final[Mapping[str, str]] = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Each batch then uploads what it changed, and not the files that hold it.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
"""Settings for queries that keep their state in RocksDB, on disk and outside of Java's heap:
``transformWithState`` needs them, and joins and aggregations with millions of keys are better off.
A query's checkpoint keeps to the kind of store with which it was begun."""

_LOCAL: Final = re.compile(r"local(?:\[(?P<cores>\d+|\*)(?:,\d+)?\])?")
_LOOPBACK: Final = "127.0.0.1"

_EVERYWHERE: Final = {
    # The Arrow batches of a sink are bounded by their rows. By Spark's default they are cut at
    # 64 MiB too, measured row by row, and that costs a sink most of its speed.
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
}
_ON_ONE_MACHINE: Final = {
    # Nobody else is to reach it, and the machine's name need not resolve.
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # The executor is the driver's own process, whose death needs no heartbeat to be noticed. By
    # Spark's default a machine that slept for two minutes has the driver forget itself, and its
    # heartbeats, refused from then on, end it ten minutes later. It must not be below
    # spark.network.timeoutInterval (one minute) and spark.executor.heartbeatInterval (10 s).
    "spark.storage.blockManagerHeartbeatTimeoutMs": str(60 * 60 * 1000),
    # Likewise once a shuffle's file is gone, as by who cleans up /tmp: Spark makes it anew, takes
    # its executor for lost, and by default ends the process when 60 heartbeats were refused.
    "spark.executor.heartbeat.maxFailures": str(2**31 - 1),
}


def settings(
    *, master: str = DEFAULT_MASTER, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What ``session`` sets, as Spark's settings: for spark-defaults.conf and spark-submit --conf.

    With ``more`` over them. Only a local ``master`` ("local", "local[N]", "local[N,ATTEMPTS]")
    is held to the loopback interface, has no web page, outlives a stall of up to an hour and the
    loss of shuffled files, and shuffles into as many partitions as it has cores: into Spark's 200
    it would mostly start tasks.
    """
    values = {"spark.master": master, **_EVERYWHERE}
    if (local := _LOCAL.fullmatch(master)) is not None:
        values |= _ON_ONE_MACHINE
        cores = local["cores"] or "1"
        count = str(os.cpu_count() or 1) if cores == "*" else cores
        values["spark.sql.shuffle.partitions"] = count
    return values | dict(more or {})


def prepare_environment(java: Path | None = None) -> None:
    """Have the Java that Spark will start found, and Spark's Python processes be this Python.

    Sets JAVA_HOME, and PYSPARK_PYTHON unless it is set. ``java`` is a Java's home; without it one
    is found (``penstock.pipeline.java``). Raises JavaMissingError and SparkMissingError.
    """
    require_spark()
    found = find_java() if java is None else java_at(java)
    os.environ["JAVA_HOME"] = str(usable_home(found))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def require_spark() -> None:
    """Raise SparkMissingError unless PySpark is installed. Imports none of it."""
    missing = [
        name for name in ("pyspark", "pyarrow", "pandas") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise SparkMissingError(
            f"pipelines need packages that are not installed: {', '.join(missing)}; "
            "next: pip install 'penstock[pipeline]'"
        )


def session(
    name: str = "penstock",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    java: Path | None = None,
) -> SparkSession:
    """A Spark session that knows the source and the sink "penstock"; the one there is, if any.

    ``name`` is the application's. ``settings`` are Spark's, and win over all else; of a session
    that there was before, those that Spark fixes at its start stay as they were. What is
    configured for Spark (``penstock.pipeline.configured``, or ``spark-submit`` in a program that
    was started by it) wins over those of ``settings()``. So without ``master`` it is the one that
    is configured, and ``local[2,4]`` where none is; SPARK_REMOTE names a Spark Connect server in
    its place.

    ``java`` is the home of a Java; without it one is found. The first session of a process starts
    a Java process, which takes some seconds and ends with this process, or by ``stop()``.

    Raises JavaMissingError, SparkMissingError, and what Spark raises.
    """
    given = dict(settings or {})
    if master is not None:
        given = {"spark.master": master, **given}
    is_remote = "spark.remote" in given or "SPARK_REMOTE" in os.environ
    if is_remote and "spark.master" not in given:
        require_spark()
        return _session(name, {**_EVERYWHERE, **given})
    prepare_environment(java)
    # What is known of spark-submit in a program of it: it has started the Java already.
    if "spark.master" not in given and "PYSPARK_GATEWAY_PORT" in os.environ:
        return _session(name, _unless(_submitted(), _EVERYWHERE) | given)
    outside = configured()
    chosen = given.get("spark.master") or outside.get("spark.master") or DEFAULT_MASTER
    if _LOCAL.fullmatch(chosen):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    values = _unless(outside, _settings(master=chosen))
    return _session(name, {**values, "spark.master": chosen, **given})


def _unless(outside: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Those that are not configured outside."""
    return {key: value for key, value in values.items() if key not in outside}


def _submitted() -> dict[str, str]:
    """What spark-submit has handed to the Java that it has started."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - it takes a second.

    SparkContext._ensure_initialized()
    return dict(SparkConf(_jvm=SparkContext._jvm).getAll())


def _session(name: str, values: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - it takes a second, and may be missing.

    builder = SparkSession.builder.appName(name)
    for key, value in values.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


# The parameter of the same name hides it in ``session``.
_settings = settings
