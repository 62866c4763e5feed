"""Writes the dashboards, as `python deploy/monitoring/grafana/make_dashboards.py`.

What they show is said here, in a line a curve; the JSON beside it is what Grafana is given, and a
test holds the two together and every query to the metrics that there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from panels import Dashboard, Panel, as_json, curve, less, number, quantile, rate

TARGET: Final = Path(__file__).parent / "dashboards"
_MINE: Final = 'cluster=~"$cluster"'
_NODE: Final = f'{_MINE}, node=~"$node"'
_TOPIC: Final = f'{_MINE}, topic=~"$topic"'
_GROUP: Final = f'{_MINE}, group=~"$group"'
_CHANGED: Final = f"max by (cluster) (penstock_cluster_metadata_index{{{_MINE}}})"
_QUERY: Final = 'query=~"$query"'
_LAG: Final = f"max by (cluster, group, topic) (penstock_group_lag_records{{{_GROUP}}})"

_CLUSTER_VARIABLE: Final = {"cluster": ("penstock_build_info", "cluster")}
_NODE_VARIABLE: Final = {**_CLUSTER_VARIABLE, "node": ("penstock_build_info", "node")}

CLUSTER: Final = Dashboard(
    "cluster",
    "Penstock: cluster",
    [
        number("Nodes up", f'sum(up{{job="penstock", {_MINE}}})'),
        number("Active controllers", f"sum(penstock_active_controller{{{_MINE}}})"),
        number("Offline partitions", f"max(penstock_offline_partitions{{{_MINE}}})", 1),
        number("Refusing acks=all", f"sum(penstock_under_min_isr_partitions{{{_MINE}}})", 1),
        number("Under-replicated", f"sum(penstock_under_replicated_partitions{{{_MINE}}})", 1),
        number("Damaged replicas", f"sum(penstock_damaged_replicas{{{_MINE}}})", 1),
        Panel(
            "Bytes in and out",
            [
                (
                    "produced",
                    f"sum(rate(penstock_produced_bytes_total{{{_MINE}}}[$__rate_interval]))",
                ),
                (
                    "fetched",
                    f"sum(rate(penstock_fetched_bytes_total{{{_MINE}}}[$__rate_interval]))",
                ),
            ],
            "Bps",
        ),
        curve(
            "Records in",
            "",
            f"sum(rate(penstock_produced_records_total{{{_MINE}}}[$__rate_interval]))",
        ),
        Panel(
            "Produce, from request to answer",
            [
                (
                    f"p{share * 100:g}",
                    quantile(
                        share,
                        "penstock_request_seconds",
                        f'{_MINE}, method="Log.Produce"',
                        "cluster",
                    ),
                )
                for share in (0.5, 0.99, 0.999)
            ],
            "s",
        ),
        Panel(
            "Partitions to look after",
            [
                ("under-replicated", f"sum(penstock_under_replicated_partitions{{{_MINE}}})"),
                ("at min ISR", f"sum(penstock_at_min_isr_partitions{{{_MINE}}})"),
                ("under min ISR", f"sum(penstock_under_min_isr_partitions{{{_MINE}}})"),
                ("offline", f"max(penstock_offline_partitions{{{_MINE}}})"),
                ("reassigning", f"sum(penstock_reassigning_partitions{{{_MINE}}})"),
                (
                    "not at their preferred leader",
                    f"max(penstock_not_preferred_partitions{{{_MINE}}})",
                ),
            ],
        ),
        curve(
            "Refused, by error",
            "{{error}}",
            rate("penstock_refused_batches_total", _MINE, "error"),
        ),
        Panel(
            "In-sync sets change",
            [
                ("left: {{reason}}", rate("penstock_isr_left_total", _MINE, "reason")),
                ("joined", f"sum(rate(penstock_isr_joined_total{{{_MINE}}}[$__rate_interval]))"),
            ],
        ),
        Panel("Leaders", [("node {{node}}", f"penstock_leader_partitions{{{_MINE}}}")]),
        Panel(
            "Leader elections",
            [
                ("all", f"sum(rate(penstock_leader_elections_total{{{_MINE}}}[$__rate_interval]))"),
                (
                    "unclean",
                    f"sum(rate(penstock_unclean_leader_elections_total{{{_MINE}}}[$__rate_interval]))",
                ),
            ],
        ),
        Panel(
            "Free of each disk",
            [
                (
                    "node {{node}} {{directory}}",
                    " / ".join(
                        f"penstock_log_directory_{what}_bytes{{{_MINE}}}"
                        for what in ("free", "total")
                    ),
                )
            ],
            "percentunit",
        ),
        Panel(
            "Software",
            [
                (
                    "{{version}} {{revision}} {{codec}}",
                    f"count by (version, revision, codec) (penstock_build_info{{{_MINE}}})",
                )
            ],
        ),
    ],
    _CLUSTER_VARIABLE,
)

BROKER: Final = Dashboard(
    "broker",
    "Penstock: broker",
    [
        number("Fenced", f"sum(penstock_broker_fenced{{{_NODE}}})", 1),
        number("Replicas", f"sum(penstock_replica_partitions{{{_NODE}}})"),
        number("Leaders", f"sum(penstock_leader_partitions{{{_NODE}}})"),
        number("Failed directories", f"sum(penstock_offline_log_directories{{{_NODE}}})", 1),
        number("Offline replicas", f"sum(penstock_offline_replicas{{{_NODE}}})", 1),
        number(
            "Up since", f"max(process_start_time_seconds{{{_NODE}}}) * 1000", unit="dateTimeFromNow"
        ),
        curve(
            "Calls a second", "{{method}}", rate("penstock_request_seconds_count", _NODE, "method")
        ),
        curve(
            "p99 of calls",
            "{{method}}",
            quantile(0.99, "penstock_request_seconds", _NODE, "method"),
            "s",
        ),
        curve(
            "Requests that wait",
            "{{kind}}",
            f"sum by (kind) (penstock_waiting_requests{{{_NODE}}})",
        ),
        Panel(
            "Bytes in and out",
            [
                ("produced {{node}}", rate("penstock_produced_bytes_total", _NODE, "node")),
                ("fetched {{node}}", rate("penstock_fetched_bytes_total", _NODE, "node")),
            ],
            "Bps",
        ),
        Panel(
            "p99 of the disk",
            [
                (
                    "fsync {{node}} {{directory}}",
                    quantile(0.99, "penstock_fsync_seconds", _NODE, "node, directory"),
                ),
                (
                    "flush round {{node}} {{directory}}",
                    quantile(0.99, "penstock_flush_wait_seconds", _NODE, "node, directory"),
                ),
            ],
            "s",
        ),
        Panel(
            "Records that followers lack",
            [
                (
                    "{{node}} to {{follower}}",
                    f"sum by (node, follower) (penstock_replica_lag_records{{{_NODE}}})",
                )
            ],
        ),
        curve(
            "Followers out of sync",
            "{{reason}}",
            f"sum by (reason) (penstock_out_of_sync_followers{{{_NODE}}})",
        ),
        Panel(
            "Connections and streams",
            [
                (
                    "connections: {{listener}}",
                    f"sum by (listener) (penstock_connections{{{_NODE}}})",
                ),
                ("streams: {{method}}", f"sum by (method) (penstock_open_streams{{{_NODE}}})"),
            ],
        ),
        curve(
            "Answers that clients have yet to take",
            "{{node}}",
            f"sum by (node) (penstock_unsent_bytes{{{_NODE}}})",
            "bytes",
        ),
        Panel(
            "Answers refused and clients disconnected, since they are not taken",
            [
                ("refused: {{node}}", rate("penstock_answers_refused_total", _NODE, "node")),
                ("disconnected: {{node}}", rate("penstock_stalled_clients_total", _NODE, "node")),
            ],
        ),
        Panel(
            "Requests that were sent in part, and connections closed for that",
            [
                ("bytes: {{node}}", f"sum by (node) (penstock_unfinished_bytes{{{_NODE}}})"),
                ("closed: {{node}}", rate("penstock_overfull_clients_total", _NODE, "node")),
                ("closed idle: {{node}}", rate("penstock_idle_clients_total", _NODE, "node")),
            ],
        ),
        curve("CPU", "{{node}}", rate("process_cpu_seconds_total", _NODE, "node"), "percentunit"),
        curve("Memory", "{{node}}", f"process_resident_memory_bytes{{{_NODE}}}", "bytes"),
        Panel(
            "p99 of late timers and of garbage collections",
            [
                (
                    "event loop {{node}}",
                    quantile(0.99, "penstock_event_loop_delay_seconds", _NODE, "node"),
                ),
                (
                    "collections {{node}}",
                    quantile(0.99, "penstock_gc_pause_seconds", _NODE, "node"),
                ),
            ],
            "s",
        ),
        curve(
            "Descriptors in use",
            "{{node}}",
            f"process_open_fds{{{_NODE}}} / process_max_fds{{{_NODE}}}",
            "percentunit",
        ),
        Panel(
            "Cleaning and scrubbing",
            [
                (
                    "cleaner reads {{node}}",
                    rate("penstock_cleaner_read_bytes_total", _NODE, "node"),
                ),
                (
                    "cleaner writes {{node}}",
                    rate("penstock_cleaner_written_bytes_total", _NODE, "node"),
                ),
                (
                    "scrubber reads {{node}}",
                    rate("penstock_scrubber_read_bytes_total", _NODE, "node"),
                ),
            ],
            "Bps",
        ),
        curve(
            "Old records deleted",
            "{{reason}}",
            rate("penstock_retention_deleted_bytes_total", _NODE, "reason"),
            "Bps",
        ),
    ],
    _NODE_VARIABLE,
)

TOPIC: Final = Dashboard(
    "topic",
    "Penstock: topics",
    [
        curve(
            "Records in",
            "{{topic}}",
            rate("penstock_topic_produced_records_total", _TOPIC, "topic"),
        ),
        curve(
            "Bytes in",
            "{{topic}}",
            rate("penstock_topic_produced_bytes_total", _TOPIC, "topic"),
            "Bps",
        ),
        curve(
            "Bytes out",
            "{{topic}}",
            rate("penstock_topic_fetched_bytes_total", _TOPIC, "topic"),
            "Bps",
        ),
        curve(
            "Bytes on all disks",
            "{{topic}}",
            f"sum by (topic) (penstock_log_size_bytes{{{_TOPIC}}})",
            "bytes",
        ),
        Panel(
            "Bytes a record",
            [
                (
                    "{{topic}}",
                    " / ".join(
                        rate(f"penstock_topic_produced_{what}_total", _TOPIC, "topic")
                        for what in ("bytes", "records")
                    ),
                )
            ],
            "bytes",
        ),
        Panel(
            "Groups behind",
            [
                (
                    "{{group}} in {{topic}}",
                    f"max by (group, topic) (penstock_group_lag_records{{{_TOPIC}}})",
                )
            ],
        ),
    ],
    {**_CLUSTER_VARIABLE, "topic": ("penstock_log_size_bytes", "topic")},
)

GROUP: Final = Dashboard(
    "group",
    "Penstock: groups and transactions",
    [
        Panel(
            "Lag",
            [
                (
                    "{{group}} in {{topic}}",
                    f"max by (group, topic) (penstock_group_lag_records{{{_GROUP}}})",
                )
            ],
        ),
        curve(
            "How fast the lag grows",
            "{{group}} in {{topic}}",
            # Not by coordinator: a series of a former one would go on for a quarter of an hour.
            f"deriv({_LAG}[15m:1m])",
        ),
        Panel(
            "For how long it stands still",
            [
                (
                    "{{group}} in {{topic}}",
                    f"max by (group, topic) (penstock_group_stalled_seconds{{{_GROUP}}})",
                )
            ],
            "s",
        ),
        Panel("Groups by state", [("{{state}}", f"sum by (state) (penstock_groups{{{_MINE}}})")]),
        Panel("Members", [("", f"sum(penstock_group_members{{{_MINE}}})")]),
        curve(
            "Rebalances a second",
            "node {{node}}",
            rate("penstock_group_rebalances_total", _MINE, "node"),
        ),
        Panel(
            "p99 of commits",
            [
                (
                    "",
                    quantile(
                        0.99,
                        "penstock_request_seconds",
                        f'{_MINE}, method="Groups.CommitOffsets"',
                        "cluster",
                    ),
                )
            ],
            "s",
        ),
        curve(
            "Transactions by state",
            "{{state}}",
            f"sum by (state) (penstock_transactions{{{_MINE}}})",
        ),
        curve(
            "Transactions that end",
            "{{outcome}}",
            rate("penstock_transactions_ended_total", _MINE, "outcome"),
        ),
        curve(
            "Oldest open transaction",
            "",
            f"max(penstock_oldest_transaction_seconds{{{_MINE}}})",
            "s",
        ),
    ],
    {**_CLUSTER_VARIABLE, "group": ("penstock_group_lag_records", "group")},
)

QUORUM: Final = Dashboard(
    "quorum",
    "Penstock: controllers",
    [
        Panel("Active controller", [("node {{node}}", f"penstock_active_controller{{{_MINE}}}")]),
        Panel("Term", [("node {{node}}", f"penstock_raft_term{{{_MINE}}}")]),
        curve(
            "Elections, of the last hour",
            "",
            f"max(increase(penstock_controller_elections_total{{{_MINE}}}[1h]))",
        ),
        curve(
            "Entries decided a second",
            "node {{node}}",
            f"deriv(penstock_raft_commit_index{{{_MINE}}}[5m])",
        ),
        curve(
            "Entries that others lack",
            "node {{voter}}",
            f"max by (voter) (penstock_raft_lag_entries{{{_MINE}}})",
        ),
        Panel(
            "Entries to apply, and to be decided",
            [
                (
                    "to apply {{node}}",
                    less("penstock_raft_commit_index", "penstock_raft_applied_index", _MINE),
                ),
                (
                    "to be decided {{node}}",
                    less("penstock_raft_last_index", "penstock_raft_commit_index", _MINE),
                ),
            ],
        ),
        Panel(
            "Brokers behind with the metadata, in entries",
            [
                (
                    "node {{node}}",
                    f"{_CHANGED} - on (cluster) group_right () penstock_metadata_index{{{_MINE}}}",
                )
            ],
        ),
        Panel("Brokers", [("{{state}}", f"max by (state) (penstock_cluster_brokers{{{_MINE}}})")]),
        Panel(
            "Topics and partitions",
            [
                ("topics", f"max(penstock_cluster_topics{{{_MINE}}})"),
                ("partitions", f"max(penstock_cluster_partitions{{{_MINE}}})"),
            ],
        ),
        Panel(
            "Refusals",
            [
                (
                    "{{command}}: {{error}}",
                    rate("penstock_controller_refusals_total", _MINE, "command, error"),
                )
            ],
        ),
        Panel(
            "p99 of calls to controllers",
            [
                (
                    "{{method}}",
                    quantile(
                        0.99,
                        "penstock_request_seconds",
                        f'{_MINE}, method=~"Controller.*"',
                        "method",
                    ),
                )
            ],
            "s",
        ),
        number("metadata.version", f"min(penstock_metadata_version{{{_MINE}}})"),
    ],
    _CLUSTER_VARIABLE,
)

PIPELINE: Final = Dashboard(
    "pipeline",
    "Penstock: pipelines on Spark",
    [
        Panel(
            "Behind, in offsets",
            [
                (
                    "{{query}} {{topic}}",
                    f"sum by (query, topic) (penstock_query_lag_offsets{{{_QUERY}}})",
                )
            ],
        ),
        Panel(
            "Rows that arrive and are processed a second",
            [
                ("{{query}} arrive", f"penstock_query_input_rows_per_second{{{_QUERY}}}"),
                ("{{query}} processed", f"penstock_query_processed_rows_per_second{{{_QUERY}}}"),
            ],
        ),
        curve(
            "Time of a micro-batch", "{{query}}", f"penstock_query_batch_seconds{{{_QUERY}}}", "s"
        ),
        Panel(
            "Rows processed", [("{{query}}", rate("penstock_query_rows_total", _QUERY, "query"))]
        ),
        Panel("Micro-batch", [("{{query}}", f"penstock_query_batch_id{{{_QUERY}}}")]),
    ],
    {"query": ("penstock_query_batch_id", "query")},
)

DASHBOARDS: Final = (CLUSTER, BROKER, TOPIC, GROUP, QUORUM, PIPELINE)


def main() -> None:
    """Write all of them."""
    TARGET.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        path = TARGET / f"{dashboard.name}.json"
        path.write_text(as_json(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
