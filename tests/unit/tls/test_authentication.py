"""Who a peer may speak as follows from the DNS names of its certificate and from nothing else."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.raft_meta.authentication import PeerAuthentication, node_name

CLUSTER = "kT_b-C.x"
SECURE = PeerAuthentication(CLUSTER, tls=True)


class Context:
    """A call from a peer with these properties."""

    def __init__(self, **properties: list[bytes]) -> None:
        self._properties = properties

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._properties


def peer(*names: str) -> Any:
    return SECURE.identify(Context(peer_dns=[name.encode() for name in names]))


def test_a_node_speaks_for_itself_alone() -> None:
    two = peer("localhost", node_name(2, CLUSTER))
    assert two.refusal() is None
    assert two.refusal(2) is None
    refusal = two.refusal(3)
    assert refusal is not None
    assert refusal.status is grpc.StatusCode.PERMISSION_DENIED
    assert "node 2, as its certificate says, may not speak as node 3" in refusal.reason


@pytest.mark.parametrize(
    "name",
    [
        "",
        "localhost",
        "node-2.other.penstock",
        f"node-2.{CLUSTER}.penstock.evil",
        f"evil.node-2.{CLUSTER}.penstock",
        f"node-2.{CLUSTER}.penstock.",
        f"node-2.{CLUSTER}.penstock\n",
        f"NODE-2.{CLUSTER}.penstock",
        f"node-2.{CLUSTER.upper()}.penstock",
        f"node-2.{CLUSTER.replace('.', 'a')}.penstock",
        f"node-02.{CLUSTER}.penstock",
        f"node--2.{CLUSTER}.penstock",
        f"node-*.{CLUSTER}.penstock",
        f"*.{CLUSTER}.penstock",
        f"node-.{CLUSTER}.penstock",
        f"node-\u0662.{CLUSTER}.penstock",
    ],
)
def test_what_is_only_like_a_nodes_name_is_none(name: str) -> None:
    refusal = peer(name).refusal()
    assert refusal is not None
    assert refusal.status is grpc.StatusCode.UNAUTHENTICATED
    assert f"connect with one for node-N.{CLUSTER}.penstock" in refusal.reason


@given(st.lists(st.binary(max_size=60)))
def test_no_bytes_in_a_certificate_break_it(names: list[bytes]) -> None:
    found = SECURE.identify(Context(peer_dns=names))
    assert found.nodes == frozenset()


def test_other_kinds_of_names_do_not_count() -> None:
    name = node_name(2, CLUSTER).encode()
    context = Context(
        x509_common_name=[name],
        x509_subject_alternative_name=[name],
        peer_uri=[name],
        peer_email=[name],
        x509_subject=[b"CN=" + name],
    )
    assert SECURE.identify(context).nodes == frozenset()


def test_whoever_shows_no_certificate_is_nobody() -> None:
    refusal = SECURE.identify(Context()).refusal(1)
    assert refusal is not None
    assert refusal.status is grpc.StatusCode.UNAUTHENTICATED


def test_without_tls_everybody_is_believed() -> None:
    anyone = PeerAuthentication(CLUSTER, tls=False).identify(Context())
    assert anyone.refusal() is None
    assert anyone.refusal(7) is None
