"""What the commands about the whole cluster do: shared settings, and the feature level."""

from __future__ import annotations

from penstock.raft_meta.core.tables import Draft
from penstock.raft_meta.core.versions import require_known
from penstock.v1 import cluster_pb2
from penstock.wire.cluster_config import check_cluster_config_key, validate_cluster_configs
from penstock.wire.errors import (
    InvalidConfigError,
    InvalidRequestError,
    UnsupportedMetadataVersionError,
)


def alter_configs(
    draft: Draft, command: cluster_pb2.AlterClusterConfigsCommand, _: cluster_pb2.CommandResult
) -> None:
    """Set and reset settings that the whole cluster shares, all or none."""
    validate_cluster_configs(command.set)
    for key in command.remove:
        check_cluster_config_key(key)
        if key in command.set:
            raise InvalidConfigError(f"cluster config {key} is both set and removed")
    configs = {k: text for k, text in draft.cluster_configs.items() if k not in command.remove}
    configs.update(command.set)
    if not command.validate_only and configs != draft.cluster_configs:
        draft.cluster_configs = configs


def raise_version(
    draft: Draft, command: cluster_pb2.RaiseMetadataVersionCommand, _: cluster_pb2.CommandResult
) -> None:
    """Raise the metadata.version, unless a registered broker does not support it.

    Raises SoftwareTooOldError where this software does not know what the others now go by.
    """
    version, now = command.metadata_version, draft.metadata_version
    if version == now:
        return
    if version < now:
        raise InvalidRequestError(
            f"the cluster works at metadata.version {now}, and cannot go back to {version}: what "
            f"was written since needs it"
        )
    if version > command.controller_supports:
        raise UnsupportedMetadataVersionError(
            f"the active controller knows metadata.version 1 to {command.controller_supports}, "
            f"not {version}: install a newer Penstock on every node first"
        )
    lacking = sorted(
        broker.node_id for broker in draft.tables.brokers.values() if broker.max_version < version
    )
    if lacking:
        raise UnsupportedMetadataVersionError(
            f"metadata.version {version} is not supported by broker(s) "
            f"{', '.join(map(str, lacking[:100]))}: install a newer Penstock there, or unregister "
            f"those that are gone for good"
        )
    require_known(version)
    draft.metadata_version = version
