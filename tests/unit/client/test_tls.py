"""Clients under TLS: wrong files are refused at once, and a failed connection says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.cli.certificates import Authority, write_files
from penstock.client import AdminClient, AsyncAdminClient, AsyncProducer, Consumer, Producer
from penstock.client.cluster import Cluster
from penstock.client.config import AdminConfig
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from penstock.wire.errors import BootstrapError, ConfigurationError

AUTHORITY = Authority()
BROKER = AUTHORITY.issue("broker", ["localhost", "127.0.0.1"])


def files(directory: Path, authority: Authority = AUTHORITY, **options: Any) -> dict[str, Any]:
    where = write_files(directory, "client", authority, authority.issue("client", **options))
    return {"tls_ca": where.ca, "tls_certificate": str(where.certificate), "tls_key": where.key}


class Fake(metadata_pb2_grpc.MetadataServicer):
    """Knows a cluster of one."""

    port = 0

    async def DescribeCluster(self, request: Any, context: Any) -> Any:
        answer = metadata_pb2.DescribeClusterResponse(cluster_id="fake")
        answer.brokers.add(node_id=1, host="localhost", port=self.port)
        return answer


@asynccontextmanager
async def broker(
    credentials: grpc.ServerCredentials | None = None, *, asks: bool = False, plain: bool = False
) -> AsyncIterator[int]:
    server = grpc.aio.server()
    fake = Fake()
    metadata_pb2_grpc.add_MetadataServicer_to_server(fake, server)
    shown = credentials or grpc.ssl_server_credentials(
        [(BROKER.key, BROKER.certificate)], AUTHORITY.pem, asks
    )
    address = "127.0.0.1:0"
    port = server.add_insecure_port(address) if plain else server.add_secure_port(address, shown)
    fake.port = port
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def describe(port: int, host: str = "127.0.0.1", **settings: Any) -> str:
    """The cluster's id, or why the client could not begin."""
    settings.setdefault("bootstrap_timeout_ms", 300)
    settings.setdefault("bootstrap_servers", f"{host}:{port}")
    async with AsyncAdminClient(**settings) as admin:
        try:
            return (await admin.describe_cluster()).cluster_id
        except BootstrapError as error:
            return error.message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_client_under_tls_is_served(tmp_path: Path, host: str) -> None:
    settings = files(tmp_path) | {"bootstrap_timeout_ms": 10_000}
    async with broker(asks=True) as port:
        assert await describe(port, host, **settings) == "fake"
    async with broker() as port:
        assert await describe(port, host, **settings) == "fake"
        only_ca = {"tls_ca": settings["tls_ca"], "bootstrap_timeout_ms": 10_000}
        assert await describe(port, host, **only_ca) == "fake"


async def test_a_client_without_tls_is_told_to_use_it() -> None:
    for asks in (False, True):
        async with broker(asks=asks) as port:
            said = await describe(port)
            assert "it speaks TLS and this client does not (" in said
            assert "; next: set tls_ca, and tls_certificate and tls_key where brokers ask" in said
            assert "that brokers run there" not in said


async def test_a_client_with_tls_is_told_that_there_is_none(tmp_path: Path) -> None:
    async with broker(plain=True) as port:
        said = await describe(port, **files(tmp_path))
    assert "it does not speak TLS" in said
    assert "; next: leave tls_ca, tls_certificate and tls_key out" in said


async def test_a_broker_of_another_authority(tmp_path: Path) -> None:
    async with broker() as port:
        said = await describe(port, **files(tmp_path, Authority("stranger")))
    assert "its certificate is not accepted" in said
    assert "; next: check that tls_ca is the authority of this cluster" in said


async def test_a_broker_under_another_name(tmp_path: Path) -> None:
    other = AUTHORITY.issue("broker", ["broker-1.example"])
    shown = grpc.ssl_server_credentials([(other.key, other.certificate)])
    async with broker(shown) as port:
        said = await describe(port, **files(tmp_path))
    assert "the certificate is made out to 127.0.0.1" in said


async def test_a_client_that_must_show_a_certificate_and_has_none(tmp_path: Path) -> None:
    async with broker(asks=True) as port:
        said = await describe(port, tls_ca=files(tmp_path)["tls_ca"])
    assert "as brokers do that ask clients for a certificate (" in said
    assert "; next: set tls_certificate and tls_key" in said


async def test_a_client_whose_certificate_has_expired(tmp_path: Path) -> None:
    now, day = datetime.now(UTC), timedelta(days=1)
    old = files(tmp_path, begins=now - 2 * day, ends=now - day)
    async with broker(asks=True) as port:
        said = await describe(port, **old)
    assert f"does not accept the certificate in {old['tls_certificate']}" in said
    assert "; next: check that the authority of the brokers' tls.ca has signed it" in said
    assert "that it has not expired" in said


async def test_what_several_addresses_need_is_said_once() -> None:
    async with broker() as one, broker() as other:
        said = await describe(one, bootstrap_servers=f"127.0.0.1:{one},127.0.0.1:{other}")
    assert said.count("it speaks TLS") == 2
    assert said.count("set tls_ca") == 1


@pytest.mark.parametrize("client", [AdminClient, Consumer, Producer, AsyncProducer])
def test_every_client_refuses_what_cannot_be_used(tmp_path: Path, client: Any) -> None:
    sound = files(tmp_path)
    strange = files(tmp_path / "strange")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for settings, wanted in (
        ({"tls_certificate": "x"}, "tls_certificate is set and tls_key is not"),
        ({"tls_key": "x", "tls_ca": "y"}, "tls_key is set and tls_certificate is not"),
        ({**sound, "tls_ca": ""}, "tls_certificate is set and tls_ca is not"),
        (
            {"tls_ca": "/no/such.pem"},
            r"tls_ca: cannot read /no/such\.pem: No such file .*; next: name a PEM",
        ),
        ({"tls_ca": 3}, "tls_ca=3: text is wanted"),
        ({"tls_ca": empty}, "holds no authority's certificate that can be read"),
        ({"tls_ca": sound["tls_key"]}, "holds no authority's certificate that can be read"),
        ({**sound, "tls_key": strange["tls_key"]}, r"together \(key values mismatch\)"),
        ({**sound, "tls_key": empty}, "cannot be used together"),
        ({"tls_cert": "x"}, "did you mean 'tls_certificate'"),
    ):
        with pytest.raises(ConfigurationError, match=wanted):
            client("localhost:1", **settings)


def half_written(path: Path) -> None:
    path.write_bytes(b"")


async def test_changed_files_are_used_for_new_channels(tmp_path: Path) -> None:
    settings = files(tmp_path)
    async with broker(asks=True) as port:
        cluster = Cluster(AdminConfig.load(f"localhost:{port}", settings))
        await cluster.start()
        before = cluster.channel(("localhost", port))
        stub: Any = metadata_pb2_grpc.MetadataStub(before)
        assert cluster.channel(("localhost", port)) is before
        half_written(settings["tls_key"])
        assert cluster.channel(("localhost", port)) is before
        files(tmp_path)
        after = cluster.channel(("localhost", port))
        assert after is not before
        # What was under way on the former goes on.
        assert await stub.DescribeCluster(metadata_pb2.DescribeClusterRequest(), timeout=10)
        assert await metadata_pb2_grpc.MetadataStub(after).DescribeCluster(  # type: ignore[misc]
            metadata_pb2.DescribeClusterRequest(), timeout=10
        )
        await cluster.close()
        await asyncio.sleep(0)  # What closing scheduled runs.
