"""How the command fails: one line that says what is wrong, one that says what to do next."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Final

from penstock.cli.standard_streams import OutputError
from penstock.wire.errors import ErrorCode, PenstockError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
"""What a shell reports for a tool that a closed pipe ended (128 + SIGPIPE)."""

_MORE_REPLICAS: Final = (
    "start the missing brokers, or accept fewer copies: "
    "`penstock topics alter NAME --config min.insync.replicas=N`"
)

NEXT_STEPS: Final[Mapping[ErrorCode, str]] = {
    ErrorCode.ACCESS_FORBIDDEN: "name a topic of your own; this one is the cluster's",
    ErrorCode.ADDRESS_IN_USE: "stop what holds the port, or choose others with --base-port",
    ErrorCode.BOOTSTRAP_FAILED: (
        "start a cluster with `penstock dev`, or name a broker that runs with -b HOST:PORT"
    ),
    ErrorCode.BROKER_ID_NOT_REGISTERED: "`penstock cluster describe` lists the brokers",
    ErrorCode.BROKER_FENCED: "see `penstock cluster describe` for which brokers are live",
    ErrorCode.CONFIGURATION: "correct it; --help lists what is allowed",
    ErrorCode.CONSUMER_STALLED: "mend what the message names; waiting longer will not help",
    ErrorCode.CORRUPT_MESSAGE: "see `penstock log dump SEGMENT --verify` for where it is",
    ErrorCode.DATA_DIRECTORY: "choose another directory, or mount the right disk",
    ErrorCode.DELIVERY_TIMED_OUT: "see `penstock cluster describe` for which brokers are live",
    ErrorCode.DISK_FULL: "free space on the disk of the broker's data directory",
    ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE: "start the brokers that `Isr` and `Elr` name",
    ErrorCode.GROUP_ID_NOT_FOUND: "`penstock groups list` shows the groups",
    ErrorCode.INCONSISTENT_CLUSTER_ID: "choose another directory, or mount the right disk",
    ErrorCode.INVALID_CONFIG: "correct what --config KEY=VALUE or --reset KEY names",
    ErrorCode.INVALID_GROUP_ID: "choose a group id of 1 to 255 bytes",
    ErrorCode.INVALID_PARTITIONS: "choose another number with --partitions",
    ErrorCode.INVALID_RECORD: "correct what the message names, in the producer or in the topic",
    ErrorCode.INVALID_REPLICA_ASSIGNMENT: (
        "choose among the brokers that `penstock cluster describe` lists"
    ),
    ErrorCode.INVALID_REPLICATION_FACTOR: (
        "choose a --replication-factor of at most the live brokers; "
        "`penstock cluster describe` lists them"
    ),
    ErrorCode.INVALID_REQUEST: "correct what the message names; --help lists what is taken",
    ErrorCode.INVALID_TOPIC: "letters, digits, '.', '_' and '-' make a name",
    ErrorCode.LEADER_NOT_AVAILABLE: (
        "start the brokers that hold the partition; `penstock topics describe` lists them"
    ),
    ErrorCode.MESSAGE_TOO_LARGE: (
        "send smaller records, or raise the limit that the message names: "
        "`penstock topics alter NAME --config KEY=BYTES`"
    ),
    ErrorCode.NETWORK_EXCEPTION: "see whether the broker runs, and try again",
    ErrorCode.NO_REASSIGNMENT_IN_PROGRESS: (
        "see `penstock partitions reassign --list` for what moves"
    ),
    ErrorCode.NON_EMPTY_GROUP: "stop the group's members first",
    ErrorCode.NOT_ENOUGH_REPLICAS: _MORE_REPLICAS,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: _MORE_REPLICAS,
    ErrorCode.OFFSET_OUT_OF_RANGE: "choose an offset in the log (`penstock consume` has --offset)",
    ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE: (
        "wait until the first of `Replicas` is among `Isr` in `penstock topics describe`"
    ),
    ErrorCode.REQUEST_TIMED_OUT: "see `penstock cluster describe`, and try again",
    ErrorCode.STORAGE_ERROR: "see the broker's log; its disk may be failing",
    ErrorCode.TOPIC_ALREADY_EXISTS: "choose another name, or pass --if-not-exists",
    ErrorCode.INVALID_TRANSACTIONAL_ID: "`penstock transactions list` shows the ids",
    ErrorCode.INVALID_TXN_STATE: "see `penstock transactions describe ID` for where it stands",
    ErrorCode.TRANSACTIONAL_ID_NOT_FOUND: "`penstock transactions list` shows the ids",
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: (
        "`penstock topics list` shows the topics; `penstock topics create NAME` makes one"
    ),
    ErrorCode.UNSUPPORTED_METADATA_VERSION: (
        "install the same Penstock on every node, then `penstock cluster upgrade`"
    ),
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE: "choose none, gzip, snappy, lz4 or zstd",
}
"""The next step for a person at a terminal, where the error's own message may not know one."""

NODE_STEPS: Final[Mapping[ErrorCode, str]] = {
    ErrorCode.ADDRESS_IN_USE: (
        "stop what holds the port, or choose another with --set broker.listen=HOST:PORT "
        "(or controller.listen, metrics.listen)"
    ),
    ErrorCode.CONFIGURATION: "correct it in the --config file, in PENSTOCK_* variables or in --set",
    ErrorCode.DATA_DIRECTORY: NEXT_STEPS[ErrorCode.DATA_DIRECTORY],
    ErrorCode.INCONSISTENT_CLUSTER_ID: NEXT_STEPS[ErrorCode.INCONSISTENT_CLUSTER_ID],
}
"""The next step for who starts a single node."""

_DIRECTORY_ERRORS: Final = (ErrorCode.DATA_DIRECTORY, ErrorCode.INCONSISTENT_CLUSTER_ID)
_STEP: Final = "next: "
_TLS_OPTIONS: Final = {
    "tls_ca": "--tls-ca",
    "tls_certificate": "--tls-cert",
    "tls_key": "--tls-key",
}
_TLS_SETTING: Final = re.compile(rf"(?<![\w./-])({'|'.join(_TLS_OPTIONS)})(?![\w/-]|\.\w)")
"""One of them as a word of its own, and not as a part of a path."""
OWN_STEP: Final = "; next: "
"""Before what to do, in messages that know it themselves."""
_GENERAL_STEP: Final = "see the nodes' logs (DIR/node-N/node.log under `penstock dev`)"


def explain(error: PenstockError, steps: Mapping[ErrorCode, str] = NEXT_STEPS) -> str:
    """The lines for ``error``: what is wrong, its notes (none, or lines of a log), what to do.

    A note that begins with ``next:`` is what to do in this very case; so is what follows ``next:``
    in the message itself.
    """
    message = " ".join(error.message.split())
    # What was waited for in vain knows better what to do than the waiting that ended.
    reason = error.__cause__ if isinstance(error.__cause__, PenstockError) else error
    step = steps.get(reason.code) or steps.get(error.code) or _GENERAL_STEP
    if OWN_STEP in message:
        message, _, step = message.partition(OWN_STEP)
    elif error.code in _DIRECTORY_ERRORS and "; " in message:
        # These say it themselves: only they know which of the many ways it is.
        message, _, step = message.rpartition("; ")
    notes: list[str] = []
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_STEP):
            step = note.removeprefix(_STEP)
        else:
            notes.append(note)
    return as_options("\n".join([f"error: {message}", *notes, _STEP + step]))


def as_options(text: str) -> str:
    """``text`` with the options of commands where the client names settings of its own."""
    return _TLS_SETTING.sub(lambda found: _TLS_OPTIONS[found[0]], text)


def explain_output(error: OutputError) -> str:
    """The lines for a standard output that took no more."""
    return f"error: {error}\n{_STEP}free space where the output goes, or send it elsewhere"


def with_step(error: PenstockError, step: str) -> PenstockError:
    """``error``, to be explained with this next step."""
    error.add_note(_STEP + step)
    return error


def report(text: str) -> None:
    """Write ``text`` to standard error, whole lines, whatever became of standard output."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # Nobody listens any more, or the disk is full, and there is nowhere else to say it.
        return
