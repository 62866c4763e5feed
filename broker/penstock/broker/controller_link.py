"""The broker's side of the Controller service: registration, heartbeats, the metadata feed."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import structlog
from grpc import aio

from penstock.broker.controller_directory import ActiveController, ControllerDirectory
from penstock.broker.controller_log import (
    ControllerSilence,
    FeedRefusals,
    Unheard,
    Untold,
    in_words,
)
from penstock.broker.core.lease import Lease, MetadataLag
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.identity import BrokerIdentity
from penstock.broker.quorum_view import QuorumView
from penstock.raft_meta import tracing
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.core.versions import EXTERNAL_ADDRESSES_SINCE
from penstock.v1 import cluster_pb2, common_pb2, controller_pb2
from penstock.wire.errors import (
    BrokerFencedError,
    BrokerIdNotRegisteredError,
    MetadataDivergedError,
    NetworkError,
    NotControllerError,
    PenstockError,
    StaleBrokerEpochError,
    error_from_proto,
)

_BACKOFF_MS: Final = 50
_REQUEST_TIMEOUT_MS: Final = 10_000
_BEHIND_MS: Final = 1_000
"""A feed that lags behind what the active controller told for so long is left for another."""

log = structlog.get_logger()


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


async def _at_once() -> None:
    return None


def _error_of(response: Any) -> common_pb2.Error | None:
    return response.error if response.HasField("error") else None


class ActingFailedError(Exception):
    """A change of the metadata was acted on in part: this process is unfit to go on."""


class ControllerLink:
    """Keeps the broker registered, heard and informed. Used on one event loop.

    ``on_change`` is awaited after each delta was applied to ``image``, and before the next one is;
    only then do the controllers hear that this broker is so far. ``on_registered`` is called with
    every new broker epoch before the first heartbeat under it; ``until_idle`` is awaited before the
    image is changed, for what acts on it then. ``may_be_let_in`` says whether this
    process is ready to lead; until then it asks to stay fenced. :meth:`wait_failed` ends with
    the error that makes this process unfit to go on: another process took its node id, the
    metadata that it acted on were given up (MetadataDivergedError), or ``on_change`` raised
    something.
    """

    def __init__(
        self,
        identity: BrokerIdentity,
        voters: dict[int, tuple[str, int]],
        image: MetadataImage,
        *,
        connector: NodeConnector,
        heartbeat_interval_ms: int,
        session_timeout_ms: int,
        on_change: Callable[[ImageChange], Awaitable[None]],
        on_registered: Callable[[int], None],
        until_idle: Callable[[], Awaitable[None]] = _at_once,
        may_be_let_in: Callable[[], bool] = lambda: True,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._identity = identity
        self._directory = ControllerDirectory(voters, connector)
        self._quorum = QuorumView(self._directory, identity.node_id)
        self._directory.while_none_is_active(self._quorum)
        self._silence = ControllerSilence(clock_ms)
        self._refusals = FeedRefusals()
        self._image = image
        self._acted_index = image.index  # Up to here ``on_change`` has done what it does.
        self._interval_ms = heartbeat_interval_ms
        self._session_timeout_ms = session_timeout_ms
        self._on_change = on_change
        self._on_registered = on_registered
        self._until_idle = until_idle
        self._may_be_let_in = may_be_let_in
        self._ready_epoch = -1  # The registration that may be let in.
        self._clock_ms = clock_ms
        self._lease = Lease(session_timeout_ms)
        self._incarnation_id = uuid.uuid4().bytes
        self._broker_epoch = -1  # -1 until registered.
        self._nudge = asyncio.Event()  # Set: the next heartbeat is sent now.
        self._want_shutdown = False
        self._may_shut_down = asyncio.Event()
        self._informed = asyncio.Event()  # Set: the image is one of metadata.
        self._index_moved = asyncio.Event()  # Set, and replaced, when the image moves on.
        self._rotate = asyncio.Event()  # Set: the feed must try another controller.
        self._left_feed_ms: int | None = None
        self._lag = MetadataLag()
        self._unheard = Unheard()
        self._untold = Untold()
        self._was_fenced = True  # What the image said last of this registration.
        self._sequence = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def broker_epoch(self) -> int:
        """This registration's epoch, -1 before there is one."""
        return self._broker_epoch

    def may_serve(self) -> bool:
        """Whether the controllers have been heard recently enough to go on serving."""
        return self._lease.valid(self._clock_ms())

    def why_not_ready(self) -> str:
        """Why the broker should be sent no clients; empty while it is registered, unfenced and
        has the newest metadata that it was told of.
        """
        now_ms = self._clock_ms()
        if self._broker_epoch < 0:
            return "the broker is not registered with the controllers yet"
        record = self._image.brokers.get(self._identity.node_id)
        if record is None or record.broker_epoch != self._broker_epoch:
            return "the broker has not heard of its own registration yet"
        if record.fenced:
            return "the broker is fenced: it has yet to catch up with the metadata or its replicas"
        if not self._lease.valid(now_ms):
            return "the broker is not heard by an active controller"
        behind_ms = self._lag.behind_ms(now_ms)
        if behind_ms >= _BEHIND_MS:
            return f"the broker has waited for the newest metadata for {behind_ms} ms"
        return ""

    async def start(self) -> None:
        """Begin to follow the metadata and to register. Returns at once."""
        self._tasks = [
            asyncio.create_task(self._guard(self._follow_metadata()), name="metadata feed"),
            asyncio.create_task(self._guard(self._keep_heard()), name="heartbeats"),
        ]

    async def stop(self) -> None:
        """End the streams; the controller takes it for a stop and fences without delay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._directory.close()

    async def wait_failed(self) -> None:
        """Wait for ever, or raise what ended the link."""
        await asyncio.shield(self._failed)

    def heartbeat_soon(self) -> None:
        """Do not wait for the interval: what heartbeats say has changed."""
        self._nudge.set()

    async def wait_for_index(self, index: int, timeout_ms: int) -> None:
        """Wait until what happened up to ``index`` was acted on, quietly no longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                while self._acted_index < index:
                    await self._index_moved.wait()

    async def shut_down_controlled(self, timeout_ms: int) -> bool:
        """Ask for the leaderships to be moved away; whether that was done in time.

        A broker that is not registered leads nothing, and there may be nobody to ask: it is done.
        """
        if self._broker_epoch < 0:
            return True
        self._want_shutdown = True
        self._nudge.set()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._may_shut_down.wait()
        except TimeoutError:
            return False
        return True

    async def alter_partition(
        self, change: cluster_pb2.AlterPartitionCommand
    ) -> controller_pb2.AlterPartitionResponse:
        """Propose in-sync sets. Safe to repeat: partition epochs let it take effect once."""
        request = controller_pb2.AlterPartitionRequest(change=change)
        return await self._directory.call(
            lambda stub, left: stub.AlterPartition(request, timeout=left),
            _error_of,
            timeout_ms=_REQUEST_TIMEOUT_MS,
            what="changing in-sync sets",
        )

    async def report_replicas(
        self, report: cluster_pb2.ReportReplicasCommand
    ) -> controller_pb2.ReportReplicasResponse:
        """Say how replicas are. Safe to repeat: saying it again changes nothing."""
        request = controller_pb2.ReportReplicasRequest(report=report)
        return await self._directory.call(
            lambda stub, left: stub.ReportReplicas(request, timeout=left),
            _error_of,
            timeout_ms=_REQUEST_TIMEOUT_MS,
            what="reporting replicas",
        )

    async def allocate_producer_ids(self) -> cluster_pb2.AllocateProducerIdsResult:
        """Take a block of producer ids. A repeated question may waste a block, no more.

        Raises BrokerFencedError, which a producer may take to another broker, while this process
        is not registered: the lack is ours and not the producer's.
        """
        if self._broker_epoch < 0:
            raise self._unregistered()
        allocation = cluster_pb2.AllocateProducerIdsCommand(
            node_id=self._identity.node_id, broker_epoch=self._broker_epoch
        )
        request = controller_pb2.AllocateProducerIdsRequest(allocation=allocation)
        response = await self._directory.call(
            lambda stub, left: stub.AllocateProducerIds(request, timeout=left),
            _error_of,
            timeout_ms=_REQUEST_TIMEOUT_MS,
            what="taking producer ids",
        )
        if response.HasField("error"):
            error = error_from_proto(response.error)
            if isinstance(error, StaleBrokerEpochError | BrokerIdNotRegisteredError):
                raise self._unregistered() from error
            raise error
        result: cluster_pb2.AllocateProducerIdsResult = response.result
        return result

    def _unregistered(self) -> BrokerFencedError:
        return BrokerFencedError(
            f"broker {self._identity.node_id} is not registered with the controllers and gives no "
            "producer ids until it is; ask another broker, or try again"
        )

    async def execute_admin(
        self, command: cluster_pb2.Command, timeout_ms: int
    ) -> cluster_pb2.CommandResult:
        """Forward an administrator's command; typed refusals are in the result."""
        request = controller_pb2.ExecuteAdminRequest(command=command)
        response = await self._directory.call(
            lambda stub, left: stub.ExecuteAdmin(
                request, timeout=left, metadata=tracing.outgoing()
            ),
            lambda answer: _error_of(answer.result),
            timeout_ms=timeout_ms,
            what=f"the command {command.WhichOneof('body')}",
            gives_up=True,
        )
        return response.result

    async def supported_by_controllers(self, timeout_ms: int) -> int:
        """The newest metadata.version that every controller knows; see QuorumView."""
        return await self._quorum.supported_version(timeout_ms)

    async def describe_quorum(self, timeout_ms: int) -> controller_pb2.DescribeQuorumResponse:
        """How the controllers stand; see QuorumView."""
        return await self._quorum.describe(timeout_ms)

    async def require_founded(self) -> None:
        """Raise ClusterNotFoundedError where no controller knows of any voters; see QuorumView."""
        await self._quorum.require_founded()

    async def alter_voters(
        self, request: controller_pb2.AlterVotersRequest, timeout_ms: int
    ) -> controller_pb2.AlterVotersResponse:
        """Add or remove one voter; typed refusals are in the response."""
        return await self._directory.call(
            lambda stub, left: stub.AlterVoters(request, timeout=left, metadata=tracing.outgoing()),
            lambda answer: answer.error if answer.HasField("error") else None,
            timeout_ms=timeout_ms,
            what="the change of the voters",
            gives_up=True,
        )

    # ------------------------------------------------------------------ metadata

    async def _follow_metadata(self) -> None:
        """Stream the metadata from one controller after the other, this node's own first."""
        own = self._identity.node_id
        position = 0
        while True:
            voters = self._directory.voters()  # More may have been heard of.
            order = sorted(voters, key=lambda node: (node != own, node))
            node = order[position % len(order)]
            try:
                await self._stream_metadata(node, voters[node])
            except aio.AioRpcError as error:
                log.debug("metadata feed broke", controller=node, reason=error.details())
                self._silence.broke(node, f"{error.code().name}: {error.details()}")
            except MetadataDivergedError:
                raise  # What this process acted on was given up; only another one begins anew.
            except PenstockError as error:
                self._refusals.say(node, error.message, self._clock_ms())
            position += 1
            await asyncio.sleep(self._refusals.pause_ms(_BACKOFF_MS) / 1000)

    async def _stream_metadata(self, node_id: int, address: str) -> None:
        request = controller_pb2.WatchMetadataRequest(
            cluster_id=self._identity.cluster_id,
            node_id=self._identity.node_id,
            known_index=max(self._image.index, 0),
            known_controller_epoch=max(self._image.controller_epoch, 0),
        )
        self._rotate.clear()
        call: Any = self._directory.stub(node_id, address).WatchMetadata(request)
        rotate = asyncio.create_task(self._rotate.wait())
        rotate.add_done_callback(lambda _task: call.cancel())
        try:
            async for message in call:
                self._silence.heard()
                await self._take_metadata(message)
                self._refusals.heard()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # Somebody stops us; the other case is a rotation.
        finally:
            rotate.cancel()
            call.cancel()

    async def _take_metadata(self, message: controller_pb2.WatchMetadataResponse) -> None:
        if message.HasField("error"):
            raise error_from_proto(message.error)
        if message.HasField("active_controller"):
            endpoint = message.active_controller
            self._directory.learn(endpoint.voters)
            self._directory.observe(
                endpoint.node_id, endpoint.controller_epoch, endpoint.host, endpoint.port
            )
        if not message.HasField("delta"):
            return
        self._lag.acting(self._clock_ms())
        await self._until_idle()
        change = self._image.apply(message.delta)
        self._informed.set()
        if change is not None:
            self._lag.reached(self._image.index)
            await self._act_on(change)
        self._lag.acted(self._clock_ms())
        if change is None:
            return
        self._acted_index = self._image.index
        self._index_moved.set()
        self._index_moved = asyncio.Event()
        fenced = self._looks_fenced()
        if fenced or self._was_fenced:
            # Fenced: a heartbeat that shows how far the image is may end it. No longer fenced:
            # the answer to a heartbeat begins the lease.
            self._nudge.set()
        if self._identity.is_untold(self._image, self._broker_epoch):
            self._nudge.set()
        self._was_fenced = fenced

    async def _act_on(self, change: ImageChange) -> None:
        try:
            await self._on_change(change)
        except (PenstockError, aio.AioRpcError) as error:
            # Those of a feed are a reason to follow another; the next one would begin after this
            # change, which is done in part and would stay so. A new process begins with a snapshot.
            raise ActingFailedError(
                f"broker {self._identity.node_id} could not act on the metadata of index "
                f"{change.index}: {error}; it stops, and acts on all of them when it is started"
            ) from error

    def _looks_fenced(self) -> bool:
        """Whether the image says that this registration is fenced: a heartbeat mends that."""
        record = self._image.brokers.get(self._identity.node_id)
        return record is not None and record.broker_epoch == self._broker_epoch and record.fenced

    # ------------------------------------------------------------------ heartbeats

    async def _keep_heard(self) -> None:
        """Register with, and be heard by, whichever controller is active."""
        while True:
            active = self._directory.active
            if active is None:
                await self._directory.wait_news(None, _BEHIND_MS)
                if self._directory.active is None:
                    # The feed's controller knows of none: it may be cut off from the others.
                    self._leave_feed()
                continue
            try:
                await self._be_heard_by(active)
            except StaleBrokerEpochError:
                raise
            except BrokerIdNotRegisteredError:
                log.warning("the controllers do not know this broker; registering anew")
                self._disown()
            except (PenstockError, aio.AioRpcError, TimeoutError) as error:
                self._complain(active, error)
                if isinstance(error, NotControllerError):
                    self._directory.observe_hint(error.leader)
            self._rotate_when_unheard()
            await self._directory.wait_news(active, _BACKOFF_MS)

    def _complain(self, active: ActiveController, error: BaseException) -> None:
        """Log why this broker is not heard: once until it is heard again, then now and then."""
        told = self._unheard.failed(self._clock_ms())
        if told is not None:
            log.warning(
                "not heard by the controller",
                controller=active.node_id,
                address=active.address,
                reason=in_words(error),
                **told,
                next_step="this broker goes on trying and follows whichever controller is active; "
                "if it lasts, see penstock quorum status and that node's log",
            )

    def _rotate_when_unheard(self) -> None:
        """A feed that knows no reachable active controller may hang on an isolated one."""
        silent_ms = self._lease.silent_ms(self._clock_ms())
        if silent_ms is None or silent_ms > self._session_timeout_ms // 2:
            self._leave_feed()

    def _leave_feed(self) -> None:
        """Follow another controller, unless the one followed now has had too little time."""
        now_ms = self._clock_ms()
        if self._left_feed_ms is None or now_ms - self._left_feed_ms >= _BEHIND_MS:
            self._left_feed_ms = now_ms
            self._rotate.set()

    def _disown(self) -> None:
        self._lease.lost()
        self._broker_epoch = -1
        self._incarnation_id = uuid.uuid4().bytes

    async def _be_heard_by(self, active: ActiveController) -> None:
        """Heartbeat with ``active`` until it is replaced or the stream breaks."""
        stub = self._directory.stub(active.node_id, active.address)
        if self._broker_epoch < 0:
            await self._register(active)
        # The bidirectional form without an iterator is missing from the type stubs.
        call: Any = stub.Heartbeat()  # type: ignore[call-arg]  # As said above.
        try:
            while self._directory.active == active:
                await self._heartbeat(call)
                if self._identity.is_untold(self._image, self._broker_epoch):
                    await self._tell_external(active)
                await self._pause(active)
        finally:
            call.cancel()

    async def _pause(self, active: ActiveController) -> None:
        """Wait for the next heartbeat's time, a nudge, or news of another controller."""
        nudge = asyncio.create_task(self._nudge.wait())
        news = asyncio.create_task(self._directory.wait_news(active, self._interval_ms))
        try:
            await asyncio.wait((nudge, news), return_when=asyncio.FIRST_COMPLETED)
        finally:
            nudge.cancel()
            news.cancel()
        self._nudge.clear()

    async def _register(self, active: ActiveController) -> None:
        identity = self._identity
        if self._image.index < 0:
            async with asyncio.timeout(self._session_timeout_ms / 2000):
                await self._informed.wait()
        # If the feed has not brought the newest yet this is refused, and asked again when it has:
        # a request that comes late is so told from the one of the process that is alive.
        known = self._image.brokers.get(identity.node_id)
        follows = 0 if known is None else known.broker_epoch
        self._broker_epoch = await self._ask_to_register(
            active, follows, timeout_ms=self._session_timeout_ms
        )
        log.info("registered", broker_epoch=self._broker_epoch, controller=active.node_id)
        if not identity.is_external_known(self._image):
            log.warning(
                "clients from outside are not told of external.advertised, but broker.advertised",
                metadata_version=self._image.metadata_version,
                wanted=EXTERNAL_ADDRESSES_SINCE,
                next_step="run penstock cluster upgrade once every node has this software; this "
                "broker need not be restarted for it",
            )
        self._on_registered(self._broker_epoch)

    async def _tell_external(self, active: ActiveController) -> None:
        """Register once more, to say where clients from outside reach this broker.

        It serves without that. So no heartbeat waits for it long, or ends by its failure; what was
        not taken is said again after the next one.
        """
        try:
            await self._ask_to_register(
                active, self._broker_epoch, timeout_ms=self._session_timeout_ms // 4
            )
        except (PenstockError, aio.AioRpcError) as error:
            self._untold.failed(active.node_id, error)
        else:
            self._untold.told()

    async def _ask_to_register(
        self, active: ActiveController, follows_broker_epoch: int, timeout_ms: int
    ) -> int:
        """The broker epoch of this process: that which it has, if it has registered already."""
        registration = self._identity.registration(self._incarnation_id, follows_broker_epoch)
        response = await self._directory.stub(active.node_id, active.address).RegisterBroker(
            controller_pb2.RegisterBrokerRequest(registration=registration),
            timeout=timeout_ms / 1000,
        )
        if response.HasField("error"):
            raise error_from_proto(response.error)
        return int(response.broker_epoch)

    async def _heartbeat(self, call: Any) -> None:
        self._sequence += 1
        sent_ms = self._clock_ms()
        request = controller_pb2.BrokerHeartbeatRequest(
            node_id=self._identity.node_id,
            broker_epoch=self._broker_epoch,
            metadata_index=self._acted_index,
            want_shutdown=self._want_shutdown,
            want_fence=not self._ready(),
            sequence=self._sequence,
        )
        try:
            await call.write(request)
        except (asyncio.InvalidStateError, aio.AioRpcError):
            # So gRPC says that the stream ended while nobody looked; reading tells why.
            log.debug("the heartbeat stream had ended")
        async with asyncio.timeout(self._session_timeout_ms / 2000):
            response = await self._answer_to(call, self._sequence)
        self._take_answer(response, sent_ms)

    def _ready(self) -> bool:
        """Whether this registration may be let in; once it was, it is not taken back."""
        if self._ready_epoch != self._broker_epoch and self._may_be_let_in():
            self._ready_epoch = self._broker_epoch
        return self._ready_epoch == self._broker_epoch

    def _take_answer(self, response: controller_pb2.BrokerHeartbeatResponse, sent_ms: int) -> None:
        self._unheard.heard()
        now_ms = self._clock_ms()
        self._lag.told(response.metadata_index, self._image.index, now_ms)
        behind_ms = self._lag.behind_ms(now_ms)
        if response.fenced or behind_ms >= self._session_timeout_ms:
            # Whoever hears so little of who leads what must not serve, though it is heard. Whoever
            # merely is slow to act goes on: no leader moves while it is heard, so refusing would
            # help nobody, and in what it leads no longer the epochs keep it from doing harm.
            self._lease.lost()
        else:
            self._lease.answered(sent_ms)
        if behind_ms >= _BEHIND_MS:
            self._leave_feed()
        if response.may_shut_down:
            self._may_shut_down.set()

    async def _answer_to(self, call: Any, sequence: int) -> controller_pb2.BrokerHeartbeatResponse:
        while True:
            response: Any = await call.read()
            if response is aio.EOF:  # type: ignore[attr-defined]  # Missing from the stubs.
                raise NetworkError("the controller ended the heartbeat stream")
            if response.HasField("error"):
                raise error_from_proto(response.error)
            if response.sequence >= sequence:
                return cast("controller_pb2.BrokerHeartbeatResponse", response)

    async def _guard(self, work: Any) -> None:
        """Run ``work``; what it raises is what makes this broker unfit to go on."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise
