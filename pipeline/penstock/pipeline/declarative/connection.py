"""The Spark Connect session in which declarative pipelines are defined and run.

Spark knows these pipelines by its Connect protocol alone. On one machine this starts the server of
that protocol inside the session's own Java process, on a port of its own, with a token that
nobody else has; several runs stand beside each other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.pipeline.configured import configured
from penstock.pipeline.errors import PipelineError
from penstock.pipeline.session import DEFAULT_MASTER, require_spark, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MODE = "SPARK_CONNECT_MODE_ENABLED"
_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - the name of a variable.
_ANSWER_S: Final = 20.0
_SERVICE = "org.apache.spark.sql.connect.service.SparkConnectService$"


class ConnectError(PipelineError):
    """The Spark Connect server does not answer, or refuses."""


@contextlib.contextmanager
def local_connection(
    name: str, settings: Mapping[str, str], *, master: str | None = None, log_level: str = "OFF"
) -> Iterator[SparkSession]:
    """A session on this machine, which ends with the block; its server hears loopback alone.

    ``settings`` are Spark's, over those of ``penstock.pipeline.session.settings``; without a master
    in them or by name it is the one that is configured, as of ``session``. ``log_level`` is what
    Spark writes to standard error, unless they say. Raises JavaMissingError and SparkMissingError.
    """
    token = secrets.token_hex(16)
    outside = master or configured().get("spark.master", DEFAULT_MASTER)
    server = session(
        name,
        master=settings.get("spark.master", outside),
        settings={
            # What fails is said by the command: Spark would say the same, in hundreds of lines.
            "spark.log.level": log_level,
            **settings,
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            "spark.connect.authenticate.token": token,
        },
    )

    def quiet() -> None:
        # The client's last calls race with its end, and the server would complain of them.
        with contextlib.suppress(Exception):
            server.sparkContext.setLogLevel("OFF")

    try:
        # Spark's own way to start a local server takes one port for all of a machine.
        java: Any = server._jvm
        port = getattr(getattr(java, _SERVICE), "MODULE$").localPort()
        # Only "localhost" may have a token without TLS.
        url = f"sc://localhost:{port}"
        with _variables({_MODE: "1", _TOKEN: token}), _opened(url, quiet) as opened:
            # A server in a process of ours does not come back: to ask again takes ten minutes.
            client: Any = opened
            client.client.set_retry_policies([])
            yield opened
    finally:
        # A signal to all processes of a group ends Java as well, which has then stopped itself.
        with contextlib.suppress(Exception):
            server.stop()


@contextlib.contextmanager
def remote_connection(url: str, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """A session of the Connect server at ``sc://host:port``, released at the block's end.

    What the server lets nobody change of ``settings`` stays as the server has it. Raises
    ConnectError, also where nobody answers within 20 seconds, and SparkMissingError.
    """
    require_spark()
    with _variables({_MODE: "1"}), _opened(url) as opened:
        _see_that_it_answers(opened, url)
        for key, value in settings.items():
            _set(opened, key, value)
        yield opened


@contextlib.contextmanager
def _opened(url: str, on_end: Callable[[], None] = lambda: None) -> Iterator[SparkSession]:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - it may be missing.
    from pyspark.sql.connect.session import (  # noqa: PLC0415 - it takes a second, and the same.
        SparkSession as ConnectSession,
    )

    try:
        made: Any = ConnectSession.builder.remote(url).create()
    except PySparkException as error:
        raise _nobody(url, _first_line(error)) from error
    try:
        yield made
    finally:
        on_end()
        made.stop()


def _see_that_it_answers(opened: SparkSession, url: str) -> None:
    """Raise ConnectError where nobody does: PySpark would ask on for ten minutes."""
    import grpc  # noqa: PLC0415 - PySpark's Connect client needs it, and it takes a while.

    connect: Any = opened
    ready = grpc.channel_ready_future(connect.client._channel)
    try:
        ready.result(timeout=_ANSWER_S)
    except grpc.FutureTimeoutError:
        # Nothing is to be told to a server that is not there: that would take as long.
        connect.client.set_retry_policies([])
        raise _nobody(url, f"no connection within {_ANSWER_S:.0f} s") from None
    finally:
        ready.cancel()


def _nobody(url: str, why: str) -> ConnectError:
    # Behind the semicolon are parameters, the token among them.
    shown = url.partition(";")[0].rstrip("/")
    return ConnectError(
        f"no Spark Connect server answers at {shown}: {why}; next: see that it runs "
        "(sbin/start-connect-server.sh), and name it as sc://HOST:PORT"
    )


def _set(opened: SparkSession, key: str, value: str) -> None:
    """Set what may be set. Spark warns where it may not, and a server's settings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):
            opened.conf.set(key, value)


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """The environment with these: from there PySpark takes which kind of session it is."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
