"""Settings of nodes that the whole cluster can share, and change without a restart.

Set with `penstock cluster alter`, they are part of the metadata and go before what a node's own
file says. The controllers validate with this table where a command is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.wire.config_keys import MAX_SHOWN_CHARS, ConfigKey, boolean, integer, suggest
from penstock.wire.errors import InvalidConfigError

_DAY_MS: Final = 86_400_000

_KEYS: Final = (
    ConfigKey(
        "broker.disconnect.grace.ms",
        "200",
        "A broker whose heartbeat stream broke is fenced after this.",
        integer(0, _DAY_MS),
    ),
    ConfigKey(
        "controlled.shutdown.timeout.ms",
        "5000",
        "How long a stopping broker waits for its leaderships to move away.",
        integer(0, _DAY_MS),
    ),
    ConfigKey(
        "controller.takeover.grace.ms",
        "400",
        "How long a new active controller waits for a broker to connect to it whose node is "
        "another controller without a connection to this one; all others have up to "
        "broker.session.timeout.ms.",
        integer(0, _DAY_MS),
    ),
    ConfigKey(
        "leader.imbalance.check.interval.ms",
        "5000",
        "How often the active controller gives leaderships back to preferred leaders.",
        integer(100, _DAY_MS),
    ),
    ConfigKey(
        "leader.imbalance.enable",
        "true",
        "Whether leaderships go back to the preferred leaders that are in sync again.",
        boolean,
    ),
    ConfigKey(
        "leader.imbalance.threshold.percent",
        "0",
        "A broker gets leaderships back when it lacks more than this part of those that are its by "
        "preference.",
        integer(0, 100),
    ),
    ConfigKey(
        "log.min.free.bytes",
        str(64 * 1024 * 1024),
        "What producers must leave free on the disk of a data directory: below it writes are "
        "refused with DISK_FULL, and the node works on; 0: no limit.",
        integer(0),
    ),
    ConfigKey(
        "replica.lag.time.max.ms",
        "10000",
        "A follower that has not caught up for this long leaves the in-sync set.",
        integer(100, _DAY_MS),
    ),
    ConfigKey(
        "replication.catchup.max.bytes.per.second",
        str(64 * 1024 * 1024),
        "What a broker sends in a second at most, in sum, to replicas that are out of sync; what "
        "producers append to the same partitions meanwhile does not count. 0: no limit.",
        integer(0),
    ),
)

CLUSTER_CONFIGS: Final[Mapping[str, ConfigKey]] = {entry.key: entry for entry in _KEYS}


def check_cluster_config_key(key: str) -> ConfigKey:
    """The key's entry, or an InvalidConfigError that suggests the near key."""
    entry = CLUSTER_CONFIGS.get(key)
    if entry is None:
        shown = key[:MAX_SHOWN_CHARS]
        raise InvalidConfigError(
            f"{shown!r} is no setting that the cluster shares"
            f"{suggest(shown, list(CLUSTER_CONFIGS))}; the others are set in each node's own file"
        )
    return entry


def validate_cluster_configs(configs: Mapping[str, str]) -> None:
    """Refuse an unknown key or a value out of bounds with an InvalidConfigError that names it.

    Of several the first in order is named: a map has another order in every process.
    """
    for key, text in sorted(configs.items()):
        entry = check_cluster_config_key(key)
        try:
            entry.parse(text)
        except ValueError as error:
            raise InvalidConfigError(
                f"cluster config {key}={text[:MAX_SHOWN_CHARS]!r}: {error}"
            ) from None


def parsed_cluster_configs(configs: Mapping[str, str]) -> dict[str, Any]:
    """The values that are set, typed; keys that this software does not know are left out."""
    return {
        key: CLUSTER_CONFIGS[key].parse(text)
        for key, text in configs.items()
        if key in CLUSTER_CONFIGS
    }
