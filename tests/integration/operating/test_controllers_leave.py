"""Controllers of their own are kept by their preStop until the others have caught up."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, environment_without_penstock
from tests.integration.operating.stateful_set import PRE_STOP
from tests.integration.ports import free_ports
from tests.support import wait_until

pytestmark = pytest.mark.integration


class Controllers(Cluster):
    """Three that are no brokers, each with an HTTP port."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 3, {"node.roles": "controller"})
        self.http_ports = dict(zip(self.nodes, free_ports(3), strict=True))
        for node_id, node in self.nodes.items():
            with node.config.open("a") as file:
                file.write(f'metrics.listen = "127.0.0.1:{self.http_ports[node_id]}"\n')

    def may_leave(self, node_id: int) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_ports[node_id], timeout=15)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/can-roll")
            return connection.getresponse().status == 200
        return False

    def pre_stop(self, node_id: int, seconds: float) -> subprocess.Popen[str]:
        """Begin what its manifest has it do before SIGTERM."""
        voters = ",".join(f"{one}@{address}" for one, address in self.controller_addresses.items())
        settings = {
            "NODE_ID": str(node_id),
            "NODE_ROLES": "controller",
            "DATA_DIR": str(self.nodes[node_id].directory),
            "CONTROLLER_QUORUM_VOTERS": voters,
            "METRICS_LISTEN": f"127.0.0.1:{self.http_ports[node_id]}",
        }
        return subprocess.Popen(
            [sys.executable, str(PRE_STOP), str(seconds)],
            env={
                **environment_without_penstock(),
                **{f"PENSTOCK_{key}": value for key, value in settings.items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    made = Controllers(tmp_path)
    try:
        for node in made.nodes.values():
            node.start()
        for node_id in made.nodes:
            wait_until(lambda one=node_id: made.may_leave(one), f"{node_id} may leave", 60)  # type: ignore[misc]  # mypy infers no lambda with a default.
        yield made
    finally:
        made.close()


def test_a_controller_leaves_once_the_others_are_a_majority_that_has_caught_up(
    controllers: Controllers,
) -> None:
    leaving = controllers.pre_stop(1, 20)
    said, _ = leaving.communicate(timeout=60)
    assert (leaving.returncode, said) == (0, "")

    controllers.nodes[3].kill()
    wait_until(lambda: not controllers.may_leave(1), "one is missed", 60)
    leaving = controllers.pre_stop(1, 2)
    said, _ = leaving.communicate(timeout=60)
    assert leaving.returncode == 1
    assert "without controller 1 only 1 of 3 controllers would be there and caught up" in said

    leaving = controllers.pre_stop(1, 60)
    try:
        assert leaving.poll() is None
        controllers.nodes[3].start()
        said, _ = leaving.communicate(timeout=90)
    finally:
        leaving.kill()
        leaving.wait()
    assert (leaving.returncode, said) == (0, "")
    assert controllers.may_leave(1)
