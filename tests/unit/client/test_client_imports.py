from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys

import pytest

from penstock.client import AdminClient, Consumer, Producer, errors

# The last five come with grpcio itself: it looks for its optional companions.
ALLOWED = {
    "grpc",
    "google",
    "crc32c",
    "penstock",
    "typing_extensions",
    "cython_runtime",
    "grpc_tools",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
}

SCRIPT = """
import sys
before = set(sys.modules)
import penstock.client
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print("\\n".join(sorted(new - set(sys.stdlib_module_names))))
"""


def test_importing_the_client_imports_next_to_nothing() -> None:
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert {name for name in output.split() if not name.startswith("_")} <= ALLOWED


def test_everything_named_is_there() -> None:
    import penstock.client

    for name in penstock.client.__all__:
        assert getattr(penstock.client, name) is not None


@pytest.mark.parametrize("documented", [AdminClient, Consumer, Producer])
def test_what_the_clients_promise_to_raise_can_be_caught_by_name(documented: type) -> None:
    texts = [documented.__doc__, *(inspect.getdoc(each) for each in vars(documented).values())]
    named = {name for text in texts for name in re.findall(r"\b[A-Z]\w+Error\b", text or "")}
    assert named
    assert named <= {*errors.__all__, *dir(builtins)}


def test_whatever_a_client_may_hear_can_be_caught_by_name() -> None:
    between_nodes = {
        "AddressInUseError",
        "DataDirectoryError",
        "DuplicateBrokerRegistrationError",
        "DuplicateProposalError",
        "InconsistentClusterIdError",
        "IneligibleReplicaError",
        "InvalidUpdateVersionError",
        "MetadataDivergedError",
        "NewLeaderElectedError",
        "StaleBrokerEpochError",
        "StaleControllerEpochError",
        "TransactionTornError",
    }
    table = {error.__name__ for error in errors.every_error().values()}
    assert table - between_nodes <= set(errors.__all__)
