"""`penstock dev --tls`, and what a user meets at it with the right options and with wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cli.dev_cluster import DevCluster

pytestmark = pytest.mark.integration


def test_a_cluster_with_certificates_of_its_own(tmp_path: Path) -> None:
    dev = DevCluster(tmp_path / "data", 27_000)
    try:
        dev.start("--tls")
        options = dev.messages.partition("clients need: ")[2].splitlines()[0].split()
        assert options[::2] == ["--tls-ca", "--tls-cert", "--tls-key"]
        assert Path(options[5]).stat().st_mode & 0o077 == 0
        dev.ok("topics", "create", "orders", *options)
        dev.ok("produce", "orders", *options, stdin=b"one\ntwo\n")
        read = dev.ok("consume", "orders", "--from-beginning", "--timeout", "5", *options)
        assert sorted(read.split()) == ["one", "two"]
        plain = dev.refused("topics", "list")
        assert "it speaks TLS and this client does not" in plain
        assert "next: set --tls-ca, and --tls-cert and --tls-key where brokers ask" in plain
        nameless = dev.refused("topics", "list", *options[:2])
        assert "next: set --tls-cert and --tls-key" in nameless
        wrong = dev.refused("topics", "list", "--tls-ca", options[3], *options[2:])
        assert wrong.startswith("error: ")  # And nothing of gRPC's own.
        dev.stop()
        logs = dev.directory.glob("node-*/node.log")
        assert not any("ssl_transport_security" in log.read_text() for log in logs)
        # Started again it is as it was.
        dev.start()
        read = dev.ok("consume", "orders", "--from-beginning", "--timeout", "5", *options)
        assert sorted(read.split()) == ["one", "two"]
    finally:
        dev.close()


def test_a_cluster_that_was_made_without_tls(tmp_path: Path) -> None:
    dev = DevCluster(tmp_path / "data", 28_000)
    try:
        dev.start()
        authority = tmp_path / "ca.pem"
        said = dev.refused("topics", "list", "--tls-ca", str(authority))
        assert f"error: --tls-ca: cannot read {authority}" in said
        dev.stop()
        said = dev.refused("dev", "--data-dir", str(dev.directory), "--tls")
        assert "holds a cluster without TLS" in said
        assert "next: start it without --tls, or choose another --data-dir" in said
    finally:
        dev.close()
