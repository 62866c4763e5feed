"""Channels from one node to another."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Final

import grpc
from grpc import aio

from penstock.raft_meta.authentication import PeerAuthentication, Refusal, node_name
from penstock.raft_meta.credentials import NodeTls
from penstock.raft_meta.tls_contexts import TlsContexts
from penstock.wire.transport import CHANNEL_OPTIONS, Option

_EXPECTED_NAME: Final = "grpc.ssl_target_name_override"


class NodeConnector:
    """Opens channels to the cluster's nodes: under TLS to that very node, wherever it is.

    Under TLS the other end must hold a certificate of the authority's that is made out to the
    node that is meant. Its address plays no part, and may change.
    """

    def __init__(self, tls: NodeTls | None) -> None:
        self._tls = tls
        self._contexts = None if tls is None else TlsContexts(tls)
        cluster_id = "" if tls is None else tls.cluster_id
        self._authentication = PeerAuthentication(cluster_id, tls=tls is not None)

    @property
    def is_secure(self) -> bool:
        """Whether channels are under TLS."""
        return self._tls is not None

    def open(self, address: str, node_id: int) -> aio.Channel:
        """A new channel, with the certificate that the files hold now. Close it."""
        if self._tls is None:
            return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        options: list[Option] = [
            *CHANNEL_OPTIONS,
            (_EXPECTED_NAME, self.expected_name(node_id)),
        ]
        return aio.secure_channel(address, self._tls.channel_credentials(), options=options)

    def tls_context(self) -> ssl.SSLContext | None:
        """What a connection without gRPC is to be made with now; None without TLS.

        It proves that the other end holds a certificate of the authority's, and leaves whose to
        :meth:`refusal`.
        """
        return None if self._contexts is None else self._contexts.client()

    def expected_name(self, node_id: int) -> str:
        """The name that a node's certificate is made out to; only under TLS."""
        assert self._tls is not None
        return node_name(node_id, self._tls.cluster_id)

    def refusal(self, names: Iterable[str], node_id: int) -> Refusal | None:
        """Why an end with these DNS names in its certificate is not that node; None when it is."""
        return self._authentication.named(names).refusal(node_id)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """What a channel opened now shows; another object when the files have changed since."""
        return None if self._tls is None else self._tls.channel_credentials()


class NodeChannels:
    """Channels that are kept, by address and node. Used on one event loop.

    After a change of certificates new calls go through new channels. Streams on the channels
    before stay as they are: those are closed at the change after the next one.
    """

    def __init__(self, connector: NodeConnector) -> None:
        self._connector = connector
        self._credentials: grpc.ChannelCredentials | None = None
        self._channels: dict[tuple[str, int], aio.Channel] = {}
        self._retired: list[aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str, node_id: int) -> aio.Channel:
        """The channel to a node at an address."""
        credentials = self._connector.credentials()
        if credentials is not self._credentials:
            self._credentials = credentials
            self._renew()
        found = self._channels.get((address, node_id))
        if found is None:
            found = self._channels[address, node_id] = self._connector.open(address, node_id)
        return found

    async def close(self) -> None:
        """Close every channel."""
        channels = [*self._channels.values(), *self._retired]
        self._channels, self._retired = {}, []
        for channel in channels:
            await channel.close(None)
        await asyncio.gather(*self._closing)

    def _renew(self) -> None:
        for channel in self._retired:
            task = asyncio.ensure_future(channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._retired = list(self._channels.values())
        self._channels = {}
