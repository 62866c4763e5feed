from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.datadir import (
    META_FILE,
    DirectoryMeta,
    format_directory,
    open_directories,
    read_meta,
    use_up_founding,
)
from penstock.cli.adopt import PLACEHOLDER, Adopted, adopt_disks
from penstock.cli.app import app
from penstock.cli.kube_api import Access, KubeApi
from penstock.cli.node_records import (
    ConfigMapRecords,
    DirectoryRecords,
    Records,
    open_records,
)
from penstock.wire.errors import (
    ConfigurationError,
    DataDirectoryError,
    InconsistentClusterIdError,
    NetworkError,
)
from tests.unit.chaos.fake_kubernetes import TOKEN, FakeKubernetes, RefusedError, served

CLUSTER = "the-cluster"
CONFIGMAPS = "/api/v1/namespaces/shop/configmaps"


class FakeConfigMaps(FakeKubernetes):
    """As a real API server: what is not there is not updated, what is there is not made."""

    def __init__(self) -> None:
        super().__init__()
        self.configmaps: dict[str, dict[str, Any]] = {}

    def answer(self, method: str, target: str, body: Any, token: str) -> Any:
        if not target.startswith(CONFIGMAPS):
            return super().answer(method, target, body, token)
        if token != f"Bearer {TOKEN}" or self.forbidden:
            raise RefusedError(403, "configmaps is forbidden: User cannot do that")
        name = target.removeprefix(CONFIGMAPS).removeprefix("/")
        if body is not None:
            self._require((body["kind"], body["apiVersion"]) == ("ConfigMap", "v1"), "ConfigMap")
            self._require(all(isinstance(text, str) for text in body["data"].values()), "data")
            self._require(method == "POST" or body["metadata"]["name"] == name, "name")
        if method in ("GET", "PUT") and name not in self.configmaps:
            raise RefusedError(404, f'configmaps "{name}" not found')
        if method == "GET":
            return self.configmaps[name]
        name = body["metadata"]["name"]
        if method == "POST" and name in self.configmaps:
            raise RefusedError(409, f'configmaps "{name}" already exists')
        self.configmaps[name] = body
        return body


@pytest.fixture
def kubernetes() -> Iterator[FakeConfigMaps]:
    fake = FakeConfigMaps()
    with served(fake):
        yield fake


@pytest.fixture(params=["directory", "configmaps"])
def records(request: pytest.FixtureRequest, tmp_path: Path, kubernetes: FakeConfigMaps) -> Records:
    if request.param == "directory":
        (tmp_path / "records").mkdir()
        return DirectoryRecords(tmp_path / "records")
    return ConfigMapRecords(KubeApi(Access(kubernetes.url, TOKEN)), "shop", "log")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def adopted(disk: Path, records: Records, node: int = 0, cluster: str = CLUSTER) -> Adopted:
    return adopt_disks([disk], node, cluster, founder=node == 0, records=records)


def lose(disk: Path) -> None:
    """What a new volume in its place looks like."""
    shutil.rmtree(disk)
    (disk / "lost+found").mkdir(parents=True)


def test_a_new_node_has_its_empty_disk_formatted(disk: Path, records: Records) -> None:
    assert adopted(disk, records, node=1) == Adopted((disk,), may_found=False)
    assert read_meta(disk) == DirectoryMeta(CLUSTER, 1)


def test_no_cluster_is_founded_by_the_id_that_stands_in_for_one(
    disk: Path, records: Records
) -> None:
    root = Path(__file__).resolve().parents[3]
    for variant in ("production", "production-dedicated"):
        text = (root / f"deploy/kubernetes/overlays/{variant}/cluster-id.yaml").read_text()
        assert f"cluster-id: {PLACEHOLDER}\n" in text
    with pytest.raises(ConfigurationError, match="openssl rand"):
        adopt_disks([disk], 0, PLACEHOLDER, founder=True, records=records)
    assert not (disk / META_FILE).exists()
    assert records.read("node-0") is None


def test_the_founder_may_found_on_its_first_day_alone(disk: Path, records: Records) -> None:
    assert adopted(disk, records) == Adopted((disk,), may_found=True)
    assert read_meta(disk).may_found
    use_up_founding(disk)
    assert adopted(disk, records) == Adopted()
    assert not read_meta(disk).may_found


def test_a_founder_that_was_not_started_yet_may_found_still(disk: Path, records: Records) -> None:
    adopted(disk, records)
    adopted(disk, records)
    assert read_meta(disk).may_found


def test_a_node_that_comes_back_finds_its_disk(disk: Path, records: Records) -> None:
    adopted(disk, records, node=2)
    (disk / "logs" / "orders-0").mkdir(parents=True)
    (disk / "logs" / "orders-0" / "0.log").write_bytes(b"records")
    assert adopted(disk, records, node=2) == Adopted()
    assert (disk / "logs" / "orders-0" / "0.log").read_bytes() == b"records"


@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_disk_is_not_replaced_by_an_empty_one(
    disk: Path, records: Records, node: int
) -> None:
    adopted(disk, records, node=node)
    lose(disk)
    with pytest.raises(DataDirectoryError, match=r"had a disk there.*Nothing was formatted; next:"):
        adopted(disk, records, node=node)
    assert not (disk / "meta.json").exists()


def test_a_directory_that_is_not_there_is_a_lost_disk_too(disk: Path, records: Records) -> None:
    adopted(disk, records, node=1)
    shutil.rmtree(disk)
    with pytest.raises(DataDirectoryError, match="not mounted, or lost"):
        adopted(disk, records, node=1)


def test_a_founder_that_is_permitted_an_empty_disk_founds_no_second_cluster(
    disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "records").mkdir()
    records = DirectoryRecords(tmp_path / "records")
    adopted(disk, records)
    lose(disk)
    with pytest.raises(DataDirectoryError) as refused:
        adopted(disk, records)
    # What it says is what helps.
    command = records.how_to_forget("node-0")
    assert command in refused.value.message
    Path(command.removeprefix("rm ")).unlink()
    assert adopted(disk, records) == Adopted((disk,), may_found=False)
    assert not read_meta(disk).may_found


def test_the_record_says_how_it_is_removed_from_kubernetes(kubernetes: FakeConfigMaps) -> None:
    records = ConfigMapRecords(KubeApi(Access(kubernetes.url, TOKEN)), "shop", "log")
    wanted = "kubectl -n shop delete configmap log-node-2"
    assert records.how_to_forget("node-2") == wanted
    records.write("node-2", {"cluster_id": CLUSTER, "directories": []})
    assert set(kubernetes.configmaps) == {"log-node-2"}


def test_a_disk_of_another_node_or_cluster_is_refused(disk: Path, records: Records) -> None:
    adopted(disk, records, node=1)
    with pytest.raises(DataDirectoryError, match="belongs to node 1, not to node 2"):
        adopted(disk, records, node=2)
    other = disk.with_name("other")
    format_directory(other, "another-cluster", 1)
    with pytest.raises(InconsistentClusterIdError, match="mount the right disk"):
        adopted(other, records, node=1)


def test_files_of_nobody_knows_whom_are_not_taken(disk: Path, records: Records) -> None:
    disk.mkdir()
    (disk / "orders-0.log").touch()
    for _ in range(2):
        with pytest.raises(DataDirectoryError, match="it is not known whose data this is"):
            adopted(disk, records, node=1)
    assert records.read("node-1") is None


def test_another_cluster_under_the_same_names_is_refused(disk: Path, records: Records) -> None:
    adopted(disk, records, node=1)
    with pytest.raises(InconsistentClusterIdError, match="those of cluster the-cluster, not of"):
        adopted(disk.with_name("new"), records, node=1, cluster="another")
    adopted(disk.with_name("zero"), records)
    with pytest.raises(InconsistentClusterIdError):
        adopted(disk.with_name("third"), records, node=0, cluster="another")


def test_a_disk_that_was_formatted_by_hand_is_known_from_then_on(
    disk: Path, records: Records
) -> None:
    format_directory(disk, CLUSTER, 0)
    assert adopted(disk, records) == Adopted()
    lose(disk)
    with pytest.raises(DataDirectoryError):
        adopted(disk, records)


def test_a_second_disk_may_be_added_and_not_lost(disk: Path, records: Records) -> None:
    more = disk.with_name("more")

    def both() -> Adopted:
        return adopt_disks([disk, more], 0, CLUSTER, founder=True, records=records)

    adopted(disk, records)
    assert both() == Adopted((more,), may_found=False)
    assert open_directories(disk, 0, [more]).cluster_id == CLUSTER
    lose(more)
    with pytest.raises(DataDirectoryError, match="more is empty"):
        both()


class Crashing:
    """Records of a process that ends where something is to be written for the n-th time."""

    def __init__(self, records: Records, writes: int) -> None:
        self._records = records
        self._left = writes

    def read(self, name: str) -> Any:
        return self._records.read(name)

    def write(self, name: str, record: Any) -> None:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        self._records.write(name, record)

    def how_to_forget(self, name: str) -> str:
        return self._records.how_to_forget(name)


@pytest.mark.parametrize("writes", [0, 1])
def test_a_crash_at_any_point_is_gone_on_from(disk: Path, records: Records, writes: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        adopted(disk, Crashing(records, writes))
    assert adopted(disk, records) == Adopted()
    assert read_meta(disk).may_found
    assert records.read("cluster") is not None
    lose(disk)
    with pytest.raises(DataDirectoryError):
        adopted(disk, records)


def test_records_that_are_not_mounted_are_not_taken_for_new_ones(
    disk: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="is not there, where it is kept"):
        adopted(disk, DirectoryRecords(tmp_path / "none"))
    assert not disk.exists()


def test_a_damaged_record_is_refused(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "node-0.json").write_text("{")
    with pytest.raises(ConfigurationError, match="restore it"):
        adopted(disk, DirectoryRecords(tmp_path))
    assert not disk.exists()


def test_an_account_without_rights_formats_nothing(disk: Path, kubernetes: FakeConfigMaps) -> None:
    kubernetes.forbidden = True
    records = ConfigMapRecords(KubeApi(Access(kubernetes.url, TOKEN)), "shop", "log")
    with pytest.raises(NetworkError, match=r"403: configmaps is forbidden.*next: see that the pod"):
        adopted(disk, records)
    assert not disk.exists()


def test_outside_of_kubernetes_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no account of Kubernetes in .*; next: run this"):
        open_records("kubernetes", "log", tmp_path)
    with pytest.raises(ConfigurationError, match="none for Kubernetes"):
        open_records("kubernetes", "Log/1", tmp_path)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, disk: Path, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    for key, text in {
        "NODE_ID": "7",
        "DATA_DIR": str(disk),
        "LOG_DIRS": f"{disk / 'logs'},{tmp_path / 'second'}",
        "CONTROLLER_QUORUM_VOTERS": "7@127.0.0.1:1,8@127.0.0.1:2",
        "CLUSTER_ID": CLUSTER,
    }.items():
        monkeypatch.setenv(f"PENSTOCK_{key}", text)


@pytest.mark.usefixtures("environment")
def test_the_command_takes_the_node_from_its_settings(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["adopt", "--records", str(tmp_path / "records")]
    with pytest.raises(SystemExit) as ended:
        app([*line, "--output", "json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == {
        "cluster_id": CLUSTER,
        "node_id": 7,
        "formatted": [str(disk), str(tmp_path / "second")],
        "may_found": True,
    }
    # Within data.dir the node gives directories their identity itself.
    assert not (disk / "logs").exists()
    with pytest.raises(SystemExit):
        app(line)
    assert "the disk of node 7 of cluster the-cluster is there" in capsys.readouterr().out
    lose(disk)
    with pytest.raises(SystemExit) as ended:
        app(line)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "next: bring the disk back" in said


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("key", "text"), [("NODE_ID", "8"), ("NODE_ROLES", "broker")])
def test_only_the_first_controller_founds(
    monkeypatch: pytest.MonkeyPatch, disk: Path, tmp_path: Path, key: str, text: str
) -> None:
    monkeypatch.setenv(f"PENSTOCK_{key}", text)
    with pytest.raises(SystemExit):
        app(["adopt", "--records", str(tmp_path / "records")])
    assert not read_meta(disk).may_found
