"""A container engine, as far as the harness needs it: Docker's, through its SDK for Python."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any, Final, Protocol

from penstock.chaos.errors import FaultError, PlanError

LABEL: Final = "org.penstock.chaos.run"
"""On everything that a run makes; its value is the run's."""
OWNER_LABEL: Final = "org.penstock.chaos.owner"
_USUAL_HOST: Final = "unix:///var/run/docker.sock"
_TRIES: Final = 5
_WAIT_S: Final = 60


@dataclass(frozen=True, slots=True)
class Network:
    """A network of a run's own, with addresses that we give out."""

    id: str
    name: str
    subnet: str
    gateway: str

    def address(self, node: int) -> str:
        """That of a node: the same over all of its lives."""
        return str(ip_network(self.subnet)[node + 9])


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What a container is made of. It has no capabilities but those named, and no new privileges.

    ``inside`` is a container whose network it shares; else it has ``address`` in ``network``.
    """

    name: str
    image: str
    command: Sequence[str]
    labels: Mapping[str, str]
    entrypoint: Sequence[str] | None = None
    network: Network | None = None
    address: str = ""
    inside: str = ""
    user: str = ""
    capabilities: Sequence[str] = ()
    mounts: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """By path of this machine: where it is seen, and whether it may be written."""
    read_only: bool = True
    has_input: bool = False
    """Whether its standard input is open, and never written to."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What the engine says of a container now."""

    status: str
    """``created``, ``running``, ``paused``, ``exited`` ...; empty where there is none."""
    pid: int = 0
    exit_code: int = 0
    out_of_memory: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether its process lives, be it paused."""
        return self.status in ("running", "paused", "restarting")


class Engine(Protocol):
    """What the backend asks of an engine. Each raises FaultError where it refuses."""

    def version(self) -> str:
        """Its own."""
        ...

    def image(self, name: str) -> tuple[str, Mapping[str, str]]:
        """The id and the labels of an image. Raises PlanError where it is not there."""
        ...

    def make_network(self, name: str, labels: Mapping[str, str]) -> Network:
        """A bridge whose addresses nobody else on this machine has."""
        ...

    def create(self, spec: ContainerSpec) -> str:
        """Make a container that does not run yet; its id."""
        ...

    def start(self, container: str) -> None:
        """Run it, again if it ended."""
        ...

    def signal(self, container: str, name: str) -> None:
        """Send a signal to its first process; nothing where it does not run."""
        ...

    def wait(self, container: str, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        ...

    def pause(self, container: str) -> None:
        """Freeze all of it."""
        ...

    def unpause(self, container: str) -> None:
        """Have it go on; nothing where it is not paused."""
        ...

    def state(self, container: str) -> ContainerState:
        """What it does now."""
        ...

    def execute(self, container: str, command: Sequence[str], user: str) -> tuple[int, str]:
        """Run a command in it: its exit status, and what it said."""
        ...

    def logs(self, container: str) -> bytes:
        """What it has written, over all of its lives; nothing where it is gone."""
        ...

    def owners(self) -> Mapping[str, str]:
        """The runs of which something is left on this engine, and who made them."""
        ...

    def remove_all(self, run: str) -> None:
        """Remove all containers and networks of a run, whatever they do. Idempotent."""
        ...

    def close(self) -> None:
        """Talk to it no more. Idempotent."""
        ...


def _try_socket(host: str) -> None:
    """Raise OSError where nobody listens: the SDK would leave its own socket open then."""
    scheme, _, path = host.partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_WAIT_S)
            probe.connect(path)


class DockerEngine:
    """The engine that DOCKER_HOST names, or that of this machine (``Engine``)."""

    def __init__(self) -> None:
        """Connect. Raises PlanError where there is no SDK, or no engine answers."""
        try:
            import docker  # noqa: PLC0415 - only who runs in containers needs it.
            from docker import errors  # noqa: PLC0415 - as above.
        except ModuleNotFoundError as error:
            raise PlanError(
                f"the backend docker needs the package {error.name!r}, which is not installed; "
                'next: pip install "penstock[chaos]"'
            ) from None
        self._docker: Final = docker
        self._errors: Final = errors
        try:
            _try_socket(os.environ.get("DOCKER_HOST") or _USUAL_HOST)
            self._client: Final = docker.from_env(timeout=_WAIT_S)
            self._version: Final = str(self._client.version()["Version"])
        except (errors.DockerException, OSError) as error:
            raise PlanError(
                f"no container engine answers: {error}; next: start Docker's, name it with "
                "DOCKER_HOST, or see that you may use its socket"
            ) from None

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._errors.DockerException, OSError) as error:
            # What the HTTP client raises is a kind of OSError.
            raise FaultError(f"the engine did not {what}: {error}") from error

    def version(self) -> str:
        """Its own."""
        return self._version

    def image(self, name: str) -> tuple[str, Mapping[str, str]]:
        """The id and the labels of an image. It is never fetched."""
        try:
            found = self._client.images.get(name)
        except self._errors.ImageNotFound:
            raise PlanError(
                f"the engine has no image {name!r}; next: make it by `make image` (see "
                "docs/operating/docker.md), or name another with --backend-set image=NAME"
            ) from None
        return str(found.id), dict(found.labels)

    def make_network(self, name: str, labels: Mapping[str, str]) -> Network:
        """A bridge whose addresses nobody else on this machine has.

        Addresses can be given out by us in a range that was asked for alone, and it is the engine
        that knows which is free: so it chooses one first, which is then asked for.
        """
        types = self._docker.types
        for tries_left in reversed(range(_TRIES)):
            with self._asking("make a network"):
                drawn = self._client.networks.create(name, driver="bridge", labels=dict(labels))
                pool = self._pool_of(drawn)
                drawn.remove()
                ipam = types.IPAMConfig(pool_configs=[types.IPAMPool(**pool)])
                try:
                    made = self._client.networks.create(
                        name, driver="bridge", labels=dict(labels), ipam=ipam
                    )
                except self._errors.APIError:
                    # Another network has taken it in between.
                    if not tries_left:
                        raise
                    continue
                return Network(str(made.id), name, pool["subnet"], pool["gateway"])
        raise FaultError("the engine did not make a network")

    def _pool_of(self, network: Any) -> dict[str, str]:
        network.reload()
        config = network.attrs["IPAM"]["Config"][0]
        return {"subnet": config["Subnet"], "gateway": config["Gateway"]}

    def create(self, spec: ContainerSpec) -> str:
        """Make a container that does not run yet; its id."""
        types = self._docker.types
        where: dict[str, Any] = {"network_mode": "none"}
        if spec.inside:
            where = {"network_mode": f"container:{spec.inside}"}
        elif spec.network is not None:
            endpoint = types.EndpointConfig(
                self._client.api._version,  # It has no other name.
                ipv4_address=spec.address,
            )
            where = {
                "network": spec.network.name,
                "networking_config": {spec.network.name: endpoint},
            }
        with self._asking(f"make the container {spec.name}"):
            made = self._client.containers.create(
                spec.image,
                list(spec.command),
                name=spec.name,
                labels=dict(spec.labels),
                entrypoint=None if spec.entrypoint is None else list(spec.entrypoint),
                user=spec.user or None,
                cap_drop=["ALL"],
                cap_add=list(spec.capabilities),
                security_opt=["no-new-privileges"],
                read_only=spec.read_only,
                stdin_open=spec.has_input,
                volumes={
                    path: {"bind": target, "mode": "rw" if is_writable else "ro"}
                    for path, (target, is_writable) in spec.mounts.items()
                },
                # Whatever the engine is set to: all lives in full, and read back from it.
                log_config=types.LogConfig(type="json-file", config={}),
                # What the container's health check asks we ask ourselves.
                healthcheck={"test": ["NONE"]},
                **where,
            )
        return str(made.id)

    def start(self, container: str) -> None:
        """Run it, again if it ended."""
        with self._asking("start a container"):
            self._client.api.start(container)

    def signal(self, container: str, name: str) -> None:
        """Send a signal to its first process; nothing where it does not run."""
        with self._asking(f"send {name} to a container"):
            try:
                self._client.api.kill(container, name)
            except self._errors.APIError as error:
                if error.status_code not in (404, 409):
                    raise

    def wait(self, container: str, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        import requests  # noqa: PLC0415 - the SDK shows what its HTTP client raises.

        try:
            with self._asking("wait for a container"):
                self._client.api.wait(container, timeout=timeout_s)
        except FaultError as error:
            if isinstance(
                error.__cause__, requests.exceptions.Timeout | requests.exceptions.ConnectionError
            ):
                return not self.state(container).is_alive
            raise
        return True

    def pause(self, container: str) -> None:
        """Freeze all of it."""
        with self._asking("pause a container"):
            self._client.api.pause(container)

    def unpause(self, container: str) -> None:
        """Have it go on; nothing where it is not paused."""
        with self._asking("resume a container"):
            if self.state(container).status == "paused":
                self._client.api.unpause(container)

    def state(self, container: str) -> ContainerState:
        """What it does now."""
        with self._asking("say what a container does"):
            try:
                found = self._client.api.inspect_container(container)["State"]
            except self._errors.NotFound:
                return ContainerState("")
        return ContainerState(
            str(found["Status"]),
            int(found["Pid"]),
            int(found["ExitCode"]),
            bool(found["OOMKilled"]),
        )

    def execute(self, container: str, command: Sequence[str], user: str) -> tuple[int, str]:
        """Run a command in it: its exit status, and what it said."""
        with self._asking("run a command in a container"):
            found = self._client.containers.get(container).exec_run(list(command), user=user)
        return int(found.exit_code), found.output.decode(errors="replace").strip()

    def logs(self, container: str) -> bytes:
        """What it has written, over all of its lives; nothing where it is gone."""
        with self._asking("give a container's log"):
            try:
                return bytes(self._client.api.logs(container))
            except self._errors.NotFound:
                return b""

    def owners(self) -> Mapping[str, str]:
        """The runs of which something is left on this engine, and who made them."""
        with self._asking("list what is left of runs"):
            ours = {"label": LABEL}
            containers = self._client.api.containers(all=True, filters=ours)
            networks = self._client.api.networks(filters=ours)
            labels = [one["Labels"] for one in (*containers, *networks)]
        return {one[LABEL]: one.get(OWNER_LABEL, "") for one in labels}

    def remove_all(self, run: str) -> None:
        """Remove all containers and networks of a run, whatever they do. Idempotent."""
        ours = {"label": f"{LABEL}={run}"}
        with self._asking("remove what a run had"):
            for one in self._client.api.containers(all=True, filters=ours):
                with contextlib.suppress(self._errors.NotFound):
                    self._client.api.remove_container(one["Id"], v=True, force=True)
            for one in self._client.api.networks(filters=ours):
                with contextlib.suppress(self._errors.NotFound):
                    self._client.api.remove_network(one["Id"])

    def close(self) -> None:
        """Talk to it no more. Idempotent."""
        self._client.close()
