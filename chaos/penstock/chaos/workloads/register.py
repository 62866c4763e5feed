"""The workload ``register``: registers in the metadata log, compared and set, and read.

A register is the name of a topic: ``taken`` where a topic has it, null where none does. Creating
the topic sets it from null to taken, deleting it back. Both are commands of the metadata log that
carry the topic's id, so that each takes effect once at most, however often it is repeated; and a
creation that is only to be checked (``validate_only``) is such a command too, which is applied
after all that was committed before it: that is a linearizable read. Descriptions of topics and
configs are answered by a broker of what it has heard, which may be late; they promise no such thing
and are not judged here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from penstock.chaos.checkers import Checker
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings
from penstock.chaos.workloads.casting import Choices, Pace, option
from penstock.chaos.workloads.claims import Claim
from penstock.chaos.workloads.outcomes import words_of
from penstock.client import AdminClient, AsyncAdminClient, PenstockError, TopicAlreadyExistsError

_OPTIONS: Final[Choices] = {
    "registers": (3, 1, 1_000),
    "clients": (6, 1, 100),
    "workers": (2, 1, 64),
    "operations": (40, 1, 10_000),
}
TAKEN: Final = "taken"
_READS: Final = 0.6
_PAUSE_S: Final = 0.05
_API_TIMEOUT_MS: Final = 12_000
_REQUEST_TIMEOUT_MS: Final = 8_000
"""Longer than nodes are paused for: what a paused broker was asked it answers when it goes on."""


def _option(plan: Plan, name: str) -> int:
    return option(plan, "register", _OPTIONS, name)


class Register:
    """Names of topics, that several clients take and give back, and that all of them look at."""

    name = "register"
    summary = "creations, deletions and checks of topics as registers in the metadata log"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Nothing: no name is taken at first."""

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """Clients that are all alike, with numbers of their own for what they make."""
        workers, clients = _option(plan, "workers"), _option(plan, "clients")
        parameters = {
            "registers": _option(plan, "registers"),
            "rate": _option(plan, "operations") / clients,
            "copies": min(3, max(1, plan.nodes - 1)),
        }
        return [
            ClientSpec(
                f"client-{number}", "client", number % workers, {**parameters, "number": number}
            )
            for number in range(clients)
        ]

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        return _Client(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Whether the registers are linearizable."""
        # Imported here: only who judges needs it, and what it stands on.
        from penstock.chaos.checkers.registry import registers  # noqa: PLC0415 - see above.

        return registers()


class _Client:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._recorder: Final[Recorder] = surroundings.recorder
        self._names: Final = [
            f"register-{number}" for number in range(surroundings.spec.parameters["registers"])
        ]

    def _admin(self) -> AsyncAdminClient:
        return AsyncAdminClient(
            self._surroundings.bootstrap,
            client_id=self._surroundings.spec.process,
            default_api_timeout_ms=_API_TIMEOUT_MS,
            request_timeout_ms=_REQUEST_TIMEOUT_MS,
        )

    async def run(self) -> None:
        """Compare and set, and read, registers by chance."""
        random, parameters = self._surroundings.random, self._surroundings.spec.parameters
        pace = Pace(parameters["rate"])
        async with self._admin() as admin:
            claims = [
                Claim.of(admin, self._surroundings, name, parameters["number"])
                for name in self._names
            ]
            while True:
                claim = random.choice(claims)
                reads = random.random() < _READS
                await pace.wait(1)
                settled = await claim.settle()
                if reads or not settled:
                    done = await self._read(admin, claim.name)
                elif claim.topic_id is None:
                    done = await self._take(claim)
                else:
                    done = await self._give_back(claim)
                if not done:
                    await asyncio.sleep(_PAUSE_S)

    async def _take(self, claim: Claim) -> bool:
        return await claim.create(
            "cas",
            {"register": claim.name, "expected": None, "value": TAKEN},
            partitions=1,
            replication_factor=self._surroundings.spec.parameters["copies"],
        )

    async def _give_back(self, claim: Claim) -> bool:
        asked = {"register": claim.name, "expected": TAKEN, "value": None}
        return await claim.delete("cas", asked)

    async def _read(self, admin: AsyncAdminClient, name: str) -> bool:
        """One operation; whether it was answered."""
        asked: dict[str, Any] = {"register": name}
        self._recorder.invoke("read", asked)
        try:
            await admin.create_topic(name, partitions=1, replication_factor=1, validate_only=True)
        except TopicAlreadyExistsError:
            self._recorder.ok({**asked, "value": TAKEN})
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return False
        else:
            self._recorder.ok({**asked, "value": None})
        return True

    async def finish(self) -> None:
        """Read every register once more."""
        async with self._admin() as admin:
            for name in self._names:
                while True:
                    if await self._read(admin, name):
                        break
                    await asyncio.sleep(_PAUSE_S)
