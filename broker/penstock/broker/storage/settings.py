"""What the storage is told: how durable, how large, how long."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.wire.topic_config import cleanup_policies, config_value, integer_config


class FlushPolicy(enum.StrEnum):
    """When appended batches are forced to the disk, and so what ``durable_offset`` promises."""

    COMMIT = "commit"  # durable_offset waits for fdatasync: survives the power loss of every node.
    INTERVAL = "interval"  # durable_offset is the log's end; flushed every flush.interval.ms.
    OS = "os"  # durable_offset is the log's end; flushed at segment roll and on a clean stop.


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What holds for every log of a broker."""

    # An operator's trade of durability for speed; the safe one is the default.
    flush_policy: FlushPolicy = FlushPolicy.COMMIT
    # With FlushPolicy.INTERVAL: what a power cut may cost, in milliseconds of appends.
    flush_interval_ms: int = 1_000
    # High watermarks, log starts and recovery points are saved so long after they changed.
    # Later: less writing. Sooner: less to check after a crash.
    checkpoint_interval_ms: int = 5_000
    # A producer that wrote nothing for so long is forgotten (Kafka's producer.id.expiration.ms).
    producer_expiration_ms: int = 86_400_000
    # The most that local state may grow to: about 100 bytes a partition.
    local_state_max_bytes: int = 64 * 1024 * 1024
    # Closed segments kept open for reading, over all logs of a directory.
    open_segments_max: int = 256
    # Leaders append no producer's records that would leave less of the disk free, followers none
    # that would leave less than half: what leaders took has room on disks that are as large. The
    # rest is for the cluster's own topics, local state and the controller. 0: no limit.
    min_free_bytes: int = 0
    # Whether segments get their room on the disk in advance, where the topic says nothing of it.
    preallocate: bool = False
    # How large segments grow of topics that do not say. The less, the more files; the more, the
    # later retention and compaction get at what is old.
    segment_bytes: int = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanerSettings:
    """What compaction may use of a broker."""

    # So many logs are cleaned side by side; 0: none ever is.
    threads: int = 1
    # What all of them read and write together in a second. A whole core gets through 25 MB, and the
    # event loop shares the interpreter with them.
    io_max_bytes_per_second: int = 8 * 1024 * 1024
    # The memory for keys, of all of them together: 30 bytes a key that is cleaned at once.
    dedupe_buffer_bytes: int = 128 * 1024 * 1024
    # So long after nothing was dirty enough it is looked for again.
    backoff_ms: int = 15_000


_DEFAULT_SETTINGS: Final = LogSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLogConfig:
    """What a topic's configs say about its logs; see penstock.wire.topic_config."""

    max_message_bytes: int
    segment_bytes: int
    segment_ms: int
    index_interval_bytes: int
    log_append_time: bool
    deletes: bool  # cleanup.policy has delete: old segments go, by the two that follow.
    retention_ms: int  # -1: for ever.
    retention_bytes: int  # -1: any number.
    compacts: bool  # cleanup.policy has compact: of a key the last record stays, by the rest.
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    delete_retention_ms: int
    preallocate: bool | None = None  # None: as the broker's settings say.

    @classmethod
    def of(
        cls, configs: Mapping[str, str], settings: LogSettings = _DEFAULT_SETTINGS
    ) -> TopicLogConfig:
        """The values in force; ``configs`` are those set on the topic, validated before.

        ``settings`` stand in where the topic says nothing. Segments whose size it does not say are
        never too small for the batches that it says it takes.
        """
        policies = cleanup_policies(configs)
        asked_bytes = int(configs.get("max.message.bytes", 0))
        return cls(
            max_message_bytes=integer_config(configs, "max.message.bytes"),
            segment_bytes=integer_config(configs, "segment.bytes")
            if "segment.bytes" in configs
            else max(settings.segment_bytes, asked_bytes),
            segment_ms=integer_config(configs, "segment.ms"),
            index_interval_bytes=integer_config(configs, "index.interval.bytes"),
            log_append_time=config_value(configs, "message.timestamp.type") == "LogAppendTime",
            deletes="delete" in policies,
            retention_ms=integer_config(configs, "retention.ms"),
            retention_bytes=integer_config(configs, "retention.bytes"),
            compacts="compact" in policies,
            min_cleanable_dirty_ratio=float(config_value(configs, "min.cleanable.dirty.ratio")),
            min_compaction_lag_ms=integer_config(configs, "min.compaction.lag.ms"),
            max_compaction_lag_ms=integer_config(configs, "max.compaction.lag.ms"),
            delete_retention_ms=integer_config(configs, "delete.retention.ms"),
            preallocate={"true": True, "false": False}.get(config_value(configs, "preallocate")),
        )
