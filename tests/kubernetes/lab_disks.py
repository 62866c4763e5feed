"""The lab's provisioner: a directory, as a volume of the kind `local`, for each claim.

Local volumes are given to the pod's fsGroup as real disks are, which hostPath is not. A volume goes
with its claim (reclaimPolicy Delete), and its directory with it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

from lab_api import LabApi

CLASS = "lab-disks"
CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


def make_class(api: LabApi) -> None:
    """The default class of disks."""
    if any(one["metadata"]["name"] == CLASS for one in api.items(CLASSES)):
        return
    api.call(
        "POST",
        CLASSES,
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": CLASS,
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "Immediate",
        },
    )


def volume_for(claim: dict[str, Any], directory: Path, node: str) -> dict[str, Any]:
    """A volume for this claim alone."""
    about = claim["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"disk-{about['uid']}", "labels": {"lab": "disk"}},
        "spec": {
            "capacity": claim["spec"]["resources"]["requests"],
            "accessModes": claim["spec"]["accessModes"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": CLASS,
            "claimRef": {key: about[key] for key in ("name", "namespace", "uid")},
            "local": {"path": str(directory / about["uid"])},
            "nodeAffinity": {
                "required": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {
                                    "key": "kubernetes.io/hostname",
                                    "operator": "In",
                                    "values": [node],
                                }
                            ]
                        }
                    ]
                }
            },
        },
    }


def go_round(api: LabApi, directory: Path, node: str) -> None:
    """Make a volume for each claim that has none, and remove those whose claim is gone."""
    volumes = {one["metadata"]["name"]: one for one in api.items(f"{VOLUMES}?labelSelector=lab")}
    for claim in api.items(CLAIMS):
        name = f"disk-{claim['metadata']['uid']}"
        mine = claim["spec"].get("storageClassName") == CLASS
        if mine and name not in volumes and not claim["spec"].get("volumeName"):
            (directory / claim["metadata"]["uid"]).mkdir(parents=True)
            api.call("POST", VOLUMES, volume_for(claim, directory, node))
    for name, volume in volumes.items():
        if volume.get("status", {}).get("phase") == "Released":
            api.call("DELETE", f"{VOLUMES}/{name}")
            shutil.rmtree(volume["spec"]["local"]["path"])


def main() -> None:
    """Until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--node", required=True)
    given = parser.parse_args()
    api = LabApi(given.kubeconfig)
    while True:
        try:
            make_class(api)
            go_round(api, given.directory, given.node)
        except (OSError, urllib.error.HTTPError) as error:
            sys.stderr.write(f"{error!r}\n")
        time.sleep(0.5)  # An interval between looks.


if __name__ == "__main__":
    main()
