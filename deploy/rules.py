"""Put the alert rules of deploy/monitoring into what Kubernetes and compose are given.

    python deploy/rules.py [--check]

Every file below deploy/monitoring whose one top-level key is ``groups`` is one of rules for
Prometheus. With ``--check`` nothing is written, and the exit status says whether all is fresh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent
NOTE = "# Made of deploy/monitoring by `make deploy-rules`: change it there.\n"
LABELS = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": "penstock"}


def groups_in(directory: Path) -> list[Any]:
    """The groups of rules of all files there, in the order of their names."""
    found: list[Any] = []
    for path in sorted(directory.rglob("*.y*ml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and set(content) == {"groups"}:
            found += content["groups"]
    return found


def files(groups: list[Any]) -> Iterator[tuple[Path, str]]:
    """What is to be in which file."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "penstock", "labels": LABELS},
        "spec": {"groups": groups},
    }
    yield DEPLOY / "kubernetes/components/monitoring/rules.yaml", written(rule)
    yield DEPLOY / "helm/penstock/files/alerts.yaml", written({"groups": groups})


def written(content: Any) -> str:
    """The YAML of it."""
    return NOTE + yaml.safe_dump(content, sort_keys=False, width=100, allow_unicode=True)


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    wanted = dict(files(groups_in(DEPLOY / "monitoring")))
    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" not in arguments:
        for path in stale:
            path.write_text(wanted[path], encoding="utf-8")
        return 0
    for path in stale:
        sys.stdout.write(f"{path} is not fresh; next: make deploy-rules\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
