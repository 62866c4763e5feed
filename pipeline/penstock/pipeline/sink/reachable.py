"""Whether there is anything to write to, asked where a batch is planned, before tasks are.

A task that cannot write fails, and Spark attempts it three times more: each of them would wait for
the same wrong address or the same absent topic. Spark offers no way to have it attempted less.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic, sleep
from typing import Final

from penstock.client import (
    AdminClient,
    BootstrapError,
    InvalidTopicError,
    PenstockError,
    UnknownTopicOrPartitionError,
)
from penstock.client.config import AdminConfig
from penstock.pipeline.errors import WriteFailedError
from penstock.pipeline.setting_names import as_options
from penstock.pipeline.sink_options import SinkOptions

_WHERE: Final = "the penstock sink"
_OUTAGE_S: Final = 30.0
"""Brokers that are all away may come back: so long, as four attempts of a task take, nobody is told
of it, unless ``penstock.delivery.timeout.ms`` is less. Whether a ``df.write`` is a query's, which
has to outlive that, Spark does not say here."""
_AGREE_S: Final = 5.0
"""A broker may hear of a topic later than who has made it: so long it is asked for again."""
_PAUSE_S: Final = 0.1
_seen: set[tuple[str, str | None]] = set()
"""What this process has found already: Spark plans each batch of a query anew, mostly in the same
one. Whatever becomes of it is for the tasks."""


def check_target(
    options: SinkOptions, *, open_admin: Callable[..., AdminClient] = AdminClient
) -> None:
    """Raises WriteFailedError where no broker answers at the address for 30 s or for what a write
    may take, if that is less, where there is no such topic for 5 s, and at once where no topic can
    have the name.

    What else goes wrong is for the tasks, which need other rights than this question does. A
    process does not ask again for what it has found.
    """
    servers = options.client.bootstrap_servers
    if (servers, options.topic) in _seen:
        return
    outage_s = min(_OUTAGE_S, options.client.settings.get("delivery_timeout_ms", inf) / 1000)
    begun_s = monotonic()
    absent_since_s: float | None = None
    while True:
        try:
            _ask(options, open_admin)
        except BootstrapError as error:
            absent_since_s = None
            if monotonic() - begun_s >= outage_s:
                raise _refused(f" to penstock.bootstrap.servers={servers}", error) from None
        except UnknownTopicOrPartitionError as error:
            now_s = monotonic()
            absent_since_s = now_s if absent_since_s is None else absent_since_s
            if now_s - absent_since_s >= _AGREE_S:
                step = (
                    f"make it (`penstock topics create {options.topic}`), or write another name "
                    "as option topic"
                )
                raise _refused(
                    f", for there is no topic {options.topic} at {servers}", error, step
                ) from None
        except InvalidTopicError as error:
            raise _refused(f", for no topic can have the name {options.topic}", error) from None
        except PenstockError:
            return
        else:
            _seen.add((servers, options.topic))
            return
        sleep(_PAUSE_S)


def _ask(options: SinkOptions, open_admin: Callable[..., AdminClient]) -> None:
    settings = options.client.of(AdminConfig)
    with open_admin(options.client.bootstrap_servers, **settings) as admin:
        if options.topic is None:
            admin.describe_cluster()
        else:
            admin.describe_topics([options.topic])


def _refused(why: str, error: PenstockError, step: str | None = None) -> WriteFailedError:
    following = "" if step is None else f"; next: {step}"
    return WriteFailedError(
        f"{_WHERE}: nothing was written{why}: {type(error).__name__}: "
        f"{as_options(error.message)}{following}"
    )
