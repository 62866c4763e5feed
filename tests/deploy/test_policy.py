from __future__ import annotations

import re
from typing import Any

from tests.deploy.objects import Object, built, containers, environment, of_kind, only, pod_specs

# What the node itself takes between SIGTERM and its end at most: two parts, 30 s each.
STOP_S = 60


def nodes(objects: list[Object]) -> list[Object]:
    return [one["spec"] for one in of_kind(objects, "StatefulSet")]


def main_container(stateful: Object) -> Object:
    (found,) = stateful["template"]["spec"]["containers"]
    return dict(found)


def test_nobody_is_root_or_may_become_it(objects: list[Object]) -> None:
    seen = 0
    for name, spec in pod_specs(objects):
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] > 0
        assert pod["fsGroup"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for container in containers(spec):
            context = container["securityContext"]
            assert context == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            seen += 1
    assert seen >= 3


def test_limits_are_set(objects: list[Object]) -> None:
    for name, spec in pod_specs(objects):
        for container in containers(spec):
            for kind in ("requests", "limits"):
                assert set(container["resources"][kind]) == {"cpu", "memory"}, name


def test_only_the_step_that_needs_it_has_an_account(objects: list[Object]) -> None:
    for name, spec in pod_specs(objects):
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False
        holders = [
            one["name"]
            for one in containers(spec)
            if any(mount["name"] == "account" for mount in one["volumeMounts"])
        ]
        assert holders == (["adopt"] if "initContainers" in spec else [])
    (role,) = of_kind(objects, "Role")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "create", "update"]}
    ]
    assert not of_kind(objects, "ClusterRole")


def test_production_names_its_images_version() -> None:
    for variant in ("production", "production-dedicated"):
        for _, spec in pod_specs(built(f"overlays/{variant}")):
            for container in containers(spec):
                tag = container["image"].rpartition(":")[2]
                assert re.fullmatch(r"\d+\.\d+\.\d+", tag), container["image"]


def test_production_has_tls_and_dev_says_that_it_has_none(
    objects: list[Object], variant: str
) -> None:
    for stateful in nodes(objects):
        for container in containers(stateful["template"]["spec"]):
            variables = environment(container)
            has_tls = {"PENSTOCK_TLS_CA", "PENSTOCK_TLS_CERTIFICATE", "PENSTOCK_TLS_KEY"} <= set(
                variables
            )
            assert has_tls == (variant != "dev")
            assert ("PENSTOCK_CONTROLLER_INSECURE_ALLOW" in variables) == (variant == "dev")


def test_each_node_has_a_certificate_of_its_own(objects: list[Object], variant: str) -> None:
    if variant == "dev":
        assert not of_kind(objects, "Certificate")
        return
    cluster_id = only(objects, "Secret", "penstock-cluster")["stringData"]["cluster-id"]
    for stateful in of_kind(objects, "StatefulSet"):
        spec, name = stateful["spec"], stateful["metadata"]["name"]
        first = spec.get("ordinals", {}).get("start", 0)
        mounted = next(one for one in spec["template"]["spec"]["volumes"] if one["name"] == "tls")[
            "projected"
        ]["sources"]
        secrets = {source["secret"]["name"] for source in mounted}
        for node in range(first, first + spec["replicas"]):
            certificate = only(objects, "Certificate", f"{name}-{node}")["spec"]
            names = certificate["dnsNames"]
            # Exactly one name of a node: whoever has the key is that node.
            assert [one for one in names if one.endswith(".penstock")] == [
                f"node-{node}.{cluster_id}.penstock"
            ]
            assert f"{name}-{node}.penstock-nodes.penstock.svc" in names
            assert set(certificate["usages"]) >= {"server auth", "client auth"}
            assert certificate["secretName"] in secrets
    client = only(objects, "Certificate", "penstock-client")["spec"]
    assert "dnsNames" not in client
    assert "server auth" not in client["usages"]


def test_probes_ask_for_different_things(objects: list[Object]) -> None:
    for stateful in nodes(objects):
        container = main_container(stateful)
        probes = {
            name: container[f"{name}Probe"]["httpGet"]["path"]
            for name in ("startup", "readiness", "liveness")
        }
        assert probes == {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}
        startup = container["startupProbe"]
        # A recovery may be long: killed for it, a node would never start.
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
        liveness = container["livenessProbe"]
        # The event loop says that it is dead after ten seconds: a hiccup more is no reason.
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
        (port,) = [one for one in container["ports"] if one["name"] == "http"]
        assert port["containerPort"] == 9094


def test_a_node_has_the_time_to_drain_and_to_end(objects: list[Object]) -> None:
    for stateful in nodes(objects):
        grace_s = stateful["template"]["spec"]["terminationGracePeriodSeconds"]
        container = main_container(stateful)
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:2] == ["python", "/opt/penstock/etc/prestop.py"]
        assert int(command[2]) * 2 <= grace_s
        assert grace_s - int(command[2]) >= STOP_S


def test_nodes_find_each_other_before_they_are_ready(objects: list[Object]) -> None:
    headless = only(objects, "Service", "penstock-nodes")["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"] is True
    for stateful in nodes(objects):
        assert stateful["serviceName"] == "penstock-nodes"
        assert stateful["podManagementPolicy"] == "Parallel"
        labels = stateful["template"]["metadata"]["labels"]
        assert headless["selector"].items() <= labels.items()
    ready = only(objects, "Service")["spec"]
    assert "publishNotReadyAddresses" not in ready


def test_disks_outlive_the_stateful_set(objects: list[Object]) -> None:
    for stateful in nodes(objects):
        policy = stateful["persistentVolumeClaimRetentionPolicy"]
        assert set(policy.values()) == {"Retain"}
        (claim,) = stateful["volumeClaimTemplates"]
        assert claim["metadata"]["name"] == "data"
        for container in containers(stateful["template"]["spec"]):
            (mount,) = [one for one in container["volumeMounts"] if one["name"] == "data"]
            assert mount["mountPath"] == "/var/lib/penstock"


def test_no_more_nodes_are_disrupted_than_a_quorum_can_spare(objects: list[Object]) -> None:
    budgets = {
        one["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: one["spec"]
        for one in of_kind(objects, "PodDisruptionBudget")
    }
    for stateful in of_kind(objects, "StatefulSet"):
        component = stateful["metadata"]["labels"]["app.kubernetes.io/component"]
        spec, budget = stateful["spec"], budgets.pop(component)
        selector = budget["selector"]["matchLabels"]
        assert selector.items() <= spec["template"]["metadata"]["labels"].items()
        assert budget["maxUnavailable"] == 1
        roles = environment(main_container(spec))["PENSTOCK_NODE_ROLES"]
        if "controller" in roles:
            assert budget["maxUnavailable"] <= (spec["replicas"] - 1) // 2
    assert budgets == {}


def test_topics_of_the_job_outlive_the_loss_of_one_node(objects: list[Object]) -> None:
    text = next(
        one["data"]["topics"] for one in of_kind(objects, "ConfigMap") if "topics" in one["data"]
    )
    for line in text.splitlines():
        replicas = re.search(r"--replication-factor (\d+)", line)
        in_sync = re.search(r"min\.insync\.replicas=(\d+)", line)
        assert replicas is not None
        assert in_sync is not None
        assert int(replicas[1]) - int(in_sync[1]) >= 1
        assert int(in_sync[1]) >= 2


def test_nodes_are_spread(objects: list[Object], variant: str) -> None:
    for stateful in nodes(objects):
        spec = stateful["template"]["spec"]
        rules = spec["affinity"]["podAntiAffinity"]
        kind = "preferred" if variant == "dev" else "required"
        assert list(rules) == [f"{kind}DuringSchedulingIgnoredDuringExecution"]
        (rule,) = rules[f"{kind}DuringSchedulingIgnoredDuringExecution"]
        term = rule["podAffinityTerm"] if variant == "dev" else rule
        assert term["topologyKey"] == "kubernetes.io/hostname"
        (spread,) = spec["topologySpreadConstraints"]
        assert spread["topologyKey"] == "topology.kubernetes.io/zone"
        wanted = "ScheduleAnyway" if variant == "dev" else "DoNotSchedule"
        assert spread["whenUnsatisfiable"] == wanted
        labels = stateful["template"]["metadata"]["labels"]
        for selector in (term["labelSelector"], spread["labelSelector"]):
            assert selector["matchLabels"].items() <= labels.items()


def ports_of(rule: dict[str, Any]) -> set[object]:
    return {one["port"] for one in rule["ports"]}


def test_nodes_resolve_names_wherever_dns_is(objects: list[Object]) -> None:
    """On the host, as NodeLocal DNSCache is, or in a namespace of another name, as in OpenShift."""
    (policy,) = of_kind(objects, "NetworkPolicy")
    anywhere = [
        (one["port"], one.get("protocol", "TCP"))
        for rule in policy["spec"]["egress"]
        if not rule.get("to")
        for one in rule["ports"]
    ]
    for port in (53, 5353):
        assert {(port, "UDP"), (port, "TCP")} <= set(anywhere)
    # By no other rule does a node reach those that are none of its cluster.
    assert {port for port, _ in anywhere} == {53, 5353, 443, 6443}


def test_strangers_reach_no_port_by_the_network(objects: list[Object]) -> None:
    (policy,) = of_kind(objects, "NetworkPolicy")
    spec = policy["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    for stateful in nodes(objects):
        labels = stateful["template"]["metadata"]["labels"]
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert all(rule.get("from") for rule in spec["ingress"]), "a rule for everybody"
    within, clients, monitoring = spec["ingress"]
    assert ports_of(within) == {"broker", "frames", "controller"}
    assert ports_of(clients) == {"broker"}
    assert ports_of(monitoring) == {"http"}
    for _, pod in pod_specs(objects):
        if "initContainers" not in pod:
            # The Job of the topics is a client.
            (job,) = of_kind(objects, "Job")
            labels = job["spec"]["template"]["metadata"]["labels"]
            assert clients["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
