"""The objects that the overlays and the chart make, by the real tools."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "penstock"
VARIANTS = ("dev", "production", "production-dedicated")

Object = dict[str, Any]

# Helm's own engine is a library in Go: it lives in a process of its own.
_RENDER = """
import json, sys
import helm_python
given = json.load(sys.stdin)
with helm_python.Chart.load(given["chart"]) as chart:
    try:
        found = chart.render(given["values"], name=given["name"], namespace=given["namespace"])
    except helm_python.HelmError as error:
        sys.exit(str(error))
json.dump(found, sys.stdout)
"""


@cache
def built(directory: str) -> list[Object]:
    """What ``kubectl kustomize`` makes of a directory below deploy/kubernetes."""
    require_kustomize()
    return documents(kustomize(KUBERNETES / directory))


@cache
def _kustomize_version() -> tuple[int, ...]:
    if shutil.which("kubectl") is None:
        return ()
    done = subprocess.run(
        ["kubectl", "version", "--client", "--output", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        text = str(json.loads(done.stdout).get("kustomizeVersion", "v0"))
    except ValueError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", text))


def require_kustomize() -> None:
    """Skip where there is none that knows components and replacements."""
    if _kustomize_version() < (5,):
        pytest.skip("there is no kubectl with kustomize 5, as of version 1.27")


def kustomize(directory: Path) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def render(
    values: Mapping[str, Any], name: str = "penstock", namespace: str = "penstock"
) -> list[Object]:
    """What Helm makes of the chart. Raises AssertionError with what it says."""
    pytest.importorskip("helm_python", reason="Helm's engine comes as a wheel for x86-64 alone")
    done = subprocess.run(
        [sys.executable, "-c", _RENDER],
        input=json.dumps(
            {"chart": str(CHART), "values": values, "name": name, "namespace": namespace}
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files: dict[str, str] = json.loads(done.stdout)
    return [one for text in files.values() for one in documents(text)]


@cache
def rendered(variant: str) -> list[Object]:
    """What Helm makes of the chart with the values of a variant."""
    values = CHART.parent / f"values-{variant}.yaml"
    namespace = "penstock-dev" if variant == "dev" else "penstock"
    return render(yaml.safe_load(values.read_text()), namespace=namespace)


def documents(text: str) -> list[Object]:
    return [one for one in yaml.safe_load_all(text) if one]


def key_of(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def by_key(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {key_of(one): one for one in objects}
    assert len(found) == len(objects), "an object twice"
    return found


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def only(objects: list[Object], kind: str, name: str = "penstock") -> Object:
    return by_key(objects)[kind, name]


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """The pods that the objects make, by the name of what makes them."""
    for one in objects:
        if one["kind"] in ("StatefulSet", "Job"):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def environment(container: Object) -> dict[str, Any]:
    """Its variables: their text, or where it comes from."""
    found = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert len(found) == len(container["env"]), "a variable twice"
    return found


def compared(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """The objects without what the two tools have to do in ways of their own.

    kustomize tells by a ConfigMap's name that it is another one, Helm by an annotation of the pods
    and a Job's name; kustomize puts namespaces into objects, Helm gives them to the API.
    """
    text = json.dumps(deepcopy(objects))
    text = re.sub(r"penstock-(settings|topics)-[0-9a-z]{8,10}\b", r"penstock-\1", text)
    found: list[Object] = json.loads(text)
    for one in found:
        one["metadata"].pop("namespace", None)
        if one["kind"] == "StatefulSet":
            template = one["spec"]["template"]["metadata"]
            template.get("annotations", {}).pop("checksum/settings", None)
            if not template.get("annotations"):
                template.pop("annotations", None)
        # In what order these stand means nothing: each has a name. That variables stand behind
        # those that they are made of is a test of its own.
        for _, spec in pod_specs([one]):
            spec["volumes"].sort(key=itemgetter("name"))
            for container in containers(spec):
                container["env"] = environment(container)
                container["volumeMounts"].sort(key=itemgetter("name"))
    return by_key([one for one in found if one["kind"] != "Namespace"])
