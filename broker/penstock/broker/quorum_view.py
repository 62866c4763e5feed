"""How the quorum stands, as a broker can find out: of a leader that a majority confirms, or not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from grpc import aio

from penstock.broker.controller_directory import ControllerDirectory
from penstock.v1.controller_pb2 import DescribeQuorumRequest, DescribeQuorumResponse
from penstock.wire.errors import (
    ClusterNotFoundedError,
    NetworkError,
    NotControllerError,
    NotEnoughVotersError,
)
from penstock.wire.transport import format_address

_PATIENCE_MS: Final = 1_500
"""An election is over by then. Less than an administrator's client waits for one broker."""
_ASK_MS: Final = 700
"""For one controller, which asks the others in turn. Beyond this it hangs, or cannot be reached."""
_PAUSE_MS: Final = 50
_MAJORITY_MS: Final = 3_000
"""For each controller, before it counts as one that cannot be reached: a busy one is slow."""


class QuorumView:
    """Asks controllers how the quorum stands. Used on one event loop."""

    def __init__(self, directory: ControllerDirectory, node_id: int) -> None:
        self._directory = directory
        self._node_id = node_id

    async def describe(self, timeout_ms: int) -> DescribeQuorumResponse:
        """What a leader says that a majority confirms, or the best that anybody says.

        Without a confirmed leader for as long as an election takes, and never longer than
        ``timeout_ms``, it is the answer of the newest term; a leader's of it, if there is one. A
        leader of older software, which confirms nothing, is not waited for. Raises NetworkError
        when no controller answers, ClusterNotFoundedError when none that does knows of any voters.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + min(timeout_ms, _PATIENCE_MS) / 1000
        failures: dict[int, str] = {}
        best: DescribeQuorumResponse | None = None
        answers: list[DescribeQuorumResponse] = []
        while (left_ms := int((deadline_s - loop.time()) * 1000)) > 0:
            active = self._directory.active
            failures = {}
            answers = await self._answers(min(left_ms, _ASK_MS), failures)
            if answers:
                # A last question that has little time left may reach only some.
                best = max([*answers, *([best] if best else [])], key=self._worth)
                leads = best.leader_id == best.answered_by
                if best.confirmed or (leads and not best.HasField("confirmed")):
                    return best
            await self._directory.wait_news(active, _PAUSE_MS)
        if best is not None and (error := _not_founded(answers)) is not None:
            raise error
        if best is None:
            raise NetworkError(
                "no controller says how the quorum stands: "
                + "; ".join(f"controller {node} {why}" for node, why in sorted(failures.items()))
                + "; next: start the controllers, and look into their logs"
            )
        return best

    async def require_founded(self) -> None:
        """Raise ClusterNotFoundedError if no controller that answers knows of any voters.

        Whoever waits for an active controller waits in vain then.
        """
        error = _not_founded(await self._told(self._directory.voters(), _ASK_MS, {}))
        if error is not None:
            raise error

    async def require_majority(self) -> None:
        """Raise NotEnoughVotersError if no active controller can come of those that answer.

        That is so where they are too few of the voters, and none of them hears a leader.
        """
        failures: dict[int, str] = {}
        asked = self._directory.voters()
        answers = await self._told(asked, _MAJORITY_MS, failures)
        newest = max(answers, key=lambda answer: (answer.voters_index, answer.term), default=None)
        voters = {voter.node_id for voter in newest.voters} if newest else set(asked)
        voting = [answer for answer in answers if answer.answered_by in voters]
        if 2 * len(voting) > len(voters) or any(_hears_leader(answer) for answer in voting):
            return
        heard = ", ".join(str(answer.answered_by) for answer in voting)
        missing = sorted(voters - {answer.answered_by for answer in voting})
        raise NotEnoughVotersError(
            f"no controller is active, and broker {self._node_id} reaches no majority of the "
            f"voters {', '.join(map(str, sorted(voters)))}, but {heard or 'none'}: "
            + "; ".join(
                f"controller {node} {failures.get(node, 'is not known')}" for node in missing
            )
            + "; next: start those that are down, and see `penstock quorum status`"
        )

    async def supported_version(self, timeout_ms: int) -> int:
        """The newest metadata.version that the software of every controller knows.

        Asked are the voters in force, as a confirmed leader names them: those of the settings, or
        of a leader that is cut off, may be fewer, others, or gone. Raises NetworkError for one that
        does not answer, since it might know less, and NotControllerError where nobody can say for
        sure who votes. A leader of software that confirms nothing is refused too: it knows no
        newer level than the one that it was written for.
        """
        quorum = await self.describe(timeout_ms)
        if not quorum.confirmed:
            raise NotControllerError(
                f"controller {quorum.answered_by} is not the active one, or cut off from the "
                "others, or its software is too old to tell; it does not say for sure who votes; "
                "next: try again, or install the new software on every controller first"
            )
        voters = {voter.node_id: format_address(voter.host, voter.port) for voter in quorum.voters}

        async def ask(node_id: int, address: str) -> int:
            try:
                answer = await self._ask(node_id, address, timeout_ms)
            except aio.AioRpcError as error:
                raise NetworkError(
                    f"controller {node_id} at {address} does not say which metadata.version it "
                    f"knows ({error.details()}); next: start it, or if it is gone for good "
                    f"`penstock quorum remove {node_id}`"
                ) from error
            return max(answer.supported_metadata_version, 1)

        return min(await asyncio.gather(*(ask(*voter) for voter in sorted(voters.items()))))

    async def _answers(
        self, timeout_ms: int, failures: dict[int, str]
    ) -> list[DescribeQuorumResponse]:
        """The active controller's answer, if it is confirmed, else everybody's."""
        active = self._directory.active
        if active is not None:
            told = await self._told({active.node_id: active.address}, timeout_ms, failures)
            if told and told[0].confirmed:
                return told
        else:
            told = []
        others = self._directory.voters()
        if active is not None:
            others.pop(active.node_id, None)
        return told + await self._told(others, timeout_ms, failures)

    async def _told(
        self, controllers: Mapping[int, str], timeout_ms: int, failures: dict[int, str]
    ) -> list[DescribeQuorumResponse]:
        async def ask(node_id: int, address: str) -> DescribeQuorumResponse | None:
            try:
                return await self._ask(node_id, address, timeout_ms)
            except aio.AioRpcError as error:
                failures[node_id] = f"at {address}: {error.code().name} {error.details()}"
                return None

        asked = await asyncio.gather(*(ask(*one) for one in controllers.items()))
        return [answer for answer in asked if answer is not None]

    async def _ask(self, node_id: int, address: str, timeout_ms: int) -> DescribeQuorumResponse:
        stub = self._directory.stub(node_id, address)
        return await stub.DescribeQuorum(DescribeQuorumRequest(), timeout=timeout_ms / 1000)

    def _worth(self, answer: DescribeQuorumResponse) -> tuple[bool, int, bool, int, bool]:
        return (
            answer.confirmed,
            answer.term,
            answer.leader_id == answer.answered_by,
            answer.commit_index,
            answer.answered_by == self._node_id,
        )


def _hears_leader(answer: DescribeQuorumResponse) -> bool:
    """There is a majority somewhere: this controller leads one, or hears who does."""
    if answer.leader_id == answer.answered_by:
        return answer.confirmed
    return answer.leader_id >= 0


_SAME: Final = "controller.quorum.voters must be the same on all, and their directories new"


def _not_founded(answers: Sequence[DescribeQuorumResponse]) -> ClusterNotFoundedError | None:
    """Why nobody has founded the cluster yet; None if one of these knows voters."""
    if not answers or not all(answer.HasField("founding") for answer in answers):
        return None
    founder_id = answers[0].founding.founder_node_id
    heard = ", ".join(str(answer.answered_by) for answer in answers)
    known = f"controllers {heard} know" if len(answers) > 1 else f"controller {heard} knows"
    founder = next((answer for answer in answers if answer.answered_by == founder_id), None)
    if founder is None:
        why = f"controller {founder_id}, which founds it, does not answer"
        step = (
            f"start node {founder_id}, in a directory that `penstock format` made without "
            "--cluster-id, or with --found"
        )
    elif founder.founding.needs_permission:
        why = f"controller {founder_id}, which would found it, may not"
        step = (
            f"stop node {founder_id}, say `penstock format --data-dir DIR --node-id {founder_id} "
            "--cluster-id ID --found`, and start it"
        )
    else:
        refusals = founder.founding.refusals
        missing = ", ".join(map(str, founder.awaited_node_ids)) or "nobody any more"
        refused = [node for node in founder.awaited_node_ids if node in refusals]
        why = f"controller {founder_id}, which founds it, waits for {missing}"
        step = f"start those; {_SAME}"
        if refused:
            reasons = "; ".join(f"{node} runs and is refused: {refusals[node]}" for node in refused)
            why = f"{why} ({reasons})"
            step = f"mend that, and start all that are waited for; {_SAME}"
    return ClusterNotFoundedError(
        f"the cluster is not founded yet, as far as {known}: {why}; next: {step} "
        "(a node that joins a cluster: `penstock quorum add`, asked of a broker of that cluster)"
    )
