"""Admin.AlterQuorum: what a broker forwards for who changes the voters."""

from __future__ import annotations

from penstock.v1 import admin_pb2, controller_pb2
from penstock.wire.errors import LastVoterError, PenstockError
from tests.unit.broker.test_services import FakeControllers, image_with, led_nowhere, servicer_of


class Controllers(FakeControllers):
    """Takes any change of the voters, or refuses it."""

    def __init__(self, refusal: PenstockError | None = None) -> None:
        super().__init__()
        self.refusal = refusal
        self.altered: list[controller_pb2.AlterVotersRequest] = []

    async def alter_voters(
        self, request: controller_pb2.AlterVotersRequest, timeout_ms: int
    ) -> controller_pb2.AlterVotersResponse:
        self.altered.append(request)
        if self.refusal is not None:
            return controller_pb2.AlterVotersResponse(error=self.refusal.to_proto())
        quorum = controller_pb2.DescribeQuorumResponse(leader_id=2)
        return controller_pb2.AlterVotersResponse(quorum=quorum)


async def test_a_change_of_the_voters_goes_to_the_controllers() -> None:
    controllers = Controllers()
    servicer = servicer_of(image_with(), controllers, led_nowhere)
    request = admin_pb2.AlterQuorumRequest(add={"node_id": 4, "host": "h", "port": 1})
    assert (await servicer.AlterQuorum(request, None)).quorum.leader_id == 2
    await servicer.AlterQuorum(admin_pb2.AlterQuorumRequest(remove_node_id=0), None)
    added, removed = controllers.altered
    assert (added.add.node_id, added.add.host, added.add.port) == (4, "h", 1)
    assert removed.WhichOneof("change") == "remove_node_id"


async def test_a_refusal_comes_back() -> None:
    controllers = Controllers(LastVoterError("the only one"))
    servicer = servicer_of(image_with(), controllers, led_nowhere)
    refused = await servicer.AlterQuorum(admin_pb2.AlterQuorumRequest(remove_node_id=1), None)
    assert refused.error.message == "the only one"
