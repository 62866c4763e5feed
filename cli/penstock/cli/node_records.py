"""What is remembered of nodes outside of their disks: which had one, and that a cluster is founded.

In a directory of its own, or in ConfigMaps of the Kubernetes cluster in which this process runs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.cli.kube_api import ACCOUNT, KubeApi, address_within
from penstock.wire.errors import ConfigurationError, NetworkError

KUBERNETES: Final = "kubernetes"
_KEY: Final = "record"
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?")

Record = Mapping[str, Any]


class Records(Protocol):
    """Small records by name. Each of them is written by one process at a time."""

    def read(self, name: str) -> Record | None:
        """What was written last; None where nothing was. Raises PenstockError."""
        ...

    def write(self, name: str, record: Record) -> None:
        """Keep it, durably, in place of what was there. Raises PenstockError."""
        ...

    def how_to_forget(self, name: str) -> str:
        """The command that removes it, for people."""
        ...


class DirectoryRecords:
    """Files of a directory that is on none of the nodes' disks."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory

    def read(self, name: str) -> Record | None:
        """What stands in its file."""
        try:
            found = json.loads(self._file(name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self._directory.is_dir():
                return None
            raise ConfigurationError(
                f"{self._directory} is not there, where it is kept which nodes had a disk; next: "
                "mount it, or make it before the cluster's first day"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"cannot read {self._file(name)}: {error}; next: restore it, it says which disks "
                "the node had"
            ) from None
        return dict(found)

    def write(self, name: str, record: Record) -> None:
        """Put it into its file, all of it or nothing."""
        temporary = self._file(name).with_suffix(".tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._file(name))
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise ConfigurationError(
                f"cannot write {self._file(name)}: {error.strerror}; next: give the node's user "
                "the right to write there"
            ) from None

    def how_to_forget(self, name: str) -> str:
        """For a shell."""
        return f"rm {self._file(name)}"

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"


class ConfigMapRecords:
    """ConfigMaps, named PREFIX-NAME. The account needs get, create and update of configmaps."""

    def __init__(self, api: KubeApi, namespace: str, prefix: str) -> None:
        self._api: Final = api
        self._namespace: Final = namespace
        self._prefix: Final = prefix
        self._path: Final = f"/api/v1/namespaces/{namespace}/configmaps"

    def read(self, name: str) -> Record | None:
        """What stands in its ConfigMap."""
        found = self._call("GET", f"{self._path}/{self._prefix}-{name}")
        if found is None:
            return None
        try:
            return dict(json.loads(found["data"][_KEY]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the ConfigMap {self._namespace}/{self._prefix}-{name} is damaged: {error!r}; "
                "next: restore it, it says which disks the node had"
            ) from None

    def write(self, name: str, record: Record) -> None:
        """Put it into its ConfigMap, which is made where there is none."""
        full = f"{self._prefix}-{name}"
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": full,
                "labels": {
                    "app.kubernetes.io/name": "penstock",
                    "app.kubernetes.io/instance": self._prefix,
                    "app.kubernetes.io/component": "record",
                },
            },
            "data": {_KEY: json.dumps(record)},
        }
        # Updated first: what is not there is told by 404, and made.
        if self._call("PUT", f"{self._path}/{full}", body) is None:
            self._call("POST", self._path, body)

    def how_to_forget(self, name: str) -> str:
        """For a shell."""
        return f"kubectl -n {self._namespace} delete configmap {self._prefix}-{name}"

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        try:
            return self._api.call(method, path, body)
        except NetworkError as error:
            raise NetworkError(
                f"{error.message}; next: see that the pod's account may get, create and update "
                "configmaps, and that a network policy lets the pod reach the API"
            ) from None


def open_records(where: str, prefix: str, account: Path = ACCOUNT) -> Records:
    """Those that ``where`` names: ``kubernetes``, or a directory. Raises ConfigurationError."""
    if not _NAME.fullmatch(prefix):
        raise ConfigurationError(
            f"the records' name {prefix!r} is none for Kubernetes; next: lower-case letters, "
            "digits and - make one"
        )
    if where != KUBERNETES:
        return DirectoryRecords(Path(where))
    try:
        api = KubeApi(address_within(account))
        namespace = (account / "namespace").read_text(encoding="utf-8").strip()
    except (ConfigurationError, OSError):
        raise ConfigurationError(
            f"there is no account of Kubernetes in {account}; next: run this in a pod whose "
            "service account is mounted there, or name a directory with --records"
        ) from None
    return ConfigMapRecords(api, namespace, prefix)
