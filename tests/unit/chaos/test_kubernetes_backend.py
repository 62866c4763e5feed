from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.chaos.cluster import (
    CLIENTS,
    OFFERED,
    DiskFault,
    Link,
    LinkFault,
    PacketFault,
)
from penstock.chaos.errors import ClusterError, FaultError, PlanError
from penstock.cli.chaos import kubernetes_backend
from penstock.cli.chaos.kube_pods import KubePods, pods_within
from penstock.cli.chaos.kubernetes_backend import KubernetesBackend
from penstock.cli.kube_api import Access
from tests.unit.chaos.fake_kubernetes import SELECTOR, TOKEN, FakeKubernetes, served

CUT = LinkFault(cut=True)


def both(one: int, other: int) -> dict[Link, LinkFault]:
    return {Link(one, other): CUT, Link(other, one): CUT}


@pytest.fixture
def kubernetes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    # That nodes serve is for tests with real ones.
    brokers = [SimpleNamespace(node_id=node, host="10.0.0.1", port=node) for node in (1, 2, 3)]
    answer = SimpleNamespace(cluster_id="it", brokers=brokers)
    monkeypatch.setattr(kubernetes_backend, "describe_cluster", lambda _node: answer)
    monkeypatch.setattr(kubernetes_backend, "describe_unwhole", lambda _nodes, _cluster_id: "")
    with served(FakeKubernetes()) as found:
        yield found


def backend_for(
    kubernetes: FakeKubernetes, directory: Path, nodes: int = 3, *, cuts: bool = False
) -> KubernetesBackend:
    return KubernetesBackend(
        directory / "cluster",
        nodes,
        KubePods(Access(kubernetes.url, TOKEN)),
        bootstrap="log:9092",
        namespace="shop",
        selector=SELECTOR,
        first_id=1,
        cuts=cuts,
    )


@pytest.fixture
def backend(kubernetes: FakeKubernetes, tmp_path: Path) -> KubernetesBackend:
    made = backend_for(kubernetes, tmp_path)
    made.start()
    return made


def test_pods_are_found_by_their_labels(
    backend: KubernetesBackend, kubernetes: FakeKubernetes
) -> None:
    assert (backend.nodes, backend.running) == ([1, 2, 3], [1, 2, 3])
    assert backend.bootstrap == "log:9092"
    assert backend.capabilities == OFFERED["kubernetes"]
    assert backend.versions == {"kubernetes": "v1.33.0", "image": "penstock:1"}
    assert backend.pid(1) is None
    kubernetes.pods["log-1"]["status"]["phase"] = "Pending"
    assert backend.running == [1, 3]


def test_another_number_of_pods_is_another_cluster(
    kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match=r"nodes \[1, 2, 3\] with app=log .* next: see --nodes"):
        backend_for(kubernetes, tmp_path, nodes=5).start()
    kubernetes.pods["other"] = kubernetes.pods["log-1"] | {"metadata": {"name": "log-abc"}}
    with pytest.raises(ClusterError, match="log-abc is of no StatefulSet"):
        backend_for(kubernetes, tmp_path).start()


def test_kill_has_no_grace_and_term_has(
    backend: KubernetesBackend, kubernetes: FakeKubernetes
) -> None:
    backend.kill(1)
    backend.terminate(3)
    backend.start_node(1)
    assert kubernetes.deletions == [("log-0", 0), ("log-2", 30)]
    uids = [pod["metadata"]["uid"] for pod in kubernetes.pods.values()]
    assert uids == ["log-0/1", "log-1/0", "log-2/2"]
    assert backend.running == [1, 2, 3]
    backend.stop()
    log = backend.log(1)
    assert log is not None
    # That of the pod that was killed, and that of the one that took its place.
    assert log.read_text() == "log-0/0 says\nlog-0/1 says\n"


def test_cuts_are_network_policies_of_both_ends(
    backend: KubernetesBackend, kubernetes: FakeKubernetes
) -> None:
    backend.set_links(both(1, 2) | both(1, 3))
    assert kubernetes.cut_by_policies() == {
        "log-0": (["log-1", "log-2"], ["log-1", "log-2"]),
        "log-1": (["log-0"], ["log-0"]),
        "log-2": (["log-0"], ["log-0"]),
    }
    backend.set_links(both(2, 3))
    assert set(kubernetes.cut_by_policies()) == {"log-1", "log-2"}
    asked = len(kubernetes.requests)
    backend.set_links(both(2, 3))
    assert len(kubernetes.requests) == asked
    backend.heal_all()
    assert kubernetes.policies == {}


def test_others_policies_stay(backend: KubernetesBackend, kubernetes: FakeKubernetes) -> None:
    kubernetes.policies["theirs"] = {"metadata": {"labels": {}}}
    backend.set_links(both(1, 2))
    backend.stop()
    backend.stop()
    assert list(kubernetes.policies) == ["theirs"]


@pytest.mark.parametrize(
    ("selector", "is_in_the_way"),
    [
        ({}, True),
        ({"matchLabels": {"app": "log"}}, True),
        ({"matchLabels": {"app": "shop"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["log"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["log"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_a_policy_that_allows_what_is_to_be_cut_is_in_the_way(
    kubernetes: FakeKubernetes, tmp_path: Path, selector: dict[str, object], *, is_in_the_way: bool
) -> None:
    """Policies add up: a partition beside one that allows all would be none."""
    kubernetes.policies["theirs"] = {
        "metadata": {"name": "theirs", "labels": {}},
        "spec": {"podSelector": selector},
    }
    backend_for(kubernetes, tmp_path).start()
    cutting = backend_for(kubernetes, tmp_path, cuts=True)
    if is_in_the_way:
        with pytest.raises(ClusterError, match=r"what theirs allows .* next: delete that"):
            cutting.start()
    else:
        cutting.start()


@pytest.mark.parametrize(
    "links",
    [
        {Link(1, 2): CUT},
        {Link(1, CLIENTS): CUT, Link(CLIENTS, 1): CUT},
        {Link(1, 2): LinkFault(latency_ms=5), Link(2, 1): LinkFault(latency_ms=5)},
        both(1, 9),
    ],
)
def test_what_policies_cannot_do_is_refused(
    backend: KubernetesBackend, kubernetes: FakeKubernetes, links: dict[Link, LinkFault]
) -> None:
    with pytest.raises(FaultError):
        backend.set_links(links)
    assert kubernetes.policies == {}


def test_what_pods_have_not_is_refused(backend: KubernetesBackend) -> None:
    for refused in (
        lambda: backend.pause(1),
        lambda: backend.set_packets(1, PacketFault(loss=5)),
        lambda: backend.set_disk(1, DiskFault("EIO")),
        lambda: backend.set_clock(1, 5),
        lambda: backend.set_limits(1, memory_bytes=5),
        lambda: backend.data_directory(1),
    ):
        with pytest.raises(FaultError, match="next: "):
            refused()
    backend.resume(1)
    backend.set_packets(1, None)
    backend.set_disk(1, None)
    backend.set_clock(1, 0)
    backend.set_limits(1)


def test_what_the_api_refuses_is_said(
    backend: KubernetesBackend, kubernetes: FakeKubernetes
) -> None:
    kubernetes.forbidden = True
    with pytest.raises(FaultError, match="403: pods is forbidden"):
        backend.kill(1)
    with pytest.raises(ClusterError, match="forbidden"):
        backend.wait_ready(0)


def test_an_api_that_does_not_answer_is_said(tmp_path: Path) -> None:
    with served(FakeKubernetes()) as gone:
        pass
    with pytest.raises(ClusterError, match=r"the API at http://127\.0\.0\.1:\d+ does not answer"):
        backend_for(gone, tmp_path).start()


def test_a_pod_that_is_gone_already_is_no_error(
    backend: KubernetesBackend, kubernetes: FakeKubernetes
) -> None:
    del kubernetes.pods["log-1"]
    backend.kill(2)
    api = KubePods(Access(kubernetes.url, TOKEN))
    api.delete_pod("shop", "log-1", "uid", 0)
    assert api.log("shop", "log-1") == b""


def test_where_no_cluster_is_named_it_says_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(PlanError, match="next: run it in a pod"):
        pods_within(tmp_path)
    for wrong in ("cluster.example", "ftp://cluster.example", "http://"):
        with pytest.raises(PlanError, match="is no address of an API"):
            KubePods(Access(wrong))
