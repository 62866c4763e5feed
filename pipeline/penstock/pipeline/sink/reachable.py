"""Whether there is anything to write to, asked once in the driver before tasks are.

A task that cannot write fails, and Spark attempts it three times more: each of them would wait for
the same wrong address or the same absent topic. Spark offers no way to have it attempted less.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Final

from penstock.client import (
    AdminClient,
    BootstrapError,
    PenstockError,
    UnknownTopicOrPartitionError,
)
from penstock.client.config import AdminConfig
from penstock.pipeline.errors import WriteFailedError
from penstock.pipeline.setting_names import as_options
from penstock.pipeline.sink_options import SinkOptions

_WHERE: Final = "the penstock sink"
_AGREE_S: Final = 3.0
"""A broker may hear of a topic later than who has made it: so long it is asked for again."""
_AGREE_PAUSE_S: Final = 0.1
_seen: set[tuple[str, str | None]] = set()
"""What this process has found already: Spark plans each batch of a query anew."""


def check_target(
    options: SinkOptions, *, once: bool, open_admin: Callable[..., AdminClient] = AdminClient
) -> None:
    """Raises WriteFailedError where no broker answers at the address, within
    ``penstock.bootstrap.timeout.ms`` (5 s), or where there is no such topic.

    What else goes wrong is for the tasks, which need other rights than this question does. With
    ``once`` a process does not ask again for what it has found.
    """
    servers = options.client.bootstrap_servers
    if once and (servers, options.topic) in _seen:
        return
    until = monotonic() + _AGREE_S
    while True:
        try:
            with open_admin(servers, **options.client.of(AdminConfig)) as admin:
                if options.topic is None:
                    admin.describe_cluster()
                else:
                    admin.describe_topics([options.topic])
        except BootstrapError as error:
            raise WriteFailedError(
                f"{_WHERE}: nothing was written to penstock.bootstrap.servers={servers}: "
                f"BootstrapError: {as_options(error.message)}"
            ) from None
        except UnknownTopicOrPartitionError as error:
            if monotonic() >= until:
                raise WriteFailedError(
                    f"{_WHERE}: nothing was written, for there is no topic {options.topic} at "
                    f"{servers}: UnknownTopicOrPartitionError: {error.message}; next: make it "
                    f"(`penstock topics create {options.topic}`), or write another name as option "
                    "topic"
                ) from None
            sleep(_AGREE_PAUSE_S)
            continue
        except PenstockError:
            return
        _seen.add((servers, options.topic))
        return
