"""A container engine that writes down what is asked of it (``penstock.chaos.backends``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.chaos.backends.containers import (
    LABEL,
    OWNER_LABEL,
    ContainerSpec,
    ContainerState,
    Network,
)
from penstock.chaos.errors import FaultError, PlanError


class FakeEngine:
    """Containers that are what they were told to be; their names are their ids."""

    def __init__(self, images: Sequence[str] = ("penstock:latest",)) -> None:
        self.images = images
        self.specs: dict[str, ContainerSpec] = {}
        self.states: dict[str, ContainerState] = {}
        self.networks: dict[str, str] = {}
        self.done: list[str] = []
        self.told: list[tuple[str, Any]] = []
        self.others: dict[str, str] = {}
        self.probe_says = ""
        self.deaf: set[str] = set()
        """Containers that do not hear SIGTERM."""
        self.closed = False

    def version(self) -> str:
        return "1.2.3"

    def image(self, name: str) -> tuple[str, Mapping[str, str]]:
        if name not in self.images:
            raise PlanError(f"the engine has no image {name!r}; next: make it")
        return "sha256:1", {"org.opencontainers.image.version": "9.9"}

    def make_network(self, name: str, labels: Mapping[str, str]) -> Network:
        self.networks[name] = labels[LABEL]
        return Network("net", name, "172.20.0.0/16", "172.20.0.1")

    def create(self, spec: ContainerSpec) -> str:
        self.specs[spec.name] = spec
        self.states[spec.name] = ContainerState("created")
        return spec.name

    def start(self, container: str) -> None:
        self.done.append(f"start {self.short(container)}")
        self.states[container] = ContainerState("running", 4711)
        if container.endswith("probe"):
            self.states[container] = ContainerState("exited", 0, 1 if self.probe_says else 0)

    def signal(self, container: str, name: str) -> None:
        self.done.append(f"{name} {self.short(container)}")
        if name == "SIGKILL" or container not in self.deaf:
            code = 137 if name == "SIGKILL" else 0
            self.states[container] = ContainerState("exited", 0, code)

    def wait(self, container: str, timeout_s: float) -> bool:
        return not self.states[container].is_alive

    def pause(self, container: str) -> None:
        self.done.append(f"pause {self.short(container)}")
        self.states[container] = ContainerState("paused", 4711)

    def unpause(self, container: str) -> None:
        if self.state(container).status == "paused":
            self.done.append(f"unpause {self.short(container)}")
            self.states[container] = ContainerState("running", 4711)

    def state(self, container: str) -> ContainerState:
        return self.states.get(container, ContainerState(""))

    def execute(self, container: str, command: Sequence[str], user: str) -> tuple[int, str]:
        if container in self.deaf:
            return 1, "no such file"
        assert user == "0:0"
        assert command[3] == "set"
        self.told.append((self.short(container), json.loads(command[4])))
        return 0, "ok"

    def logs(self, container: str) -> bytes:
        if container not in self.states:
            return b""
        return (self.probe_says or f"{self.short(container)} says\n").encode()

    def owners(self) -> Mapping[str, str]:
        ours = {spec.labels[LABEL]: spec.labels[OWNER_LABEL] for spec in self.specs.values()}
        return {**self.others, **ours}

    def remove_all(self, run: str) -> None:
        self.others.pop(run, None)
        for name, spec in list(self.specs.items()):
            if spec.labels[LABEL] == run:
                del self.specs[name], self.states[name]
        self.networks = {name: of for name, of in self.networks.items() if of != run}

    def close(self) -> None:
        self.closed = True

    def short(self, container: str) -> str:
        """Its name without that of the run."""
        if container not in self.specs:
            raise FaultError(f"no such container: {container}")
        return "-".join(container.split("-")[3:])

    def end(self, name: str, state: ContainerState) -> None:
        """Have a container end by itself."""
        (found,) = (one for one in self.specs if one.endswith(f"-{name}"))
        self.states[found] = state

    def spec(self, name: str) -> ContainerSpec:
        """What a container was made of."""
        (found,) = (spec for one, spec in self.specs.items() if one.endswith(f"-{name}"))
        return found
