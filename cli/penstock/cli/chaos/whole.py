"""Whether a cluster under test is whole, as its own nodes say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc

from penstock.chaos.errors import ClusterError
from penstock.cli.readiness import Listening, describe_cluster, describe_unready
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from penstock.wire.transport import CHANNEL_OPTIONS

_ASK_S: Final = 2.0


def describe_unwhole(nodes: Sequence[Listening], cluster_id: str) -> str:
    """What is missing, in words; empty where every node serves and every partition has a leader.

    Raises ClusterError where another cluster answers.
    """
    return (
        describe_unready(nodes)
        or _describe_strangers(nodes, cluster_id)
        or _describe_leaderless(nodes, cluster_id)
    )


def _describe_strangers(nodes: Sequence[Listening], cluster_id: str) -> str:
    """Another cluster's node may have taken a port before ours, which ends only later."""
    for node in nodes:
        answer = describe_cluster(node)
        if answer is None or answer.cluster_id != cluster_id:
            return f"a node of another cluster, or none, answers at {node.address}"
    return ""


def _describe_leaderless(nodes: Sequence[Listening], cluster_id: str) -> str:
    for node in nodes:
        with grpc.insecure_channel(node.address, options=CHANNEL_OPTIONS) as channel:
            request = metadata_pb2.DescribeTopicsRequest(all_topics=True, include_internal=True)
            try:
                answer = metadata_pb2_grpc.MetadataStub(channel).DescribeTopics(
                    request, timeout=_ASK_S
                )
            except grpc.RpcError:
                return f"node {node.node_id} does not answer at {node.address}"
        if answer.cluster_id != cluster_id:
            raise ClusterError(
                f"another cluster answers at {node.address}, where node {node.node_id} was to; "
                "next: run it again, and not beside another one that begins just then"
            )
        for topic in answer.topics:
            for found in topic.partitions:
                if found.leader < 0:
                    return f"node {node.node_id} knows no leader of {topic.name}-{found.partition}"
    return ""
