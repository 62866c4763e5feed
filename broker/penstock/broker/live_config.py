"""A node's settings in force: its own, and before them what the whole cluster shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.broker.config import NodeConfig, describe_keys
from penstock.v1 import admin_pb2
from penstock.wire.cluster_config import CLUSTER_CONFIGS, parsed_cluster_configs


class LiveConfig:
    """The settings of one node, as they change. One event loop."""

    def __init__(self, own: NodeConfig) -> None:
        self._own = own
        self._shared: Mapping[str, str] = {}
        self.now = own
        """The settings in force; replaced whole."""

    def take(self, shared: Mapping[str, str]) -> None:
        """Go by what the cluster shares from now on."""
        self._shared = dict(shared)
        parsed = parsed_cluster_configs(shared)
        changes: dict[str, Any] = {key.replace(".", "_"): value for key, value in parsed.items()}
        self.now = dataclasses.replace(self._own, **changes)

    def describe(self) -> Iterator[admin_pb2.ConfigEntry]:
        """Every setting with its value in force, and who says so."""
        for key, _, meaning in describe_keys():
            value = getattr(self.now, key.replace(".", "_"))
            shared = key in self._shared and key in CLUSTER_CONFIGS
            yield admin_pb2.ConfigEntry(
                key=key,
                value=str(value).lower() if isinstance(value, bool) else str(value),
                source="cluster" if shared else self._own.origins.get(key, "default"),
                documentation=meaning,
                dynamic=key in CLUSTER_CONFIGS,
            )
