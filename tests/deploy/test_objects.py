from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.wire.transport import parse_address
from tests.deploy.objects import (
    CHART,
    KUBERNETES,
    ROOT,
    Object,
    built,
    compared,
    containers,
    environment,
    kustomize,
    of_kind,
    only,
    pod_specs,
    render,
    rendered,
    require_kustomize,
)

# The oldest that the chart takes, the first that tells pods their zone, the newest.
VERSIONS = ("1.32", "1.35", "1.37")
# Other projects' kinds, whose schemas Kubernetes does not have.
OTHERS = {
    "Certificate": "cert-manager.io/v1",
    "Issuer": "cert-manager.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_one_that_kubernetes_knows(objects: list[Object], version: str) -> None:
    checked = 0
    for one in objects:
        if one["kind"] in OTHERS:
            assert one["apiVersion"] == OTHERS[one["kind"]]
            continue
        kubernetes_validate.validate(one, version, strict=True)
        checked += 1
    assert checked >= 11


def test_the_oldest_version_is_that_of_the_chart_and_the_page() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    page = (ROOT / "docs" / "operating" / "kubernetes.md").read_text()
    assert f"Kubernetes {VERSIONS[0]} or later" in page
    assert "the\nschemas of Kubernetes 1.32, 1.35 and 1.37" in page


def test_the_schema_notices_a_field_that_is_none(variant: str) -> None:
    stateful = only(rendered(variant), "StatefulSet")
    wrong = json.loads(json.dumps(stateful))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_chart_makes_the_same_objects(variant: str) -> None:
    ours, charts = compared(built(f"overlays/{variant}")), compared(rendered(variant))
    assert set(ours) == set(charts)
    for key, one in ours.items():
        assert charts[key] == one, key


def test_an_image_that_hosts_have_is_taken_as_it_is(objects: list[Object]) -> None:
    """Without a policy Kubernetes pulls `latest` each time, and `make image` pushes it nowhere."""
    for _, spec in pod_specs(objects):
        for container in containers(spec):
            assert container["imagePullPolicy"] == "IfNotPresent"


def test_each_component_is_part_of_what_is_tested() -> None:
    names = {path.name for path in (KUBERNETES / "components").iterdir()}
    used: set[str] = set()
    for path in (KUBERNETES / "overlays").glob("*/kustomization.yaml"):
        used |= {Path(name).name for name in yaml.safe_load(path.read_text())["components"]}
    # The one that is left has a test of its own, below.
    assert names - used == {"external"}


def copied(variant: str, tmp_path: Path) -> Path:
    """A copy of an overlay, as its user makes one, beside all that it refers to."""
    require_kustomize()
    overlay = tmp_path / "overlays" / "outside"
    for name in ("base", "components", "overlays"):
        source = KUBERNETES / name
        for path in source.rglob("*"):
            if path.is_file():
                copy = tmp_path / name / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    (tmp_path / "overlays" / variant).rename(overlay)
    return overlay


def edit(overlay: Path, old: str, new: str) -> None:
    file = overlay / "kustomization.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def with_outside(tmp_path: Path, variant: str = "production") -> list[Object]:
    """A production overlay with addresses from outside: its commented line, for all to see."""
    overlay = copied(variant, tmp_path)
    edit(overlay, "  # - ../../components/external\n", "  - ../../components/external\n")
    return list(yaml.safe_load_all(kustomize(overlay)))


@pytest.mark.parametrize("variant", ["production", "production-dedicated"])
def test_each_certificate_has_the_name_outside_at_the_place_that_overlays_name(
    variant: str, tmp_path: Path
) -> None:
    objects = with_outside(tmp_path, variant)
    for node in range(3):
        names = only(objects, "Certificate", f"penstock-{node}")["spec"]["dnsNames"]
        assert f"penstock-{node}.logs.example.com" in names


@pytest.mark.parametrize(
    ("variant", "before"),
    [("production", "tls"), ("production-dedicated", "tls"), ("dev", "soft-anti-affinity")],
)
def test_addresses_from_outside_are_refused_where_there_are_no_certificates(
    variant: str, before: str, tmp_path: Path
) -> None:
    overlay = copied(variant, tmp_path)
    line = f"  - ../../components/{before}\n"
    edit(overlay, line, f"  - ../../components/external\n{line}")
    with pytest.raises(AssertionError, match="no matches for Id Certificate"):
        kustomize(overlay)


def test_addresses_from_outside_are_the_same_by_both_tools(tmp_path: Path) -> None:
    values = yaml.safe_load((CHART.parent / "values-production.yaml").read_text())
    charts = render({**values, "external": {"domain": "logs.example.com"}})
    ours, theirs = compared(with_outside(tmp_path)), compared(charts)
    assert set(ours) == set(theirs)
    for key, one in ours.items():
        assert theirs[key] == one, key
    for version in VERSIONS:
        for service in of_kind(charts, "Service"):
            kubernetes_validate.validate(service, version, strict=True)
    for node in range(3):
        names = only(charts, "Certificate", f"penstock-{node}")["spec"]["dnsNames"]
        assert f"penstock-{node}.logs.example.com" in names
        assert f"penstock-{node}.penstock-nodes.penstock.svc" in names
        service = only(charts, "Service", f"penstock-{node}-outside")
        pod = service["spec"]["selector"]["statefulset.kubernetes.io/pod-name"]
        assert pod == f"penstock-{node}"


def outside(tool: str, tmp_path: Path) -> list[Object]:
    if tool == "kustomize":
        return with_outside(tmp_path)
    values = yaml.safe_load((CHART.parent / "values-production.yaml").read_text())
    return render({**values, "external": {"domain": "logs.example.com"}})


@pytest.mark.parametrize("tool", ["kustomize", "helm"])
def test_clients_outside_are_told_of_what_leads_to_the_port_for_them(
    tool: str, tmp_path: Path
) -> None:
    """The name in the load balancer's Service, its port, the pod's port and the node's settings."""
    from penstock.broker.config import NodeConfig

    objects = outside(tool, tmp_path)
    settings = next(
        one
        for one in of_kind(objects, "ConfigMap")
        if one["metadata"]["name"].startswith("penstock-settings")
    )
    file = tmp_path / "node.toml"
    file.write_text(settings["data"]["node.toml"])
    spec = only(objects, "StatefulSet")["spec"]["template"]["spec"]
    for node in range(3):
        for container in containers(spec):
            config = NodeConfig.load(file, played(container, node))
            assert config.advertised == (f"penstock-{node}.penstock-nodes.shop.svc", 9092)
        service = only(objects, "Service", f"penstock-{node}-outside")
        notes = service["metadata"]["annotations"]
        (port,) = service["spec"]["ports"]
        name = notes["external-dns.alpha.kubernetes.io/hostname"]
        assert (
            config.external == (name, port["port"]) == (f"penstock-{node}.logs.example.com", 9092)
        )
        listens = {one["name"]: one["containerPort"] for one in spec["containers"][0]["ports"]}
        assert listens[port["targetPort"]] == parse_address(config.external_listen)[1]
        assert parse_address(config.external_listen)[0] == "0.0.0.0"
        assert len(set(listens.values())) == len(listens) == 5


def test_controllers_of_their_own_serve_nobody_outside() -> None:
    controllers = {"dedicated": True}
    found = render({**VALUES, "controllers": controllers, "external": {"domain": "example.com"}})
    served = {
        one["metadata"]["name"]: "PENSTOCK_EXTERNAL_LISTEN" in environment(container)
        and "external" in {port["name"] for port in container["ports"]}
        for one in of_kind(found, "StatefulSet")
        for container in one["spec"]["template"]["spec"]["containers"]
    }
    assert served == {"penstock": True, "penstock-controller": False}


@pytest.mark.parametrize("tool", ["kustomize", "helm"])
def test_the_network_lets_those_outside_reach_the_port_for_them_alone(
    tool: str, tmp_path: Path
) -> None:
    (policy,) = of_kind(outside(tool, tmp_path), "NetworkPolicy")
    everybody = [rule["ports"] for rule in policy["spec"]["ingress"] if not rule.get("from")]
    assert everybody == [[{"port": "external"}]]
    some = [rule["ports"] for rule in policy["spec"]["ingress"] if rule.get("from")]
    assert {"port": "external"} not in [port for ports in some for port in ports]


VALUES: dict[str, Any] = {"clusterId": "abc123"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "clusterId"),
        ({"clusterId": "not_in_dns"}, "clusterId"),
        ({**VALUES, "replicas": 2}, "replicas"),
        ({**VALUES, "replica": 3}, "replica"),
        ({**VALUES, "antiAffinity": "none"}, "antiAffinity"),
        ({**VALUES, "controllers": {"dedicated": True, "replicas": 4}}, "replicas"),
        ({**VALUES, "resources": {"limits": {"memory": None}}}, "memory"),
        ({**VALUES, "topics": ["orders; rm -rf /"]}, "topics"),
        ({**VALUES, "terminationGracePeriodSeconds": 119}, "terminationGracePeriodSeconds"),
        (
            {**VALUES, "settings": {"controlled.shutdown.timeout.ms": 60000}},
            "terminationGracePeriodSeconds 120 is too short.*next: 170",
        ),
        (
            {**VALUES, "external": {"domain": "example.com"}, "tls": {"enabled": False}},
            "external.domain .* without TLS",
        ),
        ({**VALUES, "settings": {"node.rack": "a"}}, "node.rack"),
        ({**VALUES, "settings": {"log.min.free.bytes": 0.5}}, "log.min.free.bytes"),
    ],
)
def test_the_chart_refuses_values_that_cannot_be(values: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        render(values)


@pytest.mark.parametrize("name", ["a" * 43, "shop.logs"])
def test_the_chart_refuses_names_of_releases_that_records_cannot_have(name: str) -> None:
    with pytest.raises(AssertionError, match=r"the release's name .* 42 characters"):
        render(VALUES, name=name)


def test_the_longest_name_of_a_release_makes_records(tmp_path: Path) -> None:
    from penstock.cli.node_records import open_records

    found = render({**VALUES, "controllers": {"dedicated": True}}, name="a" * 42)
    for one in of_kind(found, "StatefulSet"):
        (adopt,) = one["spec"]["template"]["spec"]["initContainers"]
        (given,) = [text for text in adopt["args"] if text.startswith("--name=")]
        open_records(str(tmp_path), given.removeprefix("--name="))


def test_the_chart_lets_brokers_grow_where_they_are_no_controllers() -> None:
    found = render({**VALUES, "replicas": 4, "controllers": {"dedicated": True}})
    assert only(found, "StatefulSet")["spec"]["replicas"] == 4
    assert len(of_kind(found, "Certificate")) == 2 + 4 + 3


def test_names_follow_the_release() -> None:
    found = render(VALUES, name="billing")
    names = {one["metadata"]["name"] for one in found}
    assert all(name.startswith("billing") for name in names), names
    assert "penstock-" not in re.sub(r"penstock-(tls|client)", "", json.dumps(found))


def test_settings_are_toml_that_a_node_takes(tmp_path: Path) -> None:
    from penstock.broker.config import NodeConfig

    settings = {"log.min.free.bytes": 1073741824, "flush.policy": "os", "log.preallocate": True}
    found = render({**VALUES, "settings": settings})
    file = tmp_path / "node.toml"
    file.write_text(only(found, "ConfigMap", "penstock-settings")["data"]["node.toml"])
    container = only(found, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    config = NodeConfig.load(file, played(container, 2))
    assert (config.log_min_free_bytes, config.flush_policy) == (1073741824, "os")
    assert config.log_preallocate


def test_a_setting_of_the_chart_can_be_another(tmp_path: Path) -> None:
    from penstock.broker.config import NodeConfig

    settings = {"log.format": "console", "metrics.listen": "[::]:9094"}
    found = render({**VALUES, "settings": settings})
    file = tmp_path / "node.toml"
    file.write_text(only(found, "ConfigMap", "penstock-settings")["data"]["node.toml"])
    container = only(found, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    config = NodeConfig.load(file, played(container, 0))
    assert (config.log_format, config.metrics_listen) == ("console", "[::]:9094")
    assert config.data_dir == "/var/lib/penstock/data"


def test_what_the_environment_sets_is_no_setting() -> None:
    """It would win over the file, and nobody would be told."""
    from penstock.broker.config import describe_keys

    external = {"external": {"domain": "example.com"}}
    found = [render({**VALUES, **external}), rendered("dev")]
    variables = {
        one["name"]
        for objects in found
        for container in only(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"]
        for one in container["env"]
    }
    keys = [key for key, _, _ in describe_keys()]
    owned = [key for key in keys if f"PENSTOCK_{key.replace('.', '_').upper()}" in variables]
    assert len(owned) >= 10
    for key in owned:
        with pytest.raises(AssertionError, match=f"settings must not have {re.escape(key)}"):
            render({**VALUES, "settings": {key: "1"}})


def played(container: Object, ordinal: int, name: str = "penstock") -> dict[str, str]:
    """The environment that a pod's container gets."""
    given = {
        "metadata.name": f"{name}-{ordinal}",
        "metadata.namespace": "shop",
        "metadata.labels['apps.kubernetes.io/pod-index']": str(ordinal),
        "metadata.labels['topology.kubernetes.io/zone']": "zone-b",
    }
    found: dict[str, str] = {}
    for one in container["env"]:
        if "value" in one:
            text = one["value"]
        elif "fieldRef" in one["valueFrom"]:
            text = given[one["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            assert one["valueFrom"]["secretKeyRef"] == {
                "name": "penstock-cluster",
                "key": "cluster-id",
            }
            text = "the-cluster"
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], text)
    return found


def test_a_nodes_settings_are_whole(objects: list[Object], tmp_path: Path) -> None:
    from penstock.broker.config import NodeConfig

    settings = next(
        one
        for one in of_kind(objects, "ConfigMap")
        if one["metadata"]["name"].startswith("penstock-settings")
    )
    file = tmp_path / "node.toml"
    file.write_text(settings["data"]["node.toml"])
    voters: set[str] = set()
    nodes: dict[int, frozenset[str]] = {}
    addresses: dict[int, tuple[str, int] | None] = {}
    for stateful in of_kind(objects, "StatefulSet"):
        name, spec = stateful["metadata"]["name"], stateful["spec"]
        first = spec.get("ordinals", {}).get("start", 0)
        for ordinal in range(first, first + spec["replicas"]):
            for container in containers(spec["template"]["spec"]):
                config = NodeConfig.load(file, played(container, ordinal, name))
                assert config.node_id == ordinal
                assert config.node_rack == "zone-b"
                assert config.log_format == "json"
                voters.add(config.controller_quorum_voters)
                nodes[ordinal] = config.roles
                addresses[ordinal] = config.controller_address
                where = f"{name}-{ordinal}.penstock-nodes.shop.svc"
                assert config.advertised == (where, 9092)
    (wanted,) = voters
    quorum = {
        int(node): (host, int(port))
        for node, host, port in (re.split("[@:]", one) for one in wanted.split(","))
    }
    controllers = {node for node, roles in nodes.items() if "controller" in roles}
    assert set(quorum) == controllers
    assert quorum == {node: addresses[node] for node in controllers}
    assert len(quorum) % 2 == 1


def test_rules_are_those_of_the_monitoring() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "rules.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_rules_of_several_files_are_put_together(tmp_path: Path) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("rules", ROOT / "deploy" / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    (tmp_path / "b.yml").write_text("groups: [{name: b, rules: []}]\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.yaml").write_text("groups: [{name: a, rules: []}]\n")
    (tmp_path / "a" / "test.yaml").write_text("rule_files: [a.yaml]\ntests: []\n")
    assert [one["name"] for one in rules.groups_in(tmp_path)] == ["a", "b"]
    assert rules.groups_in(tmp_path / "none") == []


def test_pods_find_what_they_mount(objects: list[Object]) -> None:
    made = {(one["kind"], one["metadata"]["name"]) for one in objects}
    # What others make: cert-manager, Kubernetes itself.
    made |= {("Secret", one["spec"]["secretName"]) for one in of_kind(objects, "Certificate")}
    made.add(("ConfigMap", "kube-root-ca.crt"))
    for name, spec in pod_specs(objects):
        volumes = {one["name"]: one for one in spec["volumes"]}
        for volume in volumes.values():
            for source in (volume, *volume.get("projected", {}).get("sources", [])):
                if "configMap" in source:
                    assert ("ConfigMap", source["configMap"]["name"]) in made, name
                if "secret" in source:
                    secret = source["secret"]
                    wanted = secret.get("secretName", secret.get("name"))
                    assert ("Secret", wanted) in made, name
        claims = {"data"} if name != "penstock-topics" and "topics" not in name else set()
        for container in containers(spec):
            mounted = {one["name"] for one in container["volumeMounts"]}
            assert mounted <= set(volumes) | claims


def run_job(objects: list[Object], directory: Path, answer: str) -> tuple[int, list[str]]:
    """What the Job's container does with the topics in ``directory``: exit status, and its calls.

    ``answer`` is what a `penstock` does in sh that has written its call down.
    """
    (job,) = of_kind(objects, "Job")
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    called = directory / "called"
    called.touch()
    for name, text in (("penstock", f'echo "$@" >> {called}\n{answer}'), ("sleep", "true")):
        program = directory / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    script = command[-1].replace("/etc/penstock-topics", str(directory))
    done = subprocess.run(
        [*command[:-1], script],
        env={"PATH": f"{directory}:/usr/bin:/bin"},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, called.read_text().splitlines()


def test_the_job_makes_the_last_topic_too(objects: list[Object], tmp_path: Path) -> None:
    """A file of the user's need not end with a line's end; and what stands there is no pattern."""
    (tmp_path / "topics").write_text("orders --partitions 3\n\nold-* --config a=b")
    (tmp_path / "old-file").touch()
    assert run_job(objects, tmp_path, "true") == (
        0,
        [
            "topics create orders --partitions 3 --if-not-exists",
            "topics create old-* --config a=b --if-not-exists",
        ],
    )


def test_the_job_waits_for_a_cluster_that_starts(objects: list[Object], tmp_path: Path) -> None:
    """A container that fails is tried again by Kubernetes, but after minutes in the end."""
    (tmp_path / "topics").write_text("one\ntwo\n")
    status, calls = run_job(objects, tmp_path, f"[ $(wc -l < {tmp_path}/called) -gt 4 ]")
    assert status == 0
    assert [call.split()[2] for call in calls] == [*["one"] * 5, "two"]


def test_the_job_does_not_try_for_ever(objects: list[Object], tmp_path: Path) -> None:
    (tmp_path / "topics").write_text("one\ntwo\n")
    status, calls = run_job(objects, tmp_path, "exit 1")
    assert status == 1
    assert 10 < len(calls) < 100


def test_the_job_tries_no_misspelt_line_again(objects: list[Object], tmp_path: Path) -> None:
    (tmp_path / "topics").write_text("one --partition 3\ntwo\n")
    assert run_job(objects, tmp_path, "exit 2") == (
        2,
        ["topics create one --partition 3 --if-not-exists"],
    )
