"""What is wrong with a node's TLS files is said when they are read: what, where, what to do."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from penstock.cli.certificates import Authority, Issued, issue_node, write_files
from penstock.raft_meta.credentials import NodeTls, load_credentials
from penstock.raft_meta.exposure import TlsFiles
from penstock.wire.errors import ConfigurationError

CLUSTER = "kT_b-C"
NAME = f"node-1.{CLUSTER}.penstock"
NOW = datetime.now(UTC)
AUTHORITY = Authority()


def files(directory: Path, issued: Issued | None = None, authority: Authority = AUTHORITY):
    return write_files(directory, "node-1", authority, issued or issue_node(AUTHORITY, 1, CLUSTER))


def refusal(where: TlsFiles) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_credentials(where, name=NAME, now=NOW)
    return caught.value.message


def test_sound_files_are_taken(tmp_path: Path) -> None:
    found = load_credentials(files(tmp_path), name=NAME, now=NOW)
    assert found.ca_pem == AUTHORITY.pem
    assert found.expires > NOW


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for setting in ("ca", "certificate", "key"):
        where = files(tmp_path)
        getattr(where, setting).unlink()
        said = refusal(where)
        assert said.startswith(f"tls.{setting}: cannot read {getattr(where, setting)}: No such")
        assert "; name a PEM file that the node's user may read" in said


def test_a_file_that_the_nodes_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    # The tests may run as root, whom nothing is denied.
    monkeypatch.setattr(Path, "read_bytes", denied)
    where = files(tmp_path)
    said = refusal(where)
    assert said.startswith(f"tls.ca: cannot read {where.ca}: Permission denied; next: have it")
    assert f" {where.ca}`" in said.partition("`chown ")[2]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\nx\n"])
def test_a_file_that_is_no_pem(tmp_path: Path, content: bytes) -> None:
    for setting in ("ca", "certificate"):
        where = files(tmp_path)
        path = getattr(where, setting)
        path.write_bytes(content)
        assert refusal(where).startswith(f"tls.{setting}: {path} holds no certificate")
    where = files(tmp_path)
    where.key.write_bytes(content)
    assert refusal(where).startswith(f"tls.key: {where.key} holds no private key")


def test_the_key_of_another_certificate(tmp_path: Path) -> None:
    where = files(tmp_path)
    where.key.write_bytes(issue_node(AUTHORITY, 1, CLUSTER).key)
    assert "is not the key of the certificate in" in refusal(where)


def test_an_encrypted_key(tmp_path: Path) -> None:
    where = files(tmp_path)
    key = load_pem_private_key(where.key.read_bytes(), None)
    where.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    assert "is encrypted" in refusal(where)
    assert "openssl pkey -in" in refusal(where)


def test_a_certificate_out_of_its_time(tmp_path: Path) -> None:
    day = timedelta(days=1)
    old = AUTHORITY.issue("x", [NAME], begins=NOW - 2 * day, ends=NOW - day)
    assert "has expired at" in refusal(files(tmp_path, old))
    early = AUTHORITY.issue("x", [NAME], begins=NOW + day, ends=NOW + 2 * day)
    assert "is not valid before" in refusal(files(tmp_path, early))


def test_a_certificate_of_another_authority(tmp_path: Path) -> None:
    stranger = Authority("stranger")
    said = refusal(files(tmp_path, issue_node(stranger, 1, CLUSTER)))
    assert "no authority in tls.ca" in said
    assert "CN=stranger" in said
    # One that only bears the authority's name has not signed it either.
    namesake = Authority()
    assert "no authority in tls.ca" in refusal(files(tmp_path, issue_node(namesake, 1, CLUSTER)))


def test_one_of_several_authorities_is_enough(tmp_path: Path) -> None:
    where = files(tmp_path)
    where.ca.write_bytes(Authority("next").pem + AUTHORITY.pem)
    assert load_credentials(where, name=NAME, now=NOW)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["localhost"],
        [f"node-2.{CLUSTER}.penstock"],
        ["node-1.other.penstock"],
        [f"node-1.{CLUSTER.lower()}.penstock"],
        [f"*.{CLUSTER}.penstock"],
    ],
)
def test_a_certificate_of_another_name(tmp_path: Path, names: list[str]) -> None:
    said = refusal(files(tmp_path, AUTHORITY.issue("node-1", names)))
    assert f"and not to this node, which is {NAME}" in said
    assert f"subjectAltName=DNS:{NAME}" in said


@pytest.mark.parametrize("one", [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
def test_a_certificate_for_one_side_only(tmp_path: Path, one: object) -> None:
    issued = AUTHORITY.issue("node-1", [NAME], usage=[one])  # type: ignore[list-item]
    assert "extendedKeyUsage=serverAuth,clientAuth" in refusal(files(tmp_path, issued))


def node_tls(where: TlsFiles) -> NodeTls:
    return NodeTls(where, cluster_id=CLUSTER, node_id=1)


def replace(where: TlsFiles, issued: Issued) -> None:
    """Swing a new pair in, as renewal tools do."""
    for path, content in ((where.certificate, issued.certificate), (where.key, issued.key)):
        fresh = path.with_suffix(".new")
        fresh.write_bytes(content)
        fresh.rename(path)


def test_changed_files_are_in_force_at_once(tmp_path: Path) -> None:
    where = files(tmp_path)
    tls = node_tls(where)
    before, channel = tls.current(), tls.channel_credentials()
    assert tls.channel_credentials() is channel
    renewed = issue_node(AUTHORITY, 1, CLUSTER)
    replace(where, renewed)
    assert tls.current().certificate_pem == renewed.certificate != before.certificate_pem
    assert tls.channel_credentials() is not channel


def test_changed_files_that_are_unusable_leave_the_old_in_force(tmp_path: Path) -> None:
    where = files(tmp_path)
    tls = node_tls(where)
    before, channel = tls.current(), tls.channel_credentials()
    renewed = issue_node(AUTHORITY, 1, CLUSTER)
    where.certificate.write_bytes(renewed.certificate)  # Its key is not there yet.
    assert tls.current() is before
    assert tls.channel_credentials() is channel
    where.certificate.unlink()
    assert tls.current() is before
    replace(where, renewed)
    assert tls.current().certificate_pem == renewed.certificate


def with_malformed_names() -> Issued:
    """Signed by the authority, with alternative names that end in the middle of one."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.UnrecognizedExtension(
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x05\x82\x09abc"
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node-1")]))
        .issuer_name(x509.load_pem_x509_certificate(AUTHORITY.pem).subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=30))
        .add_extension(names, critical=False)
        .sign(AUTHORITY._key, hashes.SHA256())
    )
    return Issued(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def test_a_malformed_certificate_is_refused_and_leaves_the_old_in_force(tmp_path: Path) -> None:
    malformed = with_malformed_names()
    where = files(tmp_path, malformed)
    assert f"a certificate in {where.certificate} or {where.ca} is malformed" in refusal(where)
    where = files(tmp_path)
    tls = node_tls(where)
    before = tls.current()
    replace(where, malformed)
    assert tls.current() is before


def test_touched_files_change_nothing(tmp_path: Path) -> None:
    where = files(tmp_path)
    tls = node_tls(where)
    before = tls.current()
    os.utime(where.certificate, ns=(1, 1))
    assert tls.current() is before


@pytest.mark.parametrize("cluster_id", ["", "a.b", "two words", "x" * 64, "gr\u00f6\u00dfe", "a:1"])
def test_a_cluster_id_that_is_no_part_of_a_name(tmp_path: Path, cluster_id: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be a part of a node's name"):
        NodeTls(files(tmp_path), cluster_id=cluster_id, node_id=1)
